"""Imitation on a tiny model: what is learnt, what is stored, and that an interruption changes nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from env.training import imitation
from env.training.imitation import main
from env.training.samples import BATCH_UNIT, IGNORED, batches, encode
from interp.subject import Subject
from tests.interp.tiny import save_base, tiny_tokenizer

STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tiny") / "base", max_position_embeddings=4096)


@pytest.fixture
def quick(monkeypatch):
    """A held-out measurement of a few pairs."""
    measure = imitation.measure_held_out
    monkeypatch.setattr(imitation, "measure_held_out", lambda *args, **kw: measure(*args, **kw, pairs=3, states=3))


def run(base, out, *more):
    arguments = ["--base", str(base), "--steps", str(STEPS), "--batch", "4", "--rank", "2", "--save-every", "2"]
    return main([*arguments, "--out", str(out), "--quiet", *more])


@pytest.mark.slow
def test_an_interrupted_run_ends_as_one_that_was_not(base, quick, tmp_path, monkeypatch):
    assert run(base, tmp_path / "whole") == 0

    class Interrupting(imitation.JsonLog):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 5:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(imitation, "JsonLog", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(base, tmp_path / "broken")
    torn = tmp_path / "broken" / "checkpoints" / "checkpoint-5"
    torn.mkdir()
    (torn / "adapter_config.json").write_text("{")
    assert run(base, tmp_path / "broken", "--resume") == 0

    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    logs = [(tmp_path / name / "training.jsonl").read_text() for name in ("whole", "broken")]
    assert logs[0] == logs[1]
    assert [json.loads(line)["step"] for line in logs[0].splitlines()] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_what_is_stored_rebuilds_the_subject(base, quick, tmp_path):
    assert run(base, tmp_path / "adapter") == 0
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {
        *(
            "adapter_config.json",
            "adapter_model.safetensors",
            "workbench.json",
            "training.jsonl",
            "held_out.json",
            "graphs.txt",
        )
    }
    subject = Subject.load(tmp_path / "adapter")
    record = json.loads((tmp_path / "adapter" / "workbench.json").read_text())
    assert record["base"] == subject.base_identity
    measured = json.loads((tmp_path / "adapter" / "held_out.json").read_text())
    assert measured["pairs"] == measured["graphs"] == 3
    for model in ("base", "trained"):
        found = measured[model]
        assert found["moves_by"] == pytest.approx(found["logit_difference_a"] - found["logit_difference_b"])


@pytest.mark.slow
def test_a_run_that_starts_from_another_one_adds_to_it(base, quick, tmp_path):
    assert run(base, tmp_path / "first") == 0
    assert run(base, tmp_path / "second", "--init", str(tmp_path / "first"), "--seed", "1") == 0
    first, second = ((tmp_path / name / "training.jsonl").read_text() for name in ("first", "second"))
    assert second.startswith(first)
    assert [json.loads(line)["run"] for line in second.splitlines()] == [0] * STEPS + [1] * STEPS
    record = json.loads((tmp_path / "second" / "workbench.json").read_text())
    assert [entry["seed"] for entry in record["training"]["runs"]] == [0, 1]
    graphs = [set((tmp_path / name / "graphs.txt").read_text().split()) for name in ("first", "second")]
    assert graphs[0] < graphs[1]
    assert {s.graph for batch in batches(STEPS, 4, seed=1) for s in batch} <= graphs[1]
    assert run(base, tmp_path / "third", "--init", str(base)) == 2


def test_a_run_says_why_it_does_not_start(base, tmp_path, capsys):
    assert run(base, tmp_path / "a", "--resume") == 2
    assert "expected an unfinished run, found none" in capsys.readouterr().err
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    assert run(base, tmp_path / "b") == 2
    assert "expected no unfinished run, found one; --resume goes on with it" in capsys.readouterr().err
    assert main(["--base", "nowhere", "--out", str(tmp_path / "c")]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["--out", "x", "--batch", "6"])
    assert exit_.value.code == 2


def test_batches_hold_both_sides_of_pairs_and_as_many_states():
    made = batches(3, 2 * BATCH_UNIT, seed=1)
    for batch in made:
        pairs, states = batch[:4], batch[4:]
        assert [pair.learnt for pair in pairs[1::2]] == ["[]}"] * 2
        assert all(a.graph == b.graph and a.given == b.given for a, b in zip(pairs[::2], pairs[1::2], strict=True))
        assert all(state.given == "" and json.loads(state.learnt) for state in states)
    assert batches(2, 2 * BATCH_UNIT, seed=1) == made[:2]


def test_labels_are_the_tokens_of_what_is_learnt_and_the_end_of_the_turn():
    tokenizer = tiny_tokenizer()
    for sample in batches(1, 2 * BATCH_UNIT, seed=1)[0]:
        row = encode(sample, tokenizer)
        learnt = [i for i in row["labels"] if i != IGNORED]
        assert row["input_ids"][-len(learnt) :] == learnt
        assert tokenizer.decode(learnt).strip() == sample.learnt + "<|im_end|>"
        given = tokenizer.decode(row["input_ids"][: -len(learnt)])
        assert given.endswith("assistant\n" + sample.given.rstrip())
