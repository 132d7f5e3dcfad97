"""All that fast memory can hold between two kernels: the states of the planner's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.scheduler.graph import Graph

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]
Integers = NDArray[np.int64]

MOST_STATES = 3**7


class PlannerError(ValueError):
    """A question that the planner cannot answer; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Boundary:
    """What fast memory can hold between two kernels, when `position` nodes are placed.

    Attributes:
        position: nodes placed.
        tensors: ids of the m live tensors that may be retained here.
        complete: whether those are all live tensors.
        kept: (sets, m), which tensors a set holds; the empty set first.
        first: (sets,), the first state of each set. A set has one state for each choice of its written tensors.
        weight: (sets, m), how many states further a state lies if that tensor is written.
        set_of: (states,), the set of each state.
        written: (states, m), which tensors have been written to slow memory.
    """

    position: int
    tensors: tuple[int, ...]
    complete: bool
    kept: Booleans
    first: Integers
    weight: Floats
    set_of: Integers
    written: Booleans

    @classmethod
    def of(cls, graph: Graph, position: int, most_states: int, retention: bool) -> Boundary:
        """The boundary with as many live tensors, those read soonest first, as `most_states` states allow."""
        positions, capacity = graph.positions, graph.hardware.fast_mem_capacity
        next_use = {
            i: min(later)
            for i in graph.order[:position]
            if retention and (later := [positions[c] for c in graph.consumers[i] if positions[c] >= position])
        }
        tensors: list[int] = []
        writable: list[bool] = []
        kept = np.zeros((1, 0), dtype=bool)
        for i in sorted(next_use, key=lambda i: (next_use[i], i)):
            # A tensor is in fast memory and written only if a kernel has loaded it, hence read it.
            more = [*writable, any(positions[c] < position for c in graph.consumers[i])]
            wider = np.pad(np.repeat(kept, 2, axis=0), ((0, 0), (0, 1)))
            wider[1::2, -1] = True
            wider = wider[wider @ np.array([graph.sizes[j] for j in (*tensors, i)]) <= capacity]
            if (1 << (wider & more).sum(axis=1)).sum() > most_states:
                break
            tensors, writable, kept = [*tensors, i], more, wider
        can_be_written = kept & np.array(writable, dtype=bool)
        counts = 1 << can_be_written.sum(axis=1)
        rank = np.cumsum(can_be_written, axis=1) - 1
        first = np.cumsum(counts) - counts
        set_of = np.repeat(np.arange(len(kept)), counts)
        choice = np.arange(len(set_of)) - first[set_of]
        written = can_be_written[set_of] & ((choice[:, None] >> np.maximum(rank[set_of], 0)) & 1 == 1)
        weight = np.where(can_be_written, 1 << np.maximum(rank, 0), 0).astype(float)
        complete = len(tensors) == len(next_use)
        return cls(position, tuple(tensors), complete, kept, first, weight, set_of, written)

    def state(self, fast: Mapping[int, bool]) -> int:
        """The number of the state in which fast memory holds `fast` (id -> written).

        Raises:
            PlannerError: if it holds something that the table leaves out.
        """
        held = np.array([i in fast for i in self.tensors], dtype=bool)
        found = np.flatnonzero((self.kept == held).all(axis=1))
        if held.sum() < len(fast) or not len(found):
            raise PlannerError(
                f"fast memory at position {self.position}: expected some of the tensors {list(self.tensors)}, "
                f"within the capacity, found {sorted(fast)}"
            )
        row = int(found[0])
        return int(self.first[row] + sum(self.weight[row, j] for j, i in enumerate(self.tensors) if fast.get(i)))
