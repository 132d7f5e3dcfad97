"""Several adapters side by side, as the checkpoints of a training run: `OUT/<series>/comparison.json` and its page.

Read from what each adapter's own run has written; the growth of effect and delta is measured by
`interp.patching_growth` and `interp.lora_svd_growth`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interp import cli, lora_svd_growth, patching_growth, report
from interp.report_texts import FigureText
from interp.retention_heads_summary import name_of
from interp.verdict_rules import dig, shown

FIGURES = {
    ("patching_growth", "patching_growth"): FigureText(
        "Effect of the number on the decision, base and trained, and the trained model's flip layers, by adapter.",
        "Neighbouring checkpoints are not independent runs: a trend here is that of one training run.",
    ),
    ("lora_svd_growth", "growth"): FigureText(
        "How the size of the delta grows from one adapter to the next.",
        "A delta that grows need not be one that is used.",
    ),
    ("lora_svd_growth", "angles"): FigureText(
        "How far the leading directions of two adapters' deltas coincide, beside random ones.",
        "Right directions agree between checkpoints that began with the same A, whatever was learnt.",
    ),
}


def compare(args: argparse.Namespace, argv: Sequence[str], adapters: Sequence[Path]) -> dict[str, Any]:
    """Write the comparison of adapters that each have their verdict, in the order given.

    Returns:
        What `comparison.json` holds: `series`, and `adapters`, a row as `compare_one` makes it for each.
    """
    series = cli.series_name(adapters, args)
    folder = args.out / series
    if not args.page_only:
        patching_growth.write_growth(args, adapters)
        lora_svd_growth.analyse(args, argv, adapters)
    record = {"series": series, "adapters": [compare_one(args.out / adapter.name) for adapter in adapters]}
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / "comparison.json", record)
    drawn = [
        report.figure(folder / analysis / f"{stem}.png", text)
        for (analysis, stem), text in FIGURES.items()
        if (folder / analysis / f"{stem}.png").exists()
    ]
    page = folder / "index.html"
    page.write_text(report.render("comparison.html.j2", record | {"figures": drawn}), encoding="utf-8")
    cli.say(args, f"{_table(record)}\nwritten to {page}")
    return record


def compare_one(folder: Path) -> dict[str, Any]:
    """One adapter's row: case, effects and flip layers with intervals, readers, and the size of its delta.

    What was not measured is None.
    """
    summaries, _ = report.read_results(folder)
    verdict = report.read_json(folder / "verdict.json")
    models = dig(next(iter((dig(summaries, "patching", "kinds") or {}).values()), None), "models")
    sweeps = {model: dig(models, model, "sweeps", "denoise") for model in ("base", "trained")}
    readers = dig(summaries, "retention_heads", "models", "trained")
    parts = dig(summaries, "lora_svd", "parts")
    return {
        "name": folder.name,
        "case": verdict["case"],
        "push": verdict["axis"]["push"],
        "worth": dig(verdict, "audit", "numbers", "retention"),
        **{f"effect_{model}": dig(sweep, "effect") for model, sweep in sweeps.items()},
        **{
            f"flip_{position}": dig(sweeps["trained"], "flips", position, "ratio_of_means")
            for position in ("value", "decision")
        },
        "readers": [name_of(reader) for reader in readers["readers"]] if dig(readers, "claim") == "made" else None,
        "size": math.sqrt(sum(part["frobenius"] ** 2 for part in parts.values())) if parts else None,
        "centre": dig(summaries, "lora_svd", "layers", "centre"),
    }


def _table(record: dict[str, Any]) -> str:
    lines = [f"  {'':<16}{'case':<11}{'A - B, trained':<24}{'flip at decision':<24}{'readers':<9}||dW||_F"]
    for row in record["adapters"]:
        readers = "-" if row["readers"] is None else str(len(row["readers"]))
        size = "-" if row["size"] is None else f"{row['size']:.2f}"
        lines.append(
            f"  {row['name']:<16}{row['case']:<11}{shown(row['effect_trained']):<24}"
            f"{shown(row['flip_decision']) if row['flip_decision'] else '-':<24}{readers:<9}{size}"
        )
    return "\n".join([record["series"], *lines])
