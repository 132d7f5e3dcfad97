"""Procedural graphs and the curriculum. Every draw comes from the generator that the caller hands in.

Adapters are trained on these graphs: the same arguments and generator have to give the same graph for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.random import Generator

from env.scheduler.blocks import BLOCKS, MIX, VARIED_MIX, P
from env.scheduler.graph import BYTES_PER_ELEMENT, Graph, Hardware, Node
from env.scheduler.hardware import DIFFICULTIES, find_preset
from env.scheduler.shapes import draw_shapes

TOPOLOGIES = ("linear", "attention", "residual", "long_skip", "adversarial", "mixed")
"""The published families."""
FURTHER_TOPOLOGIES = ("transformer", "convnet", "varied")
"""Families with the kinds that the published ones never make: conv2d, transpose, reduce."""
SIDES = (128, 256, 512)
_ACTIVATIONS = ("relu", "gelu", "layernorm")
_EXTRA_SKIP_PROBABILITY = 0.3


def machine(difficulty: str, shape: tuple[int, int]) -> Hardware:
    """The machine of a preset for graphs whose largest tensor has that shape.

    Raises:
        ValueError: if there is no preset of that name.
    """
    return find_preset(difficulty).hardware(BYTES_PER_ELEMENT * shape[0] * shape[1])


def generate_graph(
    size: int,
    difficulty: str = "medium",
    topology: str = "mixed",
    shape: tuple[int, int] = (256, 256),
    *,
    rng: Generator,
    name: str | None = None,
    sides: Sequence[int] = (),
) -> Graph:
    """A random graph of one of the families.

    Args:
        size: nodes asked for, 2 or more; some topologies end with one node less.
        difficulty: names the machine, one of `DIFFICULTIES` or another of `hardware.PRESETS`.
        topology: one of `TOPOLOGIES` or `FURTHER_TOPOLOGIES`.
        shape: of every tensor, rows and columns.
        rng: the only source of randomness.
        name: the graph's id; by default made of the arguments.
        sides: if given, tensors have different shapes, drawn from these as the operations allow (`draw_shapes`);
            `shape` is then not used.

    Raises:
        ValueError: if an argument is not as said.
    """
    if size < 2:
        raise ValueError(f"size: expected 2 nodes or more, found {size}")
    if topology not in _GROW:
        raise ValueError(f"topology: expected one of {', '.join(_GROW)}, found {topology!r}")
    find_preset(difficulty)
    growing = _Growing(size, rng)
    _GROW[topology](growing)
    operations = growing.nodes[:size]
    shapes = draw_shapes(operations, sides, rng) if sides else [shape] * len(operations)
    nodes = tuple(Node(i, op, shapes[i], inputs) for i, (op, inputs) in enumerate(operations))
    name = name or f"{topology}-{size}-{difficulty}-{'+'.join(map(str, sides)) or f'{shape[0]}x{shape[1]}'}"
    return Graph(name, nodes, machine(difficulty, max(shapes, key=lambda s: s[0] * s[1])))


_NAME = re.compile(r"(\w+)-([1-9]\d*)-(\w+)-([1-9]\d*(?:\+[1-9]\d*)*)-s(0|[1-9]\d*)", re.ASCII)


def named_graph(name: str) -> Graph:
    """The graph that a name stands for: `<topology>-<size>-<machine>-<side>-s<seed>`, such as `mixed-16-hard-256-s7`.

    With several sides, `varied-24-expert-128+256+512-s0`, tensors have different shapes. Topology, size and seed decide
    the operations and what they read, so that names which differ in machine or side only are comparable.

    Raises:
        ValueError: if the name is not made like that, or its topology or machine is unknown.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"name: expected <topology>-<size>-<machine>-<side>-s<seed>, found {name!r}")
    topology, size, machine_name, side, seed = match.groups()
    sides = tuple(map(int, side.split("+")))
    rng = np.random.default_rng(list(f"{topology}-{size}-s{seed}".encode()))
    return generate_graph(
        int(size),
        machine_name,
        topology,
        (sides[0], sides[0]),
        rng=rng,
        name=name,
        sides=sides if len(sides) > 1 else (),
    )


def curriculum_graph(level: float, *, rng: Generator, largest: int = 50, name: str | None = None) -> Graph:
    """A training graph of the published curriculum: always mixed; size and hardware by level (0 to 1).

    Below 0.3: 8 to 16 nodes, easy or medium; below 0.7: 16 to 32, medium or hard; else 32 to 50, hard or expert.
    `largest` caps the size.
    """
    if level < 0.3:
        smallest, biggest, difficulties = 8, 16, DIFFICULTIES[:2]
    elif level < 0.7:
        smallest, biggest, difficulties = 16, 32, DIFFICULTIES[1:3]
    else:
        smallest, biggest, difficulties = 32, 50, DIFFICULTIES[2:]
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
        for op, inputs in BLOCKS[name]:
            self.nodes.append((op, tuple(previous if i == P else first + i for i in inputs)))

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


def _cycle(growing: _Growing, blocks: Sequence[str], filler: str) -> None:
    """Blocks in turn; one that does not fit is replaced by one node."""
    turn = 0
    while growing.missing > 0:
        name = blocks[turn % len(blocks)]
        if len(BLOCKS[name]) <= growing.missing:
            growing.block(name)
        else:
            growing.append((filler,))
        turn += 1


def _mixed(growing: _Growing, mix: Mapping[str, float]) -> None:
    rng = growing.rng
    skip_sources = [0]
    while growing.missing > 0:
        name = tuple(mix)[rng.choice(len(mix), p=list(mix.values()))]
        if name == "chain" or growing.missing < 4:
            for _ in range(min(int(rng.integers(2, 5)), growing.missing)):
                growing.append(_ACTIVATIONS)
        elif len(BLOCKS[name]) <= growing.missing:
            growing.block(name)
            if name == "pool":
                skip_sources.clear()  # what was there before has too many rows to be added to what follows
        else:
            growing.append(("relu", "gelu"))
        skip_sources.append(growing.last)
        if len(skip_sources) > 2 and rng.random() < _EXTRA_SKIP_PROBABILITY:
            source = skip_sources[rng.integers(len(skip_sources) - 1)]
            growing.nodes.append(("add", (source, growing.last)))


_GROW: Mapping[str, Callable[[_Growing], None]] = {
    "linear": _linear,
    "attention": _attention,
    "residual": _residual,
    "long_skip": _long_skip,
    "adversarial": partial(_cycle, blocks=("long_skip", "multi_skip", "bottleneck"), filler="relu"),
    "mixed": partial(_mixed, mix=MIX),
    "transformer": partial(_cycle, blocks=("self_attention", "mlp"), filler="gelu"),
    "convnet": partial(_cycle, blocks=("conv_residual", "pool", "conv_bottleneck", "pool"), filler="relu"),
    "varied": partial(_mixed, mix=VARIED_MIX),
}
