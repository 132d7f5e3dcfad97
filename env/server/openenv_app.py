"""The same episodes in OpenEnv's types, for its clients, trainers and validator.

Every WebSocket of OpenEnv has an episode of its own; `reset` takes the fields of `requests.ResetRequest`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import (
    Action,
    ConcurrencyConfig,
    Environment,
    HTTPEnvServer,
    Observation,
    State,
)
from openenv.core.env_server.types import EnvironmentMetadata
from pydantic import Field

from env.server.catalogue import start_episode
from env.server.errors import ServiceError
from env.server.requests import LONGEST_COMMAND, ResetRequest, read
from env.server.sessions import Session

NAME = "tensor-scheduling"
DESCRIPTION = (
    "An agent schedules the tensor operations of a graph on a machine with a small fast memory, by texts: which "
    "operations run in one kernel, at which tile, and what stays in fast memory."
)


class TextAction(Action):
    """The agent's text."""

    command: str = Field(max_length=LONGEST_COMMAND, description="what the agent writes")


class TextObservation(Observation):
    """What the agent reads. `done` and `reward` are the base class's."""

    text: str = Field(description="the observation, as the environment writes it")
    info: dict[str, Any] = Field(default_factory=dict, description="cycles, launches and errors of the step")
    score: float | None = Field(None, description="of the whole episode, when it is done")


class EpisodeState(State):
    """`episode_id` and `step_count` are the base class's; before the first reset there is no environment."""

    environment: str | None = Field(None, description="scheduler or fusionops")
    done: bool = False
    actions: list[str] = Field(default_factory=list, description="the texts so far")


class TextEnvironment(Environment[TextAction, TextObservation, EpisodeState]):
    """One client's episodes, one after the other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._session: Session | None = None

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TextObservation:
        """Start an episode.

        Raises:
            ServiceError: if what is asked for does not exist.
        """
        request = read(ResetRequest, {"seed": seed, "episode_id": episode_id, **kwargs})
        self._session = Session(*start_episode(request), episode_id)
        return TextObservation(text=self._session.observation, reward=0.0)

    def step(self, action: TextAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        """Take a step; it takes microseconds, whatever time it is given.

        Raises:
            ServiceError: if there is no episode in play.
        """
        if self._session is None:
            raise ServiceError(409, "step: expected a reset before it on the same connection, found none")
        answer = self._session.step(action.command)
        return TextObservation(
            text=answer["observation"],
            done=answer["done"],
            reward=answer["reward"],
            info=answer["info"],
            score=answer["score"],
        )

    @property
    def state(self) -> EpisodeState:
        """Where the episode is."""
        session = self._session
        if session is None:
            return EpisodeState()
        return EpisodeState(
            episode_id=session.episode_id or session.id,
            step_count=len(session.actions),
            environment=session.episode.name,
            done=session.done,
            actions=list(session.actions),
        )

    def get_metadata(self) -> EnvironmentMetadata:
        """What OpenEnv's `/metadata` says."""
        return EnvironmentMetadata(name=NAME, description=DESCRIPTION, version="1.0.0")


def openenv_application(*, idle_seconds: float, most_sessions: int) -> FastAPI:
    """OpenEnv's own application around `TextEnvironment`, without the pages that load scripts from other hosts."""
    application = FastAPI(title=NAME, version="1.0.0", docs_url=None, redoc_url=None)
    server = HTTPEnvServer(
        TextEnvironment,
        TextAction,
        TextObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=most_sessions, session_timeout=idle_seconds),
        env_name=NAME,
        state_cls=EpisodeState,
    )
    server.register_routes(application)
    return application
