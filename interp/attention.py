"""One position's attention in every layer and head, what it writes, and what happens when a head may not look.

Nothing here is quadratic in the prompt's length T. The tokens before the last one go through the model once, with its
own fast attention, and leave their keys and values. Then the last token alone is driven through the layers with an
attention function that computes its one row,

    a_h = softmax(q_h [K; k]^T / sqrt(d_head) + mask),    z_h = a_h [V; v],    out = W_O [z_1; …; z_H],

so projections, norms, rotary embeddings and LoRA stay the model's own, and key/value heads are shared by their query
heads as the model shares them. Each prompt's row is compared with the model's own forward: a model for which this does
not give its logits is refused.

Blocking the edge from this position to a span for head h of layer l puts -inf into the mask there, in that head only
(attention knockout, arXiv 2304.14767). All (layer, head, span) cells go through in one pass of a batch that grows: at
layer l one row joins for each of the layer's cells, a copy of the unblocked stream; everything below l is shared. Keys
and values of the position itself change with it above l. Nothing before it can.

What attention of 1 to token j writes into the stream is v_j W_O,h, with the adapter's delta in W_O (attention alone
says nothing of it: arXiv 2004.10102). Its norm is sqrt(v_j G_h v_j^T) with the Gram matrix G_h = W_O,h W_O,h^T of the
module as it is switched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from interp.one_token import Span, TokenRow, drive_token
from interp.recording import recording
from interp.shared_prefix import SharedPrefix
from interp.subject import Subject, UnsupportedArchitecture, find_decoder

MAX_ROWS = 1024  # one-token rows in one pass: bounds the memory of scores, rows x heads x T
MAX_UNEMBEDDED = 128  # rows whose logits are held at once


class Cell(NamedTuple):
    """A head that may not look at a span, [start, end) of token positions."""

    layer: int
    head: int
    span: tuple[int, int]


@dataclass(frozen=True)
class Prefix:
    """Tokens that were run, all but the last, and what the last one needs of them. T tokens, L layers.

    Attributes:
        ids: (T,) the prompt, the position of interest last.
        cache: keys and values of the first T - 1; `row` and `generate` read it, and leave it as it is.
    """

    ids: tuple[int, ...]
    cache: DynamicCache

    def shared(self) -> SharedPrefix:
        """Its keys and values alone, by layer."""
        layers: Any = self.cache.layers
        return SharedPrefix(tuple(layer.keys for layer in layers), tuple(layer.values for layer in layers))


@dataclass(frozen=True)
class QueryRow:
    """What the last token of a prompt does. H query heads.

    Attributes:
        prefix: the tokens before it.
        attention: (L, H, T), rows sum to 1; float32.
        written: (L, H, T), the norm of what attention of 1 to each token would write.
        streams: (L + 1, d_model), what enters each layer at this position, and the final norm.
        logits: (vocab,) float32.
    """

    prefix: Prefix
    attention: Tensor
    written: Tensor
    streams: Tensor
    logits: Tensor


@torch.inference_mode()
def run_prefix(model: Subject | nn.Module, ids: Sequence[int]) -> Prefix:
    """Run all tokens but the last through the model as it is now switched.

    Raises:
        ValueError: with fewer than two tokens.
        UnsupportedArchitecture: for a model without the usual decoder.
    """
    if len(ids) < 2:
        raise ValueError(f"ids: expected two tokens or more, found {len(ids)}")
    causal = _causal_lm(model)
    cache = DynamicCache()  # full length in every layer; the model's masks keep its windows
    find_decoder(causal)(input_ids=torch.tensor([list(ids[:-1])], device=causal.device), cache=cache, use_cache=True)
    return Prefix(tuple(ids), cache)


@torch.inference_mode()
def query_row(model: Subject | nn.Module, prefix: Prefix, grams: Tensor) -> QueryRow:
    """The last token's attention in every layer and head.

    Args:
        model: as it was switched for `run_prefix`.
        grams: of `head_grams`, of the model as it is switched.

    Raises:
        UnsupportedArchitecture: if attention computed this way does not give the model's own logits.
    """
    causal = _causal_lm(model)
    decoder = find_decoder(causal)
    own = _own_cache(prefix)
    with recording(decoder) as recorded:
        expected = causal(input_ids=_last(prefix, causal), cache=own, use_cache=True).logits[0, -1].float()
    first = recorded.streams[0][0]  # (1, d_model)
    row = TokenRow(prefix.shared(), {}, [], [])
    streams = drive_token(decoder, row, len(prefix.ids) - 1, first[None], lambda layer, batch: batch)
    logits = _unembed(causal, decoder, streams[-1])[0]
    _compare(causal, logits, expected)
    values = torch.stack(row.values).float()  # (L, kv_heads, T, d_head)
    values = values.repeat_interleave(grams.shape[1] // values.shape[1], dim=1)  # (L, H, T, d_head)
    squares = torch.einsum("lhtd,lhde,lhte->lht", values, grams, values)
    return QueryRow(
        prefix=prefix,
        attention=torch.stack(row.seen),
        written=squares.clamp(min=0).sqrt(),
        streams=torch.cat([stream[0] for stream in streams]),
        logits=logits,
    )


@torch.inference_mode()
def block(model: Subject | nn.Module, row: QueryRow, cells: Sequence[Cell], tokens: Sequence[int]) -> Tensor:
    """Logits of some tokens when one head of one layer may not look at a span.

    Args:
        model: as it was switched for the row.
        cells: what is blocked, each in a run of its own; a span may not hold the last position.

    Returns:
        (len(cells), len(tokens)) float32.

    Raises:
        ValueError: if a span is empty or holds the last position.
    """
    causal, last = _causal_lm(model), len(row.prefix.ids) - 1
    wrong = [cell for cell in cells if not 0 <= cell.span[0] < cell.span[1] <= last]
    if wrong:
        raise ValueError(f"cells: expected spans within 0 to {last}, found {wrong[0]}")
    order = sorted(range(len(cells)), key=lambda i: cells[i].layer)
    found = torch.empty(len(cells), len(tokens))
    for at in range(0, len(order), MAX_ROWS):
        chosen = order[at : at + MAX_ROWS]
        found[chosen] = _blocked(causal, row, [cells[i] for i in chosen], tokens).cpu()
    return found


@torch.inference_mode()
def continue_with(model: Subject | nn.Module, row: QueryRow, donor: Tensor) -> Tensor:
    """Logits with another run's stream at the last position, from each layer on.

    Args:
        donor: (L + 1, d_model), what enters each layer in the other run.

    Returns:
        (L + 1, vocab) float32; row l: the stream entering layer l was the donor's.
    """
    causal = _causal_lm(model)
    decoder = find_decoder(causal)
    streams = drive_token(
        decoder,
        TokenRow(row.prefix.shared(), {}, [], []),
        len(row.prefix.ids) - 1,
        donor[:1, None],
        lambda layer, batch: batch if layer == 0 else torch.cat([batch, donor[layer : layer + 1, None]]),
    )
    return torch.cat(list(_unembedded(causal, decoder, torch.cat([streams[-1], donor[-1:, None]]))))


@torch.inference_mode()
def generate(model: Subject | nn.Module, prefix: Prefix, length: int, ends: Sequence[int]) -> list[int]:
    """Greedy tokens after the prompt, at most `length`, up to an end token (left out)."""
    causal = _causal_lm(model)
    cache, token, written = _own_cache(prefix), _last(prefix, causal), []
    for _ in range(length):
        token = causal(input_ids=token, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        if int(token) in ends:
            break
        written.append(int(token))
    return written


@torch.inference_mode()
def head_grams(model: Subject | nn.Module) -> Tensor:
    """(L, H, d_head, d_head) float32, W_O,h W_O,h^T of every head, adapter included as it is now switched.

    Raises:
        UnsupportedArchitecture: if a layer has no `self_attn.o_proj`.
    """
    causal = _causal_lm(model)
    decoder = find_decoder(causal)
    heads = int(decoder.config.num_attention_heads)
    grams = []
    for layer in decoder.layers:
        project = getattr(getattr(layer, "self_attn", None), "o_proj", None)
        if project is None:
            raise UnsupportedArchitecture(
                f"{type(causal).__name__}: this architecture is not covered: expected self_attn.o_proj in every layer, "
                f"found none in {type(layer).__name__}"
            )
        width = int(project.in_features)
        one = torch.eye(width, dtype=causal.dtype, device=causal.device)
        bias = project(torch.zeros_like(one[:1]))
        matrix = (project(one) - bias).float().reshape(heads, width // heads, -1)  # (H, d_head, d_model)
        grams.append(matrix @ matrix.mT)
    return torch.stack(grams)


def _blocked(causal: Any, row: QueryRow, cells: Sequence[Cell], tokens: Sequence[int]) -> Tensor:
    """One pass; cells in ascending order of layers."""
    decoder, lowest = find_decoder(causal), cells[0].layer
    blocked: dict[int, list[tuple[int, int, Span]]] = {}
    for number, cell in enumerate(cells, 1):  # row 0 is the run that nothing is blocked in
        blocked.setdefault(cell.layer, []).append((number, cell.head, cell.span))

    def grow(layer: int, batch: Tensor) -> Tensor:
        joining = blocked.get(layer, [])
        return torch.cat([batch, batch[:1].expand(len(joining), -1, -1)]) if joining else batch

    start = row.streams[None, lowest : lowest + 1]
    streams = drive_token(
        decoder, TokenRow(row.prefix.shared(), blocked, [], []), len(row.prefix.ids) - 1, start, grow, lowest
    )
    return _logits_of(causal, decoder, streams[-1][1:], list(tokens))


def _unembed(causal: Any, decoder: Any, batch: Tensor) -> Tensor:
    """(rows, vocab) float32 from (rows, 1, d_model)."""
    logits: Tensor = causal.get_output_embeddings()(decoder.norm(batch[:, 0])).float()
    return logits


def _unembedded(causal: Any, decoder: Any, batch: Tensor) -> Iterator[Tensor]:
    return (_unembed(causal, decoder, batch[at : at + MAX_UNEMBEDDED]) for at in range(0, len(batch), MAX_UNEMBEDDED))


def _logits_of(causal: Any, decoder: Any, batch: Tensor, tokens: list[int]) -> Tensor:
    """(rows, len(tokens)) float32. A plain unembedding is asked for these rows of it only: it is most of a small
    model's weights, and there is a row for every head."""
    head = causal.get_output_embeddings()
    if type(head) is nn.Linear:
        bias = None if head.bias is None else head.bias[tokens]
        return nn.functional.linear(decoder.norm(batch[:, 0]), head.weight[tokens], bias).float()
    return torch.cat([logits[:, tokens] for logits in _unembedded(causal, decoder, batch)])


def _compare(causal: Any, found: Tensor, expected: Tensor) -> None:
    difference = float((found - expected).abs().max())
    tolerance = max(1e-3, 64 * torch.finfo(causal.dtype).eps) * float(expected.std())
    if not difference <= tolerance:
        raise UnsupportedArchitecture(
            f"{type(causal).__name__}: expected attention computed for one position to give the model's own logits "
            f"within {tolerance:.2g}, found a difference of {difference:.2g}: this architecture is not covered"
        )


def _own_cache(prefix: Prefix) -> DynamicCache:
    """A cache that starts with the prefix; it grows by itself, tensors of the prefix are not written to."""
    cache = DynamicCache()
    layers: Any = prefix.cache.layers
    for index, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, index)
    return cache


def _last(prefix: Prefix, causal: Any) -> Tensor:
    return torch.tensor([[prefix.ids[-1]]], device=causal.device)


def _causal_lm(model: Any) -> Any:
    return model.causal_lm if isinstance(model, Subject) else model
