"""Random graphs: the same arguments and generator give the same graph for ever."""

from hashlib import sha256

import numpy as np
import pytest

from counterfactuals.scheduler import random_graph
from env.scheduler import SchedulerEnv, curriculum_graph, generate_graph
from env.scheduler.graph import FLOPS_PER_ELEMENT
from env.scheduler.topologies import DIFFICULTIES, FURTHER_TOPOLOGIES, SIDES, TOPOLOGIES, named_graph


def digest(graphs):
    return sha256("".join(graph.fingerprint for graph in graphs).encode()).hexdigest()[:16]


# Adapters are trained on these graphs: a changed number means that a seed no longer names the graph that it named.
RECORDED = {
    "linear": ("e661274b80bd9716", 0.22915166999670655),
    "attention": ("e7b6c869dae6eaff", 0.5118216247002567),
    "residual": ("afdcfb99b45f7396", 0.2616121342493164),
    "long_skip": ("ac997762ea67e5f5", 0.08564916714362436),
    "adversarial": ("e072c31f1167244f", 0.9430561055723676),
    "mixed": ("50712e2c42d51557", 0.10309995896703916),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_published_families_are_the_recorded_ones(topology):
    rng = np.random.default_rng(TOPOLOGIES.index(topology))
    graphs = [
        generate_graph(size, difficulty, topology, (side, side // 2), rng=rng)
        for size in (2, 8, 17, 50)
        for difficulty in DIFFICULTIES
        for side in SIDES
    ]
    assert (digest(graphs), rng.random()) == RECORDED[topology]


def test_curriculum_graphs_are_the_recorded_ones():
    rng = np.random.default_rng(100)
    levels = (0, 0.29, 0.3, 0.69, 0.7, 1.0)
    graphs = [curriculum_graph(level, rng=rng, largest=m) for level in levels for m in (20, 50) for _ in range(5)]
    assert (digest(graphs), rng.random()) == ("8d30f5f14978f335", 0.6937392274895057)


def test_graphs_drawn_for_pairs_are_the_recorded_ones():
    rng = np.random.default_rng(200)
    assert (digest(random_graph(rng) for _ in range(100)), rng.random()) == ("0390bd712c5606ac", 0.038095715045387)


NAMED = {
    "linear-8-easy-128-s0": "1be9abfa75892cbb",
    "attention-16-hard-256-s1": "1004ab96031c150f",
    "residual-12-medium-512-s2": "fd8ccd4895ca618c",
    "long_skip-20-expert-256-s3": "1a72ff62c35118a2",
    "adversarial-20-hard_bandwidth_bound-256-s4": "621c387ec7630a23",
    "mixed-16-hard-256-s7": "3c8b29d029054806",
    "mixed-50-expert-128+256+512-s0": "6053cdcb2a6999b4",
    "transformer-32-medium-256-s0": "81ade2e92ac59648",
    "convnet-24-nvidia_a100-128+256+512-s5": "efb2486cf9689a84",
    "varied-40-easy_bandwidth_bound-64+256-s6": "dffec6348f5ffbc1",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_stands_for_one_graph(name):
    graph = named_graph(name)
    assert graph.id == name
    assert graph.fingerprint[:16] == NAMED[name]
    assert named_graph(name) == graph


def test_names_that_differ_in_machine_or_side_only_share_operations_and_reads():
    wiring = [(node.op, node.inputs) for node in named_graph("varied-24-hard-256-s3").nodes]
    for other in ("varied-24-expert_bandwidth_bound-256-s3", "varied-24-hard-128-s3", "varied-24-hard-128+256-s3"):
        assert [(node.op, node.inputs) for node in named_graph(other).nodes] == wiring
    assert [(node.op, node.inputs) for node in named_graph("varied-24-hard-256-s4").nodes] != wiring


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixed-16-hard-256", "name: expected <topology>-<size>-<machine>-<side>-s<seed>, found 'mixed-16-hard-256'"),
        ("mixed-016-hard-256-s7", "name: expected"),
        ("mixed-16-hard-256-s07", "name: expected"),
        ("mixed-16-hard-256-s7 ", "name: expected"),
        ("mixed-16-hard-256-s٧", "name: expected"),
        ("star-16-hard-256-s7", "topology: expected one of linear, .*, found 'star'"),
        ("mixed-16-tough-256-s7", "preset: expected one of easy, .*, found 'tough'"),
        ("mixed-1-hard-256-s7", "size: expected 2 nodes or more, found 1"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        named_graph(name)


def test_all_nine_kinds_occur():
    kinds = {node.op for seed in range(8) for node in named_graph(f"varied-50-easy-256-s{seed}").nodes}
    assert kinds == set(FLOPS_PER_ELEMENT)
    made = {node.op for name in ("transformer", "convnet") for node in named_graph(f"{name}-30-easy-256-s0").nodes}
    assert made == set(FLOPS_PER_ELEMENT)


@pytest.mark.parametrize("topology", TOPOLOGIES + FURTHER_TOPOLOGIES)
@pytest.mark.parametrize("size", [8, 23, 50])
def test_shapes_fit_the_operations(topology, size):
    graph = generate_graph(size, "expert", topology, rng=np.random.default_rng(size), sides=SIDES)
    assert len(graph) in (size - 1, size)
    assert max(graph.sizes) * 2.5 == graph.hardware.fast_mem_capacity
    SchedulerEnv(graph)
    for node in graph.nodes:
        rows, columns = node.shape
        assert {rows, columns} <= set(SIDES)
        read = [graph.nodes[i].shape for i in node.inputs]
        if node.op == "matmul" and len(read) == 2:
            assert read[0][1] == read[1][0]
            assert node.shape == (read[0][0], read[1][1])
        elif node.op in ("matmul", "conv2d"):
            assert all(shape[0] == rows for shape in read)
        elif node.op == "reduce":
            assert read[0][1] == columns
            assert rows <= read[0][0]
        elif node.op == "transpose":
            assert read == [(columns, rows)]
        else:
            assert set(read) <= {node.shape}


def test_different_shapes_do_occur():
    names = [f"varied-40-hard-128+256+512-s{seed}" for seed in range(5)]
    assert len({node.shape for name in names for node in named_graph(name).nodes}) == 9


def test_shapes_are_drawn_after_the_operations():
    one = generate_graph(20, "hard", "mixed", rng=np.random.default_rng(5))
    many = generate_graph(20, "hard", "mixed", rng=np.random.default_rng(5), sides=SIDES)
    assert [(n.op, n.inputs) for n in one.nodes] == [(n.op, n.inputs) for n in many.nodes]
