"""Shapes that fit together: what an operation reads ties the axes of what it makes."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.random import Generator

Operation = tuple[str, tuple[int, ...]]


def draw_shapes(operations: Sequence[Operation], sides: Sequence[int], rng: Generator) -> list[tuple[int, int]]:
    """A shape for every operation; axes that are tied to each other share one draw.

    A matmul of one tensor keeps its rows, one of two tensors is (m, k) by (k, n); weights take whatever columns are
    drawn. A conv2d keeps its rows, the pixels, and draws its columns, the channels. A reduce keeps its columns and
    draws at most as many rows as it reads. A transpose swaps. All others are elementwise or along a row: one shape.

    Args:
        operations: (op, ids read), ids are positions and refer to earlier ones.
        sides: what is drawn from, uniformly.
        rng: the only source of randomness.

    Returns:
        Rows and columns by id.
    """
    axes = _tied_axes(operations)
    drawn: dict[int, int] = {}
    for i, (op, inputs) in enumerate(operations):
        for axis in axes[i]:
            if axis not in drawn:
                pooled = op == "reduce" and axis == axes[i][0]
                choices = [side for side in sides if not pooled or side <= drawn[axes[inputs[0]][0]]]
                drawn[axis] = choices[int(rng.integers(len(choices)))]
    return [(drawn[rows], drawn[columns]) for rows, columns in axes]


def _tied_axes(operations: Sequence[Operation]) -> list[tuple[int, int]]:
    """Rows and columns of each operation as numbers, equal where they are tied (union-find)."""
    parents = list(range(2 * len(operations)))

    def find(axis: int) -> int:
        while parents[axis] != axis:
            axis = parents[axis]
        return axis

    for i, (op, inputs) in enumerate(operations):
        for a, b in _ties(op, i, inputs):
            first, second = sorted((find(a), find(b)))
            parents[second] = first
    return [(find(2 * i), find(2 * i + 1)) for i in range(len(operations))]


def _ties(op: str, i: int, inputs: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs of axes that an operation makes equal; axis 2 i is the rows of i, axis 2 i + 1 its columns."""
    if not inputs:
        return []
    rows, columns, first, last = 2 * i, 2 * i + 1, 2 * inputs[0], 2 * inputs[-1]
    if op == "matmul" and len(inputs) == 2:
        return [(first + 1, last), (rows, first), (columns, last + 1)]
    if op in ("matmul", "conv2d"):
        return [(rows, first)]
    if op == "reduce":
        return [(columns, first + 1)]
    if op == "transpose":
        return [(rows, first + 1), (columns, first)]
    return [tie for j in inputs for tie in ((rows, 2 * j), (columns, 2 * j + 1))]
