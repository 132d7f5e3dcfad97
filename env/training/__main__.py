"""Train the agent by preferences among its own actions.

    python -m env.training --out ckpt --init ckpt/imitation --episodes 400
    python -m env.training --out ckpt/bandwidth-bound --init ckpt/imitation --hardware bandwidth_bound \\
        --teacher planner --lookahead full
    python -m env.training --out ckpt --resume

Each episode is one graph of the curriculum. The defaults are the published recipe, but for the sizes of random graphs,
which are capped so that a run ends in time (--largest). OUT gets an adapter folder every --save-every episodes (ep050,
ep100, …) and training.jsonl, one line an episode. The base model's weights are bfloat16 while training, the adapter's
float32. Interrupted at any moment, --resume goes on from the last optimizer step with the same numbers and options.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import TrainerCallback
from trl import DPOConfig

from env.scheduler import TASKS
from env.scheduler.hardware import HARDWARE
from env.training.actor import Actor
from env.training.audit import audit
from env.training.curriculum import Curriculum
from env.training.preference_trainer import PreferenceTrainer
from env.training.rollouts import IMITATED, Recipe, Rollouts
from env.training.scoring import LOOKAHEADS, TEACHERS
from env.training.store import (
    Provenance,
    TrainingError,
    last_whole_checkpoint,
    lora_config,
    store_adapter,
    trained_on,
)
from interp.base_models import BUILT_IN, BaseModelError, ResolvedBase, files_sha256, find_base, load_base

WARM_UP = 5  # optimizer steps


class Keeper(TrainerCallback):
    """Writes the log, and an adapter folder every so many episodes."""

    def __init__(
        self, options: argparse.Namespace, base: ResolvedBase, start: dict[str, Any], groups: Sequence[range]
    ) -> None:
        self.options, self.base, self.start, self.groups = options, base, start, groups
        self.log = options.out / "training.jsonl"
        self.trainer: PreferenceTrainer
        self.clock = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        done = self.groups[state.global_step].start if state.global_step < len(self.groups) else self.options.episodes
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        kept = [line for line in lines if json.loads(line)["episode"] < done]
        self.log.write_text("".join(line + "\n" for line in kept))
        self.clock = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, group = time.monotonic(), self.groups[state.global_step - 1]
        seconds, self.clock = round((now - self.clock) / len(group), 2), now
        with self.log.open("a") as log:
            for record in self.trainer.records:
                log.write(json.dumps({"step": state.global_step, **record, "seconds": seconds}) + "\n")
        done = group.stop
        if done % self.options.save_every == 0 or done == self.options.episodes:
            seen = [json.loads(line)["graph"] for line in self.log.read_text().splitlines()]
            provenance = Provenance(
                self.base,
                self.options.hardware,
                self.start["audit"],
                {**self.start["training"], "episodes_done": done},
                [*self.start["graphs"], *seen],
            )
            store_adapter(self.trainer.model, self.options.out / f"ep{done:03d}", provenance)


def groups_of(episodes: int, size: int, save_every: int) -> list[range]:
    """The episodes of each optimizer step: `size` of them, fewer where an adapter is saved after the last one."""
    cuts = range(0, episodes, save_every)
    return [
        range(first, min(first + size, cut + save_every, episodes))
        for cut in cuts
        for first in range(cut, min(cut + save_every, episodes), size)
    ]


def train(options: argparse.Namespace) -> None:
    """Run, or go on with a run, as the command's options say.

    Raises:
        TrainingError: if there is an unfinished run and none is to be resumed, or the other way round.
        BaseModelError: if the base model cannot be had.
    """
    work = options.out / "checkpoints"
    if work.exists() != options.resume:
        found = "one; --resume goes on with it" if work.exists() else "none"
        raise TrainingError(f"{work}: expected {'an' if options.resume else 'no'} unfinished run, found {found}")
    start_file = work / "start.json"
    if options.resume:
        start = json.loads(start_file.read_text())
        vars(options).update({name: start["options"][name] for name in OPTIONS})
    base = find_base(options.base)
    curriculum = Curriculum(options.episodes, options.seed, options.hardware, options.largest, options.only_task)
    recipe = Recipe(
        options.candidates, options.states, tuple(options.hints), options.teacher, options.lookahead,
        options.margin_unit, options.imitate,
    )  # fmt: skip
    groups = groups_of(options.episodes, options.group, options.save_every)
    if not options.resume:
        init = _identity(options.init)
        work.mkdir(parents=True)
        start = {
            "options": {name: getattr(options, name) for name in OPTIONS},
            "audit": audit(curriculum.sample()),
            "training": {
                "curriculum": asdict(curriculum),
                "recipe": asdict(recipe),
                **{name: getattr(options, name) for name in ("group", "learning_rate", "beta", "imitation", "rank")},
                "init": init,
            },
            "graphs": sorted(trained_on(Path(options.init))) if options.init else [],
        }
        start_file.write_text(json.dumps(start, indent=1) + "\n")
    model, tokenizer = load_base(base, dtype="bfloat16")
    actor = Actor(model)
    fresh = options.init is None
    keeper = Keeper(options, base, start, groups)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        trainer = PreferenceTrainer(
            model=model if fresh else PeftModel.from_pretrained(model, options.init, is_trainable=True),
            peft_config=lora_config(options.rank) if fresh else None,
            args=_arguments(options, work),
            train_dataset=Dataset.from_list([{"first": group.start, "end": group.stop} for group in groups]),
            data_collator=lambda rows: rows[0],
            processing_class=tokenizer,
            callbacks=[keeper],
        )
    trainer.rollouts, trainer.actor = Rollouts(recipe, curriculum, tokenizer), actor
    keeper.trainer = trainer
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(work))
    shutil.rmtree(work)


def _identity(adapter: str | None) -> dict[str, str] | None:
    """The adapter that a run starts from."""
    if adapter is None:
        return None
    folder = Path(adapter)
    try:
        sha256 = files_sha256([folder / "adapter_config.json", folder / "adapter_model.safetensors"])
    except OSError as error:
        raise TrainingError(f"--init: expected an adapter folder, found {error}") from None
    return {"name": folder.name, "sha256": sha256}


def _arguments(options: argparse.Namespace, work: Path) -> DPOConfig:
    return DPOConfig(
        output_dir=str(work),
        beta=options.beta,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, options.imitation],
        num_train_epochs=1,
        per_device_train_batch_size=1,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_steps=1,
        save_total_limit=2,
        seed=options.seed,
        data_seed=options.seed,
        report_to="none",
        disable_tqdm=options.quiet,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
    )


OPTIONS = (
    "base", "init", "episodes", "seed", "hardware", "largest", "only_task", "candidates", "states", "hints", "teacher",
    "lookahead", "margin_unit", "imitate", "group", "learning_rate", "beta", "imitation", "rank", "save_every",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    recipe = Recipe()
    parser = argparse.ArgumentParser(
        prog="python -m env.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where adapter folders and the log go")
    add("--base", default=BUILT_IN, help="base model: folder, built-in name or hub id (%(default)s)")
    add("--init", metavar="DIR", help="adapter to start from, and reference (default: a fresh one, and the base model)")
    add("--episodes", type=int, default=400, help="%(default)s")
    add("--hardware", choices=HARDWARE, default="published", help="%(default)s")
    add("--largest", type=int, default=12, metavar="N", help="caps the nodes of random graphs (%(default)s)")
    add("--only-task", choices=TASKS, help="every episode is this task, as in nearly all of the published run")
    add("--candidates", type=int, default=recipe.candidates, metavar="N", help="of the model a state (%(default)s)")
    add("--states", type=int, default=recipe.states, metavar="N", help="learnt from an episode, at most (%(default)s)")
    add("--hints", type=float, nargs=2, default=recipe.hints, metavar=("FIRST", "LAST"),
        help="share of states with a hint of the teacher, at the first and the last episode (0.5 0.1)")  # fmt: skip
    add("--teacher", choices=TEACHERS, default=recipe.teacher, help="%(default)s")
    add("--lookahead", choices=LOOKAHEADS, default=recipe.lookahead, help="%(default)s")
    add("--margin-unit", type=float, default=recipe.margin_unit, metavar="X",
        help="a pair counts min(margin / X, 1), the margin in units of greedy's latency (%(default)s)")  # fmt: skip
    add("--group", type=int, default=8, metavar="N", help="episodes in an optimizer step (%(default)s)")
    add("--learning-rate", type=float, default=2e-4, help="peak, after warming up (%(default)s)")
    add("--beta", type=float, default=0.1, help="%(default)s")
    add("--imitation", type=float, default=0.1, help="weight of a hint's likelihood (%(default)s)")
    add("--imitate", choices=IMITATED, default=recipe.imitate,
        help="hints that beat the model's candidates, or all that none of them beats (%(default)s)")  # fmt: skip
    add("--rank", type=int, default=8, help="of a fresh adapter; alpha is twice that (%(default)s)")
    add("--save-every", type=int, default=50, metavar="N", help="episodes between adapter folders (%(default)s)")
    add("--seed", type=int, default=0, help="%(default)s")
    add("--resume", action="store_true", help="go on with an interrupted run, with its options")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        train(options)
    except (TrainingError, BaseModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
