"""The actions that a state leaves open, as a tree of tokens.

Only three slots of an action's text are free: true or false, the tile, and the retain list. Everything else is forced.
The tree holds the texts of all actions; a walk from the root chooses a child where there are several, and a token where
there is only one is no choice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, combinations, product

from transformers import PreTrainedTokenizerBase

from env.scheduler.action import Action
from env.scheduler.cost import TILES

MOST_LISTED = 6


def listable(observation: str) -> tuple[int, ...]:
    """The ids that a retain list may name with effect, at most `MOST_LISTED`: of what is in fast memory, in the open
    kernel, the current node or read by it, those with uses left first, then the newest."""
    seen = json.loads(observation)
    node = seen["current_node"]
    info = seen.get("current_node_info") or seen["nodes"][node]
    uses = {int(i): count for i, count in seen["future_uses"].items()}
    ids = {*seen["fast_mem"], *seen["current_group"]["node_ids"], *info["inputs"], node}
    left = {i: uses[i] - info["inputs"].count(i) for i in ids}
    return tuple(sorted(sorted(ids, key=lambda i: (left[i] <= 0, -i))[:MOST_LISTED]))


class Branch:
    """A place in the tree: the tokens that may come next. A leaf has none."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[int, Branch] = {}

    def add(self, tokens: Sequence[int], end: Branch | None = None) -> None:
        """Grow a path below this place. With `end`, the last token leads there."""
        place = self
        for token in tokens[:-1]:
            place = place.children.setdefault(token, Branch())
        place.children.setdefault(tokens[-1], end if end is not None else Branch())

    def forced(self) -> tuple[list[int], Branch]:
        """The tokens that are no choice, and the place they lead to."""
        tokens: list[int] = []
        place = self
        while len(place.children) == 1:
            ((token, place),) = place.children.items()
            tokens.append(token)
        return tokens, place


class ActionTokens:
    """Actions as tokens, the end of the turn included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end = str(tokenizer.eos_token)
        empty, full = (self._ids(Action(True, 128, retain)) for retain in ((), (1,)))
        # The list's tokens are those from the first one that depends on what is in it.
        self._tail = len(empty) - next(i for i, (a, b) in enumerate(zip(empty, full, strict=False)) if a != b)
        self.tree = lru_cache(maxsize=4096)(self._tree)

    def tokens(self, action: Action) -> list[int]:
        """The tokens of an action's text and of the end of the turn."""
        return self._ids(action)

    def action_text(self, tokens: Sequence[int]) -> str:
        """The text of an action's tokens."""
        return str(self.tokenizer.decode(tokens)).removesuffix(self.end)

    def _tree(self, ids: tuple[int, ...]) -> Branch:
        """All actions whose list names some of these ids, in ascending order."""
        lists = Branch()
        head = len(self._ids(Action(True, 128))) - self._tail
        for retain in chain.from_iterable(combinations(ids, size) for size in range(len(ids) + 1)):
            lists.add(self._ids(Action(True, 128, retain))[head:])
        root = Branch()
        for fuse, tile in product((True, False), TILES):
            tokens = self._ids(Action(fuse, tile))
            root.add(tokens[: -self._tail], end=lists)
        return root

    def _ids(self, action: Action) -> list[int]:
        ids: list[int] = self.tokenizer(action.to_text() + self.end, add_special_tokens=False)["input_ids"]
        return ids
