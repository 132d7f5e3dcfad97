"""A merged copy of the policy that plays the episodes.

A LoRA layer in float32 beside a bfloat16 one costs half as much again as the layer alone. The copy has the adapter's
delta added to its weights, in bfloat16, so that its distributions are the policy's up to rounding. It only proposes:
log-probabilities that are learnt from come from the policy itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer


class Actor:
    """A plain causal model that follows a policy.

    Attributes:
        model: the copy.
    """

    def __init__(self, causal: Any) -> None:
        """Copy a base model that no adapter has been put into yet."""
        self.model = copy.deepcopy(causal).eval().requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: PeftModel) -> Any:
        """Take over the weights of a policy as it is now.

        Args:
            policy: a LoRA adapter on a model of the same weights.

        Returns:
            The copy.
        """
        for name, layer in policy.get_base_model().named_modules():
            if isinstance(layer, LoraLayer):
                merged = layer.get_base_layer().weight.float() + layer.get_delta_weight("default").float()
                self.model.get_submodule(name).weight.copy_(merged)
        return self.model
