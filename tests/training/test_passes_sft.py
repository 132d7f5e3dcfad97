"""Fine-tuning on dialogues, on a tiny model: what is learnt and stored, and that an interruption changes nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from env.passes import load_program
from env.training import passes_sft
from env.training.passes_samples import read_samples
from env.training.passes_sft import encode, main
from env.training.passes_store import earlier_training, trained_programs
from env.training.samples import IGNORED
from env.training.store import TrainingError
from interp.subject import Subject
from tests.interp.tiny import save_base, tiny_tokenizer
from tests.training.test_passes_samples import STORED

STEPS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tiny") / "base", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """The file of the eight shortest episodes."""
    samples = sorted(read_samples(STORED), key=lambda sample: len("".join(sample.turns())))[: 2 * STEPS]
    out = tmp_path_factory.mktemp("samples") / "few.jsonl"
    out.write_text("".join(sample.to_json() + "\n" for sample in samples))
    return out


def run(base, samples, out, *more):
    arguments = ["--base", str(base), "--samples", str(samples), "--batch", "2", "--rank", "2", "--save-every", "2"]
    return main([*arguments, "--out", str(out), "--quiet", *more])


@pytest.mark.slow
def test_an_interrupted_run_ends_as_one_that_was_not(base, few, tmp_path, monkeypatch):
    assert run(base, few, tmp_path / "whole") == 0

    class Interrupting(passes_sft.JsonLog):
        def on_log(self, args, state, control, **kw):
            super().on_log(args, state, control, **kw)
            if state.global_step == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(passes_sft, "JsonLog", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(base, few, tmp_path / "broken")
    assert run(base, few, tmp_path / "broken", "--resume") == 0

    whole, resumed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "broken"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    logs = [
        [json.loads(line) for line in (tmp_path / name / "training.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    ]
    assert [[line["step"] for line in log] for log in logs] == [list(range(1, STEPS + 1))] * 2
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]

    stored = tmp_path / "whole"
    assert {file.name for file in stored.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "workbench.json", "training.jsonl", "programs.txt")
    }
    assert trained_programs(stored) == {sample.program for sample in read_samples(few)}
    (entry,) = earlier_training(stored)["runs"]
    assert (entry["stage"], entry["samples"], entry["rank"]) == ("sft", 2 * STEPS, 2)
    subject = Subject.load(stored)
    assert json.loads((stored / "workbench.json").read_text())["base"] == subject.base_identity
    ids = torch.arange(3, 30)[None]
    with subject.base():
        before = subject.model(ids).logits
    assert not torch.allclose(before, subject.model(ids).logits)


def test_learnt_are_the_agents_turns_and_nothing_else():
    tokenizer = tiny_tokenizer()
    samples = read_samples(STORED)
    whole = next(sample for sample in samples if sample.gain <= 0 and not sample.learnt_from)
    second = next(sample for sample in samples if sample.learnt_from)
    for sample in (whole, second):
        row = encode(sample, tokenizer)
        runs, before = [], IGNORED
        for label in row["labels"]:
            if label != IGNORED:
                runs = [*runs, []] if before == IGNORED else runs
                runs[-1].append(label)
            before = label
        expected = [turn + "<|im_end|>" for turn in sample.turns()[sample.learnt_from :]]
        assert [tokenizer.decode(part) for part in runs] == expected
        assert all(label in (IGNORED, i) for i, label in zip(row["input_ids"], row["labels"], strict=True))
        given = tokenizer.decode(row["input_ids"][: row["labels"].index(runs[0][0])])
        assert f"exact filepath: {sample.program}\n" in given
        assert str(load_program(sample.program).instructions) in given


def test_a_chat_template_that_rewrites_a_chat_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for", "{{ messages | length }}{% for", 1)
    with pytest.raises(TrainingError, match="chat template: expected one that continues a chat"):
        encode(read_samples(STORED)[0], tokenizer)


def test_a_run_says_why_it_does_not_start(base, few, tmp_path, capsys):
    assert run(base, few, tmp_path / "a", "--resume") == 2
    assert "expected an unfinished run, found none" in capsys.readouterr().err
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    assert run(base, few, tmp_path / "b") == 2
    assert "expected no unfinished run, found one; --resume goes on with it" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert run(base, tmp_path / "bad.jsonl", tmp_path / "c") == 2
    assert "bad.jsonl:1: expected a sample" in capsys.readouterr().err
    assert run("nowhere", few, tmp_path / "d") == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (None, "expected the record of a training run"),
        ("{", "expected the record of a training run"),
        ('{"environment": "scheduler", "training": {}}', "environment: expected 'passes', found 'scheduler'"),
    ],
)
def test_a_record_of_something_else_is_refused(record, problem, tmp_path):
    if record:
        (tmp_path / "workbench.json").write_text(record)
    with pytest.raises(TrainingError, match=problem):
        earlier_training(tmp_path)
    with pytest.raises(TrainingError, match=r"programs\.txt: expected the programs it was trained on"):
        trained_programs(tmp_path)
