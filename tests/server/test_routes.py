"""Every route of the service, with the environment itself as the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from env.fusionops import TASKS as FUSIONOPS_TASKS
from env.fusionops import FusionOpsEnv
from env.fusionops import load_task as load_fusionops_task
from env.scheduler import (
    PRESETS,
    REAL_GRAPHS,
    TASKS,
    Graph,
    SchedulerEnv,
    curriculum_graph,
    load_real,
    load_task,
    preset,
)
from env.scheduler.planner import plan
from env.scheduler.policies import greedy, heuristic, naive
from env.scheduler.replay import Replay
from env.scheduler.view import view, worth
from env.server.app import create_application
from env.server.errors import ServiceError
from tests.server.serving import known_episode


def say_keep_nothing(environment: str, observation: str) -> str:
    """A player for the adapter's seat."""
    if environment != "scheduler":
        raise ServiceError(409, "adapter: expected the environment scheduler, found another")
    node = json.loads(observation)["current_node"]
    return f'{{"fuse_with_prev": false, "tile": 64, "retain": [{node}]}}'


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_application(say_keep_nothing)) as client:
        yield client


def started(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/reset", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(response: Any, status: int, *parts: str) -> None:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    line = response.json()["error"]
    assert "\n" not in line
    assert len(line) < 400
    for part in parts:
        assert part in line


def test_tasks(client: TestClient) -> None:
    answer = client.get("/tasks").json()
    scheduler = answer["environments"]["scheduler"]
    assert answer["tasks"] == [task["name"] for task in scheduler["tasks"]] == list(TASKS)
    assert [task["nodes"] for task in scheduler["tasks"]] == [len(load_task(name)) for name in TASKS]
    assert scheduler["tasks"][0]["difficulty"] == "easy"
    assert scheduler["presets"] == list(PRESETS)
    assert scheduler["real"] == list(REAL_GRAPHS)
    assert scheduler["policies"] == ["naive", "greedy", "heuristic", "planner"]
    fusionops = answer["environments"]["fusionops"]
    assert [task["name"] for task in fusionops["tasks"]] == list(FUSIONOPS_TASKS)
    assert answer["adapter"] is True


@pytest.mark.parametrize("seed", range(4))
def test_an_episode_is_the_environments(client: TestClient, seed: int) -> None:
    episode = known_episode(seed)
    answer = started(client, **episode.reset)
    assert (answer["observation"], answer["done"], answer["reward"]) == (episode.first, False, 0.0)
    session, total = answer["session_id"], 0.0
    for text, observation in zip(episode.actions, episode.observations, strict=True):
        assert client.get(f"/state/{session}").json()["done"] is False
        answer = client.post(f"/step/{session}", json={"command": text}).json()
        assert answer["observation"] == observation
        assert (answer["score"] is None) == (not answer["done"])
        total += answer["reward"]
    assert answer["done"]
    assert answer["score"] == episode.score
    assert answer["info"]["total_latency"] == answer["view"]["latency"] == episode.latency
    assert total == pytest.approx(episode.score - 0.1 * episode.actions.count("fuse it"))
    refused(client.post(f"/step/{session}", json={"command": text}), 409, "found its end")
    refused(client.post(f"/suggest/{session}", json={"policy": "greedy"}), 409, "found its end")
    state = client.get(f"/state/{session}").json()
    assert (state["observation"], state["actions"]) == (observation, list(episode.actions))


def test_what_can_be_reset_to(client: TestClient) -> None:
    rng = np.random.default_rng(7)
    random_graph = curriculum_graph(0.25, rng=rng, name="curriculum-0.25-s7")
    uploaded = load_task("task3_attention")
    for body, graph in (
        ({}, load_task(TASKS[0])),
        ({"task": "task4_mixed"}, load_task("task4_mixed")),
        ({"random": True, "curriculum_level": 0.25, "seed": 7}, random_graph),
        ({"real": "unet_level"}, load_real("unet_level")),
        ({"real": "unet_level", "hardware": "nvidia_h100"}, preset("nvidia_h100", load_real("unet_level"))),
        ({"graph": uploaded.to_json()}, uploaded),
    ):
        answer = started(client, **body)
        env = SchedulerEnv(graph)
        assert answer["observation"] == env.reset()[0]
        assert answer["view"] == json.loads(json.dumps(view(env)))
        assert answer["view"]["optimum"] == pytest.approx(plan(graph).latency)
    one, other = (started(client, random=True)["observation"] for _ in range(2))
    assert one != other  # a fresh seed each


def test_upstream_rules(client: TestClient) -> None:
    answer = started(client, task="task2_residual", rules="upstream")
    env = SchedulerEnv(load_task("task2_residual"), "upstream")
    assert answer["observation"] == env.reset()[0]
    session = answer["session_id"]
    assert answer["view"]["optimum"] is None
    assert "documented rules" in client.get(f"/worth/{session}").json()["why_not"]
    refused(client.post(f"/suggest/{session}", json={"policy": "planner"}), 409, "documented rules")
    refused(client.post(f"/suggest/{session}", json={"policy": "heuristic"}), 409, "documented rules")
    command = client.post(f"/suggest/{session}", json={"policy": "greedy"}).json()["command"]
    assert client.post(f"/step/{session}", json={"command": command}).json()["reward"] == env.step(command)[1]


@pytest.mark.parametrize("policy", ["naive", "greedy", "heuristic", "planner", "adapter"])
def test_suggestions(client: TestClient, policy: str) -> None:
    graph = load_task("task4_mixed")
    env = SchedulerEnv(graph)
    observation, _ = env.reset()
    answer = started(client, task="task4_mixed", view=False)
    assert answer["view"] is None
    session = answer["session_id"]
    local = {
        "naive": lambda: naive(env.episode).to_text(),
        "greedy": lambda: greedy(env.episode).to_text(),
        "heuristic": lambda: heuristic(json.loads(observation)).to_text(),
        "adapter": lambda: say_keep_nothing("scheduler", observation),
    }
    while not answer["done"]:
        command = client.post(f"/suggest/{session}", json={"policy": policy}).json()["command"]
        if policy in local:
            assert command == local[policy]()
        observation = env.step(command)[0]
        answer = client.post(f"/step/{session}", json={"command": command, "view": False}).json()
        assert answer["observation"] == observation
        assert answer["view"] is None
    if policy == "planner":
        assert answer["info"]["total_latency"] == pytest.approx(plan(graph).latency)
    if policy == "naive":
        assert answer["info"]["total_latency"] == env.naive_latency
    assert client.get(f"/replay/{session}").json()["made_by"] == policy


def test_worth_is_the_planners(client: TestClient) -> None:
    graph = preset("expert_bandwidth_bound", load_real("unet_level"))
    env = SchedulerEnv(graph)
    env.reset()
    session = started(client, real="unet_level", hardware="expert_bandwidth_bound")["session_id"]
    kinds = set()
    for _ in range(len(graph)):
        found = client.get(f"/worth/{session}").json()
        assert found == json.loads(json.dumps(worth(env)))
        kinds |= {value["kind"] for value in found["retain"]}
        text = greedy(env.episode).to_text()
        env.step(text)
        client.post(f"/step/{session}", json={"command": text, "view": False})
    assert {"pays", "does_not_matter"} <= kinds
    assert client.get(f"/worth/{session}").json() == {"retain": [], "why_not": "the episode has ended"}


def test_a_replay_is_the_episode(client: TestClient) -> None:
    episode = known_episode(2)
    session = started(client, **episode.reset)["session_id"]
    for text in episode.actions:
        client.post(f"/step/{session}", json={"command": text, "view": False})
    record = client.get(f"/replay/{session}").json()
    assert record["format"] == "scheduler-replay-1"
    replay = Replay.from_json(record)
    assert replay.made_by == "by hand"
    env = SchedulerEnv(replay.graph, replay.rules)
    env.reset()
    for text in replay.actions:
        env.step(text)
    assert env.episode.latency == episode.latency


@pytest.mark.parametrize(("method", "path"), [("post", "/delete/{}"), ("delete", "/session/{}")])
def test_deleting(client: TestClient, method: str, path: str) -> None:
    session = started(client, view=False)["session_id"]
    assert getattr(client, method)(path.format(session)).json() == {"deleted": session}
    for check, where in (("get", "/state/{}"), ("get", "/worth/{}"), ("get", "/replay/{}"), (method, path)):
        refused(getattr(client, check)(where.format(session)), 404, "session")
    refused(client.post(f"/step/{session}", json={"command": ""}), 404, "session")
    refused(client.post(f"/suggest/{session}", json={"policy": "naive"}), 404, "session")


def test_sessions_by_body_and_query(client: TestClient) -> None:
    session = started(client, episode_id="mine", view=False)["session_id"]
    text = naive(SchedulerEnv(load_task(TASKS[0])).episode).to_text()
    client.post("/step", json={"session_id": session, "command": text, "view": False})
    client.post("/step", json={"session_id": session, "action": {"command": text, "metadata": {}}, "timeout_s": 1})
    state = client.get("/state", params={"session_id": session}).json()
    assert state["actions"] == [text, text]
    assert state["episode_id"] == "mine"
    refused(client.post("/step", json={"session_id": session}), 422, "either command or action")
    refused(client.post("/step", json={"action": {"command": text}}), 422, "session_id")
    refused(client.get("/state"), 422, "session_id")


def test_without_an_adapter_there_is_none() -> None:
    with TestClient(create_application()) as client:
        session = started(client, view=False)["session_id"]
        refused(client.post(f"/suggest/{session}", json={"policy": "adapter"}), 404, "--adapter DIR")
        assert client.get("/tasks").json()["adapter"] is False


def test_fusionops(client: TestClient) -> None:
    graph = load_fusionops_task(FUSIONOPS_TASKS[1])
    env = FusionOpsEnv(graph)
    for body in ({"task": FUSIONOPS_TASKS[1]}, {"graph": graph.to_json()}):
        first, _ = env.reset()
        answer = started(client, environment="fusionops", **body)
        assert (answer["observation"], answer["view"]) == (first, None)
        session = answer["session_id"]
        for op in range(len(graph)):
            command = f"SCHEDULE ops=[{op}] config=[64,64,1] retain=[]"
            answer = client.post(f"/step/{session}", json={"command": command}).json()
            observation, reward, terminated, truncated, _ = env.step(command)
            assert (answer["observation"], answer["reward"]) == (observation, reward)
            assert answer["done"] == (terminated or truncated)
            if answer["done"]:
                assert answer["score"] == env.score
                break
    record = client.get(f"/replay/{session}").json()
    assert record["format"] == "fusionops-replay-1"
    assert record["graph"] == graph.to_json()
    assert client.get(f"/worth/{session}").json()["retain"] == []
    session = started(client, environment="fusionops")["session_id"]
    refused(client.post(f"/suggest/{session}", json={"policy": "greedy"}), 404, "fusionops")
    refused(client.post(f"/suggest/{session}", json={"policy": "adapter"}), 409, "found another")
    for extra in ({"random": True}, {"real": "unet_level"}, {"hardware": "hard"}, {"rules": "upstream"}):
        refused(client.post("/reset", json={"environment": "fusionops", **extra}), 422, next(iter(extra)))


def test_the_page_and_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "<script" in page.text
    assert client.get("/static/page.js").status_code == 200
    for path in ("/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/nowhere"):
        refused(client.get(path), 404)


def test_two_sessions_do_not_mix(client: TestClient) -> None:
    one, other = (started(client, task="task4_mixed", view=False)["session_id"] for _ in range(2))
    assert one != other
    client.post(f"/step/{one}", json={"command": "no action", "view": False})
    assert client.get(f"/state/{other}").json()["actions"] == []


def test_graph_json_is_read_as_it_is_written(client: TestClient) -> None:
    graph = Graph.from_json({**load_task("task1_chain").to_json(), "id": "<b>mine</b>"})
    answer = started(client, graph=graph.to_json())
    assert Graph.from_json(client.get(f"/replay/{answer['session_id']}").json()["graph"]) == graph
