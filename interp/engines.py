"""Who measures the pairs of a run: this process, one after the other, or the workers of a Ray cluster.

An analysis hands over a function and its items, pairs as a rule, and gets back a frame for each; which engine did it is
not seen in the numbers (`interp.ray_engine` says when that is exact).
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pandas as pd

LOCAL, RAY = "local", "ray"

Measure = Callable[[Any], pd.DataFrame]


class Engine(Protocol):
    """Measures items, each by itself."""

    def measure(self, function: Measure, items: Sequence[Any]) -> Iterator[tuple[int, pd.DataFrame]]:
        """(index of the item, its frame) of every item once, in the order in which they get done."""

    def record(self) -> dict[str, Any]:
        """What `run.json` says of the engine: its `name`, and of Ray the number of `workers` that measured."""


class Local:
    """This process, in the order given."""

    def measure(self, function: Measure, items: Sequence[Any]) -> Iterator[tuple[int, pd.DataFrame]]:
        """An item is measured when its frame is asked for."""
        return ((index, function(item)) for index, item in enumerate(items))

    def record(self) -> dict[str, Any]:
        """The name alone."""
        return {"name": LOCAL}


def make(args: argparse.Namespace, setting: Mapping[str, Any]) -> Engine:
    """The engine that `--engine` names; nothing is started before there is something to measure.

    Args:
        args: of a parser with the common options; without an `engine`, the local one.
        setting: of the run (`interp.run_record.RunFolder`), which other machines have to agree with.
    """
    if getattr(args, "engine", LOCAL) == LOCAL:
        return Local()
    from interp.ray_engine import Ray

    return Ray(args, setting)


def engine_name(text: str) -> str:
    """An argument of `--engine`, if it can be had.

    Raises:
        argparse.ArgumentTypeError: if there is no such engine, or its package is not installed.
    """
    if text not in (LOCAL, RAY):
        raise argparse.ArgumentTypeError(f"expected {LOCAL} or {RAY}, found {text!r}")
    if text == RAY and importlib.util.find_spec("ray") is None:
        raise argparse.ArgumentTypeError("expected ray (pip install 'scheduler-interp[cluster]'), found no package")
    return text
