"""One style for all figures, and saving them. Draws what it is given; computes nothing.

`python -m interp.figures` draws the figures of reports again from their saved tables (`interp.redraw`).

Figures are `matplotlib.figure.Figure` objects made without pyplot, so no window opens and no state is kept. Colours are
of the Okabe-Ito palette, which colour-blind readers can tell apart. Sizes are those of a column of a two-column paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from interp.stats import Interval

COLUMN = 3.4  # inches
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
MODEL_COLOURS = {"base": GREY, "trained": BLUE}

DASHED: dict[str, Any] = {"linestyle": (0, (3, 2)), "linewidth": 0.8}

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.3,
    "lines.solid_capstyle": "round",
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,  # fonts embedded as TrueType, so that text stays text
    "svg.hashsalt": "interp",
}


@contextmanager
def style() -> Iterator[None]:
    """The style inside this context; the settings before are restored on leaving."""
    with mpl.rc_context(STYLE):
        yield


def save(figure: Figure, stem: Path) -> tuple[Path, Path]:
    """Write `stem.pdf` and `stem.png`, the same bytes for the same figure.

    Returns:
        The two paths.
    """
    pdf, png = stem.with_name(stem.name + ".pdf"), stem.with_name(stem.name + ".png")
    stem.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(pdf, metadata={"CreationDate": None, "Producer": None, "Creator": None})
        figure.savefig(png, metadata={"Software": None})
    return pdf, png


def curve(
    axes: Axes, y: ArrayLike, *, colour: str, band: tuple[ArrayLike, ArrayLike] | None = None, dashed: bool = False
) -> None:
    """A line over layers 0, 1, …, with its band where it has one."""
    values = np.asarray(y, dtype=np.float64)
    layers = np.arange(len(values))
    if band is not None:
        axes.fill_between(layers, band[0], band[1], color=colour, alpha=0.18, linewidth=0)
    axes.plot(layers, values, color=colour, **(DASHED if dashed else {}))


def mark(axes: Axes, where: Interval, height: float, *, colour: str) -> None:
    """A point with its horizontal interval, at a layer; nothing where there is no estimate."""
    if np.isnan(where.estimate):
        return
    if not np.isnan(where.low):
        axes.plot([where.low, where.high], [height, height], color=colour, linewidth=3, alpha=0.5, zorder=3)
    axes.plot([where.estimate], [height], "o", color=colour, markersize=4, markeredgecolor="white",
              markeredgewidth=0.7, zorder=4)  # fmt: skip


def label(
    axes: Axes,
    text: str,
    where: tuple[float, float],
    offset: tuple[float, float],
    *,
    colour: str,
    align: Literal["left", "center", "right"] = "left",
) -> None:
    """Write beside a point (data coordinates; the offset is in points), legible where lines cross the text."""
    halo = [patheffects.withStroke(linewidth=1.6, foreground="white")]
    axes.annotate(text, where, offset, textcoords="offset points", color=colour, fontsize=7, ha=align, va="center",
                  path_effects=halo, zorder=5)  # fmt: skip


def note(axes: Axes, text: str) -> None:
    """Say in the middle of a panel why there is nothing to draw."""
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False, labelleft=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, wrap=True)
