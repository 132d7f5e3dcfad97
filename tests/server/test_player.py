"""An adapter in the player's seat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from env.scheduler import load_task
from env.scheduler.prompts import messages
from env.scheduler.scheduler import SchedulerEnv
from env.server.app import create_application
from env.server.errors import ServiceError
from env.server.player import PlayerError, adapter_player
from interp.answers import answer
from interp.subject import Subject
from tests.interp.tiny import save_adapter, save_base


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("player")
    return save_adapter(folder / "adapter", save_base(folder / "base", max_position_embeddings=4096))


def record(adapter: Path, **fields: object) -> Path:
    (adapter / "workbench.json").write_text(json.dumps(fields), encoding="utf-8")
    return adapter


@pytest.mark.slow
def test_it_answers_what_the_model_answers(adapter: Path) -> None:
    observation, _ = SchedulerEnv(load_task("task1_chain")).reset()
    subject = Subject.load(adapter)
    record(adapter, environment="scheduler", rules="documented", system="Answer.", base=subject.base_identity)
    (expected,) = answer(subject.model, subject.tokenizer, [messages(observation, "Answer.")])
    with TestClient(create_application(adapter_player(adapter))) as client:
        session = client.post("/reset", json={"view": False}).json()["session_id"]
        for _ in range(2):
            assert client.post(f"/suggest/{session}", json={"policy": "adapter"}).json() == {"command": expected}
        session = client.post("/reset", json={"environment": "fusionops"}).json()["session_id"]
        response = client.post(f"/suggest/{session}", json={"policy": "adapter"})
        assert response.status_code == 409
        assert response.json()["error"] == "adapter: expected the environment scheduler, found fusionops"


def test_folders_that_cannot_play(tmp_path: Path) -> None:
    with pytest.raises(PlayerError, match=r"adapter_config\.json, found none"):
        adapter_player(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(PlayerError, match=r"workbench\.json: environment: expected one of scheduler, fusionops"):
        adapter_player(record(tmp_path, environment="chess"))
    with pytest.raises(PlayerError, match=r"workbench\.json: system: expected a text, found int"):
        adapter_player(record(tmp_path, system=1))
    (tmp_path / "workbench.json").write_text("[", encoding="utf-8")
    with pytest.raises(PlayerError, match="expected JSON"):
        adapter_player(tmp_path)
    (tmp_path / "workbench.json").unlink()
    play = adapter_player(tmp_path)  # what is wrong inside is found when it is first asked
    with pytest.raises(ServiceError, match="adapter: ") as refusal:
        play("scheduler", "{}")
    assert refusal.value.status == 409
    assert "\n" not in str(refusal.value)
