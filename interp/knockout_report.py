"""The knock-out for people: figures and the table on stdout, from the saved frame and the adapter's profile alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from interp.figures import BLUE, COLUMN, GREEN, GREY, MODEL_COLOURS, ORANGE, curve, label, mark, note, style
from interp.flip import MODELS, show
from interp.knockout_scores import Played, Scores, read_scores
from interp.knockout_summary import (
    METRICS,
    Knockouts,
    align,
    name_of,
    read,
    show_json,
    sizes_of,
)
from interp.stats import MIN_GROUPS, Floats

PART_COLOURS = {"attention": ORANGE, "mlp": GREEN}
END_COLOURS = {"below": ORANGE, "above": BLUE}
MARKERS = {"attention": "o", "mlp": "s"}
CHANGES = {
    "lost": "lost by switching it off\nin the trained model",
    "gained": "gained by switching it on\nin the base model",
}
LISTED = 5
LINEAR_UP_TO = 0.1  # logits; a logarithmic axis begins there
CAPTIONS = {
    "knockout": "Above: by how many logits the effect (logit difference in A minus that in B) of the trained model "
    "falls when the adapter is off in attention, or in MLP, of one layer. Below: by how many that of the base model "
    "grows when the adapter is on there alone. Means with pointwise 95 % bootstrap bands over graphs.",
    "cumulative": "Share of the adapter's effect (0: the base model's, 1: the trained one's) with the adapter on in "
    "the layers below a boundary only, or in those above it only. Ratios of means with 95 % bootstrap bands over "
    "graphs; dots: where half of the effect is reached or lost.",
    "profile": "What switching a part off costs, and switching it on alone brings, beside the Frobenius norm of the "
    "adapter's delta there; rank correlations with 95 % bootstrap intervals over graphs, p of a permutation test over "
    "layers, corrected.",
    "score": "Mean score of greedy answers on unseen graphs with parts of the adapter off, with 95 % bootstrap "
    "intervals over graphs where there are enough of them; at the right the share of answers that are valid to the "
    "letter.",
}


def figures(frame: pd.DataFrame, seed: int = 0, *, profile: pd.DataFrame | None = None) -> dict[str, Figure]:
    """All figures by name, a text for each is in `CAPTIONS`. Those without anything to show are not there.

    Args:
        frame: of `interp.knockout.measure`, with or without episodes.
        seed: of the resampling, as for `interp.knockout_summary.summarise`.
        profile: of `interp.lora_svd.profile`.
    """
    knockouts, played = read(frame, seed), read_scores(frame, seed)
    with style():
        found = {"knockout": _by_layer(knockouts), "cumulative": _cumulative(knockouts)}
        if profile is not None:
            found["profile"] = _profile(knockouts, profile, seed)
        if played is not None:
            found["score"] = _scores(played)
    return found


def table(summary: Mapping[str, Any], *, title: str, left_out: str, folder: object) -> str:
    """The result as text: base beside trained, the parts that matter most, the cumulative curves, the scores."""
    head = f"{title}, {summary['kind']}: {summary['pairs']} pairs of {summary['groups']} graphs"
    rows: list[tuple[str, ...]] = [("", *MODELS)]
    for metric, name in zip(METRICS, ("in A", "in B", "A - B"), strict=True):
        rows.append((f"logit difference, {name}", *(show_json(summary["models"][model][metric]) for model in MODELS)))
    rows.append(("the dearest parts of layers", "gained alone", "lost without"))
    dearest = sorted(summary["modules"], key=lambda module: -abs(module["lost"]["effect"]["estimate"]))
    for module in dearest[:LISTED]:
        star = " *" if module["needed"] else ""
        found = (show_json(module[change]["effect"]) for change in ("gained", "lost"))
        rows.append((f"  {name_of((module['layer'], module['part']))}{star}", *found))
    if summary["score"] is not None:
        rows.append((f"episodes, {summary['score']['graphs']} graphs", "valid answers", "score"))
        for found in summary["score"]["configurations"]:
            name = found["model"] if found["switch"] == "none" else found["part"]
            rows.append((f"  {name}", show_json(found["valid_share"]), show_json(found["score"], 3)))
    lines = [f"  {first:<39}{base:<23}{trained}".rstrip() for first, base, trained in rows]
    marks = ["  * not 0 in a simultaneous 95 % interval"] if any(m["needed"] for m in dearest[:LISTED]) else []
    ends = [*marks, summary["statement"], f"left out: {left_out}", f"written to {folder}"]
    return "\n".join([head, *lines, *ends])


def _head(figure: Figure, knockouts: Knockouts) -> None:
    figure.suptitle(
        f"{knockouts.kind}: {knockouts.n_pairs} pairs of {knockouts.bootstrap.n_groups} graphs, "
        "95 % bootstrap intervals",
        fontsize=7, color=GREY,
    )  # fmt: skip


def _by_layer(knockouts: Knockouts) -> Figure:
    figure = Figure(figsize=(COLUMN, 3.4))
    panels = figure.subplots(2, 1, sharex=True)
    for axes, draws, model in zip(panels, (knockouts.lost(), knockouts.gained()), ("trained", "base"), strict=True):
        axes.axhline(0, color=GREY, linewidth=0.4, zorder=0)
        for part in knockouts.parts:
            values = _over_layers(knockouts, draws, part)
            curve(axes, values[0], colour=PART_COLOURS.get(part, GREY), band=knockouts.bootstrap.band(values))
        switched = "lost with it off" if model == "trained" else "gained with it on"
        axes.set_title(model, loc="left", fontweight="bold", color=MODEL_COLOURS[model])
        axes.set_title(f"{switched} in one part of one layer", loc="right", fontsize=7, color=GREY)
    handles = [Line2D([], [], color=PART_COLOURS.get(part, GREY)) for part in knockouts.parts]
    top = panels[0]
    top.legend(handles, knockouts.parts, loc="upper left", handlelength=1.6)
    top.margins(y=0.12)
    panels[-1].set_xlim(-0.02 * knockouts.n_layers, knockouts.n_layers - 1 + 0.02 * knockouts.n_layers)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("layer")
    figure.supylabel("change of A − B (logits)", fontsize=7.5)
    _head(figure, knockouts)
    return figure


def _over_layers(knockouts: Knockouts, draws: Floats, part: str) -> Floats:
    """(1 + R, L) of one part; NaN in layers in which it is not adapted."""
    values = np.full((len(draws), knockouts.n_layers), np.nan)
    for column, (layer, name) in enumerate(knockouts.modules):
        if name == part and layer >= 0:
            values[:, layer] = draws[:, column]
    return values


def _cumulative(knockouts: Knockouts) -> Figure:
    figure = Figure(figsize=(COLUMN, 2.3 if knockouts.is_claimed else 1.1))
    axes = figure.subplots()
    _head(figure, knockouts)
    if not knockouts.is_claimed:
        note(axes, _why_nothing(knockouts))
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        return figure
    for level in (0, 0.5, 1):
        axes.axhline(level, color=GREY, linewidth=0.4, alpha=0.6, zorder=0)
    drawn = {end: knockouts.share(end) for end in END_COLOURS}
    for height, (end, draws) in zip((0.53, 0.47), drawn.items(), strict=True):
        curve(axes, draws[0], colour=END_COLOURS[end], band=knockouts.bootstrap.band(draws))
        half = knockouts.crossing(end, 0.5)
        mark(axes, half, height, colour=END_COLOURS[end])
    _label_halves(axes, knockouts)
    last = knockouts.n_layers
    low = max(min(0.0, *(float(draws[0].min()) for draws in drawn.values())), -1)
    high = min(max(1.0, *(float(draws[0].max()) for draws in drawn.values())), 2.5)
    axes.set_ylim(low - 0.12, high + 0.12)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("boundary between two layers")
    axes.set_ylabel("share of the effect")
    handles = [Line2D([], [], color=END_COLOURS[end]) for end in END_COLOURS]
    figure.legend(handles, [f"on {end} it only" for end in END_COLOURS], loc="outside lower center", ncols=2,
                  handlelength=1.6)  # fmt: skip
    return figure


def _label_halves(axes: Axes, knockouts: Knockouts) -> None:
    """Write where each curve crosses one half, the smaller number to the left."""
    halves = sorted((knockouts.crossing(end, 0.5).estimate, end) for end in END_COLOURS)
    for (where, end), side in zip(halves, (-1, 1), strict=True):
        if not np.isnan(where):
            label(axes, f"{where:.1f}", (where, 0.53 if end == "below" else 0.47), (6 * side, 0),
                  colour=END_COLOURS[end], align="right" if side < 0 else "left")  # fmt: skip


def _why_nothing(knockouts: Knockouts) -> str:
    if knockouts.bootstrap.n_groups < MIN_GROUPS:
        return f"no claim from {knockouts.bootstrap.n_groups} graphs,\nat least {MIN_GROUPS} are needed"
    return f"no effect of the adapter to locate:\ntrained − base: {show(knockouts.brought())} logits"


def _profile(knockouts: Knockouts, profile: pd.DataFrame, seed: int) -> Figure:
    figure = Figure(figsize=(COLUMN, 3.9))
    panels = figure.subplots(2, 1, sharex=True)
    tests = {(t["part"], t["change"]): t for t in align(knockouts, profile, seed) if t["size"] == "frobenius"}
    for axes, (change, y_label) in zip(panels, CHANGES.items(), strict=True):
        draws = knockouts.lost() if change == "lost" else knockouts.gained()
        for part in knockouts.parts:
            columns, sizes = sizes_of(knockouts, profile, part, "frobenius")
            found, test = np.abs(draws[0, columns]), tests[part, change]
            p = "" if test["p"] is None else f", p = {test['p_bh']:.3f}"
            name = f"{part}: {show_json(test['rho'])}{p}"
            colour, marker = PART_COLOURS.get(part, GREY), MARKERS.get(part, "^")
            axes.scatter(sizes, found, s=11, marker=marker, color=colour, alpha=0.75, linewidths=0, label=name)
        axes.set_ylabel(f"|logits| {y_label}")
        if np.abs(draws[0]).max() > LINEAR_UP_TO:
            axes.set_yscale("symlog", linthresh=LINEAR_UP_TO)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), handletextpad=0.2, borderpad=0.1,
                    labelspacing=0.2)  # fmt: skip
    panels[-1].set_xlabel("size of the delta, ||dW||_F")
    _head(figure, knockouts)
    return figure


def _scores(played: Scores) -> Figure:
    figure = Figure(figsize=(COLUMN, 1.0 + 0.27 * len(played.found)))
    axes = figure.subplots()
    names = [_played_name(key) for key in played.found]
    axes.axvline(0, color=GREY, linewidth=0.6)
    for row, (key, found) in enumerate(played.found.items()):
        score = found["score"]
        colour = MODEL_COLOURS[key[0]]
        axes.barh(row, score.estimate, height=0.6, color=colour, alpha=1.0 if key[1] == "none" else 0.55)
        if not np.isnan(score.low):
            axes.plot([score.low, score.high], [row, row], color="black", linewidth=0.9)
        axes.text(1.02, row, f"{round(100 * found['valid_share'].estimate)} %", transform=axes.get_yaxis_transform(),
                  ha="left", va="center", fontsize=7)  # fmt: skip
    axes.text(
        1.02, -0.85, "valid", transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=7, color=GREY
    )
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("mean score")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    intervals = "95 % bootstrap intervals" if played.n_graphs >= MIN_GROUPS else "too few for intervals"
    figure.suptitle(f"{played.n_graphs} unseen graphs, {intervals}", fontsize=7, color=GREY)
    return figure


def _played_name(key: Played) -> str:
    model, switch, part = key
    return model if switch == "none" else part.replace(" (", "\n(")
