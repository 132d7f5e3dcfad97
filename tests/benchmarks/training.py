"""The packed loss of the training program beside TRL's own, on the real base model.

    python -m tests.benchmarks.training

One process, one set of states from rollouts, bfloat16 base and float32 adapter as in training. TRL gets one sequence a
candidate and pair, as its data collator makes them; the packed form one row a state. Losses and gradients are equal in
float32 (`tests/training`); here it is time, as a ratio, medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from trl import DPOConfig, DPOTrainer

from env.training.curriculum import Curriculum
from env.training.preference_trainer import PreferenceTrainer
from env.training.rollouts import Recipe, Rollouts, State
from env.training.store import lora_config
from interp.base_models import BUILT_IN, find_base, load_base


class Prepared(DPOTrainer):
    """TRL's trainer on rows that are token ids already."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def pairs_of(state: State) -> list[dict[str, list[int]]]:
    """A row for each pair of a state, as TRL wants them."""
    return [
        {
            "prompt_ids": list(state.prompt),
            "chosen_ids": list(state.candidates[winner]),
            "rejected_ids": list(state.candidates[loser]),
        }
        for winner, loser, _ in state.pairs
    ]


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training", description=__doc__)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    causal, tokenizer = load_base(find_base(BUILT_IN), dtype="bfloat16")
    rollouts = Rollouts(Recipe(states=6), Curriculum(options.episodes, 0), tokenizer)
    states = [state for one in rollouts.play(causal, range(options.episodes)) for state in one.states]
    rows = [row for state in states for row in pairs_of(state)]
    arguments = DPOConfig(
        output_dir="unused", loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.1], bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", max_length=None,
    )  # fmt: skip
    model = get_peft_model(causal, lora_config(8))
    common = {
        "model": model,
        "args": arguments,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
    }
    packed = PreferenceTrainer(**common)
    model.delete_adapter("ref")  # fresh: the reference is the base model
    plain = Prepared(**common)
    model.delete_adapter("ref")

    def of_packed() -> None:
        for at in range(0, len(states), 8):
            packed.compute_loss(model, {"states": states[at : at + 8]}).backward()

    def of_plain() -> None:
        for at in range(0, len(rows), 4):
            plain.compute_loss(model, plain.data_collator(rows[at : at + 4])).backward()

    times = [(seconds(of_packed), seconds(of_plain)) for _ in range(options.rounds)]
    ratio = statistics.median(separate / together for together, separate in times)
    median = [statistics.median(column) for column in zip(*times, strict=True)]
    print(f"{len(states)} states, {len(rows)} pairs, {torch.get_num_threads()} threads, {options.rounds} rounds")
    print(f"packed {median[0] / len(states):.2f} s a state, separate {median[1] / len(states):.2f}: {ratio:.2f} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
