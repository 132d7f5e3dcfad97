"""What the planner suggests keeps the optimum in reach, and what would keep it busy is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env.scheduler import Graph, SchedulerEnv, curriculum_graph, load_task, preset
from env.scheduler.action import Action
from env.scheduler.planner import best_action, best_latency, plan
from env.scheduler.planner_work import MOST_PLANNER_WORK, planner_work
from env.scheduler.values import ValueTable


@pytest.mark.parametrize("machine", ["hard", "expert_bandwidth_bound"])
def test_from_the_start_it_is_the_plan(machine: str) -> None:
    graph = preset(machine, curriculum_graph(0.2, rng=np.random.default_rng(3)))
    table, env = ValueTable(graph), SchedulerEnv(graph)
    env.reset()
    while not env.episode.ended:
        env.step(best_action(table, env.episode).to_text())
    assert env.episode.latency == pytest.approx(plan(graph).latency, rel=1e-12)


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_after_any_actions_nothing_is_lost(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = preset("expert_bandwidth_bound", curriculum_graph(0.1, rng=rng))
    table, env = ValueTable(graph), SchedulerEnv(graph)
    env.reset()
    while not env.episode.ended:
        if rng.random() < 0.5:
            retain = tuple(int(i) for i in rng.integers(0, len(graph), 3))
            env.step(Action(bool(rng.integers(2)), int(rng.choice([32, 64, 128, 256])), retain).to_text())
        else:
            best = best_latency(table, env.episode)
            env.step(best_action(table, env.episode, keep_more=bool(rng.integers(2))).to_text())
            assert env.episode.error is None
            assert best_latency(table, env.episode) == pytest.approx(best, rel=1e-12)


def test_the_work_is_what_the_table_goes_through() -> None:
    graph = load_task("task4_mixed")
    table = ValueTable(graph)
    pairs = sum(
        len(table.values[position]) * len(table.boundaries[position + len(members)].kept)
        for position in range(len(graph))
        for members in table.kernels(position)
    )
    assert planner_work(graph) == pairs < MOST_PLANNER_WORK / 1000


def test_a_graph_that_would_take_the_planner_minutes_is_seen_at_once() -> None:
    nodes = [{"id": i, "op": "add", "shape": [16, 16], "inputs": list(range(max(0, i - 16), i))} for i in range(64)]
    machine = {
        "fast_mem_capacity": 10**9, "slow_mem_bandwidth": 1.0, "kernel_launch_cost": 10.0, "max_fusion_depth": 64
    }  # fmt: skip
    graph = Graph.from_json({"id": "dense", "hardware": machine, "nodes": nodes})
    assert planner_work(graph) > 10 * MOST_PLANNER_WORK


def test_of_equally_fast_lists_the_longest_is_as_fast() -> None:
    kept = {False: 0, True: 0}
    for seed in range(6):
        graph = preset("hard_bandwidth_bound", curriculum_graph(0.3, rng=np.random.default_rng(seed)))
        table = ValueTable(graph)
        for keep_more in kept:
            env = SchedulerEnv(graph)
            env.reset()
            while not env.episode.ended:
                action = best_action(table, env.episode, keep_more=keep_more)
                kept[keep_more] += len(action.retain)
                env.step(action.to_text())
            assert env.episode.latency == pytest.approx(plan(graph).latency)
    assert kept[True] > kept[False]
