"""`/ws`, in the service's own form and in OpenEnv's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from env.server.app import create_application
from env.server.limits import TOO_LARGE
from env.server.requests import LARGEST_BODY
from tests.server.serving import known_episode


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_application()) as client:
        yield client


def sessions(client: TestClient) -> int:
    count: int = client.get("/health").json()["sessions"]
    return count


@pytest.mark.parametrize("seed", [0, 1])
def test_own_form_answers_what_the_routes_answer(client: TestClient, seed: int) -> None:
    episode = known_episode(seed)
    over_http = client.post("/reset", json=episode.reset).json()
    with client.websocket_connect("/ws") as socket:
        socket.send_json({"type": "reset", **episode.reset})
        answer = socket.receive_json()
        session, other = answer.pop("session_id"), over_http.pop("session_id")
        assert answer == over_http
        for text in episode.actions:
            socket.send_json({"type": "step", "command": text})
            answer = socket.receive_json()
            assert answer == client.post(f"/step/{other}", json={"command": text}).json()
        assert answer["done"]
        assert answer["score"] == episode.score
        socket.send_json({"type": "state"})
        assert socket.receive_json() == client.get(f"/state/{session}").json()
        socket.send_json({"type": "step", "command": text})
        assert "found its end" in socket.receive_json()["error"]
    client.delete(f"/session/{other}")


def test_a_connection_has_one_session_and_takes_it_along(client: TestClient) -> None:
    before = sessions(client)
    with client.websocket_connect("/ws") as socket:
        for _ in range(3):
            socket.send_json({"type": "reset", "view": False})
            session = socket.receive_json()["session_id"]
            assert sessions(client) == before + 1
    assert client.get(f"/state/{session}").status_code == 404
    assert sessions(client) == before


def test_messages_that_cannot_be_leave_the_connection_open(client: TestClient) -> None:
    with client.websocket_connect("/ws") as socket:
        for text, part in (
            ("{", "expected a JSON object"),
            ("[" * 30_000, "expected a JSON object"),
            ("9" * 5000, "expected a JSON object"),
            ("[]", "expected a JSON object"),
            ('{"type": "step", "command": "x"}', "expected a reset before it"),
            ('{"type": "reset", "task": "task9"}', "task: expected one of"),
            ('{"type": "reset", "seed": -1}', "seed"),
            ('{"type": ["reset"]}', "type: expected reset"),
        ):
            socket.send_text(text)
            answer = socket.receive_json()
            assert answer.keys() == {"error"}
            assert part in answer["error"]
            assert "\n" not in answer["error"]
        socket.send_bytes(b"\x00")
        assert "as text" in socket.receive_json()["error"]
        socket.send_json({"type": "reset", "view": False})
        assert "session_id" in socket.receive_json()


@pytest.mark.parametrize("path", ["/ws", "/openenv/ws"])
@pytest.mark.parametrize("first", [None, {"type": "reset"}, {"type": "reset", "data": {}}])
def test_messages_that_are_too_large_close_it(client: TestClient, path: str, first: object) -> None:
    with client.websocket_connect(path) as socket:
        if first is not None:
            socket.send_json(first)
            socket.receive_json()
        socket.send_text(json.dumps({"type": "step", "command": "é" * LARGEST_BODY}, ensure_ascii=False))
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == TOO_LARGE


@pytest.mark.parametrize("path", ["/ws", "/openenv/ws"])
def test_openenvs_form(client: TestClient, path: str) -> None:
    episode = known_episode(3)
    with client.websocket_connect(path) as socket:
        socket.send_json({"type": "reset", "data": {"episode_id": "mine", **episode.reset}})
        answer = socket.receive_json()
        assert answer["type"] == "observation"
        assert answer["data"]["observation"]["text"] == episode.first
        for text in episode.actions:
            socket.send_json({"type": "step", "data": {"command": text}})
            answer = socket.receive_json()
        assert answer["data"]["done"]
        assert answer["data"]["observation"]["score"] == episode.score
        socket.send_json({"type": "state"})
        state = socket.receive_json()["data"]
        assert (state["episode_id"], state["step_count"]) == ("mine", len(episode.actions))
        assert state["actions"] == list(episode.actions)
        socket.send_json({"type": "reset", "data": {"task": "task9"}})
        answer = socket.receive_json()
        assert answer["type"] == "error"
        assert "task: expected one of" in answer["data"]["message"]
        socket.send_json({"type": "close"})


def test_a_silent_connection_is_closed() -> None:
    with (
        TestClient(create_application(idle_seconds=0.2)) as client,
        client.websocket_connect("/ws") as socket,
        pytest.raises(WebSocketDisconnect),
    ):
        socket.receive_json()
