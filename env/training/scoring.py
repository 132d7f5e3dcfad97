"""What an action is worth, by trying it in a copy of the episode.

Two lookaheads. `2` is the published one: the reward of the action, plus half of the next step's reward under the
teacher. `full` completes the episode under the teacher and takes the return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from env.scheduler import SchedulerEnv
from env.scheduler.action import Action
from env.scheduler.planner import best_action, best_latency
from env.scheduler.policies import heuristic
from env.scheduler.values import ValueTable

LOOKAHEADS = ("2", "full")
NEXT_STEP = 0.5


class Teacher(Protocol):
    """Knows what to do at any state of one graph's episodes."""

    def action(self, env: SchedulerEnv) -> Action:
        """What it would do now."""

    def rest(self, env: SchedulerEnv) -> float:
        """The rewards that are still to come if it takes over."""


class Heuristic:
    """The published teacher; sees the observation only."""

    def action(self, env: SchedulerEnv) -> Action:
        """Its answer to what the environment shows."""
        return heuristic(json.loads(env.observation()))

    def rest(self, env: SchedulerEnv) -> float:
        """The rewards that are still to come if it plays on alone."""
        played, total = env.clone(), 0.0
        while not played.episode.ended:
            total += float(played.step(self.action(played).to_text())[1])
        return total


class Planner:
    """Optimal from every state, under the documented rules. Where keeping costs nothing, it keeps if `keep_more`.

    The rewards to come are known without playing: until the end they add up to 1, less the cycles to come over
    greedy's.
    """

    def __init__(self, env: SchedulerEnv, *, keep_more: bool = False) -> None:
        self.table, self.keep_more = ValueTable(env.graph), keep_more

    def action(self, env: SchedulerEnv) -> Action:
        """The best one."""
        return best_action(self.table, env.episode, keep_more=self.keep_more)

    def rest(self, env: SchedulerEnv) -> float:
        """The rewards that are still to come in the best continuation."""
        if env.episode.ended:
            return 0.0
        return 1.0 - (best_latency(self.table, env.episode) - env.episode.latency) / env.greedy_latency


# What is imitated should not unlearn to keep where that is harmless.
TEACHERS: dict[str, Callable[[SchedulerEnv], Teacher]] = {
    "heuristic": lambda env: Heuristic(),
    "planner": lambda env: Planner(env, keep_more=True),
}


def score(env: SchedulerEnv, text: str, teacher: Teacher, lookahead: str) -> float:
    """The worth of an answer at the present state, in units of greedy's latency.

    Raises:
        ValueError: if the lookahead is unknown.
    """
    if lookahead not in LOOKAHEADS:
        raise ValueError(f"lookahead: expected one of {', '.join(LOOKAHEADS)}, found {lookahead!r}")
    tried = env.clone()
    reward = float(tried.step(text)[1])
    if lookahead == "full":
        return reward + teacher.rest(tried)
    if not tried.episode.ended:
        reward += NEXT_STEP * float(tried.step(teacher.action(tried).to_text())[1])
    return reward
