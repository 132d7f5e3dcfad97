"""Train a chat model with TRL's GRPO on the scheduler, by tool calls.

python -m env.server.trl_example --model Qwen/Qwen3-0.6B --steps 100 --out ckpt/grpo

TRL asks for a class whose methods are the model's tools, and keeps one object a rollout in its own process: hence the
environment itself, without a server. The chat template has to know tools (Qwen 2.5 and 3, Llama 3.1 do).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from env.scheduler import TASKS, SchedulerEnv, load_task
from env.scheduler.policies import naive

SYSTEM_PROMPT = (
    "You schedule tensor operations on a machine with a small fast memory. Call the tool schedule for the current "
    "node, read what it returns, and go on until the episode has ended. future_uses counts the reads of each tensor "
    "that are still to come."
)


class SchedulerTool:
    """One rollout's episode, as TRL's `environment_factory` wants it."""

    def __init__(self) -> None:
        self._env = SchedulerEnv(load_task(TASKS[0]))
        self._return = 0.0

    def reset(self, task: str = TASKS[0], **_: Any) -> str:
        """Start an episode; the text is added to the prompt. TRL hands in the row of the data set."""
        self._env = SchedulerEnv(load_task(task))
        self._return = 0.0
        return self._env.reset()[0]

    def schedule(self, fuse_with_prev: bool, tile: int, retain: list[int]) -> str:
        """Schedule the current node.

        Args:
            fuse_with_prev: Whether the node joins the open kernel.
            tile: Edge of the kernel's tiles: 32, 64, 128 or 256.
            retain: Ids of the tensors to keep in fast memory when the kernel ends.

        Returns:
            The next observation, or the score when the episode has ended.
        """
        if not self._env.episode.ended:
            # Whatever the model put there: the environment says what is wrong with it.
            text = json.dumps({"fuse_with_prev": fuse_with_prev, "tile": tile, "retain": retain})
            observation, reward, terminated, truncated, _ = self._env.step(text)
            self._return += reward
            if not (terminated or truncated):
                return observation
        return f"The episode has ended with a score of {self._env.score:.4f}."

    def get_reward(self) -> float:
        """The episode's return. One that the model left is finished naively, so that leaving never pays."""
        while not self._env.episode.ended:
            self._return += self._env.step(naive(self._env.episode).to_text())[1]
        return self._return


def train(model: Any, tokenizer: Any, out: Path, *, steps: int, rollouts: int = 4, longest: int = 2048) -> GRPOTrainer:
    """Train for some steps on the fixed tasks and save the model.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with a chat template that knows tools.
        out: folder for the model.
        steps: optimizer steps.
        rollouts: episodes of one task a step.
        longest: tokens of an episode, answers and observations together, at most.

    Returns:
        The trainer; `state.log_history` has the rewards.
    """
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": ""}]
    data = Dataset.from_list([{"prompt": prompt, "task": task} for task in TASKS])
    config = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=rollouts,
        num_generations=rollouts,
        max_completion_length=longest,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=model.device.type == "cpu",
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=model, args=config, train_dataset=data, processing_class=tokenizer, environment_factory=SchedulerTool
    )
    trainer.train()
    trainer.save_model()
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m env.server.trl_example", description=__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of a chat model that knows tools")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train(AutoModelForCausalLM.from_pretrained(args.model), tokenizer, args.out, steps=args.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
