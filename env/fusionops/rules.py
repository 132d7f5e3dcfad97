"""When a kernel may run.

The published checks in their order. Where its README says otherwise:

* Ops need not be ready: a predecessor that is listed in the same action, at any place, is enough.
* Ops that have run may run again. The penalty for an op that is already scheduled is only reached by naming an op twice
  in one action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from env.fusionops.action import Action
from env.fusionops.cost import Kernel
from env.fusionops.graph import Graph

PENALTIES: Mapping[str, float] = MappingProxyType(
    {
        "memory": -0.05,
        "dependency": -0.20,
        "retention": -0.15,
        "connectivity": -0.15,
        "already_scheduled": -0.10,
        "parse": -0.10,
        "invalid": -0.10,
    }
)
_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "oom": "memory",
        "dependency": "dependency",
        "retain_not_produced": "retention",
        "not_connected": "connectivity",
        "duplicate_op": "already_scheduled",
        "unreadable": "parse",
    }
)
LARGEST_REPORTED = 2**63 - 1


@dataclass(frozen=True)
class Refusal:
    """Why an action was not carried out.

    Attributes:
        kind: the check that failed.
        details: the numbers that it failed with.
    """

    kind: str
    details: Mapping[str, int] = field(default_factory=dict)

    @property
    def error_class(self) -> str:
        """A key of `PENALTIES`."""
        return _CLASSES.get(self.kind, "invalid")

    @property
    def penalty(self) -> float:
        """The reward of the refused action, below 0."""
        return PENALTIES[self.error_class]


def refusal(graph: Graph, scheduled: Set[int], fast: Set[int], action: Action) -> Refusal | None:
    """The first check that an action fails, or None if it may run.

    Args:
        scheduled: ops that have run.
        fast: tensors in fast memory.
    """
    return _ops_refusal(graph, scheduled, action.ops) or _kernel_refusal(graph, fast, action)


def _ops_refusal(graph: Graph, scheduled: Set[int], ops: Sequence[int]) -> Refusal | None:
    for op in ops:
        if not 0 <= op < len(graph):
            return Refusal("unknown_op", {"op": op})
    if len(set(ops)) < len(ops):
        return Refusal("duplicate_op")
    for op in ops:
        for tensor in graph.ops[op].inputs:
            producer = graph.producers.get(tensor)
            if producer is not None and producer not in scheduled and producer not in ops:
                return Refusal("dependency", {"op": op, "tensor": tensor, "producer": producer})
    return None if connected(graph, ops) else Refusal("not_connected")


def _kernel_refusal(graph: Graph, fast: Set[int], action: Action) -> Refusal | None:
    if min(action.config) <= 0:
        return Refusal("config_not_positive")
    for tensor in action.retain:
        if graph.producers.get(tensor) not in action.ops:
            return Refusal("retain_not_produced", {"tensor": tensor})
    kernel, capacity = Kernel.of(graph, action.ops, fast), graph.hardware.fast_memory_capacity
    working_set = kernel.working_set(action.config)
    if working_set > capacity:
        return Refusal("oom", {"working_set": min(working_set, LARGEST_REPORTED), "capacity": capacity})
    if action.traversal is not None:
        columns, rows = kernel.grid(action.config)
        if len(action.traversal) != columns * rows:
            return Refusal("traversal_length", {"given": len(action.traversal), "expected": columns * rows})
        if sorted(action.traversal) != list(range(columns * rows)):
            return Refusal("traversal_not_permutation")
    return None


def connected(graph: Graph, ops: Sequence[int]) -> bool:
    """Whether ops hang together by tensors that one of them makes and another reads; sharing an input is no link."""
    left = set(ops)
    reached = [left.pop()] if left else []
    while reached:
        op = reached.pop()
        linked = {i for i in left if op in graph.predecessors[i] or i in graph.predecessors[op]}
        left -= linked
        reached += linked
    return not left


def ready(graph: Graph, scheduled: Set[int]) -> tuple[int, ...]:
    """Ops that have not run and whose predecessors have, in id order."""
    return tuple(op.id for op in graph.ops if op.id not in scheduled and graph.predecessors[op.id] <= scheduled)
