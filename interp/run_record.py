"""The folder that an analysis writes: results as they come, so that a run can be resumed, and what was run.

results.parquet  the tidy frame           pairs.jsonl     the pairs used
summary.json     the result               tokens.parquet  the token ids that were really fed
<figure>.pdf, .png                        run.json        command, versions, identities, what was left out
results.partial/ one file per pair, named by the pair's contents; read by --resume, and free to be deleted

One run at a time fills a folder: it holds a lock on `results.partial/lock`, which ends with its process.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

import pandas as pd
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerBase

from counterfactuals import CounterfactualPair, write_pairs
from interp import engines
from interp.cli import InputError, Progress
from interp.figures import save
from interp.report_folders import read_record, read_table
from interp.tokens import EncodedPair, encode_pairs

PACKAGES = ("torch", "transformers", "peft", "transformer-lens", "tokenizers", "numpy", "pandas", "scipy", "matplotlib")


@dataclass(frozen=True)
class PairPlan:
    """The pairs of a run, checked: those that are used, both as text and as tokens, and those that are left out."""

    pairs: tuple[CounterfactualPair, ...]
    encoded: tuple[EncodedPair, ...]
    left_out: tuple[tuple[str, str], ...]  # (id, reason)

    @classmethod
    def make(cls, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[CounterfactualPair]) -> PairPlan:
        """Encode pairs.

        Raises:
            InputError: if none can be used, with the reasons.
            TokenizerError: if the tokenizer can encode none.
        """
        encoded, left_out = encode_pairs(tokenizer, pairs)
        unused = {pair for pair, _ in left_out}
        plan = cls(tuple(pair for pair in pairs if pair.id not in unused), tuple(encoded), tuple(left_out))
        if not encoded:
            raise InputError(f"pairs: expected at least one that can be used, found {plan.reasons()}")
        return plan

    def left_out_records(self) -> list[dict[str, str]]:
        """The pairs left out, ready for JSON."""
        return [{"id": pair, "reason": reason} for pair, reason in self.left_out]

    def reasons(self) -> str:
        """`none`, or why pairs were left out and how many: `2 (length differs: 2)`."""
        counts = Counter(reason for _, reason in self.left_out)
        listed = ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
        return f"{len(self.left_out)} ({listed})" if counts else "none"


class Identified(Protocol):
    """What a run is about: a `Subject`, or an `AdapterIdentity` where no model is loaded."""

    @property
    def name(self) -> str:
        """Of the adapter's folder."""

    @property
    def adapter_sha256(self) -> str:
        """Of the adapter's weights and configuration."""

    @property
    def base_identity(self) -> Mapping[str, str | None]:
        """The base model's `name` and `sha256`, and `why` where that is None."""


@dataclass(frozen=True)
class AdapterIdentity:
    """An adapter of which the files alone are read, with the attributes of a `Subject` that a record holds.

    `base_identity` is that of a base model, or has a `sha256` of None and the reason as `why`.
    """

    name: str
    adapter_sha256: str
    base_identity: Mapping[str, str | None]


@dataclass(frozen=True)
class RunFolder:
    """`OUT/<adapter folder's name>/<analysis>/` while a run fills it."""

    folder: Path
    setting: Mapping[str, Any]
    args: argparse.Namespace
    argv: tuple[str, ...]
    started: float  # seconds, of the monotonic clock
    command: str  # the module of the command, which may be another than the analysis
    engine: engines.Engine
    lock: IO[str] = field(repr=False)  # held while it is open

    @classmethod
    def open(
        cls,
        analysis: str,
        args: argparse.Namespace,
        argv: Sequence[str],
        subject: Identified,
        *,
        command: str | None = None,
    ) -> RunFolder:
        """Make the folder and lock it. Without --resume, what an interrupted run left in it is dropped.

        The lock is held until `finish`, an error while pairs are measured, or the end of the process.

        Raises:
            InputError: if another run is filling the folder; with --resume, if what is there was made by another
                adapter, base or precision.
            OSError: if the folder cannot be written.
        """
        setting = {
            "analysis": analysis,
            "adapter": {"name": subject.name, "sha256": subject.adapter_sha256},
            "base": dict(subject.base_identity),
            "device": torch.device(args.device).type,
            "dtype": args.dtype,
            "load_in_4bit": args.load_in_4bit,
            "versions": _versions(),
        }
        folder, engine = args.out / subject.name / analysis, engines.make(args, setting)
        lock = _claimed(folder, setting, args.resume)
        return cls(folder, setting, args, tuple(argv), time.monotonic(), command or analysis, engine, lock)

    @property
    def partial(self) -> Path:
        """Where results are kept until the run is whole."""
        return self.folder / "results.partial"

    def collect(
        self, pairs: Sequence[EncodedPair], measure_pair: Callable[[EncodedPair], pd.DataFrame], progress: Progress
    ) -> pd.DataFrame:
        """Measure every pair that has not been measured yet, keep each as soon as it is done, and return them all.

        Raises:
            InputError: if a result that was kept cannot be read.
            OSError: if one cannot be written.
        """
        files = [self.partial / f"{_content_key(pair)}.parquet" for pair in pairs]
        missing = {file: pair for file, pair in zip(files, pairs, strict=True) if not file.exists()}
        measured = self.engine.measure(measure_pair, list(missing.values()))
        names = list(missing)
        try:
            for _, (index, frame) in zip(progress(names), measured, strict=True):
                unfinished = names[index].with_suffix(".unfinished")
                with _writing(unfinished):
                    frame.to_parquet(unfinished, index=False)
                    unfinished.replace(names[index])
            return pd.concat([_read_kept(file) for file in files], ignore_index=True)
        except BaseException:
            self.lock.close()  # a process that goes on, as a notebook does, can run it again
            raise

    def finish(
        self, plan: PairPlan | None, frame: pd.DataFrame, summary: Mapping[str, Any], figures: Mapping[str, Figure]
    ) -> None:
        """Write everything, and unlock the folder. Without a plan: no pairs.

        `run.json` comes last, so that a folder that has it is whole.

        Raises:
            OSError: if a file cannot be written.
        """
        with self.lock, _writing(self.folder):
            record_file = self.folder / "run.json"
            record_file.unlink(missing_ok=True)
            frame.to_parquet(self.folder / "results.parquet", index=False)
            _write_json(self.folder / "summary.json", summary)
            for stem, figure in figures.items():
                save(figure, self.folder / stem)
            if plan is not None:
                write_pairs(plan.pairs, self.folder / "pairs.jsonl")
                token_table(plan.encoded).to_parquet(self.folder / "tokens.parquet", index=False)
            else:  # what an earlier run with pairs left would pass for this one's
                for name in ("pairs.jsonl", "tokens.parquet"):
                    (self.folder / name).unlink(missing_ok=True)
            _write_json(record_file, self._record(plan))

    def _record(self, plan: PairPlan | None) -> dict[str, Any]:
        return {
            "command": shlex.join(["python", "-m", f"interp.{self.command}", *self.argv]),
            **self.setting,
            "git": _git(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "engine": self.engine.record(),
            "seed": self.args.seed,
            "pairs": self._pairs_record(plan) if plan is not None else None,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_seconds": round(time.monotonic() - self.started, 2),
            "peak_memory_bytes": _peak_memory(),
            "peak_device_memory_bytes": _peak_device_memory(self.args.device),
        }

    def _pairs_record(self, plan: PairPlan) -> dict[str, Any]:
        source = self.args.pairs
        return {
            "source": str(source) if source else "generated",
            "source_sha256": _sha256(source) if source else None,
            "used": len(plan.encoded),
            "used_sha256": _sha256(self.folder / "pairs.jsonl"),
            "groups": len({pair.group for pair in plan.encoded}),
            "left_out": plan.left_out_records(),
        }


def _claimed(folder: Path, setting: Mapping[str, Any], resume: bool) -> IO[str]:
    """The lock file of a folder that is this run's alone, with the results of this setting in it, or none."""
    partial = folder / "results.partial"
    with _writing(folder):
        partial.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder, partial / "lock")
        try:
            file = partial / "setting.json"
            if not (resume and file.exists()):
                file.unlink(missing_ok=True)  # first: results without a setting belong to no run
                for left in partial.iterdir():
                    if left.name != "lock":
                        left.unlink()
                _write_json(file, setting)
            found = read_record(file)
            if changed := [key for key in setting if found.get(key) != setting[key]]:
                key = changed[0]
                raise InputError(
                    f"{file}: {key}: expected {setting[key]} as in this run, found {found.get(key)}; "
                    f"a run without --resume starts over"
                )
        except BaseException:
            lock.close()
            raise
    return lock


def _locked(folder: Path, file: Path) -> IO[str]:
    """The lock file of a folder, open and locked. The system unlocks it when the process ends, however it ends."""
    lock = file.open("a", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError(f"{folder}: expected no other run in this folder, found one that is filling it") from None
    return lock


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """An OSError that does not say where, as of a write to a full disk, says it on leaving."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(place)) from error


def _read_kept(file: Path) -> pd.DataFrame:
    try:
        return read_table(file)
    except InputError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{reason}; without this file --resume measures it again") from error


def token_table(encoded: Sequence[EncodedPair]) -> pd.DataFrame:
    """One row per pair: the token ids fed, `ids_a` and `ids_b` up to the decision, `answer` and `foil` after it."""
    rows = []
    for pair in encoded:
        row = {field.name: getattr(pair, field.name) for field in fields(pair)}
        row |= {name: list(row[name]) for name in ("ids_a", "ids_b", "answer", "foil")}
        row |= {
            "spans": json.dumps(dict(pair.spans)),
            "decision": pair.decision,
            "first_difference": pair.first_difference,
        }
        rows.append(row)
    return pd.DataFrame(rows)


def _content_key(pair: EncodedPair) -> str:
    """A name that two pairs share only if all that is fed and recorded of them is the same."""
    content = {field.name: getattr(pair, field.name) for field in fields(pair)}
    return hashlib.sha256(json.dumps(content, default=dict, sort_keys=True).encode()).hexdigest()[:32]


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _git() -> dict[str, Any]:
    """The revision of this package's source and whether tracked files differ from it, or why it is not known."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        revision = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return {"revision": None, "why": f"git gave none ({type(error).__name__})"}
    return {"revision": revision, "modified": bool(changes.stdout.strip())}


def _peak_memory() -> int:
    """Bytes, of this process since it began; the system counts in kilobytes except on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _peak_device_memory(device: str) -> int | None:
    """Bytes that tensors took on a CUDA device, None on others."""
    return torch.cuda.max_memory_allocated(device) if torch.device(device).type == "cuda" else None
