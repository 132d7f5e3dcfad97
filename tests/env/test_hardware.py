"""Machines by name: the published ones to the number, the real ones by their units, the narrow ones by their effect."""

from dataclasses import replace

import numpy as np
import pytest

from env.scheduler import Graph, Hardware, Node, SchedulerEnv, generate_graph
from env.scheduler.hardware import DIFFICULTIES, PRESETS, Preset, find_preset, preset
from env.scheduler.planner import plan
from env.scheduler.topologies import FURTHER_TOPOLOGIES, TOPOLOGIES, machine, named_graph

BYTES = 4 * 128 * 256


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("easy", Hardware(6 * BYTES, 15.0, 2000.0, 8)),
        ("medium", Hardware(4 * BYTES, 10.0, 3000.0, 6)),
        ("hard", Hardware(3 * BYTES, 8.0, 4000.0, 5)),
        ("expert", Hardware(5 * BYTES // 2, 6.0, 5000.0, 4)),
    ],
)
def test_published_difficulties(name, hardware):
    assert machine(name, (128, 256)) == hardware
    assert find_preset(name).hardware(BYTES) == hardware


def test_a_preset_moves_a_graph_to_another_machine():
    graph = named_graph("mixed-12-easy-256-s0")
    moved = preset("hard", graph)
    assert (moved.nodes, moved.id) == (graph.nodes, graph.id)
    assert moved.hardware == machine("hard", (256, 256))
    assert moved.fingerprint != graph.fingerprint
    assert preset("easy", moved) == graph


def test_fast_memory_of_a_graph_with_several_shapes_is_measured_in_its_largest_tensor():
    nodes = (Node(0, "relu", (8, 8)), Node(1, "relu", (16, 64)), Node(2, "relu", (32, 8)))
    graph = Graph("shapes", nodes, Hardware(1, 1.0, 1.0, 1))
    assert preset("medium", graph).hardware.fast_mem_capacity == 4 * 4 * 16 * 64


@pytest.mark.parametrize(
    ("name", "flops", "bytes_per_second", "launch_seconds"),
    [
        ("nvidia_a100", 19.5e12, 1555e9, 3e-6),
        ("amd_mi250x", 23.95e12, 1.6e12, 3e-6),
        ("google_tpu_v4", 275e12, 1.2e12, 0),
    ],
)
def test_a_kernel_on_an_accelerator_takes_its_seconds(name, flops, bytes_per_second, launch_seconds):
    """Cycles over flops a second are seconds: a copy takes launch and traffic, a long chain of matmuls its flops."""
    side = 1024
    copy = preset(name, Graph("copy", (Node(0, "relu", (side, side)),), Hardware(1, 1.0, 1.0, 1)))
    seconds = SchedulerEnv(copy).greedy_latency / flops
    assert seconds == pytest.approx(launch_seconds + 4 * side * side / bytes_per_second, rel=1e-12)
    free_traffic = replace(copy.hardware, slow_mem_bandwidth=0.0)
    busy = Graph("busy", (Node(0, "matmul", (side, side)),), free_traffic)
    tiles = (side / 128) ** 2
    seconds = SchedulerEnv(busy).greedy_latency / flops
    assert seconds == pytest.approx(launch_seconds + 4 * side * side * (1 + 0.02 * tiles) / flops, rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_graphs_of_every_family_can_be_scheduled_on_every_machine(name):
    assert PRESETS[name].name == name
    assert PRESETS[name].source
    for seed, topology in enumerate(TOPOLOGIES + FURTHER_TOPOLOGIES):
        SchedulerEnv(generate_graph(12, name, topology, (128, 128), rng=np.random.default_rng(seed)))


def test_an_unknown_machine_is_named():
    graph = named_graph("mixed-12-easy-256-s0")
    with pytest.raises(ValueError, match=r"preset: expected one of easy, .*google_tpu_v5e, found 'abacus'"):
        preset("abacus", graph)


@pytest.mark.parametrize("sizes", [{}, {"capacity": 1, "tensors": 1.0}])
def test_a_preset_has_its_fast_memory_in_bytes_or_in_tensors(sizes):
    with pytest.raises(ValueError, match="preset odd: expected either capacity or tensors"):
        Preset("odd", 1.0, 1.0, 1, **sizes)


def test_the_narrow_machines_differ_in_bandwidth_only():
    for name in DIFFICULTIES:
        narrow = PRESETS[f"{name}_bandwidth_bound"]
        assert (
            replace(narrow, name=name, bandwidth=PRESETS[name].bandwidth, source=PRESETS[name].source) == PRESETS[name]
        )
        assert narrow.bandwidth < PRESETS[name].bandwidth


# Percent of greedy's latency, means over the first eight of the graphs that the module's docstring speaks of.
RETENTION_WORTH = {
    "easy": (0.0, 13.78),
    "medium": (0.30, 12.88),
    "hard": (1.42, 11.60),
    "expert": (4.08, 14.42),
}


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_retention_pays_on_the_narrow_machines_only(difficulty):
    published, narrow = RETENTION_WORTH[difficulty]
    names = [f"mixed-{(12, 14, 16, 18, 20)[s % 5]}-{difficulty}-{(128, 256, 512)[s % 3]}-s{s}" for s in range(8)]
    graphs = [named_graph(name) for name in names]
    assert np.mean([worth(graph) for graph in graphs]) == pytest.approx(published, abs=0.01)
    moved = [preset(f"{difficulty}_bandwidth_bound", graph) for graph in graphs]
    assert np.mean([worth(graph) for graph in moved]) == pytest.approx(narrow, abs=0.01)


def worth(graph):
    """What retention saves if everything is played optimally, in percent of greedy's latency."""
    saved = plan(graph, retention=False).latency - plan(graph).latency
    return 100 * saved / SchedulerEnv(graph).greedy_latency
