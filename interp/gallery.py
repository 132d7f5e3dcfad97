"""The page that leads to all reports, `reports/index.html`: verdicts, main figures, and the command behind each figure.

    python -m interp.gallery

Made from the files of the reports, without a model; `python -m interp` makes it anew when it is done. One file: small
figures are inlined, the links lead to the pages and to the figures as PDF. What no file records is said not to be.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from interp import cli, comparison
from interp.redraw import is_drawn_here
from interp.report import render, typeset
from interp.report_folders import FigureFolder, Report, find_reports
from interp.report_texts import SECTIONS, FigureText
from interp.verdict_rules import dig, shown

KINDS = ("adapter", "comparison", "alone")  # in the order of the page
THUMBNAIL, SHARPER, COLOURS = 176, 2, 96  # CSS pixels high; a small picture for a dense screen; of its palette
DESCRIPTION = "Write index.html in the folder of all reports: a page that leads to each of them."
EXAMPLE = "python -m interp.gallery --reports reports"
TEXTS: Mapping[tuple[str, str], FigureText] = {
    **{(name, stem): text for name, section in SECTIONS.items() for stem, text in section.figures.items()},
    **comparison.FIGURES,
}


def write_gallery(root: Path) -> Path:
    """Write `index.html` in the folder of all reports.

    Returns:
        Its path.

    Raises:
        InputError: if there is no such folder, or a record cannot be read.
        OSError: if a figure cannot be read.
    """
    reports = sorted(find_reports(root), key=lambda report: KINDS.index(report.kind))
    page = root / "index.html"
    entries = [_entry(report, root) for report in reports]
    page.write_text(render("gallery.html.j2", {"reports": entries}), encoding="utf-8")
    return page


def thumbnail(png: Path) -> dict[str, Any]:
    """A figure in small, inlined.

    Returns:
        `source`, a data URL; `width` and `height` in CSS pixels.

    Raises:
        OSError: if it is no picture.
    """
    with Image.open(png) as full:
        height = THUMBNAIL * SHARPER
        width = max(1, round(full.width * height / full.height))
        small = full.convert("RGB").resize((width, height), Image.Resampling.LANCZOS).quantize(COLOURS)
    content = io.BytesIO()
    small.save(content, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")
    return {"source": source, "width": round(width / SHARPER), "height": THUMBNAIL}


def _entry(report: Report, root: Path) -> dict[str, Any]:
    """A report as the template takes it."""
    parts = sorted(report.parts, key=_place)
    finished = [part.finished for part in parts if part.finished]
    return {
        "name": report.name,
        "page": _link(report.page, root) if report.page else None,
        "case": report.record.get("case"),
        "sentences": [typeset(text) for text in _sentences(report)],
        "facts": _facts(report),
        "date": max(finished)[:10] if finished else None,
        "thumbnails": [shown for part in parts if (shown := _main_figure(part, root))],
        "parts": [
            {
                "name": part.folder.name,
                "figures": [(name, _link(part.folder / f"{name}.pdf", root)) for name in _ordered(part)],
                "command": part.command,
            }
            for part in parts
            if part.figures
        ],
        "redraw": shlex.join(["python", "-m", "interp.figures", "--report", str(report.folder)])
        if any(is_drawn_here(part) for part in parts)
        else None,
    }


def _sentences(report: Report) -> Iterator[str]:
    """What was found, with its intervals, as the report has it."""
    if report.kind == "adapter":
        case, sentence = (str(report.record.get(key) or "") for key in ("case", "sentence"))
        yield sentence[len(case) + 1 :].strip()
    elif report.kind == "comparison":
        for row in report.record.get("adapters") or ():
            yield f"{row['name']}: {row['case']}, A - B {shown(row['effect_trained'])} logits"
    elif isinstance(statement := report.parts[0].summary.get("statement"), str):
        yield statement


def _facts(report: Report) -> list[str]:
    """Of which adapter and base model, on how much."""
    run: Mapping[str, Any] = next((part.run for part in report.parts if dig(part.run, "base", "name")), {})
    facts = []
    if report.kind == "comparison":
        facts.append(f"{len(report.record.get('adapters') or ())} adapters")
    elif name := dig(run, "adapter", "name"):
        facts.append(f"adapter {name} on {Path(run['base']['name']).name}")
    if pairs := report.record.get("pairs"):
        facts.append(f"{pairs} pairs of {report.record['groups']} graphs")
    return facts


def _main_figure(part: FigureFolder, root: Path) -> dict[str, Any] | None:
    """The first figure of a folder in small, None if it has none."""
    if not part.figures:
        return None
    name = _ordered(part)[0]
    text = TEXTS.get((part.folder.name, name))
    label = part.folder.name if name == part.folder.name else f"{part.folder.name}: {name}"
    return {
        "label": label.replace("_", " "),
        "shows": text.shows if text else label,
        "pdf": _link(part.folder / f"{name}.pdf", root),
        **thumbnail(part.folder / f"{name}.png"),
    }


def _place(part: FigureFolder) -> tuple[int, str]:
    order = list(SECTIONS)
    return (order.index(part.folder.name) if part.folder.name in order else len(order)), part.folder.name


def _ordered(part: FigureFolder) -> list[str]:
    """Figures in the order in which the page explains them, then the others."""
    explained = [stem for name, stem in TEXTS if name == part.folder.name]
    order = {stem: place for place, stem in enumerate(explained)}
    return sorted(part.figures, key=lambda stem: (order.get(stem, len(order)), stem))


def _link(file: Path, root: Path) -> str:
    return quote(Path(os.path.relpath(file, root)).as_posix())


@cli.command
def main(argv: Sequence[str]) -> int:
    """Write the page, and say where it is."""
    parser = cli._Parser(
        prog="python -m interp.gallery", description=DESCRIPTION, epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--reports", type=Path, default=Path("reports"), metavar="DIR",
                        help="folder of all reports (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    args = parser.parse_args(argv)
    cli.say(args, f"written to {write_gallery(args.reports)}")
    return cli.DONE


if __name__ == "__main__":
    raise SystemExit(main())
