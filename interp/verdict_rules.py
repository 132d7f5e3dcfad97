"""What the rules of a verdict are made of: an interval read against a band, and a step that says what was read.

An interval is what `interp.stats.Interval.to_json` writes. Read against a band around 0 it lies inside, or beyond it on
one side, or neither can be said. Both claims need the whole interval, so that a wider interval never makes a claim
that a narrower one did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from interp.flip import show
from interp.stats import LEVEL, Interval

Size = Literal["inside", "beyond", "unclear"]
Record = Mapping[str, Any]

# An interval is taken over the resamples in which its statistic is defined; with more than this share of them lost it
# no longer says what it seems to.
MAX_UNDEFINED = 1 - LEVEL


@dataclass(frozen=True)
class Reason:
    """One step: a rule in words, the numbers that it was applied to, and whether it holds; None if that is open."""

    rule: str
    holds: bool | None
    numbers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def ends(interval: Record | None) -> tuple[float, float]:
    """(low, high) of an interval; everything from -inf to inf where there is none."""
    if interval is None or interval.get("low") is None or interval.get("high") is None:
        return -math.inf, math.inf
    if (interval.get("undefined") or 0.0) > MAX_UNDEFINED:
        return -math.inf, math.inf
    return float(interval["low"]), float(interval["high"])


def size(interval: Record | None, band: float) -> Size:
    """Where an interval lies: `inside` (-band, band), `beyond` it on one side, or `unclear`."""
    low, high = ends(interval)
    if -band < low and high < band:
        return "inside"
    return "beyond" if low >= band or high <= -band else "unclear"


def is_inside(interval: Record | None, band: float) -> bool | None:
    """Whether an interval lies inside the band; None where it is unclear."""
    found = size(interval, band)
    return None if found == "unclear" else found == "inside"


def is_beyond(interval: Record | None, band: float) -> bool | None:
    """Whether an interval lies beyond the band; None where it is unclear."""
    found = size(interval, band)
    return None if found == "unclear" else found == "beyond"


def is_above(interval: Record | None, threshold: float) -> bool | None:
    """Whether an interval lies above a threshold; None where the threshold is in it."""
    low, high = ends(interval)
    if low > threshold:
        return True
    return False if high < threshold else None


def dig(record: Any, *keys: str) -> Any:
    """What stands under a path of keys; None where a key is missing or leads to nothing."""
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    return record


def shown(interval: Record | None, digits: int = 2) -> str:
    """`12.39 [11.29, 13.40]`, or `not measured`."""
    if interval is None:
        return "not measured"
    numbers = (interval.get(name) for name in ("estimate", "low", "high", "undefined"))
    return show(Interval(*(math.nan if number is None else number for number in numbers)), digits)
