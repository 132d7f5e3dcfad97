"""OpenEnv's validator and typed client against a running server, and the command that starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from env.server.__main__ import main
from env.server.client import TextEnvClient
from env.server.openenv_app import TextAction, TextEnvironment
from tests.server.serving import known_episode, serving


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (base, _):
        yield base


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/openenv"])
def test_openenv_validate(address: str, prefix: str) -> None:
    openenv = Path(sys.executable).with_name("openenv")
    command = [str(openenv), "validate", "--url", address + prefix, "--json", "--timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["mode"] == "simulation"
    assert report["standard_profile"] == "openenv-http/1.x"
    assert report["summary"]["failed_criteria"] == []


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/openenv"])
def test_typed_client(address: str, prefix: str) -> None:
    one, other = known_episode(0), known_episode(5)
    with TextEnvClient(base_url=address + prefix).sync() as a, TextEnvClient(base_url=address + prefix).sync() as b:
        assert a.reset(**one.reset).observation.text == one.first
        assert b.reset(episode_id="mine", **other.reset).observation.text == other.first
        for text, observation in zip(one.actions, one.observations, strict=True):
            result = a.step(TextAction(command=text))
            assert result.observation.text == observation
        assert result.done
        assert result.observation.score == one.score
        assert result.observation.info["total_latency"] == one.latency
        state = b.state()
        assert (state.episode_id, state.step_count, state.done, state.environment) == ("mine", 0, False, "scheduler")
        with pytest.raises(RuntimeError, match="found its end"):
            a.step(TextAction(command=text))


def test_the_environment_by_itself() -> None:
    episode = known_episode(1)
    environment = TextEnvironment()
    assert environment.state.step_count == 0
    with pytest.raises(ValueError, match="expected a reset before it"):
        environment.step(TextAction(command="x"))
    assert environment.reset(**episode.reset).text == episode.first
    for text in episode.actions:
        observation = environment.step(TextAction(command=text))
    assert observation.done
    assert observation.score == episode.score
    environment.reset(environment="fusionops")
    assert environment.state.environment == "fusionops"
    assert environment.get_metadata().description


@pytest.mark.parametrize(
    "argv",
    [["--adapter", "nowhere"], ["--port", "70000"], ["--port", "x"], ["--idle-seconds", "0"], ["--most-sessions", "0"]],
)
def test_bad_options_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert argv[0] in captured.err
