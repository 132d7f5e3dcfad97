"""Procedural graphs and the curriculum. Every draw comes from the generator that the caller hands in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator

from env.scheduler.graph import BYTES_PER_ELEMENT, Graph, Hardware, Node

TOPOLOGIES = ("linear", "attention", "residual", "long_skip", "adversarial", "mixed")
DIFFICULTIES = ("easy", "medium", "hard", "expert")
SIDES = (128, 256, 512)

# Tensors that fit in fast memory, bytes a cycle, cycles a launch, operations a kernel.
_MACHINES = {
    "easy": (6.0, 15.0, 2000.0, 8),
    "medium": (4.0, 10.0, 3000.0, 6),
    "hard": (3.0, 8.0, 4000.0, 5),
    "expert": (2.5, 6.0, 5000.0, 4),
}
_ACTIVATIONS = ("relu", "gelu", "layernorm")

# A block is a list of (op, inputs); an input -1 is the last output before the block, others are the block's own nodes.
_P = -1
_BLOCKS: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "residual": (("matmul", (_P,)), ("relu", (0,)), ("matmul", (1,)), ("add", (_P, 2))),
    "diamond": (("matmul", (_P,)), ("relu", (0,)), ("matmul", (_P,)), ("gelu", (2,)), ("add", (1, 3))),
    "attention": (
        ("matmul", (_P,)),
        ("matmul", (_P,)),
        ("matmul", (_P,)),
        ("matmul", (0, 1)),
        ("softmax", (3,)),
        ("matmul", (4, 2)),
    ),
    "long_skip": (
        ("matmul", (_P,)),
        ("relu", (0,)),
        ("layernorm", (1,)),
        ("gelu", (2,)),
        ("add", (_P, 3)),
        ("add", (0, 4)),
    ),
    "multi_skip": (
        ("matmul", (_P,)),
        ("relu", (0,)),
        ("matmul", (1,)),
        ("add", (0, 2)),
        ("gelu", (3,)),
        ("layernorm", (4,)),
        ("add", (0, 5)),
    ),
    "bottleneck": (
        ("matmul", (_P,)),
        ("relu", (0,)),
        ("matmul", (1,)),
        ("gelu", (2,)),
        ("matmul", (3,)),
        ("layernorm", (4,)),
    ),
}
_MIX = {
    "chain": 0.15,
    "residual": 0.20,
    "diamond": 0.10,
    "attention": 0.10,
    "long_skip": 0.20,
    "multi_skip": 0.15,
    "bottleneck": 0.10,
}
_EXTRA_SKIP_PROBABILITY = 0.3


def machine(difficulty: str, shape: tuple[int, int]) -> Hardware:
    """The published hardware of a difficulty for graphs whose tensors all have one shape."""
    tensors, bandwidth, launch, fusion = _MACHINES[difficulty]
    return Hardware(int(tensors * BYTES_PER_ELEMENT * shape[0] * shape[1]), bandwidth, launch, fusion)


def generate_graph(
    size: int,
    difficulty: str = "medium",
    topology: str = "mixed",
    shape: tuple[int, int] = (256, 256),
    *,
    rng: Generator,
    name: str | None = None,
) -> Graph:
    """A random graph of one of the published families.

    Args:
        size: nodes asked for, 2 or more; some topologies end with one node less.
        difficulty: names the hardware, one of `DIFFICULTIES`.
        topology: one of `TOPOLOGIES`.
        shape: of every tensor, rows and columns.
        rng: the only source of randomness.
        name: the graph's id; by default made of the arguments.

    Raises:
        ValueError: if an argument is not as said.
    """
    if size < 2:
        raise ValueError(f"size: expected 2 nodes or more, found {size}")
    if difficulty not in _MACHINES:
        raise ValueError(f"difficulty: expected one of {', '.join(DIFFICULTIES)}, found {difficulty!r}")
    if topology not in _GROW:
        raise ValueError(f"topology: expected one of {', '.join(TOPOLOGIES)}, found {topology!r}")
    growing = _Growing(size, rng)
    _GROW[topology](growing)
    nodes = tuple(Node(i, op, shape, inputs) for i, (op, inputs) in enumerate(growing.nodes[:size]))
    name = name or f"{topology}-{size}-{difficulty}-{shape[0]}x{shape[1]}"
    return Graph(name, nodes, machine(difficulty, shape))


def curriculum_graph(level: float, *, rng: Generator, largest: int = 50, name: str | None = None) -> Graph:
    """A training graph of the published curriculum: always mixed; size and hardware by level (0 to 1).

    Below 0.3: 8 to 16 nodes, easy or medium; below 0.7: 16 to 32, medium or hard; else 32 to 50, hard or expert.
    `largest` caps the size.
    """
    if level < 0.3:
        smallest, biggest, difficulties = 8, 16, ("easy", "medium")
    elif level < 0.7:
        smallest, biggest, difficulties = 16, 32, ("medium", "hard")
    else:
        smallest, biggest, difficulties = 32, 50, ("hard", "expert")
    size = min(int(rng.integers(smallest, biggest + 1)), largest)
    difficulty = difficulties[rng.integers(2)]
    side = SIDES[rng.integers(len(SIDES))]
    return generate_graph(size, difficulty, "mixed", (side, side), rng=rng, name=name)


@dataclass
class _Growing:
    """A graph while it grows. Node 0 is always a matmul without inputs."""

    size: int
    rng: Generator
    nodes: list[tuple[str, tuple[int, ...]]] = field(default_factory=lambda: [("matmul", ())])

    @property
    def last(self) -> int:
        return len(self.nodes) - 1

    @property
    def missing(self) -> int:
        return self.size - len(self.nodes)

    def block(self, name: str) -> None:
        first, previous = len(self.nodes), self.last
        for op, inputs in _BLOCKS[name]:
            self.nodes.append((op, tuple(previous if i == _P else first + i for i in inputs)))

    def append(self, ops: Sequence[str]) -> None:
        """One node that reads the last one; its op is drawn from `ops`."""
        op = ops[0] if len(ops) == 1 else ops[int(self.rng.integers(len(ops)))]
        self.nodes.append((op, (self.last,)))


def _linear(growing: _Growing) -> None:
    while growing.missing > 0:
        growing.append(_ACTIVATIONS)


def _attention(growing: _Growing) -> None:
    while growing.missing > 1:
        growing.block("attention")
    growing.append(("layernorm",))


def _residual(growing: _Growing) -> None:
    while growing.missing > 1:
        growing.block("residual")


def _long_skip(growing: _Growing) -> None:
    while growing.missing > 0:
        if growing.missing >= 7:
            growing.block("multi_skip")
        elif growing.missing >= 6:
            growing.block("long_skip")
        else:
            growing.append(("relu",))


def _adversarial(growing: _Growing) -> None:
    turn = 0
    while growing.missing > 0:
        name = ("long_skip", "multi_skip", "bottleneck")[turn % 3]
        if len(_BLOCKS[name]) <= growing.missing:
            growing.block(name)
        else:
            growing.append(("relu",))
        turn += 1


def _mixed(growing: _Growing) -> None:
    rng = growing.rng
    skip_sources = [0]
    while growing.missing > 0:
        name = tuple(_MIX)[rng.choice(len(_MIX), p=list(_MIX.values()))]
        if name == "chain" or growing.missing < 4:
            for _ in range(min(int(rng.integers(2, 5)), growing.missing)):
                growing.append(_ACTIVATIONS)
        elif len(_BLOCKS[name]) <= growing.missing:
            growing.block(name)
        else:
            growing.append(("relu", "gelu"))
        skip_sources.append(growing.last)
        if len(skip_sources) > 2 and rng.random() < _EXTRA_SKIP_PROBABILITY:
            source = skip_sources[rng.integers(len(skip_sources) - 1)]
            growing.nodes.append(("add", (source, growing.last)))


_GROW: dict[str, Callable[[_Growing], None]] = {
    "linear": _linear,
    "attention": _attention,
    "residual": _residual,
    "long_skip": _long_skip,
    "adversarial": _adversarial,
    "mixed": _mixed,
}
