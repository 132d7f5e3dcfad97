"""Episodes that the learner of the pass-ordering dialogue is shown: the environment's own, and what a file may hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from env.passes import PassesEnv, load_program, load_programs
from env.passes.action import parse_turn
from env.passes.catalogue import OZ
from env.training import passes_samples
from env.training.passes_portfolio import read_portfolio
from env.training.passes_samples import SEARCH, Sample, main, played, read_samples, samples_of
from tests.passes.worlds import GOOD, GRAPH, IDLE, TINY, small

STORED = Path(__file__).parents[2] / "ckpt" / "passes" / "samples.jsonl"


def world(oz_instructions=None):
    return PassesEnv(small(oz_instructions), graph=GRAPH, genetics=TINY)


@pytest.fixture(scope="module")
def stored():
    return read_samples(STORED)


@pytest.mark.parametrize(
    ("oz", "first", "answer"), [(4, GOOD, GOOD), (4, IDLE, None), (None, IDLE, [OZ])], ids=["A", "B", "B in vain"]
)
def test_an_episode_is_on_a_valid_path(oz, first, answer):
    env = world(oz)
    sample = played(env, first)
    assert env.episode.terminated
    last = parse_turn(sample.turns()[-1]).answer
    assert last == tuple(answer or sample.found)
    assert (len(sample.turns()), len(sample.responses())) == ((2, 1) if sample.gain > 0 else (3, 2))


def test_a_sequence_that_no_tool_takes_makes_no_sample():
    with pytest.raises(ValueError, match=r"hand/small: expected an episode on a valid path"):
        played(world(), ["--barrier"])


def test_the_best_of_the_portfolio_is_tried_first_and_a_bad_one_is_shown(monkeypatch):
    monkeypatch.setattr(passes_samples, "SEARCH", TINY)
    best, bad = samples_of(small(4), [tuple(IDLE), tuple(GOOD)])
    assert (best.sequence, best.gain, best.learnt_from) == (tuple(GOOD), 0.75, 0)
    assert (bad.sequence, bad.gain, bad.learnt_from) == (tuple(IDLE), -0.75, 1)
    assert parse_turn(bad.turns()[-1]).tool == "find_best_pass_sequence"


def test_a_program_that_cannot_be_improved_has_one_sample(monkeypatch):
    monkeypatch.setattr(passes_samples, "SEARCH", TINY)
    (sample,) = samples_of(small(), [tuple(IDLE), tuple(GOOD)])
    assert (sample.sequence, sample.gain, sample.percentage) == (tuple(GOOD), 0.0, 0.0)
    assert parse_turn(sample.turns()[-1]).answer == (OZ,)


def test_stored_samples_that_begin_badly_are_of_programs_that_can_be_improved(stored):
    second = [sample for sample in stored if sample.learnt_from]
    first = {sample.program: sample for sample in stored if not sample.learnt_from}
    assert second
    assert all(sample.gain <= 0 < first[sample.program].gain for sample in second)


def test_the_stored_samples_are_of_training_programs_and_of_both_signs(stored):
    assert {sample.program for sample in stored} == {program.name for program in load_programs("train")}
    portfolio = read_portfolio(STORED.with_name("portfolio.json"))
    assert {sample.sequence for sample in stored} <= set(portfolio)
    assert 0.2 < sum(sample.gain > 0 for sample in stored) / len(stored) < 0.8


@pytest.mark.parametrize("kind", ["A", "B", "B in vain", "bad start"])
def test_stored_responses_are_the_environments_own(stored, kind):
    def kind_of(sample):
        if sample.learnt_from:
            return "bad start"
        return "A" if sample.gain > 0 else "B" if sample.percentage > 0 else "B in vain"

    sample = min(
        (sample for sample in stored if kind_of(sample) == kind),
        key=lambda sample: (load_program(sample.program).instructions, sample.sequence),
    )
    env = PassesEnv(load_program(sample.program), genetics=SEARCH)
    chat = sample.chat()
    observation, _ = env.reset()
    for said, heard in zip(chat[2::2], [*chat[3::2], None], strict=True):
        assert chat[chat.index({"role": "assistant", "content": said["content"]}) - 1]["content"] == observation
        observation, *_, info = env.step(said["content"])
        assert heard is None or heard["content"] == observation
    assert info.get("valid_path") == (None if kind == "bad start" else True)


def test_samples_survive_their_file(stored, tmp_path):
    out = tmp_path / "samples.jsonl"
    out.write_text("".join(sample.to_json() + "\n" for sample in stored[:5]))
    assert read_samples(out) == stored[:5]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"program":"a","sequence":[9999],"found":[]}', '{"program"'])
def test_a_line_that_is_no_sample_is_named(stored, line, tmp_path):
    out = tmp_path / "samples.jsonl"
    out.write_text(stored[0].to_json() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"samples\.jsonl:2: "):
        read_samples(out)
    out.write_text("")
    with pytest.raises(ValueError, match=r"samples\.jsonl: expected at least one sample, found none"):
        read_samples(out)


def test_the_command_goes_on_where_its_file_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(passes_samples, "SEARCH", TINY)
    out, portfolio = tmp_path / "samples.jsonl", tmp_path / "portfolio.json"
    portfolio.write_text(json.dumps({"sequences": [GOOD, IDLE]}))
    arguments = ["--out", str(out), "--portfolio", str(portfolio), "--split", "test", "--quiet"]
    assert main([*arguments, "--limit", "1"]) == 0
    before = out.read_text()
    assert main([*arguments, "--limit", "2"]) == 0
    assert out.read_text().startswith(before)
    assert {sample.program for sample in read_samples(out)} == {p.name for p in load_programs("test")[:2]}
    out.write_text("nonsense\n")
    assert main([*arguments, "--limit", "1"]) == 2
    assert "samples.jsonl:1: " in capsys.readouterr().err


def test_what_the_agent_thinks_does_not_give_the_decision_away(stored):
    """Up to the tag that is the decision, the turn after the response is the same for either sign."""
    sample = next(sample for sample in stored if sample.gain > 0)
    either = [sample.turns()[1], replace(sample, gain=-sample.gain, learnt_from=1).turns()[1]]
    thoughts, decisions = zip(*(turn.split("</think>\n") for turn in either), strict=True)
    assert thoughts[0] == thoughts[1]
    assert [decision.split(">")[0] for decision in decisions] == ["<answer", "<tool_call"]
    assert json.loads(sample.to_json())["program"] == sample.program
    assert Sample.from_json(sample.to_json()) == sample
