"""Greedy answers to chat prompts, in batches.

Rows that have ended leave the batch. Where answers resemble each other, those already known serve as guesses at the
next ones, whose tokens the model checks in one pass (speculative decoding, 2211.17192, with a list for a draft model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from interp.rows import Rows
from interp.tokens import TokenizerError

MAX_NEW_TOKENS = 48


@torch.inference_mode()
def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Mapping[str, str]]],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    guesses: Sequence[str] = (),
) -> list[str]:
    """The likeliest token again and again, up to the end of the turn.

    Args:
        model: a Hugging Face causal model, or a `PeftModel` around one, as it is switched now.
        prompts: chat messages, each ending with the user's.
        max_new_tokens: an answer that has not ended by then is cut.
        guesses: likely answers, likeliest first. What one goes on with is checked in one pass instead of being written
            token by token: the answers are the same, but for rounding, and take less time.

    Returns:
        The texts, without the token that ends the turn, in the order of the prompts.

    Raises:
        TokenizerError: if the tokenizer has no chat template.
    """
    rows = [_prompt_ids(tokenizer, prompt) for prompt in prompts]
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in guesses]
    written = _generate(model, rows, _end_tokens(model, tokenizer), max_new_tokens, expected) if rows else []
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in written]


def _generate(
    model: Any, prompts: list[list[int]], ends: set[int], most: int, guesses: list[list[int]]
) -> list[list[int]]:
    rows = Rows(model, prompts)
    if rows.windows:
        guesses = []
    written: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    pieces = [prompt[rows.shared :] for prompt in prompts]
    while running and most:
        drafts = [_draft(written[i], guesses)[: most - len(written[i]) - 1] for i in running]
        hidden = rows.feed([piece + draft for piece, draft in zip(pieces, drafts, strict=True)])
        last = 1 + max(map(len, drafts))
        likeliest = rows.logits(hidden, last).argmax(-1).tolist()  # (running, last)
        taken = []
        for i, draft, tokens in zip(running, drafts, likeliest, strict=True):
            next_tokens = tokens[last - 1 - len(draft) :]  # after the piece, and after each token of the draft
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, next_tokens, strict=False)))
            written[i] += [*draft[:right], next_tokens[right]]
            taken.append(right)
        going = [row for row, i in enumerate(running) if written[i][-1] not in ends and len(written[i]) < most]
        if guesses:
            wrong = [len(draft) - right for draft, right in zip(drafts, taken, strict=True)]
            rows.forget(torch.tensor(wrong, device=rows.device))
        if len(going) < len(running):
            rows.keep(torch.tensor(going, device=rows.device, dtype=torch.long))
        running = [running[row] for row in going]
        pieces = [[written[i][-1]] for i in running]
    return [ids[:-1] if ids and ids[-1] in ends else ids for ids in written]


def _draft(written: list[int], guesses: list[list[int]]) -> list[int]:
    """What the first guess that begins as written goes on with."""
    length = len(written)
    return next((guess[length:] for guess in guesses if len(guess) > length and guess[:length] == written), [])


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
