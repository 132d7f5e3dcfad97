"""Several prompts in one key/value cache, read and continued in step.

What all prompts begin with goes through the model once. Pieces are padded on the left; positions count the tokens that
a row has really read, so that it gives what it gives alone. A window of attention counts columns of the cache instead,
so a model with windows reads whole prompts and forgets nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, less the last one of the shortest, which is read for what follows it."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


class Rows:
    """Rows of tokens that a causal language model has read, as it is switched at each call.

    Attributes:
        model: the model.
        cache: full length in every layer; the model's own masks keep its windows.
        mask: (rows, columns), one where the cache's column is a token of the row.
        lengths: (rows,), the tokens of each row.
        windows: whether the model's attention has windows, so that `forget` is refused.
        shared: how many of the prompts' tokens are read already.
    """

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.cache = DynamicCache()
        self.device = next(model.parameters()).device
        self.windows = getattr(model.config.get_text_config(), "sliding_window", None) is not None
        self.shared = 0 if self.windows else shared_length(prompts)
        if self.shared:
            ids = torch.tensor([list(prompts[0][: self.shared])], device=self.device)
            model.get_decoder()(input_ids=ids, cache=self.cache, use_cache=True)
            self.cache.batch_repeat_interleave(len(prompts))
        self.mask = torch.ones(len(prompts), self.shared, dtype=torch.long, device=self.device)
        self.lengths = torch.full((len(prompts),), self.shared, device=self.device)

    def feed(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """Read each row's next tokens, at least one of each.

        Returns:
            (rows, longest, width), what the unembedding reads, padded on the left.
        """
        longest = max(map(len, pieces))
        pad = torch.tensor([longest - len(piece) for piece in pieces], device=self.device)
        padded = [[piece[0]] * (longest - len(piece)) + list(piece) for piece in pieces]
        at = torch.arange(longest, device=self.device) - pad[:, None]  # (rows, longest), negative where padded
        self.mask = torch.cat([self.mask, (at >= 0).long()], dim=1)
        hidden: Tensor = self.model.get_decoder()(
            input_ids=torch.tensor(padded, device=self.device),
            attention_mask=self.mask,
            position_ids=(self.lengths[:, None] + at).clamp(min=0),
            cache=self.cache,
            use_cache=True,
        ).last_hidden_state
        self.lengths = self.lengths + longest - pad
        return hidden

    def logits(self, hidden: Tensor, last: int = 1) -> Tensor:
        """Logits (rows, last, vocab) of the last positions of `feed`'s result.

        They are unembedded as a matrix: of a slice of three dimensions the product copies the unembedding once a row.
        """
        matrix = hidden[:, -last:].reshape(-1, hidden.shape[-1])
        logits: Tensor = self.model.get_output_embeddings()(matrix)
        return logits.view(len(hidden), last, -1)

    def forget(self, counts: Tensor) -> None:
        """Take back the last `counts` (rows,) tokens of each row.

        Raises:
            ValueError: if the model's attention has windows.
        """
        if self.windows:
            raise ValueError("forget: expected a model without windows of attention, found one with them")
        columns = torch.arange(self.mask.shape[1], device=self.device)
        self.mask = self.mask * (columns < self.mask.shape[1] - counts[:, None]).long()
        self.lengths = self.lengths - counts

    def keep(self, rows: Tensor) -> None:
        """Keep these rows, (kept,) indices, in this order; a row may be taken several times."""
        self.cache.batch_select_indices(rows)
        self.mask, self.lengths = self.mask[rows], self.lengths[rows]
