"""Roofline cost of one kernel: cycles = max(compute, load + store) + launch.

One flop takes one cycle; traffic takes bytes / bandwidth. What has to be loaded and stored, and what has to fit in fast
memory, is decided by the rules (`rules`); the formulas here are common to them.
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import NamedTuple

from env.scheduler.graph import COMPUTE_OPS, REDUCTION_OPS, Graph, Node

TILES = (32, 64, 128, 256)


class KernelCost(NamedTuple):
    """Cycles and bytes of one kernel.

    Attributes:
        compute, load, store, launch, total: cycles; all 0 if the kernel does not fit.
        working_set: bytes of fast memory that the kernel needs.
        loaded, stored: ids of the tensors moved, in order.
        fits: whether the working set is within the capacity.
    """

    compute: float
    load: float
    store: float
    launch: float
    total: float
    working_set: int
    loaded: tuple[int, ...]
    stored: tuple[int, ...]
    fits: bool


def compute_cycles(node: Node, tile: int) -> float:
    """Cycles that one operation computes at a tile (any positive integer).

    With q = max(1, ceil(elements / tile^2)) tiles: a compute op takes flops / sqrt(min(1, tile / 128)) and 2 % of its
    flops per tile; a reduction takes flops (1 + 0.1 max(0, 3 - q)); a pointwise op its flops.
    """
    flops = node.flops
    count = max(1, ceil(node.elements / (tile * tile)))
    if node.op in COMPUTE_OPS:
        return flops * (1 / sqrt(min(1.0, tile / 128))) + count * (0.02 * flops)
    if node.op in REDUCTION_OPS:
        return flops * (1 + 0.1 * max(0, 3 - count))
    return flops


class Roofline:
    """The cost tables of one graph, shared by all episodes on it.

    Args:
        graph: the graph whose kernels are costed.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._compute: dict[int, tuple[float, ...]] = {}
        self._tensors: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def compute(self, members: tuple[int, ...], tile: int) -> float:
        """Cycles that the members of a kernel compute at a tile."""
        table = self._compute.get(tile)
        if table is None:
            table = self._compute[tile] = tuple(compute_cycles(node, tile) for node in self.graph.nodes)
        return sum([table[member] for member in members])

    def tensors(self, members: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`kernel_tensors` of a kernel, remembered: episodes visit few kernels (runs of the order), often."""
        tensors = self._tensors.get(members)
        if tensors is None:
            tensors = self._tensors[members] = kernel_tensors(self.graph, members)
        return tensors

    def forget_kernels(self) -> None:
        """Drop what is remembered of kernels, not of nodes."""
        self._tensors.clear()

    def cost(
        self, members: tuple[int, ...], tile: int, loaded: list[int], stored: list[int], working_set: int
    ) -> KernelCost:
        """The roofline of a kernel whose traffic and working set (bytes) the rules have decided."""
        hardware = self.graph.hardware
        if working_set > hardware.fast_mem_capacity:
            return KernelCost(0.0, 0.0, 0.0, 0.0, 0.0, working_set, (), (), False)
        sizes = self.graph.sizes
        bandwidth = hardware.slow_mem_bandwidth
        compute = self.compute(members, tile)
        load = sum([sizes[i] for i in loaded]) / bandwidth if bandwidth > 0 else 0.0
        store = sum([sizes[i] for i in stored]) / bandwidth if bandwidth > 0 else 0.0
        launch = hardware.kernel_launch_cost
        total = max(compute, load + store) + launch
        return KernelCost(compute, load, store, launch, total, working_set, tuple(loaded), tuple(stored), True)


def kernel_tensors(graph: Graph, members: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """External inputs and outputs of a kernel, each id once.

    Inputs are in order of first mention. Outputs are first the members that no member reads, then those that are read
    both inside and outside; members read inside only are ephemeral.
    """
    inside = set(members)
    inputs: list[int] = []
    outputs: list[int] = []
    read_on_both_sides: list[int] = []
    for member in members:
        for i in graph.inputs[member]:
            if i not in inside and i not in inputs:
                inputs.append(i)
        readers = graph.consumers[member]
        if inside.isdisjoint(readers):
            outputs.append(member)
        elif not inside.issuperset(readers):
            read_on_both_sides.append(member)
    return tuple(inputs), tuple(outputs + read_on_both_sides)
