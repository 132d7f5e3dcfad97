"""Random models with the shapes of real ones, and prompts of any length for them.

Time does not depend on what the weights are, so that every size can be had without a download.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from interp.tokens import EncodedPair

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; `rank` of a live adapter on all seven projections, 0 for none."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    rank: int = 0

    @property
    def layer_weights(self) -> int:
        """Parameters of one layer's seven matrices, adapter included: 2 operations each per token."""
        keys = self.width // self.heads * self.kv_heads
        sizes = [(self.width, self.width)] * 2 + [(keys, self.width)] * 2 + [(self.inner, self.width)] * 3
        return sum(m * n + self.rank * (m + n) for m, n in sizes)

    @property
    def weights(self) -> int:
        """Parameters in all, with an unembedding of its own; norms are left out."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.width


SMOLLM2 = Shape(width=576, inner=1536, heads=9, kv_heads=3, layers=30, vocabulary=49152, rank=8)
LLAMA_8B = Shape(width=4096, inner=14336, heads=32, kv_heads=8, layers=32, vocabulary=128256)


def make_model(shape: Shape, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The causal model, in eval mode, its adapter on; the process-wide random source is left as it was."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
        if shape.rank:
            adapter = LoraConfig(
                r=shape.rank, lora_alpha=2 * shape.rank, target_modules=list(PROJECTIONS), init_lora_weights=False
            )
            model = get_peft_model(model, adapter).eval().requires_grad_(False).get_base_model()
    return model


def make_pair(length: int, suffix: int, vocabulary: int, *, answer: int = 1, seed: int = 0) -> EncodedPair:
    """Two prompts of `length` random tokens that differ in one, `suffix` tokens before the end, that one included."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary - 1, (length + answer,), generator=generator).tolist()
    a, value = ids[:length], length - suffix
    b = [*a[:value], a[value] % (vocabulary - 2) + 1, *a[value + 1 :]]
    return EncodedPair(
        id=f"random-{seed}",
        group=str(seed),
        kind="random",
        ids_a=tuple(a),
        ids_b=tuple(b),
        answer=tuple(ids[length:]),
        foil=(0,),
        spans={"value": (value, value + 1)},
    )
