"""What a kernel of several ops needs and costs.

The published model, where its README says otherwise:

* A tensor that a listed op makes and a listed op reads is ephemeral: never written, even if ops outside read it, which
  later load it all the same. Retaining an ephemeral tensor is allowed and free.
* The working set leaves out what the kernel itself retains; the kernels after it count that in full. So more than the
  capacity can be retained, after which nothing fits any more.
* Every tile pays the full base cost, whatever its size: tiles above the native size make compute cheaper, those below
  pay no other penalty. Slices are not clipped to their tensor. The native tile counts only in the naive schedule and
  for actions without a config.
* Pointwise ops pay their base cost again in each reduction step of a kernel that they share with a split matmul.
* The naive schedule ignores the capacity, and reloads a matmul's right operand in each row of tiles even where there is
  one column only, which a kernel does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from env.fusionops.action import Config
from env.fusionops.graph import MATMUL, Graph, Op

LHS, RHS, SLICE = "lhs", "rhs", "slice"


@dataclass(frozen=True)
class Kernel:
    """Some ops with their tensors sorted by what happens to them.

    Attributes:
        loaded: tensors that come from slow memory -> what a tile needs of them: `LHS`, `RHS`, or a `SLICE` of its size.
        held: elements of all that is in fast memory, whether the ops read it or not.
        outputs: tensors that are made and not read here.
        width, height: of all tiles together, the largest of any tensor made; 0 without ops.
        depth: inner dimension of the matmuls, the largest; 0 without one.
        pointwise_cost, matmul_cost: summed base costs.
    """

    graph: Graph
    loaded: dict[int, str]
    held: int
    outputs: tuple[int, ...]
    width: int
    height: int
    depth: int
    pointwise_cost: float
    matmul_cost: float

    @classmethod
    def of(cls, graph: Graph, ops: Sequence[int], fast: Set[int]) -> Kernel:
        """Classify the tensors of some ops, with `fast` in fast memory.

        A loaded tensor's role is set by the last listed op that reads it.
        """
        listed, tensors = [graph.ops[i] for i in ops], graph.tensors
        made = {t: None for op in listed for t in op.outputs}
        roles = {t: _role(op, t) for op in listed for t in op.inputs if t not in made}
        read = {t for op in listed for t in op.inputs}
        matmuls = [op for op in listed if op.type == MATMUL]
        return cls(
            graph,
            loaded={t: role for t, role in roles.items() if t not in fast},
            held=sum(tensors[t].size for t in fast),
            outputs=tuple(t for t in made if t not in read),
            width=max((tensors[t].width for t in made), default=0),
            height=max((tensors[t].height for t in made), default=0),
            depth=max((tensors[op.inputs[0]].width for op in matmuls), default=0),
            pointwise_cost=sum(op.base_cost for op in listed if op.type != MATMUL),
            matmul_cost=sum(op.base_cost for op in matmuls),
        )

    def grid(self, config: Config) -> tuple[int, int]:
        """Columns and rows of tiles."""
        return _ceil(self.width, config[0]), _ceil(self.height, config[1])

    def reduction_steps(self, config: Config) -> int:
        """Parts that the inner dimension is split into; 1 without a matmul."""
        return max(1, _ceil(self.depth, config[2]))

    def working_set(self, config: Config) -> int:
        """Elements that have to be in fast memory at once."""
        width, height, depth = config
        split = self.reduction_steps(config) > 1
        needs = {SLICE: width * height, RHS: width * depth, LHS: depth * height}
        loaded = sum(
            self.graph.tensors[t].size if split and role == LHS else needs[role] for t, role in self.loaded.items()
        )
        return loaded + self.held + len(self.outputs) * width * height


@dataclass(frozen=True)
class Cost:
    """What a kernel needs and takes.

    Attributes:
        fits: whether the working set is within the capacity; if not, latency and iterations are 0.
        working_set: elements.
        latency: time.
        iterations: tiles times reduction steps.
    """

    fits: bool
    working_set: int
    latency: float
    iterations: int


def kernel_cost(
    graph: Graph,
    ops: Sequence[int],
    config: Config,
    retain: Sequence[int] = (),
    traversal: Sequence[int] | None = None,
    fast: Set[int] = frozenset(),
) -> Cost:
    """Cost of running ops as one kernel.

    Args:
        retain: ids of outputs that are not written.
        traversal: tile indices (row * columns + column) in order; None: row by row.
        fast: ids in fast memory when it starts.
    """
    kernel = Kernel.of(graph, ops, fast)
    working_set = kernel.working_set(config)
    if working_set > graph.hardware.fast_memory_capacity:
        return Cost(False, working_set, 0.0, 0)
    columns, rows = kernel.grid(config)
    tiles = columns * rows if traversal is None else len(traversal)
    steps = kernel.reduction_steps(config)
    traffic = _Traffic.of(kernel, config, retain)
    if traversal is None:
        latency = traffic.raster(columns, rows)
    else:
        latency = sum(traffic.tile(*moves) for moves in _moves(traversal, columns))
    return Cost(True, working_set, latency, tiles * steps)


def iteration_latencies(
    graph: Graph,
    ops: Sequence[int],
    config: Config,
    retain: Sequence[int] = (),
    traversal: Sequence[int] | None = None,
    fast: Set[int] = frozenset(),
) -> Iterator[float]:
    """Time of each iteration of a kernel that fits, reduction step by reduction step, tile by tile.

    They sum to its latency, which `kernel_cost` finds without walking over them.
    """
    kernel = Kernel.of(graph, ops, fast)
    columns, rows = kernel.grid(config)
    traffic = _Traffic.of(kernel, config, retain)
    for moves in _moves(range(columns * rows) if traversal is None else traversal, columns):
        for step in range(traffic.steps):
            yield traffic.iteration(*moves, opens=step == 0, closes=step == traffic.steps - 1)


@dataclass(frozen=True)
class _Traffic:
    """Times of the parts of an iteration: max(compute, all that is moved).

    Attributes:
        steps: reduction steps of a tile.
        compute: in every iteration.
        start: loads of the very first iteration: left operands of a split reduction, which then stay.
        tile_in, tile_out: in a tile's first and last reduction step.
        row, column: operands that are reloaded where the row or column of tiles is another than the tile's before.
        every: right operands of a split reduction, in every iteration.
    """

    steps: int
    compute: float
    start: float
    tile_in: float
    tile_out: float
    row: float
    column: float
    every: float

    @classmethod
    def of(cls, kernel: Kernel, config: Config, retain: Sequence[int]) -> _Traffic:
        width, height, depth = config
        bandwidth = kernel.graph.hardware.slow_memory_bandwidth
        steps = kernel.reduction_steps(config)
        split = steps > 1
        roles = list(kernel.loaded.values())
        whole_lhs = sum(kernel.graph.tensors[t].size for t, role in kernel.loaded.items() if role == LHS)
        rhs = roles.count(RHS) * width * depth / bandwidth
        written = sum(t not in retain for t in kernel.outputs)
        return cls(
            steps=steps,
            compute=kernel.pointwise_cost + kernel.matmul_cost / steps,
            start=whole_lhs / bandwidth if split else 0.0,
            tile_in=roles.count(SLICE) * width * height / bandwidth,
            tile_out=written * width * height / bandwidth,
            row=0.0 if split else roles.count(LHS) * depth * height / bandwidth,
            column=0.0 if split else rhs,
            every=rhs if split else 0.0,
        )

    def iteration(self, first: bool, new_row: bool, new_column: bool, *, opens: bool, closes: bool) -> float:
        """Time of one reduction step of a tile."""
        moved = self.every + closes * self.tile_out
        if opens:
            moved += self.tile_in + first * self.start + new_row * self.row + new_column * self.column
        return max(self.compute, moved)

    def tile(self, first: bool, new_row: bool, new_column: bool) -> float:
        """Time of all reduction steps of a tile."""
        if self.steps == 1:
            return self.iteration(first, new_row, new_column, opens=True, closes=True)
        opening = self.iteration(first, new_row, new_column, opens=True, closes=False)
        middle = self.iteration(first, new_row, new_column, opens=False, closes=False)
        closing = self.iteration(first, new_row, new_column, opens=False, closes=True)
        return opening + (self.steps - 2) * middle + closing

    def raster(self, columns: int, rows: int) -> float:
        """Time of all tiles, row by row: a row's first tile changes rows, and columns if there are several."""
        if columns * rows == 0:
            return 0.0
        row_starts, others = rows - 1, rows * (columns - 1)
        latency = self.tile(True, True, True) + row_starts * self.tile(False, True, columns > 1)
        return latency + others * self.tile(False, False, True)


def naive_latency(graph: Graph) -> float:
    """Time of all ops, each alone with native tiles and the whole inner dimension; the capacity is ignored."""
    return sum(_naive_op(graph, op) for op in graph.ops)


def _naive_op(graph: Graph, op: Op) -> float:
    tensors, (width, height) = graph.tensors, graph.hardware.native_granularity
    columns = _ceil(max(tensors[t].width for t in op.outputs), width)
    rows = _ceil(max(tensors[t].height for t in op.outputs), height)
    if op.type == MATMUL:
        depth = tensors[op.inputs[0]].width
        row_start, other = (depth * height + width * depth + width * height), (width * depth + width * height)
    else:
        row_start = other = (len(op.inputs) + len(op.outputs)) * width * height
    bandwidth = graph.hardware.slow_memory_bandwidth
    row = max(op.base_cost, row_start / bandwidth) + (columns - 1) * max(op.base_cost, other / bandwidth)
    return rows * row


def _role(op: Op, tensor: int) -> str:
    if op.type != MATMUL:
        return SLICE
    return LHS if op.inputs.index(tensor) == 0 else RHS


def _moves(tiles: Sequence[int], columns: int) -> Iterator[tuple[bool, bool, bool]]:
    """By tile: whether it is the first, and whether its row and its column are others than the tile's before it."""
    before: tuple[int, int] | None = None
    for tile in tiles:
        row, column = divmod(tile, columns)
        yield before is None, before is None or row != before[0], before is None or column != before[1]
        before = row, column


def _ceil(whole: int, part: int) -> int:
    return -(-whole // part)
