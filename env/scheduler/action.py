"""Action texts: `{"fuse_with_prev": true, "tile": 128, "retain": [3]}`.

Two readers. The strict one takes what the agent was told to write and nothing else. The lenient one takes what the
published environment takes, its surprises included, and raises where that one crashes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from env.scheduler.cost import TILES


class ActionError(ValueError):
    """A text is not an action; the message says what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Action:
    """One decision: fuse the current node into the open kernel or not, the kernel's tile, and what it retains."""

    fuse_with_prev: bool
    tile: int
    retain: tuple[int, ...] = ()

    def to_text(self) -> str:
        """The text that an agent writes for this action."""
        fuse = "true" if self.fuse_with_prev else "false"
        return f'{{"fuse_with_prev": {fuse}, "tile": {self.tile}, "retain": {list(self.retain)}}}'


def parse_strict(text: Any) -> Action:
    """The action that a JSON object of exactly three keys describes.

    Raises:
        ActionError: for anything else.
    """
    if not isinstance(text, str):
        raise ActionError(f"expected a text, found {type(text).__name__}")
    try:
        record = json.loads(text)
    except RecursionError:
        raise ActionError("expected a JSON object, found text nested too deeply") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number with too many digits"
        raise ActionError(f"expected a JSON object, found text that is not JSON ({reason})") from None
    if not isinstance(record, dict) or record.keys() != {"fuse_with_prev", "tile", "retain"}:
        found = "the keys " + ", ".join(record) if isinstance(record, dict) else _named(record)
        raise ActionError(f"expected an object with the keys fuse_with_prev, tile, retain, found {_cut(found)}")
    fuse, tile, retain = record["fuse_with_prev"], record["tile"], record["retain"]
    if fuse is not True and fuse is not False:
        raise ActionError(f"fuse_with_prev: expected true or false, found {_named(fuse)}")
    if type(tile) is not int or tile not in TILES:
        raise ActionError(f"tile: expected one of {', '.join(map(str, TILES))}, found {_named(tile)}")
    if not isinstance(retain, list):
        raise ActionError(f"retain: expected a list of node ids, found {_named(retain)}")
    for entry in retain:
        if type(entry) is not int:
            raise ActionError(f"retain: expected a list of node ids, found {_named(entry)} in it")
    return Action(fuse, tile, tuple(retain))


_FUSE = re.compile(r"fuse[_\s]*(?:with[_\s]*prev)?[=:\s]*(true|false|yes|no|1|0)", re.IGNORECASE)
_TILE = re.compile(r"tile[=:\s]*(\d+)", re.IGNORECASE)
_RETAIN = re.compile(r"retain[=:\s]*\[(.*?)\]", re.IGNORECASE)


def parse_lenient(text: Any) -> Action:
    """The action that the published parser makes of a text; entries of `retain` may be of any type.

    JSON is tried first (inside a code fence or not), with defaults for missing keys and Python's conversions; if that
    fails, `fuse`, `tile` and `retain` are searched in the text one by one.

    Raises:
        ActionError: where the published parser raises something.
    """
    if not isinstance(text, str):
        raise ActionError(f"expected a text, found {type(text).__name__}")
    text = text.strip()
    if text.startswith("```"):
        text = "\n".join(line for line in text.split("\n") if not line.startswith("```")).strip()
    try:
        record = json.loads(text)
    except RecursionError:
        raise ActionError("expected a JSON object, found text nested too deeply") from None
    except ValueError:
        return _search(text)
    if not isinstance(record, dict):
        raise ActionError(f"expected a JSON object, found {_named(record)}")
    try:
        tile = int(record.get("tile", 128))
        retain = tuple(record.get("retain", ()))
    except OverflowError:
        raise ActionError("tile: expected a finite number, found an infinite one") from None
    except (TypeError, ValueError):
        return _search(text)
    return Action(bool(record.get("fuse_with_prev", False)), tile, retain)


def _search(text: str) -> Action:
    fuse, tile, retain = _FUSE.search(text), _TILE.search(text), _RETAIN.search(text)
    try:
        ids = [int(part) for part in map(str.strip, retain[1].split(",")) if part] if retain else []
        return Action(
            fuse is not None and fuse[1].lower() in ("true", "yes", "1"), int(tile[1]) if tile else 128, tuple(ids)
        )
    except ValueError:
        raise ActionError("expected whole numbers of at most 4300 digits in tile and retain, found others") from None


def _named(value: Any) -> str:
    """A short name of a JSON value; never walks into containers or long numbers, which can be of any size."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a very large number"
    return _cut(json.dumps(value))


def _cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
