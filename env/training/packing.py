"""Log-probabilities of all candidates of many states in one forward pass.

One row a state: its prompt once, then its candidates as a tree, so that what two candidates have in common is computed
once. A token attends to the prompt and to the tokens that it continues; its position is that of a plain sequence. What
all prompts begin with (the system prompt) goes through the model once for all rows. All of this is exact: the plain
form, one sequence a candidate, gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from interp.rows import shared_length


@dataclass(frozen=True)
class Tree:
    """Candidates as a tree of tokens, parents before children.

    Attributes:
        tokens: (n,) token ids.
        parents: (n,) index of the token that each one continues; -1 for the prompt.
        depths: (n,) how many tokens of the candidate stand before it.
        paths: for each candidate the indices of its tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, candidates: Sequence[Sequence[int]]) -> Tree:
        """The tree of candidates, each a sequence of token ids."""
        found: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        paths = []
        for candidate in candidates:
            parent, path = -1, []
            for depth, token in enumerate(candidate):
                if (parent, token) not in found:
                    found[parent, token] = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depth)
                parent = found[parent, token]
                path.append(parent)
            paths.append(tuple(path))
        return cls(tuple(tokens), tuple(parents), tuple(depths), tuple(paths))

    def ancestors(self) -> Tensor:
        """(n, n) bool: which tokens each one may attend to, itself included."""
        mask = torch.eye(len(self.tokens), dtype=torch.bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                mask[i] |= mask[parent]
        return mask


def log_probs(model: Any, prompts: Sequence[Sequence[int]], trees: Sequence[Tree]) -> list[list[Tensor]]:
    """The log-probability of every token of every candidate, given its prompt and the tokens before it.

    Args:
        model: a causal language model, as it is switched now.
        prompts: token ids, one prompt a state.
        trees: the candidates of each state.

    Returns:
        By state and candidate, (tokens of the candidate,) in float32; gradients flow if they are enabled.
    """
    decoder = model.get_decoder()
    shared = shared_length(prompts)
    cache = DynamicCache()
    if shared:
        decoder(input_ids=torch.tensor([list(prompts[0][:shared])]), cache=cache, use_cache=True)
        cache.batch_repeat_interleave(len(prompts))
    rows = [(prompt[shared:], tree) for prompt, tree in zip(prompts, trees, strict=True)]
    ids, positions, mask = _batch(rows, shared)
    hidden = decoder(
        input_ids=ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True
    ).last_hidden_state
    # The token before: its parent in the tree, or the prompt's last one.
    before = [
        torch.tensor([len(prompt) + parent if parent >= 0 else len(prompt) - 1 for parent in tree.parents])
        for prompt, tree in rows
    ]
    states = torch.cat([hidden[row, where] for row, where in enumerate(before)])
    logits = model.get_output_embeddings()(states).float()  # (all tokens of all trees, vocab)
    targets = torch.tensor([token for tree in trees for token in tree.tokens])
    found = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    by_tree = found.split([len(tree.tokens) for tree in trees])
    return [[of_tree[list(path)] for path in tree.paths] for of_tree, tree in zip(by_tree, trees, strict=True)]


def _batch(rows: Sequence[tuple[Sequence[int], Tree]], shared: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions (rows, T) and mask (rows, 1, T, shared + T), padded on the right."""
    longest = max(len(prompt) + len(tree.tokens) for prompt, tree in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    positions = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.eye(longest, dtype=torch.bool).repeat(len(rows), 1, 1)  # padding attends to itself
    for row, (prompt, tree) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(tree.tokens)
        ids[row, :end] = torch.tensor([*prompt, *tree.tokens])
        positions[row, :end] = shared + torch.tensor([*range(start), *(start + depth for depth in tree.depths)])
        mask[row, :start, :start] = torch.ones(start, start, dtype=torch.bool).tril()
        mask[row, start:end, :start] = True
        mask[row, start:end, start:end] = tree.ancestors()
    everything = torch.ones(len(rows), longest, shared, dtype=torch.bool)
    return ids, positions, torch.cat([everything, mask], dim=2)[:, None]
