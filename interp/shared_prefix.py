"""Attention of many rows over one shared prefix.

Every row has its own last S tokens; the P tokens before them are the same in all rows, so that their keys and values
are computed once and handed to every layer:

    row r:  softmax(q_r [K_prefix; k_r]^T / sqrt(d_head) + mask) [V_prefix; v_r]

The function below takes the place of the model's attention function inside `attending`. Layers hand their attention
mask on unseen, so the prefix travels in the mask's place (flex attention's block masks travel the same way); the query,
key and value projections, rotary embeddings, norms and LoRA stay the model's own. Query heads that share a key/value
head are laid side by side along the query axis: keys are not repeated for them.

Full causal attention and sliding windows are covered: a layer tells its window to the attention function. Whatever else
a layer asks for (soft caps, sinks, position biases) is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from interp.subject import UnsupportedArchitecture

NAME = "interp_shared_prefix"
NOT_COVERED = ("softcap", "s_aux", "position_bias")


@dataclass(frozen=True)
class SharedPrefix:
    """What every row attends to besides its own tokens; given to the layers in the place of the attention mask.

    Attributes:
        keys, values: per layer (1, kv_heads, P, d_head), keys after rotary.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    _masks: dict[tuple[int | None, int, int], Tensor | None] = field(default_factory=dict, repr=False)

    def mask(self, length: int, window: int | None, groups: int) -> Tensor | None:
        """(groups * length, P + length) bool, True where a row's token may look; None where it may look everywhere."""
        key = (window, length, groups)
        if key not in self._masks:
            self._masks[key] = self._mask(length, window, groups)
        return self._masks[key]

    def _mask(self, length: int, window: int | None, groups: int) -> Tensor | None:
        device, before = self.keys[0].device, self.keys[0].shape[2]
        at = torch.arange(before + length, device=device)
        distance = at[before:, None] - at[None, :]  # (query, key)
        allowed = distance >= 0
        if window is not None:
            allowed &= distance < window
        return None if bool(allowed.all()) else allowed.repeat(groups, 1)


@contextmanager
def attending(decoder: Any, name: str = NAME) -> Iterator[None]:
    """Inside this context the decoder's layers attend by the function that is registered under a name.

    The one of this module expects a `SharedPrefix` as the attention mask. Attention that an adapter has replaced
    (`modules_to_save`) is a copy with a configuration of its own, which is told as well.
    """
    configs: list[Any] = [decoder.config]
    configs += [getattr(getattr(layer, "self_attn", None), "config", decoder.config) for layer in decoder.layers]
    before = [(config, config._attn_implementation) for config in {id(config): config for config in configs}.values()]
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


def rotary_of_layers(decoder: Any, stream: Tensor, positions: Tensor) -> list[Any]:
    """What each layer is handed as `position_embeddings`: the same for all, or one for each of its `layer_types`."""
    embed = decoder.rotary_emb
    if "layer_type" not in inspect.signature(embed.forward).parameters:
        return [embed(stream, positions)] * len(decoder.layers)
    kinds = decoder.config.layer_types
    made = {kind: embed(stream, positions, kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def _attend(
    module: Any,
    query: Tensor,  # (rows, heads, S, d_head)
    key: Tensor,  # (rows, kv_heads, S, d_head)
    value: Tensor,
    attention_mask: SharedPrefix,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    asked = [name for name in NOT_COVERED if options.get(name) is not None]
    if asked:
        raise UnsupportedArchitecture(
            f"{type(module).__name__}: this architecture is not covered by the patching engine: expected plain "
            f"attention, found {', '.join(asked)}"
        )
    rows, heads, length, width = query.shape
    kv_heads = key.shape[1]
    prefix_key, prefix_value = attention_mask.keys[module.layer_idx], attention_mask.values[module.layer_idx]
    out = nn.functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads * length, width),
        torch.cat([prefix_key.expand(rows, -1, -1, -1), key], dim=2),
        torch.cat([prefix_value.expand(rows, -1, -1, -1), value], dim=2),
        attn_mask=attention_mask.mask(length, sliding_window, heads // kv_heads),
        scale=scaling,
    )
    return out.reshape(rows, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
