"""What an episode is made of: a value; each step makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from env.fusionops.action import Action
from env.fusionops.cost import Cost
from env.fusionops.graph import Graph
from env.fusionops.rules import Refusal


@dataclass(frozen=True)
class Outcome:
    """How the last step went.

    Attributes:
        action: what was asked for; None if the text could not be read.
        cost: of the kernel, if it ran.
        refusal: why it did not.
    """

    action: Action | None = None
    cost: Cost | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Episode:
    """The state of one episode.

    Attributes:
        scheduled: ops that have run.
        fast: tensors in fast memory.
        latency: time of the kernels that have run.
        step_count: valid and refused steps; unreadable texts do not count.
        last: how the last step went, None at the beginning.
        truncated, terminated: the last step ended the episode for want of steps, or by completing the graph.
    """

    graph: Graph
    scheduled: frozenset[int] = frozenset()
    fast: frozenset[int] = frozenset()
    latency: float = 0.0
    step_count: int = 0
    last: Outcome | None = None
    terminated: bool = False
    truncated: bool = False

    @property
    def covered(self) -> bool:
        """Whether every op has run."""
        return len(self.scheduled) == len(self.graph)

    @property
    def ended(self) -> bool:
        """Whether no action is taken any more."""
        return self.terminated or self.truncated
