"""The retention heads for people: the maps, the readers' attention by span, and the table on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from interp.figures import BLUE, COLUMN, GREY, MODEL_COLOURS, ORANGE, note, style
from interp.flip import MODELS, show
from interp.retention_heads_summary import Heads, name_of
from interp.stats import Floats, Interval

SPANS = {
    "attention": "entry",
    "attention_key": "its key",
    "attention_value": "its value",
    "attention_other": "other entries",
    "attention_random": "spans as long",
}
TOP = 4
MAPS = (("attention", "attention"), ("effect", "logits lost if blocked"))


def figures(frame: pd.DataFrame, summary: Mapping[str, Any]) -> dict[str, Figure]:
    """`retention_heads`: layer by head, base and trained, of attention and of the causal effect; `spans`: where the
    readers look. From the frame of `interp.retention_heads.measure` and its summary."""
    pairs = frame[frame["kind"] == summary["kind"]]
    heads = {model: Heads.of(pairs[pairs["model"] == model]) for model in MODELS} if len(pairs) else {}
    return {"retention_heads": _maps(heads, summary), "spans": _spans(summary)}


def table(summary: Mapping[str, Any], *, title: str, left_out: str, folder: object) -> str:
    """The result as text, base beside trained."""
    lines = [f"{title}: {summary['pairs']} pairs and {summary['decisions']} decisions of {summary['groups']} graphs"]
    for model in MODELS:
        found = summary["models"][model]
        plain = found["plain_definition"]
        lines.append(f"  {found['statement']}")
        if shown := found["readers"] or found["candidates"][:TOP]:
            kind = "reader" if found["readers"] else "candidate"
            lines.append(f"    {kind:<11}{'attention':<20}{'other entries':<20}{'logits lost':<20}{'p (Holm)'}")
            lines += [
                f"    {name_of(r):<11}{_show(r['attention']):<20}{_show(r.get('attention_other')):<20}"
                f"{_show(r['effect']):<20}{r['p_holm']:.2g}"
                for r in shown
            ]
        names = ", ".join(f"{name_of(head)} {head['attention']['estimate']:.2f}" for head in plain["heads"])
        few = "" if plain["enough"] else f" (fewer than {plain['decisions_needed']})"
        lines.append(
            f"    attention of {plain['threshold']} or more, mean over {plain['decisions_that_retain']} decisions that "
            f"retain k{few}: {names or 'none'}"
        )
        lines.append(f"    {found['failures']['statement']}")
    return "\n".join([*lines, f"left out: {left_out}", f"written to {folder}"])


def _maps(heads: Mapping[str, Heads], summary: Mapping[str, Any]) -> Figure:
    with style():
        if not heads:
            figure = Figure(figsize=(COLUMN, 0.6))
            note(figure.subplots(), "no pairs: no map of the heads")
            return figure
        layers = next(iter(heads["base"].values.values())).shape[1]
        figure = Figure(figsize=(COLUMN, 0.9 + 2 * max(1.2, 0.055 * layers)))
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for row, (metric, title) in zip(panels, MAPS, strict=True):
            means = {model: heads[model].values[metric].mean(axis=0) for model in MODELS}
            _pair_of_maps(figure, row, means, title, signed=metric == "effect")
        for axes, model in zip(panels[0], MODELS, strict=True):
            axes.set_title(model, fontweight="bold", loc="left")
        for row in panels:
            for axes, model in zip(row, MODELS, strict=True):
                _ring(axes, summary["models"][model]["readers"])
        for axes in panels[1]:
            axes.set_xlabel("head")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        figure.supylabel("layer", fontsize=7.5)
        figure.suptitle(
            f"{summary['kind']}: {summary['pairs']} pairs, decision to entry, prompt A; rings: readers",
            fontsize=7,
            color=GREY,
        )
    return figure


def _pair_of_maps(
    figure: Figure, row: Sequence[Axes], means: Mapping[str, Floats], title: str, *, signed: bool
) -> None:
    """Base and trained on one colour scale; where a quantity has a sign, white is 0."""
    top = max(float(np.abs(table).max()) for table in means.values()) or 1.0
    colours = [ORANGE, "white", BLUE] if signed else ["white", BLUE]
    scale = LinearSegmentedColormap.from_list("heads", colours)
    image = None
    for axes, model in zip(row, MODELS, strict=True):
        image = axes.imshow(
            means[model], origin="lower", aspect="auto", interpolation="nearest", cmap=scale,
            vmin=-top if signed else 0.0, vmax=top,
        )  # fmt: skip
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    assert image is not None
    bar = figure.colorbar(image, ax=list(row), fraction=0.06, pad=0.03)
    bar.set_label(title, fontsize=7)
    bar.outline.set_linewidth(0.4)


def _ring(axes: Axes, readers: Sequence[Mapping[str, Any]]) -> None:
    if readers:
        axes.scatter(
            [r["head"] for r in readers], [r["layer"] for r in readers], s=22, facecolors="none", edgecolors="black",
            linewidths=0.7,
        )  # fmt: skip


def _spans(summary: Mapping[str, Any]) -> Figure:
    """Attention by span of the trained model's first readers (or candidates, or the head that matters most), and of the
    same heads in the base model."""
    trained = summary["models"]["trained"]
    shown = (trained["readers"] or trained["candidates"] or [h for h in [trained["strongest"]] if h])[:TOP]
    kind = "reader" if trained["readers"] else "candidate, not confirmed" if trained["candidates"] else "no reader"
    with style():
        if not shown:
            figure = Figure(figsize=(COLUMN, 0.6))
            note(figure.subplots(), "no head to show: too few pairs")
            return figure
        figure = Figure(figsize=(COLUMN, 0.7 + 0.95 * len(shown)))
        panels = np.atleast_1d(figure.subplots(len(shown), 1, sharex=True))
        for axes, head in zip(panels, shown, strict=True):
            _span_rows(axes, head)
            axes.set_title(f"{name_of(head)} ({kind})", loc="left", fontsize=7.5)
        for model, right in zip(MODELS, (0.8, 1.0), strict=True):
            panels[0].text(right, 1.06, model, color=MODEL_COLOURS[model], transform=panels[0].transAxes, ha="right",
                           va="bottom", fontweight="bold")  # fmt: skip
        panels[-1].set_xlabel("attention from the decision")
    return figure


def _span_rows(axes: Axes, head: Mapping[str, Any]) -> None:
    """One pair of bars a span, the trained model's below the base model's."""
    names = [name for name in SPANS if name in head]
    for height, name in enumerate(reversed(names)):
        for model, record, shift in (("base", head["other_model"], 0.2), ("trained", head, -0.2)):
            found = _interval(record[name])
            axes.barh(height + shift, found.estimate, height=0.36, color=MODEL_COLOURS[model])
            if not np.isnan(found.low):
                axes.plot([found.low, found.high], [height + shift] * 2, color="black", linewidth=0.9)
    axes.set_yticks(range(len(names)), [SPANS[name] for name in reversed(names)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)


def _interval(record: Mapping[str, float | None]) -> Interval:
    return Interval(**{name: float("nan") if number is None else number for name, number in record.items()})


def _show(record: Mapping[str, float | None] | None) -> str:
    return "not measured" if record is None else show(_interval(record))
