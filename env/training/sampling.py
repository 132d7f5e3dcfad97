"""Candidate actions from a model, for many states at once.

Generation decides only what an action leaves open (`env.training.actions`). The tokens that all prompts begin with (the
system prompt) go through the model once, each prompt once, and candidates of a state are one row as long as they have
written the same. Forced tokens are fed in one piece up to the next choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from env.training.actions import Branch
from interp.rows import Rows

TEMPERATURES = (0.9, 0.7, 0.5)


@dataclass
class Walk:
    """One candidate while it is written."""

    place: Branch
    temperature: float
    rng: Generator
    tokens: list[int]

    def choose(self, logits: Tensor) -> list[int]:
        """Take one of the children by their logits (vocab,); the tokens from there to the next choice."""
        children = list(self.place.children)
        scaled = logits[children].double().numpy() / self.temperature
        weights = np.exp(scaled - scaled.max())
        token = children[int(self.rng.choice(len(children), p=weights / weights.sum()))]
        forced, self.place = self.place.children[token].forced()
        self.tokens += [token, *forced]
        return [token, *forced]


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], trees: Sequence[Branch], rngs: Sequence[Sequence[Generator]]
) -> list[list[list[int]]]:
    """Sample actions.

    Args:
        model: a causal language model, as it is switched now.
        prompts: token ids, one prompt a state.
        trees: the actions that each state leaves open.
        rngs: for each state one generator a candidate.

    Returns:
        The candidates' tokens by state.
    """
    forced, _ = trees[0].forced()
    candidates = [
        [Walk(tree.forced()[1], temperature, rng, list(forced)) for temperature, rng in _by_thirds(state)]
        for tree, state in zip(trees, rngs, strict=True)
    ]
    rows = Rows(model, prompts)
    pieces = [(*prompt[rows.shared :], *forced) for prompt in prompts]
    walking = candidates  # by row, the walks that have written the same so far
    while True:
        logits = rows.logits(rows.feed(pieces))[:, 0].float()
        parts = [_part(walks, of_row) for walks, of_row in zip(walking, logits, strict=True)]
        going = [(i, piece, walks) for i, part in enumerate(parts) for piece, walks in part if walks[0].place.children]
        if not going:
            break
        rows.keep(torch.tensor([i for i, _, _ in going]))
        pieces, walking = [piece for _, piece, _ in going], [walks for _, _, walks in going]
    return [[walk.tokens for walk in state] for state in candidates]


def _by_thirds(rngs: Sequence[Generator]) -> Iterator[tuple[float, Generator]]:
    """The first third of the candidates at temperature 0.9, then 0.7, then 0.5."""
    for i, rng in enumerate(rngs):
        yield TEMPERATURES[len(TEMPERATURES) * i // len(rngs)], rng


def _part(walks: Sequence[Walk], logits: Tensor) -> list[tuple[tuple[int, ...], list[Walk]]]:
    """Let each walk choose; what they have written since, and who has written it."""
    parts: dict[tuple[int, ...], list[Walk]] = {}
    for walk in walks:
        parts.setdefault(tuple(walk.choose(logits)), []).append(walk)
    return list(parts.items())
