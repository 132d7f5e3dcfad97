"""The actions: 124 passes of LLVM 10 and -Oz, as the paper names them, and what LLVM 20 runs for each.

The map is data (`data/passes.json`). A pass is `same` (its name is still known), `renamed`, a `substitute` (it is gone,
and another one does its work and more) or `none`: it has no successor, and an action that names it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

OZ = "-Oz"
OZ_PIPELINE = "default<Oz>"
KINDS = ("same", "renamed", "substitute", "none")


class PassError(ValueError):
    """Something is not a sequence of passes; the message says what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One action.

    Attributes:
        flag: its name in the paper, as in `opt --sroa` of LLVM 10.
        pipeline: what LLVM 20 runs, or None.
        kind: one of `KINDS`.
        note: why, where that is not plain.
    """

    flag: str
    pipeline: str | None
    kind: str
    note: str = ""


@cache
def all_passes() -> tuple[Pass, ...]:
    """The 124 passes in the paper's order."""
    text = files("env.passes").joinpath("data/passes.json").read_text(encoding="utf-8")
    return tuple(Pass(**record) for record in json.loads(text)["passes"])


@cache
def pipelines_by_flag() -> dict[str, str]:
    """What LLVM 20 runs for each flag that it can run, -Oz included."""
    return {p.flag: p.pipeline for p in all_passes() if p.pipeline} | {OZ: OZ_PIPELINE}


@cache
def runnable() -> tuple[str, ...]:
    """The flags of the passes that LLVM 20 can run, without -Oz."""
    return tuple(p.flag for p in all_passes() if p.pipeline)


def pipelines(sequence: Sequence[Any]) -> tuple[str, ...]:
    """What LLVM 20 runs for a sequence of flags, one pipeline a flag. One dash or two make no difference.

    Raises:
        PassError: if an entry is no flag of the paper, or has no successor.
    """
    return tuple(_pipeline(flag) for flag in sequence)


def _pipeline(flag: Any) -> str:
    if not isinstance(flag, str):
        raise PassError(f"pass: expected a name such as --sroa, found {type(flag).__name__}")
    by_name = _by_name()
    name = flag.lstrip("-")
    if not flag.startswith("-") or name not in by_name:
        raise PassError(f"pass: expected one of the {len(by_name)} known, such as --sroa, found {flag[:60]!r}")
    pipeline = by_name[name]
    if pipeline is None:
        note = next(p.note for p in all_passes() if p.flag.lstrip("-") == name)
        raise PassError(f"pass: {flag} has no successor in LLVM 20 ({note})")
    return pipeline


@cache
def _by_name() -> dict[str, str | None]:
    return {p.flag.lstrip("-"): p.pipeline for p in all_passes()} | {OZ.lstrip("-"): OZ_PIPELINE}
