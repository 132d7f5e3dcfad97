"""The patching result for people: the figure and the table on stdout, both from the saved frame alone."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from interp import patching_figures, patching_summary
from interp.figures import BLUE, COLUMN, DASHED, GREY, ORANGE, curve, label, mark, note, style
from interp.flip import MODELS, POSITIONS, Located, is_located, kinds, locate, show, statement
from interp.patching_curves import curves
from interp.stats import Interval

POSITION_COLOURS = {"value": ORANGE, "decision": BLUE}
HALF = 0.5
MARKS = {"value": HALF + 0.03, "decision": HALF - 0.03}  # apart, so that equal flip layers do not hide each other
PANEL, SENTENCE = 1.42, 0.45  # inches: the height of a panel with curves, and of one with a sentence


def plot(frame: pd.DataFrame, *, kind: str | None = None, seed: int = 0) -> Figure:
    """Recovery by layer, base above trained, patched at the value's tokens and at the decision position.

    Solid lines are denoising, with their bootstrap bands and flip layers; dashed ones noising. The layers between the
    trained model's two flips, the transit, are shaded. A model without an effect to locate gets a sentence, no curve.

    Args:
        frame: of `interp.patching.measure`.
        kind: of the pairs; None is the main kind, that of the first pair.
        seed: of the resampling, as for `interp.flip.summarise`.
    """
    located = locate(frame, kind, seed)
    with style():
        heights = [PANEL if is_located(located, model, "denoise") else SENTENCE for model in MODELS]
        figure = Figure(figsize=(COLUMN, 1.06 + sum(heights)))
        panels = figure.subplots(len(MODELS), 1, sharex=True, sharey=True, height_ratios=heights)
        for axes, model in zip(panels, MODELS, strict=True):
            _panel(axes, located, model)
        drawn = [
            (axes, model) for axes, model in zip(panels, MODELS, strict=True) if is_located(located, model, "denoise")
        ]
        if drawn:
            _explain_lines(*drawn[0], located)
        last = located.sweeps["trained", "denoise"].curves["value"].shape[1] - 1
        panels[-1].set_xlim(-0.02 * last, 1.02 * last)
        panels[-1].set_ylim(*_limits(located))
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1].set_yticks([0, HALF, 1])
        panels[-1].set_xlabel("layer whose input is patched")
        figure.supylabel("recovery of the logit difference", fontsize=7.5)
        figure.suptitle(
            f"{located.kind}: {located.n_pairs} pairs of {located.bootstrap.n_groups} graphs, 95 % bootstrap intervals",
            fontsize=7, color=GREY,
        )  # fmt: skip
    return figure


def figures(frame: pd.DataFrame, *, seed: int = 0) -> dict[str, Figure]:
    """File name -> figure: `patching`, and `components`, `controls`, `attribution` where they were measured."""
    drawn = {
        "patching": plot(frame, seed=seed),
        "components": patching_figures.components(frame, seed=seed),
        "controls": patching_figures.controls(frame, seed=seed),
        "attribution": patching_figures.attribution(frame, seed=seed),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def table(frame: pd.DataFrame, *, title: str, left_out: str, folder: object, seed: int = 0) -> str:
    """The result as text, base beside trained, one block per kind of pairs, then components and controls."""
    blocks = [_block(locate(frame, kind, seed), title) for kind in kinds(frame)]
    more = _component_lines(frame, seed) + _control_lines(frame, seed)
    return "\n".join([*blocks, *more, f"left out: {left_out}", f"written to {folder}"])


def _component_lines(frame: pd.DataFrame, seed: int) -> list[str]:
    """The cell of each component that shifts the decision most, in the trained model."""
    found = [c for c in curves(frame, kinds(frame)[0], seed) if c.model == "trained" and c.direction == "denoise"]
    lines = []
    for c in found:
        if c.component == "residual" and c.position not in ("key", "between"):
            continue
        head = f".{c.heads[c.peak]}" if c.component == "heads" else ""
        where = "" if not np.abs(c.means[0]).max() else f", most at {c.layers[c.peak]}{head}"
        lines.append(f"  trained, {c.component} at {c.position}, {c.n_pairs} pairs{where}: {show(c.at(c.peak))} logits")
    return lines


def _control_lines(frame: pd.DataFrame, seed: int) -> list[str]:
    located = locate(frame, None, seed)
    found = patching_summary.controls(frame, located, curves(frame, located.kind, seed), seed)
    if found is None:
        return []
    missed = max(entry["largest_difference_from_a"] for entry in found["everything"].values())
    lines = [
        f"  controls on {found['pairs']} pairs: patched into itself moves {found['self']['largest_change']:.1g}, "
        f"patched everywhere misses A by {missed:.1g}"
    ]
    for name in ("zero_b", "random_b"):
        effect = found[name]["effect"]
        lines.append(f"  {name}: A - B = {show_json(effect)} logits")
    return lines


def show_json(interval: dict[str, float | None]) -> str:
    """`show` of an interval that has been made ready for JSON."""
    return show(Interval(*(np.nan if x is None else x for x in interval.values())))


def _panel(axes: Axes, located: Located, model: str) -> None:
    sweep = located.sweeps[model, "denoise"]
    axes.set_title(model, loc="left", fontweight="bold")
    if not is_located(located, model, "denoise"):
        note(axes, statement(located, model).replace(": ", "\n").replace("-", "−"))
        return
    axes.set_title(f"A − B: {show(sweep.effect)} logits", loc="right", fontsize=7, color=GREY)
    for level in (0, HALF, 1):
        axes.axhline(level, color=GREY, linewidth=0.4, alpha=0.6, zorder=0)
    flips = {position: located.flip(model, "denoise", position) for position in POSITIONS}
    if model == "trained":
        _shade_transit(axes, flips)
    for position, colour in POSITION_COLOURS.items():
        draws = sweep.curves[position]
        curve(axes, draws[0], colour=colour, band=located.bootstrap.band(draws))
        if is_located(located, model, "noise"):
            curve(axes, located.sweeps[model, "noise"].curves[position][0], colour=colour, dashed=True)
        mark(axes, flips[position], MARKS[position], colour=colour)
    _label_flips(axes, flips)
    last = sweep.curves["decision"].shape[1] - 1
    label(axes, "at the value", (0, 1), (1, 7), colour=ORANGE)
    label(axes, "at the decision", (last, 1), (-1, 7), colour=BLUE, align="right")


def _shade_transit(axes: Axes, flips: dict[str, Interval]) -> None:
    leaves, arrives = (flips[position].estimate for position in ("value", "decision"))
    if leaves < arrives:
        axes.axvspan(leaves, arrives, color=GREY, alpha=0.14, linewidth=0, zorder=0)
        label(axes, "transit", ((leaves + arrives) / 2, 0), (0, -7), colour=GREY, align="center")


def _label_flips(axes: Axes, flips: dict[str, Interval]) -> None:
    """Write each flip layer beside its mark, the smaller one to the left."""
    ordered = sorted((flip.estimate, position) for position, flip in flips.items() if not np.isnan(flip.estimate))
    for index, (layer, position) in enumerate(ordered):
        left = index == 0 and len(ordered) > 1
        offset = (-5 if left else 5, 5 if position == "value" else -5)
        label(axes, f"{layer:.1f}", (layer, MARKS[position]), offset, colour=POSITION_COLOURS[position],
              align="right" if left else "left")  # fmt: skip


def _explain_lines(axes: Axes, model: str, located: Located) -> None:
    """A legend for solid and dashed, on the side where the curves are far apart."""
    flip = located.flip(model, "denoise", "decision").estimate
    last = located.sweeps[model, "denoise"].curves["decision"].shape[1] - 1
    solid = Line2D([], [], color=GREY, linewidth=1.3)
    dashed = Line2D([], [], color=GREY, **DASHED)
    side: Literal["center right", "center left"] = "center right" if flip < last / 2 else "center left"
    anchor = (1 if side == "center right" else 0, 0.68)
    axes.legend([solid, dashed], ["A into B", "B into A"], loc=side, bbox_to_anchor=anchor, handlelength=1.6)


def _limits(located: Located) -> tuple[float, float]:
    """Room for 0 to 1, the labels above, and curves that overshoot, but not for bands that are all over the place."""
    drawn = [
        curve[0]
        for (model, direction), sweep in located.sweeps.items()
        for curve in sweep.curves.values()
        if direction != "cross" and is_located(located, model, direction)
    ]
    low = min([0.0, *(float(curve.min()) for curve in drawn)])
    high = max([1.0, *(float(curve.max()) for curve in drawn)])
    return max(low, -0.5) - 0.16, min(high, 1.5) + 0.2


def _block(located: Located, title: str) -> str:
    head = f"{title}, {located.kind}: {located.n_pairs} pairs of {located.bootstrap.n_groups} graphs"
    rows: list[tuple[str, ...]] = [("", *MODELS, "trained - base")]
    for metric, name in (("p_answer", "P(answer)"), ("logit_difference", "logit difference")):
        for side in "ab":
            found = (show(located.baselines[model, f"baseline_{side}", metric]) for model in MODELS)
            rows.append((f"{name} in {side.upper()}", *found, ""))
    effects = (show(located.sweeps[model, "denoise"].effect) for model in MODELS)
    rows.append(("logit difference, A - B", *effects, show(located.effect_difference)))
    for direction, name in (("denoise", "A into B"), ("noise", "B into A")):
        claimed = [is_located(located, model, direction) for model in MODELS]
        for position in POSITIONS:
            flips = [located.flip(model, direction, position) for model in MODELS]
            difference = located.flip_difference(direction, position)
            cells = [
                show(x) if ok else "-" for x, ok in zip([*flips, difference], [*claimed, all(claimed)], strict=True)
            ]
            rows.append((f"flip layer, {name}, at the {position}", *cells))
    lines = [f"  {label:<39}{base:<23}{trained:<23}{difference}".rstrip() for label, base, trained, difference in rows]
    return "\n".join([head, *lines, *(f"  {model}: {statement(located, model)}" for model in MODELS)])
