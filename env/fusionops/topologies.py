"""Procedural graphs of one tensor size; every draw comes from the generator that is handed in."""

from __future__ import annotations

from numpy.random import Generator

from env.fusionops.graph import MATMUL, POINTWISE, Graph, Hardware, Op, Tensor

MATMUL_SHARE = 0.3
NEAR_SHARE = 0.6
NATIVE = 128


def generate_graph(
    ops: int,
    side: int,
    *,
    rng: Generator,
    capacity: float = 3.0,
    bandwidth: float = 10.0,
    cost: tuple[int, int] = (400, 2000),
    name: str = "generated",
) -> Graph:
    """A random acyclic graph: each op reads one or two tensors, mostly those made last.

    Args:
        ops: how many operations.
        side: width and height of every tensor, elements.
        capacity: of fast memory, in tensors.
        bandwidth: elements per unit of time.
        cost: lowest and highest base cost; drawn in hundreds.
        name: the graph's id.

    Raises:
        GraphError: if the sizes make no graph.
    """
    external = [0]  # graph inputs, numbered behind the tensors that are made; a matmul may read one of its own
    reads: list[tuple[str, list[int]]] = []
    for op in range(ops):
        made = range(1, op + 1)
        inputs = [op if op and rng.random() < NEAR_SHARE else int(rng.choice([0, *made]))]
        kind = MATMUL if rng.random() < MATMUL_SHARE else POINTWISE
        if kind == MATMUL and rng.random() < 0.5:
            external.append(ops + len(external))
            inputs.append(external[-1])
        elif kind == MATMUL or rng.random() < 0.5:
            inputs.append(int(rng.choice([0, *made])))
        reads.append((kind, inputs))
    costs = [int(c) * 100 for c in rng.integers(cost[0] // 100, cost[1] // 100 + 1, size=ops)]
    return Graph(
        name,
        tuple(Tensor(i, side, side) for i in range(ops + len(external))),
        tuple(Op(i, kind, tuple(inputs), (i + 1,), costs[i]) for i, (kind, inputs) in enumerate(reads)),
        Hardware(int(capacity * side * side), bandwidth, (NATIVE, NATIVE)),
    )
