"""Which reports there are below a folder, and which figures each has, as the gallery shows and `interp.figures` draws.

    reports/imitation/           verdict.json, index.html: an adapter's report, of the folders below it
    reports/ep050-ep400/         comparison.json, index.html: of several adapters
    reports/environment/         a folder with figures or a record of its own, of whichever command

A record is `run.json`, and where there is none the `summary.json` that names its `command`. A figure is a pair of files
`NAME.pdf` and `NAME.png`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from interp.cli import InputError

WHOLE = {"verdict.json": "adapter", "comparison.json": "comparison"}  # the file that a report is known by -> its kind


@dataclass(frozen=True)
class FigureFolder:
    """A folder that one command has filled.

    Attributes:
        analysis: what `run.json` calls it; None if it has no `run.json` of an analysis of this package.
        figures: names of the figures, sorted.
        run, summary: the records; empty where there is none.
    """

    folder: Path
    analysis: str | None
    figures: tuple[str, ...]
    run: Mapping[str, Any] = field(repr=False)
    summary: Mapping[str, Any] = field(repr=False)

    @property
    def command(self) -> str | None:
        """The command that filled it, as it was recorded; None if it was not."""
        return self.run.get("command") or self.summary.get("command")

    @property
    def finished(self) -> str | None:
        """When, as it was recorded (ISO 8601); None if it was not."""
        return self.run.get("finished")


@dataclass(frozen=True)
class Report:
    """An adapter's report, a comparison of adapters, or a folder that stands alone (its only part).

    Attributes:
        name: its path below the folder of all reports.
        kind: `adapter`, `comparison` or `alone`.
        parts: its folders, sorted by name.
        record: of `verdict.json` or `comparison.json`; empty for a folder that stands alone.
    """

    folder: Path
    name: str
    kind: str
    parts: tuple[FigureFolder, ...]
    record: Mapping[str, Any] = field(repr=False)

    @property
    def page(self) -> Path | None:
        """Its page, None if it has none."""
        page = self.folder / "index.html"
        return page if page.exists() else None


def find_reports(root: Path) -> list[Report]:
    """All reports below a folder, sorted by name; the folder itself is none.

    Raises:
        InputError: if there is no such folder, or a record cannot be read.
    """
    if not root.is_dir():
        raise InputError(f"{root}: expected a folder of reports, found none")
    return [report for folder in _folders(root) for report in _reports(folder, root)]


def open_reports(folder: Path) -> list[Report]:
    """The report in one folder; where it has no verdict, all that stands alone in it and below.

    Raises:
        InputError: if there is none, or a record cannot be read.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: expected the folder of a report, found none")
    found = list(_reports(folder, folder.parent))
    if not found:
        raise InputError(f"{folder}: expected the folder of a report, found no figure and no record in it")
    return found


def read_record(file: Path) -> dict[str, Any]:
    """A JSON object in a file; empty if there is no such file.

    Raises:
        InputError: if it cannot be read.
    """
    return read_object(file) if file.exists() else {}


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        InputError: if it holds none.
        OSError: if there is no such file.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: expected JSON, found {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{file}: expected a JSON object, found a {type(record).__name__}")
    return record


def read_table(file: Path) -> pd.DataFrame:
    """A table in a Parquet file.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: expected a table as Parquet, found {error}") from error


def _reports(folder: Path, root: Path) -> Iterator[Report]:
    """The report in a folder; or what stands alone in it and below."""
    name = folder.relative_to(root).as_posix()
    for file, kind in WHOLE.items():
        if (folder / file).exists():
            parts = tuple(part for inner in _folders(folder) if (part := _part(inner)))
            yield Report(folder, name, kind, parts, read_record(folder / file))
            return
    if part := _part(folder):
        yield Report(folder, name, "alone", (part,), {})
    for inner in _folders(folder):
        yield from _reports(inner, root)


def _part(folder: Path) -> FigureFolder | None:
    figures = tuple(sorted(file.stem for file in folder.glob("*.pdf") if file.with_suffix(".png").exists()))
    run, summary = read_record(folder / "run.json"), read_record(folder / "summary.json")
    if not (figures or run or summary):
        return None
    return FigureFolder(folder, run.get("analysis"), figures, run, summary)


def _folders(folder: Path) -> list[Path]:
    """What is left of an interrupted run is no report."""
    inside = (path for path in folder.iterdir() if path.is_dir())
    return sorted(path for path in inside if path.suffix != ".partial" and not path.name.startswith("."))
