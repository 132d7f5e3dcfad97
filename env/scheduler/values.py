"""The exact value of every state between two kernels, under the documented rules.

Let V(p, F) be the fewest cycles that nodes p, p + 1, … of the topological order can still take, when the kernels before
them have run and F is what is in fast memory (each tensor written to slow memory, or not yet). V(n, {}) = 0 after n
nodes, and

    V(p, F) = min over q, t, R of  max(compute(p..q, t), traffic(p..q, F, R) / bandwidth) + launch + V(q + 1, R)

over kernels p..q of consecutive nodes that may be fused, tiles t and sets R to retain, as far as they fit. Only tensors
with uses left are worth retaining, so F and R are sets of live tensors, and there are few of those: V is a table.

What a kernel needs and moves is a sum over tensors, and what a tensor adds depends on whether it is resident at the
start and whether it is retained at the end. All pairs of F and R of a kernel are therefore costed by a few products of
matrices, one row a state at the start and one column a set retained.

What the rules ask of the steps before a kernel's last is included: every step that fuses must fit with its own tile and
list, for which the smallest tile and the empty list are the least demanding. So is the one way in which the
environment's help beats an explicit plan: residents that it releases because the next node does not fit beside them
are stored by the kernel that starts, not by the one that ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from env.scheduler.boundary import MOST_STATES, Booleans, Boundary, Floats, Integers
from env.scheduler.cost import TILES, Roofline
from env.scheduler.graph import BYTES_PER_ELEMENT, Graph
from env.scheduler.rules import DOCUMENTED

_NEVER_FITS = 1e18


@dataclass(frozen=True)
class Residents:
    """What is in fast memory while a kernel runs; one row a state.

    Attributes:
        tensors: ids of the m columns.
        held: (rows, m), 1 where the tensor is resident.
        unwritten: (rows, m), 1 where it is resident and was never written.
        spilled: (rows,), bytes that the kernel stores of residents which had to leave before it started.
        released: (rows,), whether any had to.
    """

    tensors: tuple[int, ...]
    held: Floats
    unwritten: Floats
    spilled: Floats
    released: Booleans

    def __getitem__(self, rows: Integers) -> Residents:
        return Residents(self.tensors, self.held[rows], self.unwritten[rows], self.spilled[rows], self.released[rows])


class ValueTable:
    """V of every state of a graph, computed backwards once.

    Args:
        graph: what is scheduled, on its machine.
        fusion: False makes every kernel one node.
        tile: asked for in every action; None leaves it free.
        retention: False retains nothing, ever.
        most_states: a boundary with more states than this is narrowed to the tensors read soonest; the values are then
            those of the best schedule that retains no others.

    Attributes:
        boundaries: by position.
        residents: by position, what is left of each state when the next kernel has started.
        values: V in cycles, by position and state.
        exact: whether no boundary was narrowed.

    Raises:
        GraphError: if the graph cannot be scheduled under the documented rules.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        fusion: bool = True,
        tile: int | None = None,
        retention: bool = True,
        most_states: int = MOST_STATES,
    ) -> None:
        DOCUMENTED.check(graph)
        self.graph = graph
        self.roofline = Roofline(graph)
        self.tiles = TILES if tile is None else (tile,)
        self.max_fusion = graph.hardware.max_fusion_depth if fusion else 1
        self._sizes = np.array(graph.sizes, dtype=float)
        self._last_use = np.array(
            [max((graph.positions[c] for c in readers), default=-1) for readers in graph.consumers]
        )
        self.boundaries = tuple(
            Boundary.of(graph, position, most_states, retention) for position in range(len(graph) + 1)
        )
        self.exact = all(boundary.complete for boundary in self.boundaries)
        self.values: list[Floats] = [np.zeros(len(boundary.set_of)) for boundary in self.boundaries]
        self._choices: list[tuple[Integers, Integers]] = [
            (np.zeros(len(values), dtype=int), np.zeros(len(values), dtype=int)) for values in self.values
        ]
        self.residents = tuple(self._residents(position) for position in range(len(graph)))
        for position in reversed(range(len(graph))):
            self._tabulate(position)

    @property
    def states(self) -> int:
        """How many states there are."""
        return sum(map(len, self.values))

    def _tabulate(self, position: int) -> None:
        residents = self.residents[position]
        values, (lengths, sets) = self.values[position], self._choices[position]
        values.fill(np.inf)
        rows = np.arange(len(values))
        for members in self.kernels(position):
            if len(members) > 1:
                rows = rows[self.fits_so_far(residents[rows], members)]
                if not len(rows):
                    break
            totals = self.totals(residents[rows], members)
            columns = totals.argmin(axis=1)
            found = totals[np.arange(len(rows)), columns]
            better = found < values[rows]
            improved = rows[better]
            values[improved], sets[improved], lengths[improved] = found[better], columns[better], len(members)

    def kernels(self, position: int, opened: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """Kernels of `opened` and the nodes from a position on, as far as the rules let them be fused."""
        members = opened
        for node in self.graph.order[position:]:
            if members and (len(members) >= self.max_fusion or set(self.graph.inputs[node]).isdisjoint(members)):
                return
            members = (*members, node)
            yield members

    def choice(self, position: int, state: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Members of the best next kernel, and what it retains, in id order."""
        lengths, sets = self._choices[position]
        members = self.graph.order[position : position + int(lengths[state])]
        boundary = self.boundaries[position + len(members)]
        kept = boundary.kept[sets[state]]
        return members, tuple(sorted(i for i, keep in zip(boundary.tensors, kept, strict=True) if keep))

    def _residents(self, position: int) -> Residents:
        """The states at a position, less what has to leave before the next node can start."""
        boundary = self.boundaries[position]
        held = boundary.kept[boundary.set_of].astype(float)
        unwritten = held - boundary.written
        spilled = np.zeros(len(held))
        released = np.zeros(len(held), dtype=bool)
        node = self.graph.order[position]
        reads = self.graph.inputs[node]
        for i in sorted(boundary.tensors, key=lambda i: (i not in reads, i), reverse=True):
            column = boundary.tensors.index(i)
            needed = self._room((node,), boundary.tensors, held, TILES[0])
            leaves = (needed > self.graph.hardware.fast_mem_capacity) & (held[:, column] > 0)
            spilled[leaves] += unwritten[leaves, column] * self._sizes[i]
            held[leaves, column] = unwritten[leaves, column] = 0.0
            released |= leaves
        return Residents(boundary.tensors, held, unwritten, spilled, released)

    def fits_so_far(self, residents: Residents, members: tuple[int, ...]) -> Booleans:
        """(rows,), whether a kernel that goes on may grow to these members."""
        needed = self._room(members, residents.tensors, residents.held, self.tiles[0])
        return needed <= self.graph.hardware.fast_mem_capacity

    def least_cycles(self) -> float:
        """A lower bound of every schedule, whatever it retains: kernels that load nothing, store graph outputs only and
        need no room but their slices."""
        capacity, bandwidth = self.graph.hardware.fast_mem_capacity, self.graph.hardware.slow_mem_bandwidth
        least = [0.0] * (len(self.graph) + 1)
        for position in reversed(range(len(self.graph))):
            options = []
            for members in self.kernels(position):
                needed = [self._room(members, (), np.zeros((1, 0)), tile)[0] for tile in TILES]
                if len(members) > 1 and needed[0] > capacity:
                    break
                compute = min(
                    self.roofline.compute(members, tile)
                    for tile, room in zip(TILES, needed, strict=True)
                    if room <= capacity
                )
                stored = sum(self.graph.sizes[i] for i in members if not self.graph.consumers[i])
                traffic = stored / bandwidth if bandwidth > 0 else 0.0
                options.append(max(compute, traffic) + least[position + len(members)])
            least[position] = min(options) + self.graph.hardware.kernel_launch_cost
        return least[0]

    def _slices(self, tile: int) -> Floats:
        return np.minimum(self._sizes, BYTES_PER_ELEMENT * tile * tile)

    def _room(self, members: tuple[int, ...], tensors: tuple[int, ...], held: Floats, tile: int) -> Floats:
        """(rows,), bytes that a kernel needs if it retains nothing."""
        inputs, outputs = self.roofline.tensors(members)
        slices = self._slices(tile)
        per_resident = [self._sizes[i] - (slices[i] if i in inputs else 0.0) for i in tensors]
        return held @ np.array(per_resident) + slices[[*inputs, *outputs]].sum()

    def totals(self, residents: Residents, members: tuple[int, ...]) -> Floats:
        """(rows, sets at the boundary after the kernel), cycles of the kernel at its best tile and of the best schedule
        after it; infinite where the set cannot be retained."""
        hardware, sizes = self.graph.hardware, self._sizes
        inputs, outputs = self.roofline.tensors(members)
        end = self.graph.positions[members[-1]] + 1
        after = self.boundaries[end]
        kept = after.kept.T.astype(float)
        ids = list(after.tensors)
        read, made = _among(ids, inputs), _among(ids, outputs)

        # By tensor of the boundary after the kernel: (rows, m).
        held, unwritten = (_columns(m, residents.tensors, ids) for m in (residents.held, residents.unwritten))
        not_stored = (made + unwritten) * sizes[ids]
        written = held - unwritten + (1.0 - held) * read

        start = list(residents.tensors)
        loads = sizes[list(inputs)].sum() - residents.held @ (sizes[start] * _among(start, inputs))
        leaving = residents.unwritten @ (sizes[start] * (self._last_use[start] >= end))
        moved = loads + sizes[list(outputs)].sum() + leaving + residents.spilled
        bandwidth = hardware.slow_mem_bandwidth
        traffic = (
            (moved[:, None] - not_stored @ kept) / bandwidth
            if bandwidth > 0
            else np.zeros((len(held), len(after.kept)))
        )

        cycles = np.full(traffic.shape, np.inf)
        for tile, compute in self._useful_tiles(members):
            room = self._room(members, residents.tensors, residents.held, tile)
            whole = (1.0 - held) * (sizes[ids] - self._slices(tile)[ids] + _NEVER_FITS * ~(read | made))
            cycles[room[:, None] + whole @ kept <= hardware.fast_mem_capacity] = compute
        if len(members) == 1:
            self._as_it_opens(residents, members, cycles)
        states = after.first + (written @ after.weight.T).astype(int)
        return np.maximum(cycles, traffic) + hardware.kernel_launch_cost + self.values[end][states]

    def _useful_tiles(self, members: tuple[int, ...]) -> list[tuple[int, float]]:
        """Tiles in ascending order, less those at which a smaller one, which fits wherever they do, is as fast."""
        useful: list[tuple[int, float]] = []
        for tile in self.tiles:
            compute = self.roofline.compute(members, tile)
            if not useful or compute < useful[-1][1]:
                useful.append((tile, compute))
        return useful

    def _as_it_opens(self, residents: Residents, members: tuple[int, ...], cycles: Floats) -> None:
        """A kernel of one node always runs: it retains nothing if residents had to leave for it or no tile that may be
        asked for fits, and then takes the largest tile that does."""
        cycles[residents.released, 1:] = np.inf
        needed = {tile: self._room(members, residents.tensors, residents.held, tile) for tile in TILES}
        helped = needed[self.tiles[0]] > self.graph.hardware.fast_mem_capacity
        cycles[helped, 1:] = np.inf
        for tile in TILES:
            if tile < self.tiles[0]:
                fits = helped & (needed[tile] <= self.graph.hardware.fast_mem_capacity)
                cycles[fits, 0] = self.roofline.compute(members, tile)


def _among(ids: Sequence[int], others: Sequence[int]) -> Booleans:
    return np.array([i in others for i in ids], dtype=bool)


def _columns(matrix: Floats, tensors: Sequence[int], ids: Sequence[int]) -> Floats:
    """The columns of the tensors `ids` of a matrix whose columns are `tensors`; zeros for those that it has not."""
    columns = np.zeros((len(matrix), len(ids)))
    for column, i in enumerate(ids):
        if i in tensors:
            columns[:, column] = matrix[:, tensors.index(i)]
    return columns
