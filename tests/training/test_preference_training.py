"""The training program on a tiny model: the loss is TRL's, and an interruption changes nothing."""

import json

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer

from env.scheduler.action import Action
from env.training import __main__ as program
from env.training.__main__ import groups_of, main
from env.training.actions import ActionTokens
from env.training.preference_trainer import PreferenceTrainer
from env.training.rollouts import State
from env.training.store import lora_config
from interp.subject import Subject
from tests.interp.tiny import save_base, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tiny") / "base", max_position_embeddings=4096)


def policy():
    """A fresh adapter that has moved away from its reference, the base model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(max_position_embeddings=4096), lora_config(2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def trainer_of(kind, model, rows, folder):
    arguments = DPOConfig(
        output_dir=str(folder), loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.1], bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", per_device_train_batch_size=1, max_length=None, beta=0.3,
    )  # fmt: skip
    return kind(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer())


def test_the_loss_and_its_gradient_are_those_of_trl(tmp_path):
    actions = ActionTokens(tiny_tokenizer())
    prompt = actions.tokenizer('<|im_start|>user\n{"current_node":3}<|im_end|>\n<|im_start|>assistant\n')["input_ids"]
    winner, loser = actions.tokens(Action(True, 128, (3,))), actions.tokens(Action(False, 32))
    row = {"prompt_ids": prompt, "chosen_ids": winner, "rejected_ids": loser}

    class Prepared(DPOTrainer):
        def _prepare_dataset(self, dataset, *_, **__):
            return dataset

    def gradients(trainer, inputs):
        # TRL copies an adapter that it is handed as the reference; here it is the model with the adapter off.
        trainer.model.delete_adapter("ref")
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.item(), [p.grad for p in trainer.model.parameters() if p.grad is not None]

    trl = trainer_of(Prepared, policy(), [row], tmp_path)
    ours = trainer_of(PreferenceTrainer, policy(), [row], tmp_path)
    state = State(tuple(prompt), (tuple(loser), tuple(winner)), ((1, 0, 1.0),), hint=1)
    expected, expected_gradients = gradients(trl, trl.data_collator([row]))
    found, found_gradients = gradients(ours, {"states": [state]})
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(found_gradients) == len(expected_gradients) > 0
    for a, b in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)

    # A pair counts with its weight, and a hint that did not win is not imitated.
    half = State(state.prompt, state.candidates, ((1, 0, 0.5),), hint=None)
    both = ours.compute_loss(ours.model, {"states": [half, state]}).item()
    alone = ours.compute_loss(ours.model, {"states": [half]}).item()
    assert both == pytest.approx((alone + found) / 2, rel=1e-5)
    assert 0 < alone < found / 2
    # Without a pair, the hint's likelihood is all there is.
    hint_alone = ours.compute_loss(ours.model, {"states": [State(state.prompt, state.candidates, (), hint=1)]}).item()
    assert hint_alone == pytest.approx(found - 2 * alone, rel=1e-4)


def test_groups_end_where_an_adapter_is_saved():
    groups = groups_of(110, 8, 50)
    assert [len(group) for group in groups] == [8] * 6 + [2] + [8] * 6 + [2] + [8, 2]
    assert [episode for group in groups for episode in group] == list(range(110))


def run(base, out, *more):
    arguments = ["--base", str(base), "--episodes", "8", "--group", "2", "--save-every", "4", "--states", "3"]
    return main([*arguments, "--rank", "2", "--largest", "8", "--teacher", "planner", "--lookahead", "full",
                 "--hints", "1", "1", "--learning-rate", "1e-2", "--out", str(out), "--quiet", *more])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fresh", "init"])
def test_an_interrupted_run_ends_as_one_that_was_not(base, tmp_path, monkeypatch, start):
    monkeypatch.setattr(program, "audit", lambda graphs: {"graphs": len(graphs)})
    more = []
    if start == "init":
        assert run(base, tmp_path / "first", "--episodes", "4") == 0
        more = ["--init", str(tmp_path / "first" / "ep004")]
    assert run(base, tmp_path / "whole", *more) == 0

    class Interrupting(program.Keeper):
        def on_step_end(self, args, state, control, **kw):
            super().on_step_end(args, state, control, **kw)
            if state.global_step == 3:  # after the log, before the checkpoint
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(program, "Keeper", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            run(base, tmp_path / "broken", *more)
    assert main(["--out", str(tmp_path / "broken"), "--resume", "--quiet"]) == 0

    for episode in ("ep004", "ep008"):
        whole, resumed = (load_file(tmp_path / n / episode / "adapter_model.safetensors") for n in ("whole", "broken"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)
        assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    logs = [
        [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in text.splitlines()]
        for text in ((tmp_path / name / "training.jsonl").read_text() for name in ("whole", "broken"))
    ]
    assert logs[0] == logs[1]
    assert [line["episode"] for line in logs[0]] == list(range(8))
    assert not (tmp_path / "broken" / "checkpoints").exists()

    subject = Subject.load(tmp_path / "whole" / "ep008")
    ids = torch.arange(3, 30)[None]
    with subject.base():
        off = subject.model(ids).logits
    assert not torch.allclose(off, subject.model(ids).logits)
    record = json.loads((tmp_path / "whole" / "ep008" / "workbench.json").read_text())
    assert record["training"]["episodes_done"] == 8
    assert (record["training"]["init"] is None) == (start == "fresh")


def test_a_run_is_not_started_twice_and_not_resumed_without_one(base, tmp_path, capsys):
    assert run(base, tmp_path, "--resume") == 2
    assert "expected an unfinished run, found none" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert run(base, tmp_path) == 2
    assert "expected no unfinished run, found one; --resume goes on with it" in capsys.readouterr().err


def test_an_init_that_is_no_adapter_is_refused_before_anything_is_made(base, tmp_path, capsys):
    assert run(base, tmp_path / "out", "--init", str(tmp_path / "nothing")) == 2
    assert "--init: expected an adapter folder, found" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
