"""Greedy answers to chat prompts, in batches.

Prompts are padded on the left; positions count from each prompt's own first token, so that a padded row gives what it
gives alone. Rows that have ended leave the batch. At every step only the last position is unembedded, and only the new
tokens go through the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from interp.tokens import TokenizerError

MAX_NEW_TOKENS = 48


@torch.inference_mode()
def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Mapping[str, str]]],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """The likeliest token again and again, up to the end of the turn.

    Args:
        model: a Hugging Face causal model, or a `PeftModel` around one, as it is switched now.
        prompts: chat messages, each ending with the user's.
        max_new_tokens: an answer that has not ended by then is cut.

    Returns:
        The texts, without the token that ends the turn, in the order of the prompts.

    Raises:
        TokenizerError: if the tokenizer has no chat template.
    """
    rows = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    ends = torch.tensor(sorted(_end_tokens(model, tokenizer)), device=_device(model))
    written = _generate(model, rows, ends, max_new_tokens) if rows else []
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]


def _generate(model: Any, rows: list[list[int]], ends: Tensor, max_new_tokens: int) -> list[list[int]]:
    longest = max(map(len, rows))
    pads = [longest - len(row) for row in rows]
    ids = torch.tensor([[row[0]] * pad + row for row, pad in zip(rows, pads, strict=True)], device=ends.device)
    at = torch.arange(longest, device=ends.device) - torch.tensor(pads, device=ends.device)[:, None]  # (rows, T)
    mask = (at >= 0).long()
    positions = at.clamp(min=0)
    cache = DynamicCache()  # full length in every layer; the model's masks keep its windows
    written: list[list[int]] = [[] for _ in rows]
    running = list(range(len(rows)))
    for _ in range(max_new_tokens):
        hidden = model.get_decoder()(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
        ).last_hidden_state
        # Of rows that are not contiguous, as a slice of positions is, the product would copy the unembedding for each.
        tokens = model.get_output_embeddings()(hidden[:, -1]).argmax(-1)  # (rows still running,)
        kept = (~torch.isin(tokens, ends)).nonzero().flatten()
        running = [running[row] for row in kept.tolist()]
        if not running:
            break
        if len(kept) < len(tokens):
            cache.batch_select_indices(kept)
        for row, token in zip(running, tokens[kept].tolist(), strict=True):
            written[row].append(token)
        ids, positions = tokens[kept, None], positions[kept, -1:] + 1
        mask = torch.cat([mask[kept], torch.ones_like(ids)], dim=1)
    return written


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Mapping[str, str]]) -> list[int]:
    """The rendered chat, whose special tokens are the template's own and are not added again."""
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "chat_template: expected a tokenizer that has one, found none; use a chat model's tokenizer"
        )
    text = tokenizer.apply_chat_template([dict(m) for m in prompt], tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _end_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """What ends a turn: the tokenizer's end token, and those of the model's generation settings."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device
