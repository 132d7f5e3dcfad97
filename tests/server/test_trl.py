"""TRL trains on the environment through `environment_factory`."""

from importlib.resources import files
from pathlib import Path

import pytest

from env.scheduler import TASKS, SchedulerEnv, load_task
from env.scheduler.policies import greedy
from env.server.trl_example import SchedulerTool, train
from tests.interp.tiny import tiny_model, tiny_tokenizer


def naive_return(task: str) -> float:
    env = SchedulerEnv(load_task(task))
    return (env.greedy_latency - env.naive_latency) / env.greedy_latency


def test_the_tool_is_the_environment() -> None:
    tool = SchedulerTool()
    env = SchedulerEnv(load_task("task4_mixed"))
    assert tool.reset(task="task4_mixed", prompt=[]) == env.reset()[0]
    total = 0.0
    while not env.episode.ended:
        action = greedy(env.episode)
        observation, reward, *_ = env.step(action.to_text())
        total += reward
        answer = tool.schedule(action.fuse_with_prev, action.tile, list(action.retain))
        assert env.episode.ended or answer == observation
    assert "score" in answer
    assert tool.schedule(False, 128, []) == answer  # nothing happens after the end
    assert tool.get_reward() == pytest.approx(total) == pytest.approx(env.score)


def test_what_is_no_action_is_said_and_costs() -> None:
    tool = SchedulerTool()
    tool.reset()
    assert "invalid action: tile" in tool.schedule(True, "huge", [])  # type: ignore[arg-type]
    assert tool.get_reward() == pytest.approx(naive_return(TASKS[0]) - 0.10)


@pytest.mark.parametrize("task", TASKS)
def test_leaving_never_pays(task: str) -> None:
    tool = SchedulerTool()
    tool.reset(task=task)
    assert tool.get_reward() == pytest.approx(naive_return(task))


@pytest.mark.slow
def test_two_steps_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model calls no tool, so that every rollout has the naive schedule's return."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = files("trl").joinpath("chat_templates", "qwen3.jinja").read_text(encoding="utf-8")
    model = tiny_model(max_position_embeddings=8192)
    trainer = train(model, tokenizer, tmp_path / "out", steps=2, rollouts=2, longest=8)
    assert trainer.state.global_step == 2
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 2
    for reward in rewards:
        assert min(abs(reward - naive_return(task)) for task in TASKS) < 1e-6
    assert (tmp_path / "out" / "model.safetensors").is_file()
