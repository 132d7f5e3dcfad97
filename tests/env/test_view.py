"""What the page is given to draw."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from env.scheduler import Graph, Hardware, Node, SchedulerEnv, curriculum_graph, generate_graph, load_task, preset
from env.scheduler import view as module
from env.scheduler.planner import plan
from env.scheduler.policies import greedy, heuristic
from env.scheduler.view import optimum, view, worth


def played(env, policy):
    """The views of an episode, from the start to the end."""
    env.reset()
    views = [view(env)]
    while not env.episode.ended:
        env.step(policy(env).to_text())
        views.append(view(env))
    return views


@pytest.mark.parametrize("rules", ["documented", "upstream"])
@pytest.mark.parametrize("seed", range(3))
def test_every_node_is_in_one_place_and_cycles_add_up(rules, seed):
    graph = curriculum_graph(0.2, rng=np.random.default_rng(seed))
    env = SchedulerEnv(graph, rules)
    for seen in played(env, lambda env: greedy(env.episode)):
        assert json.loads(json.dumps(seen, allow_nan=False)) == seen
        placed = [i for kernel in seen["kernels"] for i in kernel["nodes"]] + seen["open_kernel"]["nodes"]
        assert placed == seen["order"][: len(placed)]
        assert seen["current"] == (seen["order"][len(placed)] if len(placed) < len(graph) else None)
        for node in seen["nodes"]:
            index = node["kernel"]
            assert (node["state"] == "done") == (index is not None)
            assert (node["state"] == "in_kernel") == (node["id"] in seen["open_kernel"]["nodes"])
            assert index is None or node["id"] in seen["kernels"][index]["nodes"]
        assert sum(kernel["latency"] for kernel in seen["kernels"]) == pytest.approx(seen["latency"])
    assert seen["ended"]
    assert seen["score"] == env.score
    assert {node["uses_left"] for node in seen["nodes"]} == {0}


def test_the_best_from_here_never_falls_and_starts_at_the_optimum():
    graph = preset("hard_bandwidth_bound", load_task("task4_mixed"))
    views = played(SchedulerEnv(graph), lambda env: heuristic(json.loads(env.observation())))
    reachable = [seen["best_from_here"] for seen in views]
    assert reachable[0] == pytest.approx(plan(graph).latency)
    assert all(b >= a - 1e-6 for a, b in pairwise(reachable))
    assert reachable[-1] == pytest.approx(views[-1]["latency"])
    assert {seen["optimum"] for seen in views} == {plan(graph).latency}


def test_fast_memory_holds_what_the_environment_says():
    graph = load_task("task2_residual")
    env = SchedulerEnv(graph)
    env.reset()
    env.step('{"fuse_with_prev": false, "tile": 128, "retain": [0]}')
    env.step('{"fuse_with_prev": false, "tile": 64, "retain": [0, 1]}')
    seen = view(env)
    assert seen["fast_mem"] == [{"id": 0, "bytes": graph.sizes[0]}]
    assert seen["kernels"] == [{"nodes": [0], "tile": 128, "retained": [0], "latency": env.episode.latency}]
    assert seen["open_kernel"] == {"nodes": [1], "tile": 64, "retain": [0, 1]}


def test_worth_is_the_difference_of_the_best_schedules():
    # 0 is read in the next kernel: kept, neither its store nor its load is paid.
    size = 64 * 64 * 4
    nodes = (Node(0, "relu", (64, 64)), Node(1, "relu", (64, 64), (0,)))
    env = SchedulerEnv(Graph("two", nodes, Hardware(2 * size, 1.0, 100.0, 1)))
    env.reset()
    pointwise = 64 * 64 * 0.1
    saved = (size + 2 * size) - (pointwise + size)
    found = worth(env)["retain"]
    assert found == [
        {
            "id": 0,
            "worth_cycles": pytest.approx(saved),
            "worth_share_of_greedy": pytest.approx(saved / env.greedy_latency),
            "kind": "pays",
        }
    ]


def test_where_the_planner_says_nothing_the_reason_is_given(monkeypatch):
    graph = load_task("task1_chain")
    upstream = SchedulerEnv(graph, "upstream")
    assert worth(upstream) == {
        "retain": [],
        "why_not": "the planner knows the documented rules, not the upstream ones",
    }
    assert view(upstream)["optimum"] is view(upstream)["best_from_here"] is None
    env = SchedulerEnv(graph)
    monkeypatch.setattr(module, "MOST_PLANNER_WORK", 1)
    assert worth(env)["why_not"] == "graph too large for the planner"
    assert optimum(env) is None
    monkeypatch.undo()
    played(env, lambda env: greedy(env.episode))
    assert worth(env) == {"retain": [], "why_not": "the episode has ended"}


def test_numbers_that_are_no_ids_are_left_out_of_a_retain_list():
    env = SchedulerEnv(load_task("task1_chain"), "upstream")
    env.reset()
    env.step('{"fuse_with_prev": false, "tile": 128, "retain": [0.5, 0]}')
    assert view(env)["open_kernel"]["retain"] == [0]


def test_free_traffic_and_free_launches_are_drawn_too():
    graph = generate_graph(8, rng=np.random.default_rng(0))
    free = replace(graph, hardware=replace(graph.hardware, slow_mem_bandwidth=0.0, kernel_launch_cost=0.0))
    assert json.dumps(view(SchedulerEnv(free)), allow_nan=False)
