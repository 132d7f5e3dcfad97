"""The programs: modules compiled once from musl's C sources, as data (`data/musl.tar.xz`, made by `env.passes.build`).

A module is one source file. Files of the same family (`sin`, `sinf`, `sinl`) are in the same split.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from env.passes.autophase import FEATURES
from env.passes.evaluator import Evaluator
from env.passes.llvm import LLVMError

SPLITS = ("train", "validation", "test")


class ProgramError(ValueError):
    """There is no such program; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Program:
    """A program that passes are ordered for.

    Attributes:
        name: the path that the agent calls it by.
        content: bitcode or textual IR.
        instructions: its instructions before any pass.
        oz_instructions: its instructions after -Oz.
        features: its AutoPhase features, in the order of `FEATURES`.
        split: one of `SPLITS`, or "" for a program of the user's.
    """

    name: str
    content: bytes = field(repr=False)
    instructions: int
    oz_instructions: int
    features: tuple[int, ...] = field(repr=False)
    split: str = ""

    @classmethod
    def measured(cls, name: str, content: bytes, evaluator: Evaluator, split: str = "") -> Program:
        """A program of which nothing is known but its bitcode or textual IR.

        Raises:
            LLVMError: if LLVM cannot read it, or -Oz fails on it, or it has no instructions.
        """
        outcome = evaluator.evaluate(content, features=True)
        if not outcome.instructions or outcome.features is None:
            raise LLVMError(f"{name}: expected a valid program with instructions, found {outcome.failure or 'none'}")
        return cls(name, content, outcome.instructions, evaluator.baseline(content), outcome.features, split)

    def named_features(self) -> dict[str, int]:
        """The features by name."""
        return dict(zip(FEATURES, self.features, strict=True))

    def over_oz(self, instructions: int) -> float:
        """OverOz, the share of -Oz's instructions that is saved: (Oz - count) / Oz. Below 0: worse than -Oz."""
        return (self.oz_instructions - instructions) / self.oz_instructions

    def over_orig(self, instructions: int) -> float:
        """OverOrig, the share of the original instructions that is saved: (original - count) / original."""
        return (self.instructions - instructions) / self.instructions


@cache
def manifest() -> dict[str, Any]:
    """Where the programs come from, and what was measured of each."""
    record: dict[str, Any] = json.loads(files("env.passes").joinpath("data/musl.json").read_text(encoding="utf-8"))
    return record


@cache
def _programs() -> dict[str, Program]:
    archive = files("env.passes").joinpath("data/musl.tar.xz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        contents = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
    programs = {}
    for record in manifest()["programs"]:
        name, content = record["name"], contents.get(record["name"], b"")
        if (found := hashlib.sha256(content).hexdigest()) != record["sha256"]:
            raise ProgramError(f"musl.tar.xz: {name}: expected sha256 {record['sha256']}, found {found}")
        counts = record["instructions"], record["oz_instructions"]
        programs[name] = Program(name, content, *counts, tuple(record["features"]), record["split"])
    return programs


def load_programs(split: str | None = None) -> tuple[Program, ...]:
    """All programs, or those of a split, in the order of their names.

    Raises:
        ProgramError: if there is no such split, or the data is damaged.
    """
    if split not in (None, *SPLITS):
        raise ProgramError(f"split: expected one of {', '.join(SPLITS)}, found {split!r}")
    return tuple(program for program in _programs().values() if split in (None, program.split))


def load_program(name: str) -> Program:
    """One program by its name, such as "musl/regex/regcomp".

    Raises:
        ProgramError: if there is none of that name, or the data is damaged.
    """
    programs = _programs()
    if name not in programs:
        raise ProgramError(f"program: expected one of the {len(programs)} in musl.json, found {name!r}")
    return programs[name]
