"""Train a LoRA adapter to answer as the heuristic does.

    python -m env.training.imitation --out ckpt/imitation
    python -m env.training.imitation --out ckpt/imitation --resume
    python -m env.training.imitation --init ckpt/imitation --steps 80 --seed 1 --out ckpt/longer

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from counterfactuals.scheduler import random_graph
from env.scheduler import Graph
from env.training.audit import audit
from env.training.curriculum import SAMPLE, SEED_OFFSET
from env.training.held_out import measure_held_out
from env.training.samples import BATCH_UNIT, IGNORED, Sample, batches, encode
from env.training.store import Provenance, TrainingError, last_whole_checkpoint, lora_config, write_adapter
from interp.base_models import BUILT_IN, BaseModelError, find_base, load_base

WARM_UP = 10


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
    """Trainer whose loss unembeds the learnt tokens only, and that logs how many samples of a step are wholly right.

    A step goes through the model in two halves, the pairs and the ordinary states, so that neither is padded to the
    length of the other, and each counts for half of the loss.
    """

    right: list[float]
    loss_is_scaled_for_ga = False

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


@dataclass(frozen=True)
class EarlierRuns:
    """What an adapter to start from was trained on: the runs' options, the lines of their log, and the graphs."""

    runs: list[dict[str, Any]]
    log: list[str]
    graphs: set[str]


def _earlier_runs(adapter: Path | None) -> EarlierRuns:
    if adapter is None:
        return EarlierRuns([], [], set())
    try:
        record = json.loads((adapter / "workbench.json").read_text())
        log, graphs = ((adapter / name).read_text().splitlines() for name in ("training.jsonl", "graphs.txt"))
        return EarlierRuns(record["training"]["runs"], log, set(graphs))
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"--init: expected an adapter folder that this command wrote, found {error}") from None


class JsonLog(TrainerCallback):
    """Appends each logged step to a JSONL file, after the lines of earlier runs; a resumed run first cuts off what came
    after its checkpoint."""

    def __init__(self, path: Path, batch: int, earlier: EarlierRuns) -> None:
        self.path, self.batch, self.earlier = path, batch, earlier

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        lines = self.path.read_text().splitlines()[len(self.earlier.log) :] if self.path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step]
        self.path.write_text("".join(line + "\n" for line in [*self.earlier.log, *kept]))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            row = {
                "run": len(self.earlier.runs),
                "step": state.global_step,
                "samples": state.global_step * self.batch,
                **logs,
            }
            row.pop("epoch", None)
            with self.path.open("a") as log:
                log.write(json.dumps(row) + "\n")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train, store and measure an adapter as the command's options say; returns what was measured.

    Raises:
        TrainingError: if there is an unfinished run and none is to be resumed, or the other way round.
        BaseModelError: if the base model cannot be had.
    """
    work = options.out / "checkpoints"
    earlier = _earlier_runs(options.init)
    if work.exists() != options.resume:
        found = "one; --resume goes on with it" if work.exists() else "none"
        raise TrainingError(f"{work}: expected {'an' if options.resume else 'no'} unfinished run, found {found}")
    base = find_base(options.base)
    model, tokenizer = load_base(base, dtype="bfloat16")
    adapted = _adapted(model, options)
    samples = [sample for batch in batches(options.steps, options.batch, options.seed) for sample in batch]
    work.mkdir(parents=True, exist_ok=True)
    trainer = ImitationTrainer(
        model=adapted,
        args=_arguments(options, work),
        train_dataset=Encoded(samples, tokenizer),
        data_collator=collate,
        callbacks=[JsonLog(options.out / "training.jsonl", options.batch, earlier)],
    )
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(work))
    seen = {sample.graph for sample in samples} | earlier.graphs
    training = {"teacher": "heuristic", "runs": [*earlier.runs, _run(options)]}
    write_adapter(adapted, options.out, Provenance(base, "published", audit(_graphs(options.seed)), training, seen))
    measured = measure_held_out(options.out, base=options.base, seed=options.seed, seen=seen, quiet=options.quiet)
    (options.out / "held_out.json").write_text(json.dumps(measured, indent=1) + "\n")
    shutil.rmtree(work)
    return measured


def _adapted(model: Any, options: argparse.Namespace) -> PeftModel:
    """The base model with a fresh adapter, or with the one to start from."""
    if options.init:
        return PeftModel.from_pretrained(model, options.init, is_trainable=True)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        return get_peft_model(model, lora_config(options.rank))


def _arguments(options: argparse.Namespace, work: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(work),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // 2,
        gradient_accumulation_steps=2,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
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


def _graphs(seed: int) -> list[Graph]:
    """Graphs of the kind that the samples come from."""
    return [random_graph(np.random.default_rng([seed + SEED_OFFSET, i])) for i in range(SAMPLE)]


def _run(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("steps", "batch", "learning_rate", "rank", "seed")}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.imitation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="adapter folder to write")
    parser.add_argument("--base", default=BUILT_IN, help="base model: folder, built-in name or hub id (%(default)s)")
    parser.add_argument("--init", type=Path, metavar="DIR", help="adapter to start from (default: a fresh one)")
    parser.add_argument("--steps", type=int, default=220, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=8, help=f"samples a step, a multiple of {BATCH_UNIT} (%(default)s)"
    )
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="peak, after warming up (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter; alpha is twice as much (%(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saved states (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names samples and initial weights (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no result on stdout")
    options = parser.parse_args(argv)
    if options.batch < 1 or options.batch % BATCH_UNIT:
        parser.error(f"--batch: expected a multiple of {BATCH_UNIT}, found {options.batch}")
    try:
        measured = train(options)
    except (TrainingError, BaseModelError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
