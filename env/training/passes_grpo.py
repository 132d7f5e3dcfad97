"""Train an adapter on the rewards of whole dialogues (TRL's GRPO, the second stage of 2506.15701).

    python -m env.training.passes_grpo --init ckpt/passes/sft --steps 20 --out ckpt/passes/grpo
    python -m env.training.passes_grpo --init ckpt/passes/sft --steps 20 --out ckpt/passes/grpo --resume

One step is one training program: several dialogues about it are sampled with a merged copy of the policy, and each is
compared with the others of its group by the environment's reward (format and answer, `env.passes.rewards`). Learnt are
the agent's own tokens of all turns; the responses between them are read and not learnt. The search tool is the small
one of `env.training.passes_samples`. Published are 5 dialogues a program, 64 programs a step, 40 steps, learning rate
1e-6 of all weights and a KL penalty of 0.001; here there is no penalty, so that no second model is run.

A dialogue that runs out of turns, or whose group has equal rewards, teaches nothing, and is counted in
`training.jsonl`. Interrupted at any moment, `--resume` goes on from the last saved step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from env.passes import LLVMError, PassesEnv, Program, ProgramError, load_program, load_programs
from env.passes.rewards import REWARDS
from env.training.actor import Actor
from env.training.imitation import EarlierRuns, JsonLog
from env.training.passes_rollouts import MAX_NEW_TOKENS, Chat, play
from env.training.passes_samples import SEARCH
from env.training.passes_store import earlier_training, trained_programs, write_passes_adapter
from env.training.store import TrainingError, last_whole_checkpoint
from interp.base_models import BUILT_IN, BaseModelError, find_base, load_base

MAX_TURNS = 3
OPTIONS = ("steps", "dialogues", "learning_rate", "temperature", "rewards", "seed")


class Rollouts:
    """TRL's `rollout_func`: dialogues about the programs that its prompts name.

    Args:
        actor: the copy of the policy that writes them.
        tokenizer: its tokenizer.
        options: of the command: `seed`, `temperature`, `rewards`, `max_new_tokens`.
    """

    def __init__(self, actor: Actor, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
        self.actor, self.chat, self.options = actor, Chat(tokenizer), options

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any] | None]:
        """One dialogue for each prompt, as TRL takes it; `env_mask` is 1 where the agent wrote, `score` the reward."""
        policy = self.actor.follow(trainer.accelerator.unwrap_model(trainer.model))
        programs = [load_program(name) for name in prompts]
        envs = [PassesEnv(p, self.options.rewards, max_turns=MAX_TURNS, genetics=SEARCH) for p in programs]
        step = trainer.state.global_step
        rngs = [np.random.default_rng([self.options.seed, *b"dialogue", step, i]) for i in range(len(prompts))]
        played = play(policy, self.chat, envs, rngs, self.options.temperature, self.options.max_new_tokens)
        return {
            "prompt_ids": [one.prompt for one in played],
            "completion_ids": [one.ids for one in played],
            "env_mask": [one.mask for one in played],
            "logprobs": None,
            "score": [one.reward for one in played],
            "on_valid_path": [float(one.valid_path) for one in played],
            "improvement": [one.env.score for one in played],
        }


def reward(score: list[float], **_: Any) -> list[float]:
    """What is learnt from: the environment's reward."""
    return score


def valid_path(on_valid_path: list[float], **_: Any) -> list[float]:
    """Logged only: 1 for a dialogue on a valid path."""
    return on_valid_path


def over_oz(improvement: list[float], **_: Any) -> list[float]:
    """Logged only: OverOz of the answer, 0 without one."""
    return improvement


def train(options: argparse.Namespace) -> int:
    """Train and store an adapter as the command's options say; returns how many steps it has had.

    Raises:
        TrainingError: if there is an unfinished run and none is to be resumed, or the other way round; or if the
            adapter to start from is none of this environment.
        BaseModelError: if the base model cannot be had.
    """
    work = options.out / "checkpoints"
    if work.exists() != options.resume:
        found = "one; --resume goes on with it" if work.exists() else "none"
        raise TrainingError(f"{work}: expected {'an' if options.resume else 'no'} unfinished run, found {found}")
    earlier, seen = earlier_training(options.init), trained_programs(options.init)
    programs = _programs(options)
    base = find_base(options.base)
    model, tokenizer = load_base(base, dtype="bfloat16")
    rollouts = Rollouts(Actor(model), tokenizer, options)
    policy = PeftModel.from_pretrained(model, options.init, is_trainable=True)
    work.mkdir(parents=True, exist_ok=True)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=[reward, valid_path, over_oz],
        args=_arguments(options, work),
        train_dataset=Dataset.from_list([{"prompt": program.name} for program in programs]),
        processing_class=tokenizer,
        rollout_func=rollouts,
        callbacks=[JsonLog(options.out / "training.jsonl", options.dialogues, EarlierRuns([], [], set()))],
    )
    trainer.remove_callback(PrinterCallback)  # the log is a file
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(work))
    run = {name: getattr(options, name) for name in OPTIONS} | {"stage": "grpo", "init": options.init.name}
    training = {**earlier, "runs": [*earlier["runs"], run]}
    write_passes_adapter(policy, options.out, base, training, seen | {program.name for program in programs})
    shutil.rmtree(work)
    return int(trainer.state.global_step)


def _programs(options: argparse.Namespace) -> list[Program]:
    """A training program for each step, in an order that the seed draws, of those that are not too large."""
    small = [program for program in load_programs("train") if program.instructions <= options.largest]
    order = np.random.default_rng([options.seed, *b"programs"]).permutation(len(small))
    return [small[order[step % len(small)]] for step in range(options.steps)]


def _arguments(options: argparse.Namespace, work: Path) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(work),
        max_steps=options.steps,
        num_generations=options.dialogues,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=options.dialogues,
        max_completion_length=MAX_TURNS * (options.max_new_tokens + 400),
        temperature=options.temperature,
        loss_type="grpo",
        beta=0.0,
        reward_weights=[1.0, 0.0, 0.0],
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
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
        prog="python -m env.training.passes_grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--init", type=Path, required=True, metavar="DIR", help="adapter to start from, of env.training.passes_sft")
    add("--out", type=Path, required=True, help="adapter folder to write")
    add("--base", default=BUILT_IN, help="base model: folder, built-in name or hub id (%(default)s)")
    add("--steps", type=int, default=20, help="optimizer steps, one program each (%(default)s)")
    add("--dialogues", type=int, default=5, help="about each program (%(default)s)")
    add("--largest", type=int, default=10**9, metavar="N", help="programs of at most N instructions (default: all)")
    add("--learning-rate", type=float, default=1e-4, help="constant (%(default)s)")
    add("--temperature", type=float, default=1.0, help="of the sampling (%(default)s)")
    add("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="of a turn (%(default)s)")
    add("--rewards", choices=REWARDS, default="paper", help="see env.passes.rewards (%(default)s)")
    add("--save-every", type=int, default=2, help="steps between two saved states (%(default)s)")
    add("--seed", type=int, default=0, help="orders programs, names the draws (%(default)s)")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--quiet", action="store_true", help="no progress bar and no result on stdout")
    options = parser.parse_args(argv)
    if options.dialogues < 2:
        parser.error(f"--dialogues: expected 2 or more, found {options.dialogues}")
    try:
        steps = train(options)
    except (TrainingError, BaseModelError, ProgramError, LLVMError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(json.dumps({"adapter": str(options.out), "steps": steps}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
