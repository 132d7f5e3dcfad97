"""Machines by name, so that the same graph can be scheduled on another one.

Three families:

* `easy`, `medium`, `hard`, `expert`: the published difficulties. Fast memory is measured in tensors.
* `<difficulty>_bandwidth_bound`: the same with a fraction of the bandwidth.
* public accelerators, from their vendors' figures (`Preset.source`).

What the bandwidth-bound ones are for. On the published machines a kernel with a matmul is compute-bound, so that a
reload saved is hardly ever a cycle saved. Their bandwidth is divided so that retention is worth 12 to 18 % of greedy's
latency if everything is played optimally. How much it has to be divided depends on how many kernels and how much room
there are. Means over 24 graphs `mixed-<size>-<machine>-<side>-s<seed>`, seeds 0 to 23, sizes 12, 14, 16, 18, 20 and
sides 128, 256, 512 in turn, proved optimal by `env.scheduler.planner`, in percent of greedy's latency:

    machine                    bytes/cycle  optimum  without retention  retention  fuse 128  fuse 256  heuristic
    easy                             15         8.5                8.5        0.0       0.5       6.8       -2.4
    medium                           10         9.7                9.3        0.3       1.6       7.9        0.8
    hard                              8        13.1               11.8        1.3       2.4       6.1        0.3
    expert                            6        16.4               12.1        4.3       0.8       0.7       -6.7
    easy_bandwidth_bound         0.9375        37.0               23.7       13.3       3.7       7.6       26.1
    medium_bandwidth_bound         1.25        31.7               17.9       13.8       3.1       7.2       21.5
    hard_bandwidth_bound              2        26.5               12.9       13.6      -1.1      -2.1        7.7
    expert_bandwidth_bound          2.4        24.9                9.2       15.7      -6.0     -12.9       -2.6

The last three columns are `policies.constant` and `policies.heuristic`, the others the planner's. Over all six
published families (32 to 36 graphs a machine, the same sizes and sides) retention is worth 14.0, 17.6, 15.9 and 16.8.

How an accelerator becomes a machine of this model. One kernel has the whole chip, so fast memory is the largest
on-chip memory that all of it shares: the last-level cache of a GPU, the scratchpad of a TPU. Shared memory or registers
of one multiprocessor do not qualify, since a tensor kept there is out of the others' reach. The model does one flop a
cycle, so its cycle is the time of one flop at the chip's peak, 1 / P seconds for P flops a second. That keeps the
arithmetic intensity at which a kernel becomes compute-bound: with B bytes a second from off-chip memory and L seconds a
launch,

    bytes a cycle = B / P,    cycles a launch = L P.

(The same as dividing bytes a clock, and multiplying launch clocks, by the flops a clock.) P is the float32 vector peak
of a GPU, as tensors here have 4-byte elements, and the bfloat16 peak of a TPU, the only one published. L is 3 us on
every GPU: the launch of an empty kernel on current hardware, by NVIDIA's developer forum (thread "Too much time for
kernel launch latency", 2022), taken for AMD's as well. It is 0 on a TPU, which runs a compiled program without launches
from the host. No vendor publishes a limit of operations in a kernel: 8 is the largest of the published difficulties.

Two things to know before reading results on them. The published machines move 6 to 15 bytes a flop, a real one 0.004
to 0.08; and a matmul counts 4 flops an element here, whatever its inner dimension. Hence almost nothing is
compute-bound on an accelerator, and with tensors of a few hundred rows launches are nearly all of a GPU's latency.
Chips whose off-chip bandwidth or shared on-chip memory is not published (Apple's GPUs), or that keep everything on the
chip (Cerebras, Graphcore), have no counterpart in this model and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from env.scheduler.graph import Graph, Hardware

DIFFICULTIES = ("easy", "medium", "hard", "expert")
HARDWARE = ("published", "bandwidth_bound")
"""Families of machines that agents are trained on."""
ACCELERATOR_FUSION = 8


@dataclass(frozen=True)
class Preset:
    """A named machine; one of `capacity` and `tensors` is given.

    Attributes:
        name: how it is asked for.
        bandwidth: bytes a cycle.
        launch: cycles a kernel launch.
        fusion: operations in one kernel, at most.
        capacity: bytes of fast memory, whatever the graph.
        tensors: fast memory in units of the graph's largest tensor.
        source: where the figures come from.
    """

    name: str
    bandwidth: float
    launch: float
    fusion: int
    capacity: int | None = None
    tensors: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if (self.capacity is None) == (self.tensors is None):
            raise ValueError(f"preset {self.name}: expected either capacity or tensors, found both or neither")

    def hardware(self, largest_tensor: int) -> Hardware:
        """The machine for graphs whose largest tensor has that many bytes."""
        capacity = self.capacity if self.tensors is None else int(self.tensors * largest_tensor)
        assert capacity is not None  # __post_init__ has checked that one of the two is given
        return Hardware(capacity, self.bandwidth, self.launch, self.fusion)


def find_preset(name: str) -> Preset:
    """The preset of a name.

    Raises:
        ValueError: if there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, found {name!r}")
    return PRESETS[name]


def preset(name: str, graph: Graph) -> Graph:
    """The same graph on the machine of a preset.

    Raises:
        ValueError: if there is no preset of that name.
    """
    return replace(graph, hardware=find_preset(name).hardware(max(graph.sizes)))


def on(hardware: str, graph: Graph) -> Graph:
    """A graph of a published machine on the machine of the same difficulty in a family: the graph itself for
    `published`, less bandwidth for `bandwidth_bound`.

    Raises:
        ValueError: if the family is none of `HARDWARE`, or the graph is on no published machine.
    """
    if hardware not in HARDWARE:
        raise ValueError(f"hardware: expected one of {', '.join(HARDWARE)}, found {hardware!r}")
    if hardware == "published":
        return graph
    largest = max(graph.sizes)
    for difficulty in DIFFICULTIES:
        if find_preset(difficulty).hardware(largest) == graph.hardware:
            return preset(f"{difficulty}_{hardware}", graph)
    raise ValueError(f"graph {graph.id}: expected one on a published machine, found {graph.hardware}")


def _load() -> Mapping[str, Preset]:
    data = json.loads(files("env.scheduler").joinpath("hardware.json").read_text(encoding="utf-8"))
    presets = [Preset(name, source="published environment", **row) for name, row in data["published"].items()]
    by_name = {known.name: known for known in presets}
    presets += [
        replace(
            by_name[name],
            name=f"{name}_bandwidth_bound",
            bandwidth=by_name[name].bandwidth / divisor,
            source=f"published environment, bandwidth divided by {divisor:g}",
        )
        for name, divisor in data["bandwidth_bound"].items()
    ]
    presets += [_accelerator(name, row) for name, row in data["accelerators"].items()]
    return MappingProxyType({known.name: known for known in presets})


def _accelerator(name: str, row: Mapping[str, Any]) -> Preset:
    """A chip in units of this model: bytes and launches over cycles of one flop each."""
    return Preset(
        name,
        bandwidth=row["bytes_per_second"] / row["flops_per_second"],
        launch=row["launch_seconds"] * row["flops_per_second"],
        fusion=ACCELERATOR_FUSION,
        capacity=row["capacity"],
        source=row["source"],
    )


PRESETS: Mapping[str, Preset] = _load()
