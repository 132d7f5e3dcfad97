"""The audit's figure: what there is to gain, what each freedom is worth, and how often retaining matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from env.scheduler.audit.summary import LABELS

# Okabe and Ito's palette, which colour-blind readers can tell apart; shapes tell the same.
BLUE, ORANGE, GREEN, GREY, SKY, LIGHT = "#0072B2", "#D55E00", "#009E73", "#767676", "#56B4E9", "#D9D9D9"
GAINS = (
    ("improvement", "optimum", "optimum", BLUE, "o"),
    ("improvement", "optimum without retention", "optimum without retention", SKY, "D"),
    ("improvement", "fuse, 128, nothing", "always fuse, 128, retain nothing", ORANGE, "s"),
    ("improvement", "heuristic", "heuristic", GREY, "^"),
)
WORTHS = (
    ("worth", "fusion", "fusion", GREEN, "o"),
    ("worth", "tiles", "tiles", ORANGE, "s"),
    ("worth", "retention", "retention", BLUE, "D"),
)
SHARES = dict(zip(LABELS, (BLUE, ORANGE, LIGHT), strict=True))
STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
}


def draw(table: pd.DataFrame) -> Figure:
    """The figure of a `presets_table`, documented rules."""
    table = table[table["rules"] == "documented"]
    presets = list(table["preset"].unique())
    with mpl.rc_context(STYLE):
        heights = (0.2 * len(presets) + 0.1, 0.65)  # inches, of the panels and of their legends
        figure = Figure(figsize=(7.2, sum(heights) + 0.75), layout="constrained")
        panels, legends = figure.subplots(2, 3, sharey="row", width_ratios=(1.5, 1.1, 0.9), height_ratios=heights)
        gains, worths, shares = panels
        _dots(gains, table, presets, GAINS)
        gains.set_xscale("symlog", linthresh=30, linscale=2)
        gains.set_xticks([-300, -30, -10, 0, 10, 30], ["-300", "-30", "-10", "0", "10", "30"])
        gains.set(title="Improvement over greedy", xlabel="% of greedy (log beyond 30)", xlim=(-700, 70))
        _dots(worths, table, presets, WORTHS)
        worths.set_xscale("symlog", linthresh=10)
        worths.set_xticks([0, 10, 100, 1000], ["0", "10", "100", "1000"])
        worths.set(title="Worth of a freedom", xlabel="% of greedy (log beyond 10)", xlim=(-1, 3000))
        _bars(shares, table, presets)
        shares.set(title="Retain decisions", xlabel="% of decisions", xlim=(0, 100))
        gains.set_yticks(range(len(presets)), [name.replace("_", " ") for name in presets])
        gains.set_ylim(len(presets) - 0.5, -0.5)
        for axes, below in zip(panels, legends, strict=True):
            axes.tick_params(axis="y", length=0)
            below.axis("off")
            below.legend(*axes.get_legend_handles_labels(), loc="upper center", borderaxespad=0.0)
    return figure


def _dots(axes: Axes, table: pd.DataFrame, presets: Sequence[str], series: Sequence[tuple[str, ...]]) -> None:
    axes.axvline(0, color="black", linewidth=0.6)
    offsets = np.linspace(-0.27, 0.27, len(series))
    for offset, (metric, of, label, colour, marker) in zip(offsets, series, strict=True):
        rows = table[(table["metric"] == metric) & (table["of"] == of)].set_index("preset").loc[list(presets)]
        positions = np.arange(len(presets)) + offset
        axes.hlines(positions, rows["low"], rows["high"], color=colour, linewidth=1.0)
        axes.plot(rows["mean"], positions, marker, color=colour, markersize=3, label=label)
    for position in range(1, len(presets)):
        axes.axhline(position - 0.5, color=LIGHT, linewidth=0.4, zorder=0)


def _bars(axes: Axes, table: pd.DataFrame, presets: Sequence[str]) -> None:
    start = np.zeros(len(presets))
    for label, colour in SHARES.items():
        rows = table[(table["metric"] == "decisions") & (table["of"] == label)].set_index("preset").loc[list(presets)]
        axes.barh(range(len(presets)), rows["mean"], left=start, height=0.7, color=colour, label=label)
        start += rows["mean"].to_numpy()


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write `name.pdf` and `name.png`."""
    for suffix in ("pdf", "png"):
        figure.savefig(folder / f"{name}.{suffix}", dpi=300)
