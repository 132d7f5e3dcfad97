"""Figures drawn again from the tables that the analyses have saved, without a model: `python -m interp.figures`.

    python -m interp.figures --all
    python -m interp.figures --report reports/imitation
    python -m interp.figures --list

The same tables give the same files, byte for byte, where the versions of matplotlib and its fonts are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from interp import (
    cli,
    knockout_report,
    logit_lens_report,
    lora_svd_growth,
    lora_svd_report,
    lora_svd_summary,
    patching_growth,
    patching_report,
    retention_heads_report,
)
from interp.figures import save
from interp.report_folders import FigureFolder, Report, find_reports, open_reports, read_record, read_table
from interp.verdict_rules import dig

DESCRIPTION = """Draw the figures of reports again, as .pdf and .png, from their saved tables; no model is loaded.

What other programs than those of interp have drawn is listed with its command, and left as it is."""
EXAMPLE = """python -m interp.figures --all
  python -m interp.figures --report reports/imitation --list"""
TABLE, UNRECORDED = "results.parquet", "no command recorded"


@dataclass(frozen=True)
class Tables:
    """What the figures of one folder are drawn from.

    Attributes:
        frame: what the analysis measured.
        seed: of the resampling, as the run had it.
        profile: `interp.lora_svd.profile` of the same adapter; None for an analysis that does not use it.
    """

    frame: pd.DataFrame
    summary: Mapping[str, Any]
    seed: int
    profile: pd.DataFrame | None


# analysis -> its figures by name. An analysis that is added gets a line here.
DRAWN: dict[str, Callable[[Tables], dict[str, Figure]]] = {
    "patching": lambda t: patching_report.figures(t.frame, seed=t.seed),
    "retention_heads": lambda t: retention_heads_report.figures(t.frame, t.summary),
    "logit_lens": lambda t: logit_lens_report.figures(t.frame, t.profile, seed=t.seed),
    "knockout": lambda t: knockout_report.figures(t.frame, t.seed, profile=t.profile),
    "lora_svd": lambda t: lora_svd_report.figures(t.frame, t.seed),
    "patching_growth": lambda t: {"patching_growth": patching_growth.plot(t.frame)},
    "lora_svd_growth": lambda t: {
        "growth": lora_svd_growth.plot_growth(t.frame),
        "angles": lora_svd_growth.plot_angles(t.frame),
    },
}
WITH_PROFILE = ("logit_lens", "knockout")


def redraw(part: FigureFolder) -> list[Path]:
    """Draw the figures of one folder from its tables, in place of those that are there.

    Returns:
        The files written, a `.pdf` and a `.png` for each figure.

    Raises:
        InputError: if a table that a figure needs is missing, or is about another adapter. Nothing is written then.
    """
    if part.analysis not in DRAWN:
        raise cli.InputError(f"{part.folder / 'run.json'}: analysis: expected one of {', '.join(DRAWN)}, "
                             f"found {part.analysis!r}")  # fmt: skip
    drawn = DRAWN[part.analysis](_tables(part))
    return [file for name, figure in drawn.items() for file in save(figure, part.folder / name)]


def is_drawn_here(part: FigureFolder) -> bool:
    """Whether `redraw` knows the figures of a folder."""
    return part.analysis in DRAWN


def _tables(part: FigureFolder) -> Tables:
    for name in (TABLE, "summary.json"):
        if not (part.folder / name).exists():
            raise cli.InputError(_missing(part.folder / name, part.command))
    seed = part.run.get("seed")
    if not isinstance(seed, int):
        raise cli.InputError(f"{part.folder / 'run.json'}: seed: expected a whole number, found {seed!r}")
    profile = _profile(part) if part.analysis in WITH_PROFILE else None
    return Tables(read_table(part.folder / TABLE), part.summary, seed, profile)


def _profile(part: FigureFolder) -> pd.DataFrame:
    """The sizes of the adapter's delta by layer, as the report's own SVD has them."""
    beside = part.folder.parent / "lora_svd"
    file, record = beside / TABLE, beside / "run.json"
    for needed in (file, record):
        if not needed.exists():
            raise cli.InputError(_missing(needed, "python -m interp.lora_svd"))
    found, expected = dig(read_record(record), "adapter", "sha256"), dig(part.run, "adapter", "sha256")
    if found != expected:
        raise cli.InputError(f"{record}: adapter.sha256: expected {expected} as in {part.folder / 'run.json'}, "
                             f"found {found}")  # fmt: skip
    return lora_svd_summary.profile(read_table(file))


def _missing(file: Path, command: str | None) -> str:
    return f"{file}: expected what figures are drawn from, found no such file; written by {command or UNRECORDED}"


def listing(reports: Sequence[Report]) -> str:
    """A line per figure: its file, and the command that its folder records."""
    lines = [
        f"{part.folder / name}.pdf  {part.command or UNRECORDED}"
        for report in reports
        for part in report.parts
        for name in part.figures
    ]
    return "\n".join(lines) or "no figures"


@cli.command
def main(argv: Sequence[str]) -> int:
    """Draw again, or list, the figures of one report or of all; a report that cannot be drawn does not stop others."""
    args = _parser().parse_args(argv)
    if not (args.all or args.report or args.list):
        raise cli.InputError("expected --all, --report DIR or --list, found none of them (--help lists the options)")
    if args.report:
        reports = [report for folder in args.report for report in open_reports(folder)]
    else:
        reports = find_reports(args.reports)
    if args.list:
        sys.stdout.write(listing(reports) + "\n")
        return cli.DONE
    parts = [part for report in reports for part in report.parts]
    mine = [part for part in parts if is_drawn_here(part)]
    failed = 0
    for part in cli.progress_bar(args, "figures", "folder")(mine):
        try:
            redraw(part)
        except cli.InputError as error:
            failed += 1
            sys.stderr.write(f"error: {error}\n")
    others = [part for part in parts if part.figures and not is_drawn_here(part)]
    for part in others:
        cli.say(args, f"{part.folder}: left as it is; {part.command or UNRECORDED}")
    cli.say(args, f"drawn: the figures of {len(mine) - failed} of {len(mine)} folders")
    return cli.BAD_INPUT if failed else cli.DONE


def _parser() -> argparse.ArgumentParser:
    parser = cli._Parser(
        prog="python -m interp.figures", description=DESCRIPTION, epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every report below --reports")
    which.add_argument("--report", type=Path, nargs="+", metavar="DIR", help="these reports only")
    parser.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR",
                        help="folder of all reports (default: %(default)s)")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="draw nothing: list each figure with its command")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    return parser
