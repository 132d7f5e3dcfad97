"""Fine-tune a LoRA adapter on episodes of the pass-ordering dialogue (TRL's SFT, the first stage of 2506.15701).

    python -m env.training.passes_portfolio --out ckpt/passes/portfolio.json
    python -m env.training.passes_samples --portfolio ckpt/passes/portfolio.json --out ckpt/passes/samples.jsonl
    python -m env.training.passes_sft --samples ckpt/passes/samples.jsonl --out ckpt/passes/sft
    python -m env.training.passes_sft --samples ckpt/passes/samples.jsonl --out ckpt/passes/sft --resume

The loss is the cross-entropy of the agent's turns and the ends of them; of a sample that begins with a bad sequence, of
the turn after that. An episode has 1,200 to 1,700 tokens and goes through the model by itself. The base model's weights
are bfloat16 while training, the adapter's float32. Interrupted at any moment, `--resume` goes on from the last saved
step. Published are 800 samples, learning rate 1e-6 and one epoch of all the weights of a model fifty times as large; a
small adapter of a small model needs a larger rate.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from env.passes import ProgramError
from env.training.imitation import EarlierRuns, JsonLog
from env.training.passes_samples import Sample, read_samples
from env.training.passes_store import with_adapter, write_passes_adapter
from env.training.samples import IGNORED
from env.training.store import TrainingError, last_whole_checkpoint
from interp.base_models import BUILT_IN, BaseModelError, find_base, load_base

WARM_UP = 10
OPTIONS = ("epochs", "batch", "learning_rate", "rank", "seed")


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """`input_ids` and `labels` (T,) of an episode, tokenized whole as the chat template writes it; learnt are the
    agent's turns from `learnt_from` on, with the token that ends each.

    Raises:
        TrainingError: if the chat template does not write a longer chat as the continuation of a shorter one.
    """
    chat = sample.chat()
    places = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    text = _rendered(tokenizer, chat, ask=False)
    learnt: list[tuple[int, int]] = []
    for place in places[sample.learnt_from :]:
        before, turn = _rendered(tokenizer, chat[:place], ask=True), chat[place]["content"] + str(tokenizer.eos_token)
        if not text.startswith(before + turn):
            raise TrainingError("chat template: expected one that continues a chat, found one that rewrites it")
        learnt.append((len(before), len(before + turn)))
    rendered = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = rendered["input_ids"], rendered["offset_mapping"]
    labels = [
        i if any(start < right and end > left for left, right in learnt) else IGNORED
        for i, (start, end) in zip(ids, offsets, strict=True)
    ]
    return {"input_ids": ids, "labels": labels}


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, str]], *, ask: bool) -> str:
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)
    assert isinstance(text, str)
    return text


def train(options: argparse.Namespace) -> int:
    """Train and store an adapter as the command's options say; returns how many steps it has had.

    Raises:
        TrainingError: if there is an unfinished run and none is to be resumed, or the other way round.
        ValueError, OSError: if the samples cannot be read.
        BaseModelError: if the base model cannot be had.
    """
    work = options.out / "checkpoints"
    if work.exists() != options.resume:
        found = "one; --resume goes on with it" if work.exists() else "none"
        raise TrainingError(f"{work}: expected {'an' if options.resume else 'no'} unfinished run, found {found}")
    samples = read_samples(options.samples)
    order = np.random.default_rng([options.seed]).permutation(len(samples))
    samples = [samples[place] for place in order[: options.limit]]
    base = find_base(options.base)
    model, tokenizer = load_base(base, dtype="bfloat16")
    adapted = with_adapter(model, options.rank, options.seed)
    rows = [encode(sample, tokenizer) for sample in samples]
    work.mkdir(parents=True, exist_ok=True)
    trainer = SFTTrainer(
        model=adapted,
        args=_arguments(options, work),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[JsonLog(options.out / "training.jsonl", options.batch, EarlierRuns([], [], set()))],
    )
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(work))
    run = {name: getattr(options, name) for name in OPTIONS} | {"stage": "sft", "samples": len(samples)}
    programs = {sample.program for sample in samples}
    write_passes_adapter(adapted, options.out, base, {"runs": [run]}, programs)
    shutil.rmtree(work)
    return int(trainer.state.global_step)


def _arguments(options: argparse.Namespace, work: Path) -> SFTConfig:
    return SFTConfig(
        output_dir=str(work),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=WARM_UP,
        max_grad_norm=1.0,
        max_length=None,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,  # a quarter faster, in 4.6 GB in place of 1.5
        bf16=False,
        logging_steps=1,
        save_steps=options.save_every,
        save_total_limit=2,
        seed=options.seed,
        data_seed=options.seed,
        report_to="none",
        disable_tqdm=options.quiet,
        use_cpu=not torch.cuda.is_available(),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.passes_sft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=Path, required=True, help="file of env.training.passes_samples")
    parser.add_argument("--out", type=Path, required=True, help="adapter folder to write")
    parser.add_argument("--base", default=BUILT_IN, help="base model: folder, built-in name or hub id (%(default)s)")
    parser.add_argument("--limit", type=int, help="samples at most, the first in the order of the seed")
    parser.add_argument("--epochs", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="samples a step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak, after warming up (%(default)s)")
    parser.add_argument("--rank", type=int, default=4, help="of the adapter; alpha is twice as much (%(default)s)")
    parser.add_argument("--save-every", type=int, default=5, help="steps between two saved states (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="orders samples, names initial weights (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no result on stdout")
    options = parser.parse_args(argv)
    try:
        steps = train(options)
    except (TrainingError, BaseModelError, ProgramError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(json.dumps({"adapter": str(options.out), "steps": steps}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
