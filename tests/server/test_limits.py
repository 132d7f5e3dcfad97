"""What a client may not do, each with a status of 4xx or 503 and one clear line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env.fusionops import TASKS as FUSIONOPS_TASKS
from env.fusionops import load_task as load_fusionops_task
from env.scheduler import load_task
from env.server.app import create_application
from env.server.requests import LARGEST_BODY, LONGEST_COMMAND, MOST_NODES
from tests.server.test_routes import refused, started
from tests.server.test_sessions import Clock


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_application(), raise_server_exceptions=False) as client:
        yield client


def graph_with(nodes: int = 8, **hardware: Any) -> dict[str, Any]:
    record = load_task("task1_chain").to_json()
    node = record["nodes"][1]
    record["nodes"] = [{**node, "id": i, "inputs": [i - 1] if i else []} for i in range(nodes)]
    record["hardware"] |= hardware
    return record


JSON = {"content-type": "application/json"}


def test_bodies_that_are_too_large(client: TestClient) -> None:
    filler = " " * (LARGEST_BODY - 12)
    assert client.post("/reset", content=f'{{"seed":1 {filler}}}', headers=JSON).status_code == 200
    for path in ("/reset", "/step/x", "/openenv/reset", "/mcp"):
        refused(client.post(path, content=" " * (LARGEST_BODY + 1), headers=JSON), 413, str(LARGEST_BODY))
    chunks = iter([b" " * 40_000] * 3)  # no length is declared
    refused(client.post("/reset", content=chunks, headers=JSON), 413, str(LARGEST_BODY))
    lying = {"content-length": "5", **JSON}
    refused(client.post("/reset", content=b" " * (LARGEST_BODY + 1), headers=lying), 413, str(LARGEST_BODY))


@pytest.mark.parametrize(
    ("content", "status"),
    [("{", 400), ("", 422), ("[1]", 422), ("null", 422), ("[" * 30_000, 400), ('{"seed": ' + "9" * 5000 + "}", 400),
     ('{"seed": NaN}', 422), ('{"curriculum_level": Infinity, "random": true}', 422), (b"\xff\xfe\x00", 400)],
)  # fmt: skip
def test_bodies_that_are_no_request(client: TestClient, content: str | bytes, status: int) -> None:
    response = client.post("/step/x" if content == "" else "/reset", content=content, headers=JSON)
    refused(response, status)


def test_bodies_of_another_kind(client: TestClient) -> None:
    refused(client.post("/reset", data={"task": "task1_chain"}), 422, "application/json", "urlencoded")


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({"task": "task9"}, ["task: expected one of task1_chain", "'task9'"]),
        ({"task": 1}, ["task", "string"]),
        ({"task": "task1_chain", "random": True}, ["at most one of", "task, random"]),
        ({"random": "yes"}, ["random", "boolean"]),
        ({"random": True, "curriculum_level": 1.5}, ["curriculum_level"]),
        ({"random": True, "seed": -1}, ["seed"]),
        ({"random": True, "seed": 2**63}, ["seed"]),
        ({"seed": True}, ["seed"]),
        ({"real": "nothing"}, ["real graph: expected one of", "'nothing'"]),
        ({"hardware": "abacus"}, ["preset: expected one of", "'abacus'"]),
        ({"rules": "mine"}, ["rules", "documented"]),
        ({"environment": "chess"}, ["environment", "scheduler"]),
        ({"unknown": 1}, ["unknown"]),
        ({"graph": []}, ["graph"]),
        ({"graph": {}}, ["graph.hardware: Field required"]),
        ({"graph": graph_with(MOST_NODES + 1)}, ["graph.nodes"]),
        ({"graph": graph_with(fast_mem_capacity=100)}, ["node 0: expected a working set"]),
        ({"graph": graph_with(fast_mem_capacity=1e300)}, ["fast_mem_capacity"]),
        ({"graph": graph_with(slow_mem_bandwidth=-1.0)}, ["slow_mem_bandwidth"]),
        ({"graph": graph_with(slow_mem_bandwidth=1e-300)}, ["slow_mem_bandwidth"]),
        ({"graph": graph_with(slow_mem_bandwidth="1")}, ["slow_mem_bandwidth"]),
        ({"graph": graph_with(max_fusion_depth=True)}, ["max_fusion_depth"]),
    ],
)
def test_episodes_that_cannot_be(client: TestClient, body: dict[str, Any], parts: list[str]) -> None:
    refused(client.post("/reset", json=body), 422, *parts)
    if "seed" not in body:  # OpenEnv's own form reads a seed leniently
        refused(client.post("/openenv/reset", json=body), 422)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"op": "__import__('os')"}, "expected op to be one of"),
        ({"inputs": [1]}, "cycle"),
        ({"inputs": [99]}, "expected inputs between"),
        ({"shape": ["1", "2"]}, "shape"),
        ({"shape": [0, 4]}, "shape"),
        ({"shape": [2**40, 4]}, "shape"),
        ({"shape": [4]}, "shape"),
        ({"id": 5}, "its position"),
        ({"flops": 1.0}, "expected flops"),
    ],
)
def test_nodes_that_cannot_be(client: TestClient, change: dict[str, Any], part: str) -> None:
    record = graph_with()
    record["nodes"][1] |= change
    refused(client.post("/reset", json={"graph": record}), 422, part)


@pytest.mark.parametrize(
    "change",
    [{"ops": []}, {"max_steps": -1}, {"max_steps": 10**9}, {"hardware": {}}, {"tensors": "all"}, {"ops": [{}]}],
)
def test_fusionops_graphs_that_cannot_be(client: TestClient, change: dict[str, Any]) -> None:
    record = load_fusionops_task(FUSIONOPS_TASKS[0]).to_json() | change
    refused(client.post("/reset", json={"environment": "fusionops", "graph": record}), 422, "graph")


def test_a_graph_beyond_the_planner_is_played_without_it(client: TestClient) -> None:
    record = graph_with(64, fast_mem_capacity=10**9, max_fusion_depth=64)
    for i, node in enumerate(record["nodes"]):
        node |= {"op": "add", "shape": [16, 16], "inputs": list(range(max(0, i - 16), i))}
    answer = started(client, graph=record)
    assert answer["view"]["optimum"] is None
    session = answer["session_id"]
    assert client.get(f"/worth/{session}").json() == {"retain": [], "why_not": "graph too large for the planner"}
    refused(client.post(f"/suggest/{session}", json={"policy": "planner"}), 409, "graph too large for the planner")


def test_steps_that_cannot_be(client: TestClient) -> None:
    session = started(client, view=False)["session_id"]
    longest = "x" * LONGEST_COMMAND
    assert client.post(f"/step/{session}", json={"command": longest}).json()["reward"] == -0.1
    for body in ({"command": longest + "x"}, {"command": 1}, {"command": None}, {}, {"text": "x"}, [], "x"):
        refused(client.post(f"/step/{session}", json=body), 422)
    refused(client.post(f"/suggest/{session}", json={"policy": "eval"}), 422, "policy", "'eval'")
    refused(client.post(f"/suggest/{session}", json={}), 422, "policy")
    assert client.get(f"/state/{session}").json()["actions"] == [longest]


def test_what_is_sent_is_never_run(client: TestClient) -> None:
    session = started(client, view=False)["session_id"]
    for text in ("__import__('os').abort()", "{{7*7}}", "${jndi:x}", '{"fuse_with_prev": true, "tile": 128+1}'):
        answer = client.post(f"/step/{session}", json={"command": text, "view": False}).json()
        assert "49" not in str(answer["info"])
        if answer["done"]:
            break
        assert answer["reward"] == -0.1


def test_methods_and_ids(client: TestClient) -> None:
    refused(client.put("/reset"), 405)
    for session in ("x", "a" * 1000, "%00", "é"):
        assert client.get(f"/state/{session}").status_code in (404, 422)
        assert "error" in client.get(f"/state/{session}").json()


def test_idle_sessions_end_and_a_full_house_says_so() -> None:
    clock = Clock()
    with TestClient(create_application(idle_seconds=60, most_sessions=2, clock=clock)) as client:
        one, other = (started(client, view=False)["session_id"] for _ in range(2))
        response = client.post("/reset", json={})
        refused(response, 503, "expected fewer than 2 in play")
        assert response.headers["retry-after"]
        clock.now += 50
        assert client.get(f"/state/{one}").status_code == 200
        clock.now += 50
        refused(client.get(f"/state/{other}"), 404, "60 s")
        assert client.get(f"/state/{one}").status_code == 200
        started(client)
        assert client.get("/health").json() == {"status": "healthy", "sessions": 2}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
fields = ["environment", "task", "random", "curriculum_level", "seed", "real", "graph", "rules", "hardware", "view",
          "session_id", "command", "action", "policy", "type", "data"]  # fmt: skip


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/reset", "/step", "/step/x", "/suggest/x", "/openenv/reset", "/openenv/step", "/mcp"]),
    body=st.dictionaries(st.sampled_from(fields) | st.text(max_size=8), json_values, max_size=4) | json_values,
)
def test_nothing_that_is_sent_breaks_the_server(client: TestClient, path: str, body: Any) -> None:
    response = client.post(path, content=json.dumps(body), headers=JSON)
    assert response.status_code in (200, 400, 404, 409, 422), response.text
    if response.status_code != 200:
        refused(response, response.status_code)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_a_graph_breaks_the_server(client: TestClient, data: st.DataObject) -> None:
    record = graph_with(3)
    where = data.draw(st.sampled_from([record, record["hardware"], *record["nodes"]]))
    where[data.draw(st.sampled_from(sorted(where)))] = data.draw(json_values)
    response = client.post("/reset", json={"graph": record})
    assert response.status_code in (200, 422), response.text
    if response.status_code == 200:
        session = response.json()["session_id"]
        answer = client.post(f"/step/{session}", json={"command": '{"fuse_with_prev":false,"tile":32,"retain":[0]}'})
        assert answer.status_code == 200
        client.delete(f"/session/{session}")
