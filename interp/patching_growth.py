"""Several adapters as a sequence, as the checkpoints of a training run: effect and flip layers against their order.

Read from the results that each adapter's own run has written.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from interp import cli
from interp.figures import BLUE, COLUMN, GREY, MODEL_COLOURS, ORANGE, note, save, style
from interp.flip import MODELS, POSITIONS, is_located, locate, show
from interp.report_folders import read_record, read_table
from interp.stats import Interval

ANALYSIS = "patching_growth"
COLUMNS = ("adapter", "order", "episode", "model", "quantity", "estimate", "low", "high", "pairs", "groups")
POSITION_COLOURS = {"value": ORANGE, "decision": BLUE}


def write_growth(args: argparse.Namespace, adapters: Sequence[Path]) -> dict[str, Any]:
    """Compare the adapters' results and write `OUT/<series>/patching_growth/`.

    Args:
        adapters: folders in the order of the sequence, each with its patching result under `args.out`.

    Returns:
        The summary.
    """
    folder = args.out / cli.series_name(adapters, args) / ANALYSIS
    frames = {path.name: read_table(args.out / path.name / "patching" / "results.parquet") for path in adapters}
    runs = {name: read_record(args.out / name / "patching" / "run.json") for name in frames}
    frame = growth(frames, args.seed)
    summary = summarise(frame)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(folder / "results.parquet", index=False)
    command = runs[adapters[-1].name]["command"]  # of the whole sequence
    record = {"command": command, "analysis": ANALYSIS, "adapters": list(frames), "seed": args.seed, "runs": runs}
    for name, content in (("summary", summary), ("run", record)):
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    save(plot(frame), folder / ANALYSIS)
    cli.say(args, table(frame, folder))
    return summary


def growth(frames: dict[str, pd.DataFrame], seed: int = 0) -> pd.DataFrame:
    """Effect and flip layers of each adapter, on the main kind of its pairs.

    Args:
        frames: adapter's name -> its frame (`interp.patching.measure`), in the order of the sequence.

    Returns:
        One row per adapter, model and quantity: `effect` (logits, A - B), `flip_value`, `flip_decision` (layers; NaN
        where there is nothing to locate), with the interval over graphs; `order` counts from 0, `episode` is the number
        that ends the name, NaN without one.
    """
    rows: list[tuple[Any, ...]] = []
    for order, (name, frame) in enumerate(frames.items()):
        located = locate(frame, None, seed)
        size = (located.n_pairs, located.bootstrap.n_groups)
        for model in MODELS:
            found = {"effect": located.sweeps[model, "denoise"].effect}
            nothing = Interval(np.nan, np.nan, np.nan, 1.0)
            for position in POSITIONS:
                claimed = is_located(located, model, "denoise")
                found[f"flip_{position}"] = located.flip(model, "denoise", position) if claimed else nothing
            for quantity, x in found.items():
                rows.append((name, order, episode(name), model, quantity, x.estimate, x.low, x.high, *size))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def episode(name: str) -> float:
    """The number that ends an adapter's name, `ep050` is 50; NaN without one."""
    found = re.search(r"(\d+)$", name)
    return float(found[1]) if found else float("nan")


def summarise(frame: pd.DataFrame) -> dict[str, Any]:
    """The table as JSON, with a sentence about the trained model's effect and when it first stands apart from 0."""
    effects = frame[(frame["model"] == "trained") & (frame["quantity"] == "effect")].sort_values("order")
    apart = effects[(effects["low"] > 0) | (effects["high"] < 0)]
    when = f"apart from 0 from {apart['adapter'].iloc[0]} on" if len(apart) else "in none of them apart from 0"
    first, last = (show(_interval(effects.iloc[i])) for i in (0, -1))
    names = effects["adapter"].iloc
    text = f"trained A - B: {first} logits in {names[0]}, {last} in {names[-1]}, {when}"
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return {"statement": text, "adapters": list(dict.fromkeys(frame["adapter"])), "rows": records}


def plot(frame: pd.DataFrame) -> Figure:
    """Effect of base and trained above, the trained model's flip layers below, against the order of adapters."""
    names = list(dict.fromkeys(frame["adapter"]))
    with style():
        figure = Figure(figsize=(COLUMN, 3.1))
        effect, flips = figure.subplots(2, 1, sharex=True)
        effect.axhline(0, color=GREY, linewidth=0.4, alpha=0.6)
        for model in MODELS:
            _line(effect, frame, model, "effect", MODEL_COLOURS[model], model)
        effect.set_ylabel("A − B (logits)")
        for position, colour in POSITION_COLOURS.items():
            _line(flips, frame, "trained", f"flip_{position}", colour, f"at the {position}")
        flips.set_ylabel("flip layer, trained")
        flips.yaxis.set_major_locator(MaxNLocator(integer=True))
        if frame.loc[frame["quantity"].str.startswith("flip") & (frame["model"] == "trained"), "estimate"].isna().all():
            note(flips, "no effect to locate in any adapter")
        flips.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) * len(names) > 40 else 0)
        flips.set_xlim(-0.3, len(names) - 0.7)
        for axes in (effect, flips):
            axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.96), ncols=2, handlelength=1.1)
        flips.set_xlabel("adapter, in the order given")
    return figure


def table(frame: pd.DataFrame, folder: object) -> str:
    """The result as text, a line per adapter."""
    lines = [f"  {'':<16}{'A - B, base':<24}{'A - B, trained':<24}{'flip at value':<22}flip at decision"]
    for name, rows in frame.groupby("adapter", sort=False):
        cells = {(row["model"], row["quantity"]): show(_interval(row)) for _, row in rows.iterrows()}
        keys = (("base", "effect"), ("trained", "effect"), ("trained", "flip_value"), ("trained", "flip_decision"))
        widths = (24, 24, 22, 0)
        lines.append(f"  {name!s:<16}" + "".join(f"{cells[key]:<{w}}" for key, w in zip(keys, widths, strict=True)))
    return "\n".join(["adapters in sequence", *lines, f"written to {folder}"])


def _line(axes: Axes, frame: pd.DataFrame, model: str, quantity: str, colour: str, label: str) -> None:
    rows = frame[(frame["model"] == model) & (frame["quantity"] == quantity)].sort_values("order")
    axes.plot(rows["order"], rows["estimate"], "o-", color=colour, markersize=3.5, label=label)
    axes.vlines(rows["order"], rows["low"], rows["high"], color=colour, linewidth=2.5, alpha=0.45)


def _interval(row: pd.Series) -> Interval:
    return Interval(float(row["estimate"]), float(row["low"]), float(row["high"]), 0.0)
