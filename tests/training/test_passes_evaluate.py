"""Evaluation of agents that order passes: rows against scripted agents, known means, and a whole call."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from counterfactuals.passes_moments import instrcount_text, search_text
from env.passes import load_program, load_programs, shared_evaluator
from env.passes.action import answer_text
from env.passes.search import hill_climb
from env.training import passes_evaluate
from env.training.passes_evaluate import NearestNeighbour, agent_rows, chosen, main, search_rows, searches
from env.training.passes_report import plot, summarise, table
from env.training.passes_samples import read_samples
from env.training.passes_store import with_adapter, write_passes_adapter
from env.training.store import TrainingError
from interp.base_models import find_base, load_base
from tests.interp.tiny import save_base
from tests.passes.worlds import GOOD, IDLE, NAME, TINY, small
from tests.training.test_passes_grpo import right_turn
from tests.training.test_passes_samples import STORED


@pytest.fixture(scope="module")
def known():
    return read_samples(STORED)


def played(monkeypatch, turns, programs):
    """The rows of an agent that says these turns, each a text or a function of what it has read."""
    monkeypatch.setattr(passes_evaluate, "SEARCH", TINY)

    def answer(model, tokenizer, chats, max_new_tokens):
        said = [turns[sum(message["role"] == "assistant" for message in chat)] for chat in chats]
        texts = ["".join(message["content"] for message in chat) for chat in chats]
        return [turn(text) if callable(turn) else turn for turn, text in zip(said, texts, strict=True)]

    monkeypatch.setattr(passes_evaluate, "answer", answer)
    return agent_rows(SimpleNamespace(causal_lm=None, tokenizer=None), programs)


MEASURE = instrcount_text(NAME, GOOD)


def test_an_agent_that_keeps_to_the_protocol(monkeypatch):
    turns = [MEASURE, lambda text: right_turn(text).replace(json.dumps(["--sroa", "--instcombine", "--simplifycfg"]),
                                                            json.dumps(GOOD)), right_turn]  # fmt: skip
    better, equal = played(monkeypatch, turns, [small(4), small()])
    assert (better["valid_path"], better["turns"], better["decision"], better["first_gain"]) == (
        True,
        2,
        "answer",
        0.75,
    )
    assert (better["over_oz"], better["instructions"], better["over_orig"]) == (0.75, 1, 6 / 7)
    assert (equal["valid_path"], equal["turns"], equal["decision"], equal["first_gain"]) == (True, 3, "search", 0.0)
    assert (equal["over_oz"], equal["answered"]) == (0.0, True)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([MEASURE, search_text(NAME), answer_text("", GOOD)], ("search", 0.75, True, 0.75)),
        ([MEASURE, answer_text("", IDLE)], ("answer", 0.75, True, -0.75)),
        ([MEASURE, MEASURE, answer_text("", GOOD)], ("other", 0.75, True, 0.75)),
        ([MEASURE, "what?", "what?"], ("other", 0.75, False, 0.0)),
        ([answer_text("", GOOD)], (None, None, True, 0.75)),
        ([instrcount_text(NAME, ["--barrier"]), answer_text("", GOOD)], (None, None, True, 0.75)),
        ([search_text(NAME), answer_text("", GOOD)], (None, None, True, 0.75)),
        ([MEASURE, answer_text("", ["--barrier"])], ("answer", 0.75, False, 0.0)),
    ],
)
def test_an_agent_that_does_not(turns, expected, monkeypatch):
    (row,) = played(monkeypatch, turns, [small(4)])
    assert not row["valid_path"]
    assert (row["decision"], row["first_gain"], row["answered"], row["over_oz"]) == expected


def test_searches_find_what_there_is_and_draw_by_name(known):
    for name, search in searches(known).items():
        if "100 x 10" in name:  # the same search as the agent's tool, ten times as large
            continue
        first, again = (search_rows(search, small(4), seed=0)[0] | {"seconds": 0} for _ in range(2))
        assert first == again
        assert name.startswith("nearest") or (first["instructions"], first["over_oz"]) == (1, 0.75), name


def test_hill_climbing_ends_no_higher_than_it_begins_and_says_what_its_sequence_leaves():
    program = load_program("musl/math/roundf")
    found = [
        hill_climb(program, shared_evaluator(), np.random.default_rng(seed), evaluations)
        for seed in range(3)
        for evaluations in (1, 10, 40)
    ]
    for start, middle, end in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert start.instructions >= middle.instructions >= end.instructions
        assert (start.measured, end.measured) == (1, 40)
        assert shared_evaluator().evaluate(program.content, end.sequence).instructions == end.instructions
    assert min(one.instructions for one in found[2::3]) < max(one.instructions for one in found[::3])


def test_a_search_without_a_result_is_worth_what_oz_is():
    def nothing(program, evaluator, rng):
        raise ValueError("nothing")

    (row,) = search_rows(nothing, small(4), seed=0)
    assert (row["instructions"], row["over_oz"], row["note"]) == (4, 0.0, "nothing")


def test_the_nearest_neighbour_of_a_known_program_is_itself(known):
    neighbour = NearestNeighbour(known)
    for sample in known[:20]:
        assert neighbour.nearest(load_program(sample.program)) == sample.program
    first = next(sample for sample in known if sample.gain > 0)
    program = load_program(first.program)
    (row,) = search_rows(neighbour, program, seed=0)
    assert row["over_oz"] == pytest.approx(first.gain, abs=1e-6)


def test_programs_are_unseen_and_fewer_are_a_part_of_more():
    assert chosen("test", 3, set(), 0) == chosen("test", 5, set(), 0)[:3]
    assert len(chosen("test", None, set(), 0)) == len(load_programs("test"))
    name = load_programs("test")[0].name
    with pytest.raises(TrainingError, match=f"--split test: expected programs that no adapter .* found {name}"):
        chosen("test", 1, {name}, 0)


def frame():
    rows = []
    for i in range(12):
        gain = 0.1 if i < 9 else -0.1
        about = {"program": f"p{i}", "seconds": 2.0, "over_orig": 0.5, "instructions": 1}
        rows += [
            about | {"policy": "-Oz", "kind": "reference", "over_oz": 0.0, "seconds": 0.0},
            about
            | {"policy": "sft", "kind": "adapter", "over_oz": 0.02 * (i % 2), "valid_path": i % 4 > 0, "answered": True}
            | {"first_gain": gain if i else None, "decision": ("answer" if i < 6 else "search") if i else None},
        ]
    return pd.DataFrame(rows)


def test_summary_in_dumb_cases():
    summary = summarise(frame()) | {"split": "test"}
    assert summary["programs"] == 12
    zero, agent = summary["policies"]["-Oz"], summary["policies"]["sft"]
    assert (zero["over_oz"]["estimate"], zero["over_oz"]["low"], zero["over_oz"]["high"]) == (0, 0, 0)
    assert agent["over_oz"]["estimate"] == pytest.approx(0.01)
    assert agent["over_oz"]["low"] < 0.01 < agent["over_oz"]["high"]
    assert agent["beats_oz"]["estimate"] == 0.5
    assert agent["valid"]["estimate"] == 0.75
    decisions = agent["decisions"]
    assert (decisions["beats -Oz"]["programs"], decisions["does not"]["programs"]) == (8, 3)
    assert decisions["beats -Oz"]["answer"]["estimate"] == pytest.approx(5 / 8)
    assert decisions["does not"]["search"] == {"estimate": 1.0, "low": None, "high": None, "undefined": 0.0}
    assert decisions["nothing measured"] == 1
    assert "decisions" not in zero
    text = table(summary)
    assert "12 programs of the split test" in text
    assert "1.00 [" in text
    assert plot(summary).axes


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    base = find_base(str(save_base(folder / "base", max_position_embeddings=8192)))
    model, _ = load_base(base, dtype="bfloat16")
    write_passes_adapter(with_adapter(model, 2, 0), folder / "sft", base, {"runs": []}, ["musl/math/cosl"])
    return folder


@pytest.mark.slow
def test_a_call_goes_on_where_it_was_interrupted(adapter, known, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(passes_evaluate, "SEARCH", TINY)
    monkeypatch.setattr(passes_evaluate, "MAX_NEW_TOKENS", 4)
    few = {name: search for name, search in searches(known).items() if name.startswith(("best", "nearest"))}
    monkeypatch.setattr(passes_evaluate, "searches", lambda known: few)
    arguments = ["--adapter", str(adapter / "sft"), "--base", str(adapter / "base"), "--samples", str(STORED)]
    arguments += ["--programs", "2", "--quiet", "--out"]
    assert main([*arguments, str(tmp_path / "whole")]) == 0

    def interrupted(subject, programs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(passes_evaluate, "agent_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, str(tmp_path / "broken")])
    with monkeypatch.context() as patched:  # what has been measured is not measured again
        patched.setattr(passes_evaluate, "search_rows", interrupted)
        assert main([*arguments, str(tmp_path / "broken")]) == 0
    frames = [pd.read_parquet(tmp_path / name / "results.parquet").drop(columns="seconds") for name in
              ("whole", "broken")]  # fmt: skip
    pd.testing.assert_frame_equal(*frames)
    assert frames[0]["policy"].unique().tolist() == ["-Oz", *few, "base model", "sft"]
    assert frames[0].groupby("policy").size().eq(2).all()
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["policies"]["base model"]["valid"]["estimate"] == 0.0
    assert (tmp_path / "whole" / "evaluation.png").exists()

    assert main(["--adapter", str(tmp_path), "--out", str(tmp_path / "c")]) == 2
    assert "programs.txt: expected the programs it was trained on" in capsys.readouterr().err
