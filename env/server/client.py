"""The typed client of OpenEnv's form."""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from env.server.openenv_app import EpisodeState, TextAction, TextObservation


class TextEnvClient(EnvClient[TextAction, TextObservation, EpisodeState]):
    """The typed client.

    with TextEnvClient(base_url="http://127.0.0.1:8000").sync() as client:
        result = client.reset(task="task4_mixed")
        while not result.done:
            result = client.step(TextAction(command=agent(result.observation.text)))
    """

    def _step_payload(self, action: TextAction) -> dict[str, Any]:
        return {"command": action.command}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TextObservation]:
        done, reward = payload["done"], payload["reward"]
        observation = TextObservation(**payload["observation"], done=done, reward=reward)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> EpisodeState:
        return EpisodeState(**payload)
