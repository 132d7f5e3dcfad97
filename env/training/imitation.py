"""Train a LoRA adapter to answer as the heuristic does.

    python -m env.training.imitation --out ckpt/imitation
    python -m env.training.imitation --out ckpt/imitation --resume

The loss is the cross-entropy of the action's tokens. The base model's weights are bfloat16 while training, the
adapter's float32. Interrupted at any moment, `--resume` goes on from the last saved step with the same numbers. When
it is done, the adapter is measured on pairs and episodes from graphs that it was not trained on, and stored in
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from env.scheduler.prompts import SYSTEM_PROMPT
from env.training.held_out import measure_held_out
from env.training.samples import IGNORED, Sample, batches, encode
from interp.base_models import BUILT_IN, find_base, load_base

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Encoded(Dataset[dict[str, list[int]]]):
    """Samples as token ids; the labels are the action's tokens and the end of the turn."""

    def __init__(self, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> None:
        self.rows = [encode(sample, tokenizer) for sample in samples]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return self.rows[i]


def collate(rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Left-padded batch: `input_ids`, `labels`, `attention_mask`, `position_ids`, all (rows, longest)."""
    longest = max(len(row["input_ids"]) for row in rows)
    pad = [longest - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor([[0] * n + row["input_ids"] for n, row in zip(pad, rows, strict=True)]),
        "labels": torch.tensor([[IGNORED] * n + row["labels"] for n, row in zip(pad, rows, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in pad]),
        "position_ids": torch.tensor([[0] * n + list(range(longest - n)) for n in pad]),
    }


class ImitationTrainer(Trainer):
    """Trainer whose loss unembeds the learnt tokens only, and that logs how many samples of a step are wholly right."""

    right: list[float]
    loss_is_scaled_for_ga = False  # a step's loss is the mean of its two halves'

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **_: Any
    ) -> torch.Tensor:
        labels = inputs.pop("labels")
        longest = int((labels != IGNORED).sum(dim=1).max())
        logits = model(**inputs, logits_to_keep=longest + 1, use_cache=False).logits[:, :-1].float()
        targets = labels[:, -longest:]
        right = ((logits.argmax(-1) == targets) | (targets == IGNORED)).all(dim=1)
        self.right = [*getattr(self, "right", []), float(right.float().mean())][
            -self.args.gradient_accumulation_steps :
        ]
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            pairs, episodes = self.right
            logs |= {"pairs_right": pairs, "episodes_right": episodes}
        super().log(logs, start_time)


class JsonLog(TrainerCallback):
    """Appends each logged step to a JSONL file; a resumed run first cuts off what came after its checkpoint."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self.path.write_text("".join(line + "\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            row = {"step": state.global_step, "samples": state.global_step * self.batch, **logs}
            row.pop("epoch", None)
            with self.path.open("a") as log:
                log.write(json.dumps(row) + "\n")


def train(options: argparse.Namespace) -> None:
    """Run the command."""
    out, work = options.out, options.out / "checkpoints"
    if work.exists() and not options.resume:
        raise SystemExit(f"{work}: expected no unfinished run, found one; --resume goes on with it")
    if options.resume and not work.exists():
        raise SystemExit(f"{work}: expected an unfinished run to resume, found none")
    base = find_base(options.base)
    model, tokenizer = load_base(base, dtype="bfloat16")
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        adapted = get_peft_model(
            model,
            LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS, task_type="CAUSAL_LM"),
        )
    samples = [sample for batch in batches(options.steps, options.batch, options.seed) for sample in batch]
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // 2,
        gradient_accumulation_steps=2,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=10,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=2,
        seed=options.seed,
        data_seed=options.seed,
        report_to="none",
        disable_tqdm=options.quiet,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
    )
    out.mkdir(parents=True, exist_ok=True)
    trainer = ImitationTrainer(
        model=adapted,
        args=arguments,
        train_dataset=Encoded(samples, tokenizer),
        data_collator=collate,
        callbacks=[JsonLog(out / "training.jsonl", options.batch)],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    _store(adapted, out, base, options)
    seen = {sample.graph for sample in samples}
    evaluation = measure_held_out(out, seed=options.seed, seen=seen, quiet=options.quiet)
    (out / "held_out.json").write_text(json.dumps(evaluation, indent=1) + "\n")
    print(json.dumps(evaluation, indent=1))  # noqa: T201 - the command's result
    shutil.rmtree(work)


def _store(adapted: Any, out: Path, base: Any, options: argparse.Namespace) -> None:
    """The adapter in bfloat16, and beside it what rebuilds its prompts."""
    adapted.to(torch.bfloat16)
    adapted.peft_config["default"].base_model_name_or_path = base.name
    adapted.save_pretrained(out)
    record = {
        "environment": "scheduler",
        "rules": "documented",
        "system": SYSTEM_PROMPT,
        "base": base.identity(),
        "training": {
            "command": "env.training.imitation",
            "teacher": "heuristic",
            "steps": options.steps,
            "batch": options.batch,
            "learning_rate": options.learning_rate,
            "rank": options.rank,
            "seed": options.seed,
        },
    }
    (out / "workbench.json").write_text(json.dumps(record, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m env.training.imitation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="adapter folder to write")
    parser.add_argument("--base", default=BUILT_IN, help="base model: folder, built-in name or hub id (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="samples a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="peak, after 10 steps (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter; alpha is twice as much (%(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saved states (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names samples and initial weights (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    train(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main())
