"""What a rule set decides, and what both share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from env.scheduler.action import Action
from env.scheduler.cost import KernelCost, Roofline
from env.scheduler.graph import Graph
from env.scheduler.state import Episode

INVALID_TEXT_REWARD = -0.10
INVALID_TEXTS_IN_A_ROW = 3
CALIBRATION = 0.2


def calibrated(score: float) -> float:
    """The unit of the published tables: clip(score / 0.2, -1, 1)."""
    return max(-1.0, min(1.0, score / CALIBRATION))


class Rules(ABC):
    """What a rule set decides."""

    name: ClassVar[str]

    @abstractmethod
    def parse(self, text: Any) -> Action:
        """Read an action text; raises ActionError."""

    @abstractmethod
    def observe(self, episode: Episode, greedy_latency: float) -> str:
        """What the agent sees, as compact JSON."""

    @abstractmethod
    def check(self, graph: Graph) -> None:
        """Raise GraphError if the graph cannot be scheduled under these rules."""

    @abstractmethod
    def kernel_cost(
        self, roofline: Roofline, members: tuple[int, ...], tile: int, retain: tuple[int, ...], fast: Any
    ) -> KernelCost:
        """Cost of a kernel that starts with `fast` in fast memory and ends by keeping `retain` of it."""

    @abstractmethod
    def place(self, episode: Episode, action: Action, greedy_latency: float) -> float:
        """Place the current node; returns the step's reward before `end`.

        Raises:
            ActionError: if the action cannot be carried out; the episode is then unchanged.
        """

    @abstractmethod
    def end(self, episode: Episode, greedy_latency: float) -> float:
        """Finish an episode whose last step has been taken; returns what that adds to the reward."""

    @abstractmethod
    def baselines(self, roofline: Roofline) -> tuple[float, float]:
        """Latency in cycles of the naive and of the greedy schedule."""

    @abstractmethod
    def score(self, latency: float, greedy_latency: float) -> float:
        """The score of a latency in cycles."""
