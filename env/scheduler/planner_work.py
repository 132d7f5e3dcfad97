"""How much work a graph gives the planner, found before it is done."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from env.scheduler.boundary import MOST_STATES, Boundary
from env.scheduler.graph import Graph

MOST_PLANNER_WORK = 20_000_000
"""About a second of one core. Random graphs and traced networks stay below a hundredth of it."""


@lru_cache(maxsize=256)
def planner_work(graph: Graph) -> int:
    """How many pairs of a state before and a set retained after a kernel a value table of the graph goes through."""
    boundaries = [Boundary.of(graph, position, MOST_STATES, True) for position in range(len(graph) + 1)]
    return sum(
        len(boundaries[position].set_of) * len(boundaries[end].kept)
        for position in range(len(graph))
        for end in _ends(graph, position)
    )


def _ends(graph: Graph, position: int) -> Iterator[int]:
    """Positions after the kernels that may start at one, whether they fit or not."""
    members: set[int] = set()
    for end, node in enumerate(graph.order[position:], position + 1):
        if members and (len(members) >= graph.hardware.max_fusion_depth or members.isdisjoint(graph.inputs[node])):
            return
        members.add(node)
        yield end
