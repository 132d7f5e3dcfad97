"""Graphs of tensor operations, and the machine that they run on.

Node ids are positions. A node without inputs reads nothing: weights and graph inputs do not exist as tensors.
Sizes are bytes of 4-byte elements; work is flops, of which the machine does one a cycle.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

COMPUTE_OPS = frozenset({"matmul", "conv2d"})
REDUCTION_OPS = frozenset({"layernorm", "softmax", "reduce"})
POINTWISE_OPS = frozenset({"relu", "gelu", "add", "transpose"})

FLOPS_PER_ELEMENT: Mapping[str, float] = {
    "matmul": 4.0,
    "conv2d": 6.0,
    **dict.fromkeys(sorted(REDUCTION_OPS), 1.0),
    **dict.fromkeys(sorted(POINTWISE_OPS), 0.1),
}
BYTES_PER_ELEMENT = 4


class GraphError(ValueError):
    """A graph breaks a rule; the message names the graph, the node, what was expected and what was found."""


@dataclass(frozen=True)
class Hardware:
    """The simulated machine.

    Attributes:
        fast_mem_capacity: bytes.
        slow_mem_bandwidth: bytes per cycle; 0 or less makes all traffic free.
        kernel_launch_cost: cycles.
        max_fusion_depth: operations in one kernel, at most.
    """

    fast_mem_capacity: int
    slow_mem_bandwidth: float
    kernel_launch_cost: float
    max_fusion_depth: int


@dataclass(frozen=True)
class Node:
    """One operation and the tensor that it makes."""

    id: int
    op: str
    shape: tuple[int, int]
    inputs: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Of the output."""
        return self.shape[0] * self.shape[1]

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return self.elements * FLOPS_PER_ELEMENT[self.op]

    @property
    def output_bytes(self) -> int:
        """Size of the output, bytes."""
        return self.elements * BYTES_PER_ELEMENT


@dataclass(frozen=True)
class Graph:
    """An acyclic graph of operations on a machine; immutable, with its derived tables computed once.

    Raises:
        GraphError: on construction, if ids are not positions, an op is unknown, a shape is not positive, an input does
            not exist, or the inputs form a cycle.
    """

    id: str
    nodes: tuple[Node, ...]
    hardware: Hardware
    description: str = ""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise GraphError(f"graph {self.id}: expected at least one node, found none")
        for position, node in enumerate(self.nodes):
            where = f"graph {self.id}, node {node.id}"
            if node.id != position:
                raise GraphError(f"{where}: expected id {position}, its position, found {node.id}")
            if node.op not in FLOPS_PER_ELEMENT:
                raise GraphError(f"{where}: expected op to be one of {sorted(FLOPS_PER_ELEMENT)}, found {node.op!r}")
            if min(node.shape) < 1:
                raise GraphError(f"{where}: expected a positive shape, found {list(node.shape)}")
            if unknown := [i for i in node.inputs if not 0 <= i < len(self.nodes)]:
                raise GraphError(f"{where}: expected inputs between 0 and {len(self.nodes) - 1}, found {unknown}")
        if len(self.order) < len(self.nodes):
            stuck = sorted(set(range(len(self.nodes))) - set(self.order))
            raise GraphError(f"graph {self.id}: expected no cycle, found nodes that wait for each other: {stuck}")

    def __len__(self) -> int:
        return len(self.nodes)

    def __hash__(self) -> int:
        return hash(self.id)

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Ids that each node reads, with repeats."""
        return tuple(node.inputs for node in self.nodes)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Ids that read each node, in id order, once per mention."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for i in node.inputs:
                readers[i].append(node.id)
        return tuple(map(tuple, readers))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each node's tensor."""
        return tuple(node.output_bytes for node in self.nodes)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Topological order by a first-in-first-out queue, seeded with the nodes without inputs in id order."""
        missing = [len(node.inputs) for node in self.nodes]
        queue = deque(i for i, count in enumerate(missing) if count == 0)
        order = []
        while queue:
            node = queue.popleft()
            order.append(node)
            for reader in self.consumers[node]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    queue.append(reader)
        return tuple(order)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Where each node stands in the topological order."""
        positions = [0] * len(self.nodes)
        for position, node in enumerate(self.order):
            positions[node] = position
        return tuple(positions)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the nodes and the machine, whatever the graph is called."""
        content = {key: value for key, value in self.to_json().items() if key in ("hardware", "nodes")}
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Graph:
        """The graph that a JSON object describes (`id`, `hardware`, `nodes`; other keys are not read).

        Raises:
            GraphError: if a key is missing or holds something else than expected. `flops` and `output_bytes` of a node
                may be given and must then equal what its op and shape say.
        """
        name = record.get("id", "(no id)")
        try:
            hardware = Hardware(
                fast_mem_capacity=record["hardware"]["fast_mem_capacity"],
                slow_mem_bandwidth=record["hardware"]["slow_mem_bandwidth"],
                kernel_launch_cost=record["hardware"]["kernel_launch_cost"],
                max_fusion_depth=record["hardware"]["max_fusion_depth"],
            )
            nodes = tuple(Node(n["id"], n["op"], _shape(n["shape"]), tuple(n["inputs"])) for n in record["nodes"])
        except KeyError as error:
            raise GraphError(f"graph {name}: expected the key {error}, found none") from None
        except (TypeError, ValueError) as error:
            raise GraphError(f"graph {name}: {error}") from None
        graph = cls(str(name), nodes, hardware, str(record.get("description", "")))
        for node, given in zip(nodes, record["nodes"], strict=True):
            for key, derived in (("flops", node.flops), ("output_bytes", node.output_bytes)):
                if key in given and abs(given[key] - derived) > 1e-9 * derived:
                    raise GraphError(
                        f"graph {name}, node {node.id}: expected {key} {derived} for {node.op} {list(node.shape)}, "
                        f"found {given[key]}"
                    )
        return graph

    @classmethod
    def from_torch(
        cls,
        module: Module,
        example_inputs: tuple[Any, ...],
        *,
        example_kwargs: Mapping[str, Any] | None = None,
        hardware: str | Hardware = "medium",
        name: str | None = None,
    ) -> Graph:
        """The graph of a PyTorch module's forward pass: see `env.scheduler.trace`, which needs PyTorch."""
        from env.scheduler.trace import from_torch

        return from_torch(module, example_inputs, example_kwargs=example_kwargs, hardware=hardware, name=name)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        return {
            "id": self.id,
            "description": self.description,
            "hardware": vars(self.hardware).copy(),
            "nodes": [{"id": n.id, "op": n.op, "shape": list(n.shape), "inputs": list(n.inputs)} for n in self.nodes],
        }


def _shape(value: Sequence[int]) -> tuple[int, int]:
    rows, columns = value
    return int(rows), int(columns)
