"""Graphs of operations on tensors, and the machine that they run on.

Op and tensor ids are positions. Sizes are elements, not bytes; time is in the machine's own unit. A tensor that is read
and never made is a graph input: it waits in slow memory, as everything does that is not retained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

POINTWISE, MATMUL = "Pointwise", "MatMul"
# Bounds within which no latency overflows.
LARGEST_SIDE, LARGEST_NUMBER, SMALLEST_BANDWIDTH = 2**20, 2**53, 1e-6


class GraphError(ValueError):
    """A graph breaks a rule; the message names the graph, the part, what was expected and what was found."""


@dataclass(frozen=True)
class Hardware:
    """The simulated machine.

    Attributes:
        fast_memory_capacity: elements.
        slow_memory_bandwidth: elements per unit of time.
        native_granularity: width and height of the tiles that the naive schedule uses, elements.
    """

    fast_memory_capacity: int
    slow_memory_bandwidth: float
    native_granularity: tuple[int, int]


@dataclass(frozen=True)
class Tensor:
    """A matrix of `width` columns and `height` rows."""

    id: int
    width: int
    height: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.width * self.height


@dataclass(frozen=True)
class Op:
    """An operation: ids of the tensors that it reads, in order, and makes, and its time per tile."""

    id: int
    type: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    base_cost: float


@dataclass(frozen=True)
class Graph:
    """An acyclic graph of operations on a machine; immutable, with its derived tables computed once.

    Attributes:
        max_steps: valid and refused steps of an episode; 0 stands for twice the ops and two.

    Raises:
        GraphError: on construction, if ids are not positions, a type is unknown, a size, the bandwidth or the native
            tile is not positive, a cost is negative, one of them is absurdly large, an op reads or makes nothing, a
            tensor does not exist or is made twice, or the ops form a cycle.
    """

    id: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    hardware: Hardware
    description: str = ""
    max_steps: int = 0

    def __post_init__(self) -> None:
        self._check_machine()
        self._expect(_whole(self.max_steps) and self.max_steps >= 0, "max_steps", "0 or more", self.max_steps)
        self._expect(len(self.ops) > 0, "ops", "at least one", "none")
        for position, tensor in enumerate(self.tensors):
            where, sides = f"tensor {tensor.id}", (tensor.width, tensor.height)
            self._expect(_whole(tensor.id) and tensor.id == position, where, f"id {position}, its position", tensor.id)
            fits = all(_whole(side) and 1 <= side <= LARGEST_SIDE for side in sides)
            self._expect(fits, where, f"a width and height of 1 to {LARGEST_SIDE}", sides)
        for position, op in enumerate(self.ops):
            where, ids = f"op {op.id}", (*op.inputs, *op.outputs)
            self._expect(_whole(op.id) and op.id == position, where, f"id {position}, its position", op.id)
            self._expect(op.type in (POINTWISE, MATMUL), where, f"type {POINTWISE} or {MATMUL}", repr(op.type))
            self._expect(bool(op.inputs and op.outputs), where, "inputs and outputs", f"{op.inputs} and {op.outputs}")
            self._expect(0 <= op.base_cost <= LARGEST_NUMBER, where, "a base_cost of 0 or more", op.base_cost)
            unknown = [i for i in ids if not (_whole(i) and 0 <= i < len(self.tensors))]
            self._expect(not unknown, where, f"tensors between 0 and {len(self.tensors) - 1}", unknown)
        made = Counter(i for op in self.ops for i in op.outputs)
        twice = [i for i, times in made.items() if times > 1]
        self._expect(not twice, "ops", "every tensor made once", f"{twice} made more often")
        stuck = self._unordered()
        self._expect(not stuck, "ops", "no cycle", f"ops that wait for each other: {stuck}")

    def _check_machine(self) -> None:
        machine, native = self.hardware, self.hardware.native_granularity
        capacity, bandwidth = machine.fast_memory_capacity, machine.slow_memory_bandwidth
        fits = _whole(capacity) and 0 <= capacity <= LARGEST_NUMBER
        self._expect(fits, "fast_memory_capacity", "a whole number, 0 or more", capacity)
        fits = SMALLEST_BANDWIDTH <= bandwidth <= LARGEST_NUMBER
        self._expect(fits, "slow_memory_bandwidth", "a number above 0", bandwidth)
        fits = all(_whole(side) and 1 <= side <= LARGEST_SIDE for side in native)
        self._expect(fits, "native_granularity", f"a width and height of 1 to {LARGEST_SIDE}", native)

    def _expect(self, condition: bool, where: str, expected: str, found: Any) -> None:
        if not condition:
            raise GraphError(f"graph {self.id}, {where}: expected {expected}, found {found}")

    def _unordered(self) -> list[int]:
        """Ops that can never run."""
        missing = [len(before) for before in self.predecessors]
        queue = [i for i, count in enumerate(missing) if count == 0]
        for op in queue:
            for follower in {c for t in self.ops[op].outputs for c in self.consumers[t]}:
                missing[follower] -= 1
                if missing[follower] == 0:
                    queue.append(follower)
        return sorted(set(range(len(self))) - set(queue))

    def __len__(self) -> int:
        return len(self.ops)

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def step_limit(self) -> int:
        """Steps of an episode."""
        return self.max_steps or 2 * len(self) + 2

    @cached_property
    def producers(self) -> Mapping[int, int]:
        """Tensor id -> the op that makes it; graph inputs are not in it."""
        return {tensor: op.id for op in self.ops for tensor in op.outputs}

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """By tensor, the ops that read it, in id order, once each."""
        readers: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in dict.fromkeys(op.inputs):
                readers[tensor].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def predecessors(self) -> tuple[frozenset[int], ...]:
        """By op, the ops that make what it reads."""
        return tuple(frozenset(self.producers[t] for t in op.inputs if t in self.producers) for op in self.ops)

    @cached_property
    def graph_inputs(self) -> tuple[int, ...]:
        """Tensors that are read and never made."""
        return tuple(t.id for t in self.tensors if self.consumers[t.id] and t.id not in self.producers)

    @cached_property
    def graph_outputs(self) -> tuple[int, ...]:
        """Tensors that are made and never read."""
        return tuple(t.id for t in self.tensors if not self.consumers[t.id] and t.id in self.producers)

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of the tensors, the ops and the machine, whatever the graph is called."""
        content = {key: value for key, value in self.to_json().items() if key in ("hardware", "tensors", "ops")}
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Graph:
        """The graph that a JSON object describes (`hardware`, `tensors`, `ops`; `id`, `description` and `max_steps` may
        be missing; `graph_inputs` and `graph_outputs` may be given and must then be what the ops say).

        Raises:
            GraphError: if a key is missing or holds something else than expected.
        """
        name = str(record.get("id", "(no id)"))
        try:
            machine = record["hardware"]
            width, height = machine["native_granularity"]
            hardware = Hardware(machine["fast_memory_capacity"], machine["slow_memory_bandwidth"], (width, height))
            tensors = tuple(Tensor(t["id"], t["width"], t["height"]) for t in record["tensors"])
            ops = tuple(
                Op(o["id"], o["type"], tuple(o["inputs"]), tuple(o["outputs"]), o["base_cost"]) for o in record["ops"]
            )
            graph = cls(name, tensors, ops, hardware, str(record.get("description", "")), record.get("max_steps", 0))
            for key in ("graph_inputs", "graph_outputs"):
                derived = list(getattr(graph, key))
                given = record.get(key, derived)
                graph._expect(sorted(given) == derived, key, f"{derived}, as the ops say", given)
        except KeyError as error:
            raise GraphError(f"graph {name}: expected the key {error}, found none") from None
        except GraphError:
            raise
        except (TypeError, ValueError) as error:
            raise GraphError(f"graph {name}: {error}") from None
        return graph

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        hardware = vars(self.hardware) | {"native_granularity": list(self.hardware.native_granularity)}
        return {
            "id": self.id,
            "description": self.description,
            "max_steps": self.max_steps,
            "hardware": hardware,
            "tensors": [vars(t).copy() for t in self.tensors],
            "ops": [vars(o) | {"inputs": list(o.inputs), "outputs": list(o.outputs)} for o in self.ops],
        }


def _whole(value: Any) -> bool:
    return type(value) is int
