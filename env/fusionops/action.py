"""Action texts: `SCHEDULE ops=[0,1] config=[128,128,1] retain=[2] traversal=[0,1,3,2]`.

What the published parser takes is taken, its surprises included. The word SCHEDULE is not needed, text around the parts
is passed over, and of each part the first mention counts. Only `ops` can make a text unreadable; any other part that is
bad is as good as missing. A missing config is the native tile with k = 1, so that a matmul left without one runs a
reduction step for every single element of its inner dimension.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Config = tuple[int, int, int]

_OPS = re.compile(r"ops\s*=\s*(?:\[([^\]]*)\]|(\d[\d,\s]*))")
_CONFIG = re.compile(r"config\s*=\s*\[([^\]]*)\]")
_RETAIN = re.compile(r"retain\s*=\s*\[([^\]]*)\]")
_TRAVERSAL = re.compile(r"traversal\s*=\s*\[([^\]]*)\]")


class ActionError(ValueError):
    """A text is not an action; the message says what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Action:
    """One kernel.

    Attributes:
        ops: ids of the operations that it runs.
        config: width and height of a tile and depth of a reduction step, elements.
        retain: ids of the tensors that stay in fast memory when it ends.
        traversal: tile indices in the order in which they run; None: row by row.
    """

    ops: tuple[int, ...]
    config: Config
    retain: tuple[int, ...] = ()
    traversal: tuple[int, ...] | None = None

    def to_text(self) -> str:
        """The text that an agent writes for this action."""
        text = f"SCHEDULE ops={_listed(self.ops)} config={_listed(self.config)} retain={_listed(self.retain)}"
        return text if self.traversal is None else f"{text} traversal={_listed(self.traversal)}"


def parse_action(text: Any, native: tuple[int, int] = (128, 128)) -> Action:
    """The action that a text means.

    Args:
        native: width and height of the tile that a missing config stands for.

    Raises:
        ActionError: if the text names no ops, or is no text at all (there the published parser crashes).
    """
    if not isinstance(text, str):
        raise ActionError(f"expected a text, found {type(text).__name__}")
    found = _OPS.search(text)
    if found is None:
        raise ActionError("expected ops=[ids], found no such part")
    ops = _integers(found[1] if found[1] is not None else found[2], skip_empty=True)
    if ops is None:
        raise ActionError("expected whole numbers in ops=[ids], found something else")
    retain, traversal = _part(_RETAIN, text, skip_empty=True), _part(_TRAVERSAL, text)
    return Action(ops, _config(_part(_CONFIG, text), native), retain or (), traversal or None)


def _config(numbers: tuple[int, ...] | None, native: tuple[int, int]) -> Config:
    match numbers:
        case (width, height, depth):
            return width, height, depth
        case (width, height):
            return width, height, 1
    return *native, 1


def _part(pattern: re.Pattern[str], text: str, *, skip_empty: bool = False) -> tuple[int, ...] | None:
    found = pattern.search(text)
    return _integers(found[1], skip_empty=skip_empty) if found else None


def _integers(text: str, *, skip_empty: bool = False) -> tuple[int, ...] | None:
    """The numbers of a list, as Python reads them; None if one is no whole number (or has over 4300 digits)."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip() or not skip_empty)
    except ValueError:
        return None


def _listed(numbers: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, numbers)) + "]"
