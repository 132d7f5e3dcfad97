"""Figures beside the main one: components and heads, controls and doses, and how far attribution agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from interp import patching_summary
from interp.figures import BLUE, COLUMN, DASHED, GREEN, GREY, MODEL_COLOURS, ORANGE, style
from interp.flip import MODELS, locate
from interp.patching_curves import Curve, curves, find

COMPONENT_COLOURS = {"attention": BLUE, "mlp": ORANGE, "residual": GREEN, "heads": GREY}
# On the line of the panel's title, to its right: no curve runs there.
ABOVE: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1.02, 0.96), "handlelength": 1.1, "columnspacing": 0.8,
    "handletextpad": 0.4, "borderpad": 0.2,
}  # fmt: skip
CONTROL_LABELS = {
    "effect": "A − B",
    "zero_b": "A − B, adapter zeroed",
    "random_b": "A − B, adapter random",
    "other_key_pairs": "A − B of another key's count",
    "other_position": "another number's position",
    "other_key": "another key's value",
    "other_donor_b": "another pair's B, at the decision",
    "other_donor_a": "another pair's A, at the decision",
    "lora_span": "adapter's directions",
    "random_span": "random ones, same length",
    "lora_complement": "all but the adapter's",
}


def components(frame: pd.DataFrame, *, seed: int = 0) -> Figure | None:
    """Shift of the logit difference by layer, attention and MLP patched, per position; heads below, trained model.

    The base model's curves are grey, its MLP's dashed. None where no component was measured.
    """
    kind = locate(frame, None, seed).kind
    found = [c for c in curves(frame, kind, seed) if c.direction == "denoise"]
    lines = [c for c in found if c.component in ("attention", "mlp") or c.position == "between"]
    positions = [p for p in ("value", "between", "decision") if find(lines, position=p)]
    heads = find(found, component="heads", model="trained")
    if not any(c.component != "residual" for c in found):
        return None
    with style():
        heights = [1.25] * len(positions) + ([1.5] if heads else [])
        figure = Figure(figsize=(COLUMN, 0.7 + sum(heights)))
        panels = list(np.atleast_1d(figure.subplots(len(heights), 1, height_ratios=heights)))
        for axes, position in zip(panels, positions, strict=False):
            _component_panel(axes, find(lines, position=position), position)
        panels[len(positions) - 1].set_xlabel("layer")
        names = {"attention": "attention", "mlp": "MLP", "residual": "residual stream"}
        lines_of = {names[c.component]: COMPONENT_COLOURS[c.component] for c in lines} | {"base": MODEL_COLOURS["base"]}
        handles = [Line2D([], [], color=colour) for colour in lines_of.values()]
        figure.legend(handles, lines_of, loc="outside upper center", ncols=len(handles), handlelength=1.1,
                      columnspacing=1.0)  # fmt: skip
        if heads:
            _head_panel(figure, panels[-1], heads[0])
    return figure


def controls(frame: pd.DataFrame, *, seed: int = 0) -> Figure | None:
    """Controls beside the effect, in logits, base and trained; below, the logit difference against the count.

    None where no control was measured.
    """
    located = locate(frame, None, seed)
    found = patching_summary.controls(frame, located, curves(frame, located.kind, seed), seed)
    doses = patching_summary.doses(frame, seed)
    if found is None:
        return None
    rows = _control_rows(found, patching_summary.other_key_pairs(frame, seed))
    with style():
        heights = [0.19 * len(rows) + 0.35, *([1.35] if doses else [])]
        figure = Figure(figsize=(COLUMN, 0.55 + sum(heights)))
        panels = list(np.atleast_1d(figure.subplots(len(heights), 1, height_ratios=heights)))
        _control_panel(panels[0], rows)
        panels[0].set_title(f"{found['pairs']} pairs", loc="left")
        figure.supxlabel(_exact_controls(found), fontsize=6.5, color=GREY)
        if doses:
            _dose_panel(panels[1], doses)
    return figure


def attribution(frame: pd.DataFrame, *, seed: int = 0) -> Figure | None:
    """First-order estimate against exact patch, a point per cell, trained model. None where it was not taken."""
    kind = locate(frame, None, seed).kind
    found = [c for c in curves(frame, kind, seed) if c.attribution is not None and c.model == "trained"]
    positions = list(dict.fromkeys(c.position for c in found))
    if not found:
        return None
    with style():
        figure = Figure(figsize=(COLUMN, 1.95))
        panels = np.atleast_1d(figure.subplots(1, len(positions)))
        for axes, position in zip(panels, positions, strict=True):
            for c in find(found, position=position):
                both = ~np.isnan(c.attribution).any(1) if c.attribution is not None else np.zeros(0, dtype=bool)
                exact, guess = c.shift[both].mean(0), np.asarray(c.attribution)[both].mean(0)
                axes.plot(exact, guess, "o", color=COMPONENT_COLOURS[c.component], markersize=2.6, alpha=0.7,
                          markeredgewidth=0, label=c.component)  # fmt: skip
            axes.axline((0, 0), slope=1, color=GREY, **DASHED)
            axes.set_title(f"at the {position}", fontsize=7.5)
            axes.set_xlabel("exact patch (logits)")
        panels[0].set_ylabel("attribution (logits)")
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), handletextpad=0.1)
    return figure


def _component_panel(axes: Axes, found: Sequence[Curve], position: str) -> None:
    axes.axhline(0, color=GREY, linewidth=0.4, alpha=0.6)
    for c in sorted(found, key=lambda c: c.model):
        means = c.means
        colour = COMPONENT_COLOURS[c.component] if c.model == "trained" else MODEL_COLOURS[c.model]
        axes.plot(c.layers, means[0], color=colour, **(DASHED if c.model == "base" and c.component == "mlp" else {}))
        if c.model == "trained":
            axes.fill_between(c.layers, *c.bootstrap.band(means), color=colour, alpha=0.18, linewidth=0)
    pairs = max(c.n_pairs for c in found)
    axes.set_title(f"{'between them' if position == 'between' else f'at the {position}'}, {pairs} pairs", loc="left")
    axes.set_ylabel("shift (logits)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _head_panel(figure: Figure, axes: Axes, heads: Curve) -> None:
    table = heads.means[0].reshape(-1, max(heads.heads) + 1).T  # (heads, layers)
    largest = float(np.abs(table).max()) or 1.0
    image = axes.imshow(table, aspect="auto", cmap="RdBu_r", vmin=-largest, vmax=largest, origin="lower")
    axes.set_title(f"heads at the decision, trained, {heads.n_pairs} pairs", loc="left")
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, pad=0.02, label="shift (logits)")


def _control_rows(found: Mapping[str, Any], other: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """(label, model -> interval as JSON), effect first."""
    rows: dict[str, dict[str, Any]] = {}
    for adapter in ("random_b", "zero_b"):
        if found.get(adapter):
            rows["effect"] = {model: found[adapter][f"effect_{model}"] for model in MODELS}
            rows[adapter] = {"trained": found[adapter]["effect"]}
    if other:
        rows["other_key_pairs"] = other["effect"]
    for name in CONTROL_LABELS:
        if isinstance(found.get(name), dict) and name not in rows:
            rows[name] = {model: entry["shift"] for model, entry in found[name].items()}
    return [(label, rows[name]) for name, label in CONTROL_LABELS.items() if name in rows]


def _control_panel(axes: Axes, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    axes.axvline(0, color=GREY, linewidth=0.4, alpha=0.6)
    for index, (_, models) in enumerate(rows):
        for model, x in models.items():
            height = -index + (0.16 if model == "base" else -0.16) * (len(models) > 1)
            if x["low"] is not None:
                axes.plot([x["low"], x["high"]], [height, height], color=MODEL_COLOURS[model], linewidth=2, alpha=0.5)
            axes.plot([x["estimate"]], [height], "o", color=MODEL_COLOURS[model], markersize=3.2)
    axes.set_yticks([-i for i in range(len(rows))], [label for label, _ in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("logit difference moved by (logits)")
    handles = [Line2D([], [], color=MODEL_COLOURS[model], marker="o", markersize=3.2) for model in MODELS]
    axes.legend(handles, MODELS, **ABOVE, ncols=2)


def _dose_panel(axes: Axes, doses: Mapping[str, Any]) -> None:
    for model in MODELS:
        found = doses["models"][model]["by_count"]
        counts, estimates = [int(c) for c in found], [x["estimate"] for x in found.values()]
        axes.plot(counts, estimates, "o-", color=MODEL_COLOURS[model], markersize=3, label=model)
        if all(x["low"] is not None for x in found.values()):
            low, high = ([x[side] for x in found.values()] for side in ("low", "high"))
            axes.fill_between(counts, low, high, color=MODEL_COLOURS[model], alpha=0.18, linewidth=0)
    axes.set_xticks(counts)
    axes.set_xlabel("count of remaining reads")
    axes.set_ylabel("logit difference")
    axes.set_title(f"{doses['groups']} graphs", loc="left")
    axes.legend(**ABOVE, ncols=2)


def _exact_controls(found: Mapping[str, Any]) -> str:
    missed = max(entry["largest_difference_from_a"] for entry in found["everything"].values())
    return f"patched into itself: {found['self']['largest_change']:.0e}; all positions, off A by: {missed:.0e}"
