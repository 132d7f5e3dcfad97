"""One token driven through the layers of a decoder, its attention computed as one row that can be read and cut.

The function that takes the place of the model's attention computes the row explicitly, so that its weights can be kept
and single heads be kept from looking at spans; everything else in a layer is the model's own. Full causal attention and
sliding windows are covered: a layer tells its window to the attention function. Whatever else a layer asks for (soft
caps, sinks, position biases) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from interp.shared_prefix import NOT_COVERED, SharedPrefix, attending, rotary_of_layers
from interp.subject import UnsupportedArchitecture

NAME = "interp_query_row"

Span = tuple[int, int]


@dataclass
class TokenRow:
    """Travels to the attention function in the mask's place, as the prefix does in `interp.shared_prefix`.

    Attributes:
        prefix: keys and values of the earlier tokens.
        blocked: layer -> (row, head, span) that may not be looked at, in that layer only.
        seen: (heads, T) of row 0, layer by layer.
        values: (kv_heads, T, d_head) of row 0, layer by layer.
    """

    prefix: SharedPrefix
    blocked: dict[int, list[tuple[int, int, Span]]]
    seen: list[Tensor]
    values: list[Tensor]


def drive_token(
    decoder: Any,
    row: TokenRow,
    position: int,
    batch: Tensor,
    grow: Callable[[int, Tensor], Tensor],
    lowest: int = 0,
) -> list[Tensor]:
    """Put (rows, 1, d_model) through the layers from `lowest` on; `grow` may add rows at a layer's input.

    Returns:
        What enters each of these layers, and the final norm.
    """
    positions = torch.tensor([[position]], device=batch.device)
    streams: list[Tensor] = []
    try:
        rotary = rotary_of_layers(decoder, batch, positions)
        with attending(decoder, NAME):
            for index, layer in enumerate(decoder.layers[lowest:], lowest):
                batch = grow(index, batch)
                streams.append(batch)
                batch = layer(
                    batch,
                    attention_mask=row,
                    position_ids=positions,
                    position_embeddings=rotary[index],
                    use_cache=False,
                )
    except (TypeError, AttributeError) as error:
        raise UnsupportedArchitecture(
            f"{type(decoder).__name__}: this architecture cannot be driven layer by layer: {error}"
        ) from error
    return [*streams, batch]


def _attend(
    module: Any,
    query: Tensor,  # (rows, heads, 1, d_head)
    key: Tensor,  # (rows, kv_heads, 1, d_head)
    value: Tensor,
    attention_mask: TokenRow,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    asked = [name for name in NOT_COVERED if options.get(name) is not None]
    if asked:
        raise UnsupportedArchitecture(
            f"{type(module).__name__}: this architecture is not covered: expected plain attention, found "
            f"{', '.join(asked)}"
        )
    layer = module.layer_idx
    keys, values = attention_mask.prefix.keys[layer][0], attention_mask.prefix.values[layer][0]  # (kv_heads, P, d_head)
    rows, heads, _, width = query.shape
    grouped = query.reshape(rows, len(keys), -1, width)  # (rows, kv_heads, group, d_head)
    before = torch.einsum("rkgd,kpd->rkgp", grouped, keys)
    scores = torch.cat([before, (grouped * key).sum(-1, keepdim=True)], dim=-1).reshape(rows, heads, -1)
    scores = scores.float() * (width**-0.5 if scaling is None else scaling)
    if sliding_window is not None:
        scores[..., : max(0, scores.shape[-1] - sliding_window)] = -torch.inf
    for row, head, (start, end) in attention_mask.blocked.get(layer, ()):
        scores[row, head, start:end] = -torch.inf
    weights = scores.softmax(-1)  # (rows, heads, T)
    attention_mask.seen.append(weights[0])
    attention_mask.values.append(torch.cat([values, value[0]], dim=1))
    spread = weights.to(values.dtype).reshape(rows, len(keys), -1, weights.shape[-1])
    out = torch.einsum("rkgp,kpd->rkgd", spread[..., :-1], values) + spread[..., -1:] * value
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, _attend)
