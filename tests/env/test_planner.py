"""The planner against every action sequence there is, and by schedules that can be worked out by hand."""

from dataclasses import replace
from itertools import combinations
from math import inf

import numpy as np
import pytest

from env.scheduler import TASKS, Action, Graph, GraphError, Hardware, Node, SchedulerEnv, generate_graph, load_task
from env.scheduler.boundary import PlannerError
from env.scheduler.cost import TILES, Roofline
from env.scheduler.planner import RetainValue, best_latency, plan, retain_values
from env.scheduler.policies import greedy
from env.scheduler.rules import DOCUMENTED
from env.scheduler.state import Episode
from env.scheduler.values import ValueTable

B = 4 * 64 * 64
POINTWISE = 0.1 * 64 * 64


def skip_graph(capacity=8 * B, bandwidth=1.0, launch=100.0, fusion=4):
    """0 -> 1 -> 2 -> 3, and 3 also reads 0; pointwise, so that traffic decides."""
    nodes = (
        Node(0, "relu", (64, 64)),
        Node(1, "relu", (64, 64), (0,)),
        Node(2, "relu", (64, 64), (1,)),
        Node(3, "add", (64, 64), (0, 2)),
    )
    return Graph("skip", nodes, Hardware(capacity, bandwidth, launch, fusion))


def released_graph():
    """A graph whose best schedule lets the environment release a resident."""
    nodes = (
        Node(0, "matmul", (32, 64)),
        Node(1, "gelu", (32, 64), (0,)),
        Node(2, "gelu", (32, 64), (0,)),
        Node(3, "layernorm", (32, 32), (2, 1)),
        Node(4, "matmul", (32, 32), (3,)),
    )
    return Graph("released", nodes, Hardware(12288, 15.0, 3000.0, 3))


def random_graph(rng, size, *, tiny=False):
    """Few nodes of mixed kinds and shapes on a machine that may be tight or roomy, launch- or bandwidth-bound."""
    sides = [(64, 64)] if rng.random() < 0.3 else [(32, 32), (32, 64), (64, 64), (128, 32), (128, 128), (256, 64)]
    sides = [(16, 16), (32, 32), (32, 64), (64, 64)] if tiny else sides
    kinds = ("matmul", "relu", "add", "layernorm", "softmax")
    nodes = []
    for i in range(size):
        count = min(i, int(rng.choice(4, p=[0.08, 0.45, 0.4, 0.07])))
        inputs = [int(j) for j in rng.choice(i, count, replace=False)] if count else []
        if inputs and rng.random() < 0.7:
            inputs[0] = i - 1
        if inputs and rng.random() < 0.05:
            inputs.append(inputs[0])
        nodes.append(Node(i, kinds[rng.integers(5)], sides[rng.integers(len(sides))], tuple(inputs)))
    largest = max(node.output_bytes for node in nodes)
    while True:
        capacity = int(largest * rng.choice([0.5, 1, 1.3, 1.8, 2.2, 2.6, 3, 3.5, 4.2, 6]))
        bandwidth = float(rng.choice([0.2, 0.5, 1, 4, 15, 0], p=[0.2, 0.25, 0.2, 0.1, 0.2, 0.05]))
        launch = float(rng.choice([0, 50, 500, 3000]))
        graph = Graph("random", tuple(nodes), Hardware(capacity, bandwidth, launch, int(rng.integers(1, 6))))
        try:
            DOCUMENTED.check(graph)
        except GraphError:
            continue
        return graph


def few_live(graph):
    order, positions = graph.order, graph.positions
    live = [
        sum(any(positions[c] >= p for c in graph.consumers[i]) for i in order[:p]) for p in range(1, len(graph) + 1)
    ]
    return max(live) <= 3


def small_graphs(seed, count, sizes, *, tiny=False):
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        graph = random_graph(rng, int(rng.choice(sizes)), tiny=tiny)
        if few_live(graph):
            found.append(graph)
    return found


def nameable(episode):
    """Ids that a retain list may name with effect."""
    node, members, graph = episode.current, episode.kernel.members, episode.graph
    read = {i for member in (*members, node) for i in graph.inputs[member]}
    return sorted({*episode.fast, *members, *read, node})


def alive(episode):
    """Those of them that have uses left after the current node."""
    read = episode.graph.inputs[episode.current]
    return [i for i in nameable(episode) if episode.uses[i] > read.count(i)]


def successors(episode, fuses=(False, True), tiles=TILES, *, dead=False):
    """The different states that any action leads to: all tiles, all sets of tensors, both answers to fuse."""
    ids = nameable(episode) if dead else alive(episode)
    found = {}
    for fuse in fuses:
        for tile in tiles:
            for retain in (kept for count in range(len(ids) + 1) for kept in combinations(ids, count)):
                after = episode.clone()
                DOCUMENTED.place(after, Action(fuse, tile, retain), 1.0)
                found.setdefault((after.kernel, frozenset(after.fast.items()), after.latency), after)
    return found.values()


def key(episode):
    return episode.position, episode.kernel, frozenset(episode.fast.items())


def search(episode, known, **freedom):
    """Cycles still to come if all goes best, by trying everything in the environment itself."""
    if key(episode) not in known:
        if episode.position == len(episode.graph):
            ended = episode.clone()
            DOCUMENTED.end(ended, 1.0)
            known[key(episode)] = ended.latency - episode.latency
        else:
            known[key(episode)] = min(
                after.latency - episode.latency + search(after, known, **freedom)
                for after in successors(episode, **freedom)
            )
    return known[key(episode)]


def search_both(episode, tensor, kernel, known, seen):
    """Cycles still to come if kernel number `kernel` ends with the tensor in fast memory, and without."""
    graph = episode.graph
    if len(episode.kernels) > kernel or episode.position == len(graph):
        rest = search(episode, known)
        run = [*episode.kernels, episode.kernel][kernel]
        if max(graph.positions[c] for c in graph.consumers[tensor]) <= graph.positions[run.members[-1]]:
            return rest, rest
        return (rest, inf) if tensor in run.retain else (inf, rest)
    if key(episode) not in seen:
        pairs = [
            (after.latency - episode.latency, search_both(after, tensor, kernel, known, seen))
            for after in successors(episode)
        ]
        seen[key(episode)] = min(c + keep for c, (keep, _) in pairs), min(c + drop for c, (_, drop) in pairs)
    return seen[key(episode)]


def replay(graph, actions, rules="documented"):
    env = SchedulerEnv(graph, rules=rules)
    env.reset()
    infos = [env.step(action.to_text())[-1] for action in actions]
    return infos[-1]["total_latency"], [info["error"] for info in infos]


def assert_optimal(graph, found, **freedom):
    latency, _ = replay(graph, found.actions)
    assert found.latency == pytest.approx(latency, rel=1e-9)
    assert found.latency == pytest.approx(search(Episode(Roofline(graph)), {}, **freedom), rel=1e-9)
    assert found.optimal
    assert found.lower_bound == found.latency


# By hand.


def test_everything_fused_stores_the_output_only():
    best = plan(skip_graph())
    assert [action.fuse_with_prev for action in best.actions] == [False, True, True, True]
    assert (best.latency, best.optimal, best.gap) == (B + 100, True, 0.0)


def test_without_fusion_everything_is_retained():
    best = plan(skip_graph(), fusion=False)
    assert [action.retain for action in best.actions] == [(0,), (0, 1), (0, 2), ()]
    assert best.latency == pytest.approx(3 * (POINTWISE + 100) + B + 100)


def test_without_fusion_and_retention_everything_is_moved():
    # 1 and 2 load one tensor and store one, 0 stores one, 3 loads two and stores one.
    assert plan(skip_graph(), fusion=False, retention=False).latency == 8 * B + 400


def test_in_two_tensors_the_one_read_last_is_written():
    # 0 is kept, then stored by kernel 1 so that 1 and 2 can stay in turn; 3 loads it again and stores its output.
    best = plan(skip_graph(capacity=2 * B), fusion=False)
    assert best.latency == pytest.approx((POINTWISE + 100) + (B + 100) + (POINTWISE + 100) + (2 * B + 100))


def test_a_larger_tile_is_taken_where_it_fits_and_pays():
    graph = Graph("one", (Node(0, "matmul", (256, 256)),), Hardware(4 * 256 * 256, 1000.0, 0.0, 1))
    flops = 4 * 256 * 256
    assert plan(graph).latency == pytest.approx(flops * 1.02)
    assert plan(graph, tile=128).latency == pytest.approx(flops * 1.08)
    assert plan(graph).actions == (Action(False, 256, ()),)


def test_a_resident_may_be_released_by_the_kernel_that_has_time_to_store_it():
    graph = released_graph()
    best = plan(graph)
    # Kernel 1 loads 0. Kernel 2, 3 loads 0, and stores and loads 1, a little more than it computes. Had 1 been stored
    # by kernel 1, that one would take twice as long, and this one would save only what it moves above its compute.
    moves = 8192 / 15 + 3 * 8192 / 15
    assert best.latency == pytest.approx(8192 * 1.02 + moves + 4096 * 1.02 + 4 * 3000)
    latency, errors = replay(graph, best.actions)
    assert latency == pytest.approx(best.latency)
    assert [error for error in errors if error] == ["released: [1], no room in 12288 bytes"]
    assert_optimal(graph, best)


def test_a_tile_that_one_node_does_not_fit_at_is_lowered_by_the_environment():
    graph = generate_graph(12, "expert", shape=(128, 128), rng=np.random.default_rng(1))
    best = plan(graph, tile=256)
    latency, errors = replay(graph, best.actions)
    assert latency == pytest.approx(best.latency)
    assert any("256 does not fit" in error for error in errors if error)
    assert {action.tile for action in best.actions} == {256}


# Against every action sequence.


@pytest.mark.parametrize("graph", small_graphs(0, 20, (4, 5)), ids=lambda graph: f"{len(graph)} nodes")
def test_no_action_sequence_is_faster(graph):
    assert_optimal(graph, plan(graph), dead=len(graph) == 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_action_sequence_is_faster_on_more_nodes(seed):
    for graph in small_graphs(50 + seed, 4, (6, 7)):
        assert_optimal(graph, plan(graph))


@pytest.mark.parametrize("graph", small_graphs(1, 6, (4, 5), tiny=True), ids=lambda graph: f"{len(graph)} nodes")
def test_no_action_sequence_is_faster_without_a_freedom(graph):
    assert_optimal(graph, plan(graph, fusion=False), fuses=(False,))
    assert_optimal(graph, plan(graph, tile=128), tiles=(128,))
    assert_optimal(graph, plan(graph, tile=256, fusion=False), tiles=(256,), fuses=(False,))


@pytest.mark.parametrize(("seed", "size"), [(0, 4), (1, 4), (2, 4), (3, 4), pytest.param(4, 5, marks=pytest.mark.slow)])
def test_retain_values_are_those_of_every_action_sequence(seed, size):
    rng = np.random.default_rng(seed)
    graph = small_graphs(100 + seed, 1, (size,))[0]
    table, known, episode = ValueTable(graph), {}, Episode(Roofline(graph))
    while episode.current >= 0:
        assert best_latency(table, episode) == pytest.approx(episode.latency + search(episode, known), rel=1e-9)
        found = {value.node: value for value in retain_values(table, episode)}
        for tensor in alive(episode):
            pairs = []
            for after in successors(episode):
                keep, drop = search_both(after, tensor, len(after.kernels), known, {})
                pairs.append((after.latency + keep, after.latency + drop))
            keep, drop = (min(side) for side in zip(*pairs, strict=True))
            assert (tensor in found) == (keep < inf)
            if keep < inf:
                assert (found[tensor].keep, found[tensor].drop) == pytest.approx((keep, drop), rel=1e-9)
        ids = nameable(episode)
        retain = tuple(int(i) for i in rng.permutation(ids)[: rng.integers(len(ids) + 1)])
        DOCUMENTED.place(episode, Action(bool(rng.random() < 0.6), int(rng.choice(TILES)), retain), 1.0)
    DOCUMENTED.end(episode, 1.0)
    assert best_latency(table, episode) == episode.latency


# Larger graphs: replayed, and no worse than anything that is known.


@pytest.mark.parametrize("name", TASKS)
def test_a_plan_of_a_task_replays_without_error_and_beats_every_policy(name):
    graph = load_task(name)
    env = SchedulerEnv(graph)
    best = plan(graph)
    latency, errors = replay(graph, best.actions)
    assert latency == pytest.approx(best.latency, rel=1e-9)
    assert not any(errors)
    assert best.optimal
    restricted = [plan(graph, retention=False), plan(graph, fusion=False)]
    restricted += [plan(graph, tile=tile) for tile in TILES]
    assert best.latency <= min(found.latency for found in restricted) + 1e-6
    assert best.latency <= min(env.greedy_latency, env.naive_latency) + 1e-6
    assert not any(action.retain for action in restricted[0].actions)
    assert not any(action.fuse_with_prev for action in restricted[1].actions)


@pytest.mark.parametrize("difficulty", ["easy", "expert"])
def test_a_narrowed_table_gives_a_plan_and_an_honest_bound(difficulty):
    graph = generate_graph(30, difficulty, rng=np.random.default_rng(5))
    graph = replace(graph, hardware=replace(graph.hardware, slow_mem_bandwidth=1.0))
    best = plan(graph)
    previous = inf
    for most_states in (1, 3, 9):
        narrow = plan(graph, most_states=most_states)
        assert not narrow.optimal
        assert narrow.lower_bound <= best.latency <= narrow.latency <= previous + 1e-6
        assert narrow.latency == pytest.approx(replay(graph, narrow.actions)[0], rel=1e-9)
        assert 0 < narrow.gap < 1
        assert narrow.states < best.states
        previous = narrow.latency
    assert plan(graph, most_states=1).latency == plan(graph, retention=False).latency
    assert plan(graph, retention=False).optimal


# Labels.


def test_retaining_pays_where_it_saves_traffic():
    graph = skip_graph(fusion=1)
    (value,) = retain_values(ValueTable(graph), Episode(Roofline(graph)))
    # Without 0, kernel 0 stores it and kernel 1 loads it; the rest can be as before.
    assert (value.node, value.cycles) == (0, pytest.approx(2 * (B - POINTWISE)))
    assert value.label(SchedulerEnv(graph).greedy_latency) == "pays"


def test_retaining_does_not_matter_where_the_kernel_goes_on_to_the_last_reader():
    graph = skip_graph()
    (value,) = retain_values(ValueTable(graph), Episode(Roofline(graph)))
    assert value == RetainValue(0, B + 100, B + 100)
    assert value.label(SchedulerEnv(graph).greedy_latency) == "does not matter"


def test_retaining_costs_where_it_takes_the_room_of_something_better():
    graph = skip_graph(capacity=2 * B, fusion=1)
    episode = Episode(Roofline(graph))
    DOCUMENTED.place(episode, Action(False, 128, (0,)), 1.0)
    values = {value.node: value for value in retain_values(ValueTable(graph), episode)}
    # With 0 kept, either 1 is stored and loaded, or 2 makes the environment write 0 after all.
    assert values[1].label(1e4) == "pays"
    assert values[0].cycles < 1e-9


def test_labels_follow_the_tolerance():
    value = RetainValue(3, keep=1000.0, drop=999.0)
    assert value.cycles == -1.0
    assert value.percent(1000.0) == pytest.approx(-0.1)
    assert value.label(1000.0) == "costs"
    assert value.label(1000.0, tolerance=0.001) == "does not matter"
    assert RetainValue(3, keep=999.0, drop=1000.0).label(1000.0) == "pays"


def test_every_decision_of_a_played_episode_has_a_value():
    graph = load_task("task5_adversarial")
    table, episode = ValueTable(graph), Episode(Roofline(graph))
    while episode.current >= 0:
        best = best_latency(table, episode)
        for value in retain_values(table, episode):
            assert min(value.keep, value.drop) == pytest.approx(best, rel=1e-9)
        DOCUMENTED.place(episode, greedy(episode), 1.0)


# Refusals.


def test_what_cannot_be_planned_is_refused():
    graph = skip_graph()
    with pytest.raises(PlannerError, match="tile: expected one of 32, 64, 128, 256, found 100"):
        plan(graph, tile=100)
    with pytest.raises(GraphError, match="expected a working set"):
        plan(skip_graph(capacity=B // 8))
    episode = Episode(Roofline(graph))
    with pytest.raises(PlannerError, match="expected one of graph skip with a node to place, found graph task1_chain"):
        retain_values(ValueTable(graph), Episode(Roofline(load_task("task1_chain"))))
    DOCUMENTED.end(episode, 1.0)
    with pytest.raises(PlannerError, match="found its end"):
        retain_values(ValueTable(graph), episode)


def test_a_state_that_a_narrowed_table_leaves_out_is_refused():
    graph = skip_graph(fusion=1)
    episode = Episode(Roofline(graph))
    DOCUMENTED.place(episode, Action(False, 128, (0,)), 1.0)
    DOCUMENTED.place(episode, Action(False, 128, (0, 1)), 1.0)
    with pytest.raises(PlannerError, match=r"position 2: expected some of the tensors \[1\].* found \[0, 1\]"):
        best_latency(ValueTable(graph, most_states=2), episode)
