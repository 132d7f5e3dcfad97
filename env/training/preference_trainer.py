"""TRL's DPO trainer, fed with preferences from rollouts of the policy as it is, packed.

TRL keeps the loop, the optimizer, the reference (the policy that the run starts from), logging and checkpoints. One
optimizer step is one group of episodes. Its loss is, over the states that teach something,

    mean over states of [ mean over pairs of  -w log sigmoid(beta (r_winner - r_loser))  +  weight * NLL of a hint ]

where r = log p - log p_reference of a whole action and its end of turn, w is the pair's weight, and the second term
(a mean over tokens, as TRL's `sft` loss) counts where a hint is to be imitated. With one pair of weight 1
a state it is what TRL computes for `loss_type=["sigmoid", "sft"]` (2305.18290) from separate sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.helpers import disable_input_dtype_casting
from torch import Tensor
from torch.nn.functional import logsigmoid
from trl import DPOTrainer
from trl.trainer.utils import use_adapter

from env.training.actor import Actor
from env.training.packing import Tree, log_probs
from env.training.rollouts import Rollouts, State

ROWS = 8  # states in one forward pass
REFERENCE = "ref"  # the name that TRL gives to the copy of the adapter that a run starts from


class PreferenceTrainer(DPOTrainer):
    """DPO whose batches are groups of episodes, `{"first": …, "end": …}`, played when their turn comes.

    Attributes:
        rollouts, actor: what plays them, and the copy of the policy that answers; set before training.
        records: what is to be logged of the last group's episodes.
    """

    rollouts: Rollouts
    actor: Actor
    records: list[dict[str, Any]]

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset  # numbers of groups: nothing to tokenize

    def training_step(self, model: Any, inputs: dict[str, int], num_items_in_batch: Any = None) -> Tensor:
        """Play a group, and accumulate the gradient of its loss."""
        numbers = range(inputs["first"], inputs["end"])
        played = self.rollouts.play(self.actor.follow(self.accelerator.unwrap_model(model)), numbers)
        model.train()
        states = [state for one in played for state in one.states]
        total = torch.zeros(())
        for chunk in _chunks(states):
            loss = self.compute_loss(model, {"states": chunk}) * (len(chunk) / len(states))
            self.accelerator.backward(loss)
            total += loss.detach()
        self.records = [one.record() | {"loss": round(float(total), 6)} for one in played]
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The mean over some states, `inputs["states"]`."""
        states: Sequence[State] = inputs["states"]
        prompts = [state.prompt for state in states]
        trees = [Tree.of(state.candidates) for state in states]
        causal = self.accelerator.unwrap_model(model).get_base_model()
        with _mixed_precision(model, causal.dtype):
            with torch.no_grad(), use_adapter(model, REFERENCE if REFERENCE in model.peft_config else None):
                reference = log_probs(causal, prompts, trees)
            policy = log_probs(causal, prompts, trees)
        losses = [self._of_state(*of_state) for of_state in zip(states, policy, reference, strict=True)]
        return torch.stack(losses).mean()

    def _of_state(self, state: State, policy: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
        ratios = [new.sum() - old.sum() for new, old in zip(policy, reference, strict=True)]
        sigmoid_weight, sft_weight = self.loss_weights
        terms = [
            -weight * logsigmoid(self.beta * (ratios[winner] - ratios[loser])) for winner, loser, weight in state.pairs
        ]
        loss = sigmoid_weight * torch.stack(terms).mean() if terms else torch.zeros(())
        return loss if state.hint is None else loss - sft_weight * policy[state.hint].mean()


@contextmanager
def _mixed_precision(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """The adapter, whose weights are float32, computes in the base model's dtype; nothing else changes."""
    half = dtype != torch.float32
    with disable_input_dtype_casting(model, half), torch.autocast(model.device.type, dtype, enabled=half):
        yield


def _chunks(states: Sequence[State]) -> Iterator[list[State]]:
    """States of similar length together, so that little is padded."""
    ordered = sorted(states, key=lambda state: len(state.prompt))
    return (ordered[at : at + ROWS] for at in range(0, len(ordered), ROWS))
