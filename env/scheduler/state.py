"""What an episode is made of, under any rules. Cheap to clone."""

from __future__ import annotations

from typing import Any, NamedTuple

from env.scheduler.cost import Roofline
from env.scheduler.graph import Graph


class Kernel(NamedTuple):
    """The open kernel, or one that has run.

    Attributes:
        members: ids in order.
        tile: edge of its tiles.
        retain: ids that stay in fast memory when it ends.
        evicted: residents that had to leave before it could start.
        latency: cycles; 0 while it is open (and, under the published rules, for one that was run op by op).
    """

    members: tuple[int, ...] = ()
    tile: int = 128
    retain: tuple[int, ...] = ()
    evicted: tuple[int, ...] = ()
    latency: float = 0.0


NO_KERNEL = Kernel()


class Episode:
    """The state of one episode.

    Attributes:
        graph, roofline: what is scheduled, and its cost tables; shared between clones.
        step: steps taken.
        position: how many nodes of the topological order are placed.
        uses: by node id, how many reads are still to come.
        fast: what is in fast memory: id -> whether it has been written to slow memory.
        fast_bytes: size of `fast` when it was last measured (the published environment lets it go stale).
        kernel: the open kernel.
        kernels: those that have run.
        latency: cycles of the kernels that have run.
        launches, reloads: counts.
        invalid_in_a_row: invalid texts since the last valid one.
        error: what the last step complained about, or None.
        ended: no further step changes anything.
        truncated: it ended before the agent had placed every node.
    """

    __slots__ = (
        "ended", "error", "fast", "fast_bytes", "graph", "invalid_in_a_row", "kernel", "kernels", "latency", "launches",
        "position", "reloads", "roofline", "step", "truncated", "uses",
    )  # fmt: skip

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self.graph: Graph = roofline.graph
        self.step = 0
        self.position = 0
        self.uses = [len(readers) for readers in self.graph.consumers]
        self.fast: dict[int, bool] = {}
        self.fast_bytes = 0
        self.kernel = NO_KERNEL
        self.kernels: list[Kernel] = []
        self.latency = 0.0
        self.launches = 0
        self.reloads = 0
        self.invalid_in_a_row = 0
        self.error: Any = None
        self.ended = False
        self.truncated = False

    @property
    def current(self) -> int:
        """The node to be placed, or -1 when all are."""
        return self.graph.order[self.position] if self.position < len(self.graph) else -1

    def clone(self) -> Episode:
        """An independent copy; the graph and its tables are shared."""
        copy = Episode.__new__(Episode)
        for name in Episode.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.uses = self.uses.copy()
        copy.fast = self.fast.copy()
        copy.kernels = self.kernels.copy()
        return copy
