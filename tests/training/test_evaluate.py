"""Evaluation: games against plain episodes, the numbers of known policies, and a whole call on a tiny model."""

import numpy as np
import pandas as pd
import pytest

from env.scheduler import Action, SchedulerEnv, load_task
from env.scheduler.hardware import on
from env.scheduler.planner import plan, retain_values
from env.scheduler.values import ValueTable
from env.training.evaluate import fixed_policies, main, rows_of, unseen_graphs
from env.training.evaluate_report import summarise, table
from env.training.play import play
from env.training.store import Provenance, lora_config, store_adapter
from interp.base_models import find_base
from tests.interp.tiny import save_base, tiny_model


@pytest.fixture(scope="module")
def graphs():
    return [graph for _, graph in unseen_graphs(8, 0, "bandwidth_bound", 10, set())]


def test_games_are_the_environments_episodes(graphs):
    tables = [ValueTable(graph) for graph in graphs]
    policies = fixed_policies(graphs)
    games = play(graphs, tables, policies["planner"])
    for graph, game in zip(graphs, games, strict=True):
        assert game.env.episode.latency == pytest.approx(plan(graph).latency)
        assert game.valid == len(graph)
        # The planner does what it says: what pays is kept, what costs is not.
        for decision in game.decisions:
            assert decision.label == "does not matter" or decision.retained == (decision.label == "pays")
    assert sum(decision.label == "pays" for game in games for decision in game.decisions) > 10
    for game in play(graphs, tables, policies["greedy"]):
        assert game.gain == pytest.approx(0)


def test_only_lists_that_take_effect_are_decisions():
    graph = on("bandwidth_bound", load_task("task1_chain"))
    table = ValueTable(graph)
    (game,) = play([graph], [table], lambda envs: ['{"fuse_with_prev": true, "tile": 128, "retain": [0]}'])
    kernels = game.env.episode.kernels
    ends = {sum(len(kernel.members) for kernel in kernels[: i + 1]) - 1 for i in range(len(kernels))}
    positions = {decision.position for decision in game.decisions}
    assert positions <= ends - {len(graph) - 1}
    env = SchedulerEnv(graph)
    env.reset()
    expected = []
    for position in range(len(graph)):
        if position in ends:
            expected += [(position, value.node) for value in retain_values(table, env.episode)]
        env.step('{"fuse_with_prev": true, "tile": 128, "retain": [0]}')
    assert [(decision.position, decision.node) for decision in game.decisions] == expected


def test_invalid_answers_are_counted_and_place_nothing(graphs):
    texts = iter(["nonsense", '{"fuse_with_prev": true, "tile": 128, "retain": []}'] * 100)
    (game,) = play(graphs[:1], [ValueTable(graphs[0])], lambda envs: [next(texts)])
    assert (game.valid, game.invalid) == (len(graphs[0]), len(graphs[0]))
    (game,) = play(graphs[:1], [ValueTable(graphs[0])], lambda envs: ["nonsense"])
    assert (game.valid, game.invalid) == (0, 3)
    assert game.env.episode.truncated


def test_unseen_graphs_are_unseen_and_distinct():
    first = unseen_graphs(12, 3, "published", 10, set())
    seen = {graph.fingerprint[:16] for _, graph in first[:6]}
    again = unseen_graphs(12, 3, "published", 10, seen)
    assert not seen & {graph.fingerprint[:16] for _, graph in again}
    assert len({graph.fingerprint for _, graph in again}) == 12
    assert max(len(graph) for _, graph in first) <= 11


def test_summary_in_dumb_cases():
    tasks = ["task1_chain", "task2_residual", "task3_attention", "task4_mixed", "task5_adversarial"]
    sources = [*tasks, *(f"random 0.{i}" for i in range(10, 22))]
    gains = {"planner": 0.3, "fuse, 128, nothing": 0.1, "fuse, 64, nothing": 0.05, "ep4": 0.24}
    scores = pd.DataFrame(
        [
            {"policy": policy, "kind": "adapter" if policy == "ep4" else "fixed", "source": source, "group": source,
             "score": gain * (1 + 0.01 * i), "calibrated_score": min(1, gain * 5), "valid": 9, "invalid": 1}
            for policy, gain in gains.items()
            for i, source in enumerate(sources)
        ]
    )  # fmt: skip
    decisions = pd.DataFrame(
        [
            {"policy": "ep4", "source": source, "group": source, "label": label, "retained": kept}
            for source in sources
            for label, kept in (("pays", True), ("pays", True), ("costs", False), ("costs", True))
        ]
    )
    found = summarise(scores, decisions)
    assert found["best_constant"] == "fuse, 128, nothing"
    mine = found["policies"]["ep4"]
    assert mine["of_planner"] == pytest.approx({"estimate": 0.8, "low": 0.8, "high": 0.8, "undefined": 0.0})
    assert mine["minus_best_constant"]["low"] > 0.13
    assert mine["valid"] == {"share": 0.9, "answers": 170}
    assert mine["retained"]["pays"]["share"]["estimate"] == 1
    assert mine["retained"]["costs"]["share"]["estimate"] == 0.5
    assert mine["retained"]["does not matter"] == {"decisions": 0, "graphs": 0, "share": None}
    assert "0.573" in table(found | {"hardware": "published"})


@pytest.mark.slow
def test_a_call_from_adapter_to_figure_and_again_from_what_is_left(tmp_path, capsys):
    from peft import get_peft_model

    base = save_base(tmp_path / "base", max_position_embeddings=4096)
    model = get_peft_model(tiny_model(max_position_embeddings=4096), lora_config(2))
    folder = tmp_path / "run" / "ep004"
    store_adapter(model, folder, Provenance(find_base(str(base)), "published", {}, {}, ["0" * 16]))
    arguments = ["--adapter", str(folder), "--base", str(base), "--graphs", "6", "--largest", "8",
                 "--out", str(tmp_path / "out"), "--dtype", "float32"]  # fmt: skip
    (folder / "graphs.txt").rename(folder / "elsewhere.txt")
    assert main([*arguments, "--quiet"]) == 2
    assert "expected the graphs that it was trained on, found" in capsys.readouterr().err
    (folder / "elsewhere.txt").rename(folder / "graphs.txt")
    assert main([*arguments, "--quiet"]) == 0
    first = pd.read_parquet(tmp_path / "out" / "results.parquet")
    assert set(first["policy"]) >= {"ep004", "base model", "planner", "greedy", "no fuse, 32, nothing"}
    assert (tmp_path / "out" / "evaluation.pdf").exists()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "results.partial").iterdir()}
    assert main(arguments) == 0
    assert "6 unseen graphs, published hardware" in capsys.readouterr().out
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "out" / "results.partial").iterdir()}
    pd.testing.assert_frame_equal(first, pd.read_parquet(tmp_path / "out" / "results.parquet"))


def test_rows_know_their_policy(graphs):
    games = play(
        graphs[:2], [ValueTable(graph) for graph in graphs[:2]], lambda envs: [Action(True, 128).to_text()] * len(envs)
    )
    scores, decisions = rows_of("p", "fixed", ["a", "b"], games)
    assert scores["source"].tolist() == ["a", "b"]
    assert np.isfinite(scores["score"]).all()
    assert set(decisions.columns) == {"policy", "kind", "source", "group", "position", "node", "label", "retained"}
