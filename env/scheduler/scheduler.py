"""The scheduler as a Gymnasium environment: observations and actions are texts."""

from __future__ import annotations

import string
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from env.scheduler.action import Action, ActionError
from env.scheduler.cost import Roofline
from env.scheduler.graph import Graph
from env.scheduler.rules import INVALID_TEXT_REWARD, INVALID_TEXTS_IN_A_ROW, RULES, calibrated
from env.scheduler.state import Episode

LONGEST_TEXT = 1_000_000


class SchedulerEnv(gymnasium.Env[str, str]):
    """One graph, scheduled node by node in topological order.

    At each step the agent reads an observation (compact JSON) and answers for the current node
    `{"fuse_with_prev": true, "tile": 128, "retain": [3]}`. An invalid text costs 0.10 and places nothing; three in a
    row truncate the episode. Nothing here is random: the same texts give the same episode.

    `step` and `reset` return in `info`: `total_latency` (cycles, of the kernels that have run), `greedy_latency`
    (cycles), `kernel_launches`, `reloads`, `error`, and when the episode has ended `score` and `calibrated_score`.

    Args:
        graph: what is scheduled.
        rules: "documented" or "upstream".
        max_steps: nodes placed before the episode is truncated; None or 0: no limit but the graph's size.

    Raises:
        ValueError: if the rules are unknown.
        GraphError: if the graph cannot be scheduled under the rules.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(self, graph: Graph, rules: str = "documented", max_steps: int | None = None) -> None:
        if rules not in RULES:
            raise ValueError(f"rules: expected one of {', '.join(RULES)}, found {rules!r}")
        self.rules = RULES[rules]
        self.rules.check(graph)
        self.graph = graph
        self.max_steps = max_steps or len(graph)
        self.roofline = Roofline(graph)
        self.naive_latency, self.greedy_latency = self.rules.baselines(self.roofline)
        self.observation_space = Text(LONGEST_TEXT, charset=string.printable)
        self.action_space = Text(LONGEST_TEXT, min_length=0, charset=string.printable)
        self.episode = Episode(self.roofline)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. The seed is taken for Gymnasium's sake: no draw is made."""
        super().reset(seed=seed)
        self.episode = Episode(self.roofline)
        return self.observation(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Place the current node as the text says; after the end nothing changes any more."""
        episode, rules = self.episode, self.rules
        if episode.ended:
            return self.observation(), 0.0, not episode.truncated, episode.truncated, {}
        try:
            reward = rules.place(episode, rules.parse(action), self.greedy_latency)
        except ActionError as error:
            reward = INVALID_TEXT_REWARD
            episode.error = f"invalid action: {error}"
            episode.invalid_in_a_row += 1
        else:
            episode.step += 1
            episode.invalid_in_a_row = 0
        terminated = episode.current < 0
        episode.truncated = not terminated and (
            episode.step >= self.max_steps or episode.invalid_in_a_row >= INVALID_TEXTS_IN_A_ROW
        )
        if terminated or episode.truncated:
            reward += rules.end(episode, self.greedy_latency)
        return self.observation(), reward, terminated, episode.truncated, self._info()

    def observation(self) -> str:
        """The observation of the present state."""
        return self.rules.observe(self.episode, self.greedy_latency)

    @property
    def score(self) -> float:
        """The score of the latency so far, in the unit of the rules."""
        return self.rules.score(self.episode.latency, self.greedy_latency)

    def clone(self) -> SchedulerEnv:
        """An independent copy in the same state; the graph and its cost tables are shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.episode = self.episode.clone()
        return copy

    def _info(self) -> dict[str, Any]:
        episode = self.episode
        info = {
            "total_latency": episode.latency,
            "greedy_latency": self.greedy_latency,
            "kernel_launches": episode.launches,
            "reloads": episode.reloads,
            "error": episode.error,
        }
        if episode.ended:
            gain = (self.greedy_latency - episode.latency) / self.greedy_latency
            info |= {"score": self.score, "calibrated_score": calibrated(gain)}
        return info


def parse_action(text: str, rules: str = "documented") -> Action:
    """The action that a text means under a rule set.

    Raises:
        ActionError: if it is not an action.
        ValueError: if the rules are unknown.
    """
    if rules not in RULES:
        raise ValueError(f"rules: expected one of {', '.join(RULES)}, found {rules!r}")
    return RULES[rules].parse(text)
