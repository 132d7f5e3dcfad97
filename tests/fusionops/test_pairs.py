"""Pairs of the fusion environment are proved by it, and the analyses take them as they are."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from counterfactuals import CounterfactualPair, write_pairs
from counterfactuals.fusionops import KINDS, TILES, Moment, PairRefused, generate_pairs, main, prove, replay
from env.fusionops import Graph
from env.fusionops.observation import sections
from interp import patching
from interp.subject import Subject
from interp.tokens import encode_pairs
from tests.interp.tiny import CHAT_TEMPLATE, save_adapter, save_base, tiny_tokenizer

PAIRS = {kind: generate_pairs(24, 3, kind=kind) for kind in KINDS}
ALL = [pair for pairs in PAIRS.values() for pair in pairs]


def moment_of(pair):
    meta = pair.meta
    return Moment(Graph.from_json(meta["graph"]), tuple(meta["actions"]), meta["tensor"], meta["op"])


def in_order(pair, fast, slow):
    return (fast, slow) if pair.meta["a_is_fast"] else (slow, fast)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_proved_by_replay(kind):
    for pair in PAIRS[kind]:
        again = CounterfactualPair.from_json(pair.to_json())
        assert again == pair
        prove(again)


@pytest.mark.parametrize("kind", ["residency", "roomy"])
def test_one_word_is_the_only_difference(kind):
    for pair in PAIRS[kind]:
        assert (pair.value_a, pair.value_b) == in_order(pair, "fast", "slow")
        a, b = sections(pair.user_a), sections(pair.user_b)
        assert a.pop("Memory") != b.pop("Memory")
        assert a == b
        fast, slow = moment_of(pair).states()
        assert (fast.episode.fast, slow.episode.fast) == ({pair.meta["tensor"]}, frozenset())
        assert replace(fast.episode, fast=frozenset(), last=None) == replace(slow.episode, last=None)


def test_the_answer_runs_fastest_in_a_and_the_foil_in_b():
    for pair in PAIRS["residency"]:
        moment = moment_of(pair)
        states = in_order(pair, *moment.states())
        for state, called_for in zip(states, (pair.answer, pair.foil), strict=True):
            right = state.clone()
            *_, info = right.step(pair.action_prefix + called_for)
            assert info["error"] is None
            for tile in TILES:
                if moment.action(tile).to_text() == pair.action_prefix + called_for:
                    continue
                tried = state.clone()
                if tried.act(moment.action(tile))[-1]["error"] is None:  # the same state, later
                    assert tried.episode.latency > right.episode.latency
                    assert replace(tried.episode, latency=0, last=None) == replace(right.episode, latency=0, last=None)
        refused = pair.foil if pair.meta["a_is_fast"] else pair.answer
        assert moment.states()[0].step(pair.action_prefix + refused)[-1]["error"]["kind"] == "oom"


def test_with_room_enough_both_states_call_for_the_same():
    for pair in PAIRS["roomy"]:
        moment = moment_of(pair)
        called_for = pair.meta["called_for"]
        assert called_for["fast"] == called_for["slow"] == moment.called_for(moment.states()[0])
        assert all(state.act(moment.action(max(TILES)))[-1]["error"] is None for state in moment.states())


def test_an_identical_pair_is_identical():
    assert all(pair.messages_a == pair.messages_b for pair in PAIRS["identical"])


def test_both_roles_and_both_sides_occur():
    pairs = generate_pairs(40, 0)
    for fact in ("a_is_fast", "reads_tensor"):
        assert min(Counter(pair.meta[fact] for pair in pairs).values()) > 10
    assert len({tuple(pair.meta["tiles"].values()) for pair in pairs}) >= 3
    assert len({pair.group for pair in pairs}) == 40


def test_spans_name_what_they_say():
    for pair in ALL:
        shown = {name: pair.user_a[start:end] for name, (start, end) in pair.spans.items()}
        assert shown["key"] == str(pair.meta["tensor"]) != shown["other_key"]
        assert f"{shown['key']} {shown['value']}" in shown["memory"]
        assert f"{shown['other_key']} {shown['other_value']}" in shown["memory"]
        assert shown["op"].startswith(f"op {pair.meta['op']} ")
        assert shown["graph"] == sections(pair.user_a)["Graph"]


def test_a_seed_names_its_pairs_and_a_larger_count_begins_with_the_same():
    assert [p.to_json() for p in generate_pairs(3, 3)] == [p.to_json() for p in PAIRS["residency"][:3]]
    assert generate_pairs(1, 4)[0].to_json() != PAIRS["residency"][0].to_json()


def test_a_pair_that_was_tampered_with_is_refused():
    pair = PAIRS["residency"][0]
    larger = {**pair.meta["graph"], "hardware": moment_of(pair).roomy().graph.to_json()["hardware"]}
    for changes in ({"op": 0}, {"graph": larger}, {"tensor": 0}, {"actions": ["ops=[99]"]}, {"actions": []}):
        with pytest.raises(PairRefused):
            prove(replace(pair, meta={**pair.meta, **changes}))
    with pytest.raises(PairRefused, match="cannot be made again"):
        prove(replace(pair, meta={}))
    with pytest.raises(PairRefused, match="kind: expected one of residency"):
        prove(replace(pair, kind="dose"))
    with pytest.raises(PairRefused, match="another text"):
        prove(replace(pair, spans={"value": pair.spans["value"]}))


def test_differences_elsewhere_are_refused():
    moment = moment_of(PAIRS["residency"][0])
    slow_machine = replace(moment.graph.hardware, slow_memory_bandwidth=0.01)
    with pytest.raises(PairRefused, match="another latency or progress"):  # writing the tensor takes time
        replace(moment, graph=replace(moment.graph, hardware=slow_machine)).states()
    with pytest.raises(PairRefused, match="differ in Memory only, found Memory, Hints"):
        _where_hints_differ().states()
    with pytest.raises(PairRefused, match="refused"):
        replay(moment.graph, ["ops=[0] config=[0,0,0]"])


def _where_hints_differ():
    """Room for a hint's tile, or for the tensor and a smaller one."""
    for pair in ALL:
        moment = moment_of(pair)
        size = moment.graph.tensors[moment.tensor].size
        tight = replace(moment.graph.hardware, fast_memory_capacity=size + 3 * 64 * 128)
        tight_moment = replace(moment, graph=replace(moment.graph, hardware=tight))
        try:
            tight_moment.states()
        except PairRefused as error:
            if "found Memory, Hints" in str(error):
                return tight_moment
    raise AssertionError("expected a moment whose hints depend on fast memory")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="residency, roomy, identical"):
        generate_pairs(1, 0, kind="dose")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A tiny adapter whose tokenizer knows the words, so that prompts are short enough for a quick test."""
    folder = tmp_path_factory.mktemp("tiny")
    words = tiny_tokenizer().train_new_from_iterator([pair.user_a for pair in ALL], vocab_size=700)
    words.chat_template = CHAT_TEMPLATE
    base = save_base(folder / "base", max_position_embeddings=2048, vocab_size=len(words))
    words.save_pretrained(base)
    return save_adapter(folder / "adapter", base)


def test_patching_measures_these_pairs_like_any_others(adapter):
    subject = Subject.load(adapter)
    pairs, left_out = encode_pairs(subject.tokenizer, [PAIRS["residency"][0], PAIRS["identical"][0]])
    assert not left_out
    frame = patching.measure(subject, pairs)

    def cells(pair, direction, position, model="trained"):
        keys = {"pair": pair.id, "model": model, "direction": direction, "position": position}
        rows = frame[(frame[list(keys)] == pd.Series(keys)).all(axis=1) & (frame["metric"] == "logit_difference")]
        return rows.sort_values("layer")["value"].to_numpy()

    for pair in pairs:
        for model in ("base", "trained"):
            (a,), (b,) = (cells(pair, f"baseline_{side}", "none", model) for side in "ab")
            assert (a == b) == (pair.kind == "identical")
            assert cells(pair, "denoise", "decision", model)[-1] == pytest.approx(a, abs=1e-4)
            assert cells(pair, "denoise", "decision", model)[0] == pytest.approx(b, abs=1e-4)
            assert cells(pair, "denoise", "value", model)[-1] == pytest.approx(b, abs=1e-4)
    assert np.isfinite(frame.loc[frame["metric"] == "logit_difference", "value"]).all()


def test_the_patching_command_takes_a_file_of_them(adapter, tmp_path, capsys):
    file, out = tmp_path / "pairs.jsonl", tmp_path / "reports"
    assert main(["--count", "1", "--kind", "residency", "--kind", "roomy", "--out", str(file), "--quiet"]) == 0
    assert main(["--prove", str(file), "--quiet"]) == 0
    assert patching.main(["--adapter", str(adapter), "--pairs", str(file), "--out", str(out), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    summary = json.loads((out / "adapter" / "patching" / "summary.json").read_text())
    assert {kind: found["pairs"] for kind, found in summary["kinds"].items()} == {"residency": 1, "roomy": 1}
    assert summary["left_out"] == []


def test_the_command_says_what_it_wrote_and_what_is_wrong(tmp_path, capsys):
    file = tmp_path / "pairs.jsonl"
    assert main(["--count", "2", "--out", str(file)]) == 0
    assert "2 of each of residency; 2 graphs" in capsys.readouterr().out
    write_pairs([replace(PAIRS["residency"][0], meta={})], file)
    assert main(["--prove", str(file)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: pair fusionops-residency-3-0: cannot be made")
    assert main(["--prove", str(tmp_path / "none.jsonl")]) == 2
    for wrong in ([], ["--count", "0", "--out", str(file)]):
        with pytest.raises(SystemExit) as exit_:
            main(wrong)
        assert exit_.value.code == 2


def test_it_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "counterfactuals.fusionops", "--count", "1", "--quiet"]
    done = subprocess.run([*command, "--out", str(tmp_path / "p.jsonl")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
