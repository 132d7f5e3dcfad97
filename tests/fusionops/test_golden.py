"""Every recorded number of the published fusion environment, reproduced."""

import json
from collections import Counter
from pathlib import Path

import pytest

from env.fusionops import ActionError, FusionOpsEnv, Graph, load_task, parse_action
from env.fusionops.action import Action
from env.fusionops.cost import iteration_latencies, kernel_cost, naive_latency
from env.fusionops.hints import hints
from env.fusionops.rules import ready

DATA = Path(__file__).parents[1] / "data"


def _records(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


TASK_RECORDS = json.loads((DATA / "v1_tasks.json").read_text())["graphs"]
GRAPH_RECORDS = json.loads((DATA / "v1_graphs.json").read_text())["graphs"]
GRAPHS = {record["id"]: record for record in TASK_RECORDS + GRAPH_RECORDS}
EPISODES = _records("v1_episodes.jsonl")
COSTS = _records("v1_cost.jsonl")
PUBLISHED = json.loads((DATA / "v1_golden_cases.json").read_text())["cases"]
PARSES = json.loads((DATA / "v1_parse.json").read_text())["cases"]


def _id(record):
    return record["id"]


def test_the_recordings_are_all_there():
    found = [len(records) for records in (TASK_RECORDS, GRAPH_RECORDS, EPISODES, COSTS, PUBLISHED, PARSES)]
    assert found == [4, 19, 142, 200, 12, 51]
    outcomes = Counter(step["outcome"] for episode in EPISODES for step in episode["steps"])
    assert outcomes == {"ok": 544, "invalid": 304, "parse_error": 17}


@pytest.mark.parametrize("record", GRAPHS.values(), ids=GRAPHS)
def test_graphs_and_the_naive_schedule(record):
    graph = Graph.from_json(record)
    assert naive_latency(graph) == pytest.approx(record["naive_latency"], rel=1e-9)
    assert list(graph.graph_inputs) == record["graph_inputs"]
    assert list(graph.graph_outputs) == record["graph_outputs"]
    assert FusionOpsEnv(graph).max_steps == record["max_steps"]
    assert Graph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize("record", TASK_RECORDS, ids=_id)
def test_the_tasks_are_the_recorded_ones(record):
    assert load_task(record["id"]) == Graph.from_json(record)


def _call(graph, action, fast):
    traversal = action["traversal"]
    return graph, action["ops"], tuple(action["config"]), action["retain"], traversal, frozenset(fast)


@pytest.mark.parametrize("record", COSTS, ids=_id)
def test_costs(record):
    call = _call(Graph.from_json(GRAPHS[record["graph"]]), record, record["fast_memory"])
    cost = kernel_cost(*call)
    assert (cost.fits, cost.working_set, cost.iterations) == (
        record["is_valid"],
        record["working_set"],
        record["iterations"],
    )
    assert cost.latency == pytest.approx(record["total_latency"], rel=1e-9)
    if cost.fits and "tile_latencies" in record:
        assert list(iteration_latencies(*call)) == pytest.approx(record["tile_latencies"], rel=1e-9)


@pytest.mark.parametrize("case", PUBLISHED, ids=_id)
def test_published_cases(case):
    graph = Graph.from_json(case["graph"])
    total = 0.0
    for record in case["calls"]:
        call = _call(graph, record["action"], record["fast_memory"])
        cost = kernel_cost(*call)
        assert (cost.fits, cost.working_set) == (record["is_valid"], record["working_set"])
        if record["expected"] == "oom":
            assert not cost.fits
            continue
        assert cost.latency == pytest.approx(record["expected"], abs=0.01)
        assert cost.latency == pytest.approx(record["latency_full_precision"], rel=1e-9)
        assert list(iteration_latencies(*call)) == pytest.approx(record["tile_latencies"], rel=1e-9)
        total += cost.latency
    if case["expected_total"] not in (None, "oom"):
        assert total == pytest.approx(case["expected_total"], abs=0.01)
        assert total == pytest.approx(case["total_full_precision"], rel=1e-9)


def _assert_parsed(action, expected):
    assert list(action.ops) == expected["ops"]
    assert list(action.config) == expected["config"]
    assert list(action.retain) == expected["retain"]
    assert action.traversal == (expected["traversal"] and tuple(expected["traversal"]))


@pytest.mark.parametrize("case", PARSES, ids=_id)
def test_action_texts(case):
    if "exception" in case or case["parsed"] is None:
        with pytest.raises(ActionError, match="expected"):
            parse_action(case["text"])
    else:
        _assert_parsed(parse_action(case["text"]), case["parsed"])


def _take(env, step):
    """A recorded step: a text with what it means, or the fields of an action."""
    given, native = step["action"], env.graph.hardware.native_granularity
    if "text" in given:
        if step["parsed"]:
            _assert_parsed(parse_action(given["text"], native), step["parsed"])
        return env.step(given["text"])
    parts = (tuple(given[key]) for key in ("ops", "config", "retain"))
    traversal = given["traversal"]
    action = Action(*parts, traversal if traversal is None else tuple(traversal))
    if traversal != []:  # which no text can mean
        assert parse_action(action.to_text(), native) == action
    return env.act(action)


def _assert_open(env, expected):
    episode = env.episode
    assert list(ready(env.graph, episode.scheduled)) == expected["ready"]
    assert [h.to_text() for h in hints(env.graph, episode.scheduled, episode.fast)] == expected["hints"]


@pytest.mark.parametrize("record", EPISODES, ids=_id)
def test_episodes(record):
    env = FusionOpsEnv(Graph.from_json(GRAPHS[record["graph"]]), max_steps=record["max_steps"])
    env.reset()
    _assert_open(env, record["start"])
    total = 0.0
    for step in record["steps"]:
        before = env.clone()
        _, reward, terminated, truncated, info = _take(env, step)
        total += reward
        assert reward == pytest.approx(step["reward"], abs=1e-9)
        assert (terminated or truncated) == step["done"]
        _assert_outcome(before, env, step, info)
        state = step["state"]
        assert sorted(env.episode.scheduled) == state["scheduled"]
        assert sorted(env.episode.fast) == state["fast_memory"]
        assert env.episode.step_count == info["step_count"] == state["step_count"]
        assert info["total_latency"] == pytest.approx(state["total_latency"], rel=1e-9)
        _assert_open(env, state)
        assert env.score == pytest.approx(step["score_now"], abs=1e-9)
    assert env.score == pytest.approx(record["score"], abs=1e-9)
    assert total == pytest.approx(record["total_reward"], abs=1e-9)
    assert env.episode.ended == record["finished"]


def _assert_outcome(before, env, step, info):
    error = info["error"]
    if step["outcome"] == "ok":
        assert error is None
        assert info["latency"] == pytest.approx(step["latency"], rel=1e-9)
        assert (info["working_set"], info["iterations"]) == (step["working_set"], step["iterations"])
        assert env.episode.covered == step["all_ops_covered"]
        if "tile_latencies" in step:
            action, fast = env.episode.last.action, before.episode.fast
            call = (env.graph, action.ops, action.config, action.retain, action.traversal, fast)
            assert list(iteration_latencies(*call)) == pytest.approx(step["tile_latencies"], rel=1e-9)
        return
    assert error["class"] == step["error_class"]
    if step["outcome"] == "invalid":
        assert {key: value for key, value in error.items() if key != "class"} == step["error"]
