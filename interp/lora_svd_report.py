"""The SVD result for people: the figures, from the saved frame alone, and the table on stdout, from the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from interp.figures import COLUMN, DASHED, GREEN, GREY, MODEL_COLOURS, ORANGE, note, style
from interp.lora_svd_summary import MODELS, PARTS, by_module, functional, profile, show

PART_COLOURS = {"attention": GREEN, "mlp": ORANGE, "other": GREY}
PART_NAMES = {"attention": "attention", "mlp": "MLP", "other": "other"}
ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROW_HEIGHT = 0.14  # inches, of a projection in the heat map


def figures(frame: pd.DataFrame, seed: int = 0) -> dict[str, Figure]:
    """All figures of a frame of `interp.lora_svd.measure`, by file name."""
    return {
        "lora_svd": plot(frame),
        "spectra": plot_spectra(frame),
        "overlap": plot_overlap(frame),
        "functional_size": plot_functional_size(frame, seed),
    }


def plot(frame: pd.DataFrame) -> Figure:
    """Where the adapter wrote: by layer, attention and MLP apart, whole and per parameter, and by module."""
    modules = by_module(frame)
    projections = _projections(modules)
    with style():
        heat = 0.35 + ROW_HEIGHT * len(projections)
        figure = Figure(figsize=(COLUMN, 2.5 + heat))
        whole, mean, cells = figure.subplots(3, 1, height_ratios=[1, 1, heat], sharex=True)
        found = profile(frame)
        _lines(whole, found, "frobenius")
        _lines(mean, found, "per_parameter")
        whole.set_ylabel(r"$\|\Delta W\|_F$")
        mean.set_ylabel("per parameter")
        mean.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
        _heat_map(figure, cells, modules, projections)
        if not found.empty:
            whole.legend(handles=_part_handles(found["part"]), ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0))
        cells.set_xlabel("layer")
        figure.align_ylabels([whole, mean])
    return figure


def plot_spectra(frame: pd.DataFrame) -> Figure:
    """Singular values of every module relative to its largest, attention beside MLP, with the median in bold.

    A module whose delta is zero has no curve, and is counted.
    """
    sigma = frame[(frame["metric"] == "sigma") & frame["part"].isin(PARTS)]
    zero = by_module(frame).query("spectral == 0")["part"].value_counts()
    with style():
        figure = Figure(figsize=(COLUMN, 1.75))
        for axes, part in zip(figure.subplots(1, 2, sharey=True), PARTS, strict=True):
            wide = sigma[sigma["part"] == part].pivot(index="index", columns="module", values="value")
            drawn = wide.loc[:, wide.max() > 0] if not wide.empty else wide
            axes.set_title(PART_NAMES[part], loc="left", color=PART_COLOURS[part], fontweight="bold")
            if left_out := int(zero.get(part, 0)):
                axes.set_title(f"{left_out} zero", loc="right", fontsize=7, color=GREY)
            if drawn.empty:
                note(axes, "no delta")
                axes.set_xticks([])
                continue
            relative = drawn / drawn.max()
            axes.plot(relative.index, relative, color=PART_COLOURS[part], linewidth=0.4, alpha=0.3)
            axes.plot(relative.index, relative.median(axis=1), color="black", linewidth=1.2)
            axes.set_ylim(0, 1.03)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))
        figure.axes[0].set_ylabel(r"$\sigma_i\,/\,\sigma_1$")
        figure.supxlabel("singular value", fontsize=7.5)
    return figure


def plot_overlap(frame: pd.DataFrame) -> Figure:
    """Share of the delta's 90 % energy directions inside W's leading ones, by layer, over that of random directions."""
    modules = by_module(frame)
    with style():
        figure = Figure(figsize=(COLUMN, 2.5))
        panels = figure.subplots(2, 1, sharex=True)
        drawn = False
        for axes, side in zip(panels, ("left", "right"), strict=True):
            what = "outputs of the module" if side == "left" else "inputs of the module"
            axes.set_title(f"{side} singular vectors: {what}", loc="left")
            ratio = modules[f"overlap_{side}"] / modules[f"overlap_{side}_random"]
            if ratio.notna().sum() == 0:
                note(axes, "not available" if modules["spectral"].any() else "the delta is zero")
                continue
            drawn = True
            for part in PARTS:
                rows = (modules["part"] == part) & (modules["layer"] >= 0)
                axes.plot(modules["layer"][rows], ratio[rows], ".", color=PART_COLOURS[part], markersize=3.5, alpha=0.7,
                          markeredgewidth=0)  # fmt: skip
            axes.axhline(1, color="black", **DASHED)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_locator(NullLocator())
        if drawn:
            handles = [*_part_handles(modules["part"]), Line2D([], [], color="black", **DASHED, label="random")]
            panels[0].legend(handles=handles, ncols=3, loc="lower left", bbox_to_anchor=(0, 1.14), handlelength=1.4)
        panels[-1].set_xlabel("layer")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.supylabel("overlap with W's leading directions,\ntimes that of random ones", fontsize=7.5)
    return figure


def plot_functional_size(frame: pd.DataFrame, seed: int = 0) -> Figure:
    """E ||dW x|| / E ||W x|| at the decision by layer, with bands over graphs, on both models' own activations."""
    sizes = functional(frame, seed)
    with style():
        figure = Figure(figsize=(COLUMN, 2.05))
        panels = figure.subplots(1, 2, sharey=True)
        for axes, part in zip(panels, PARTS, strict=True):
            axes.set_title(PART_NAMES[part], loc="left", fontweight="bold")
            if sizes is None or part not in set(sizes.modules["part"]):
                note(axes, "not measured")
                axes.set_xticks([])
                continue
            layers = sorted(set(sizes.modules.loc[sizes.modules["part"] == part, "layer"]))
            for model in MODELS:
                draws = np.stack([sizes.draws(model, "decision", part, layer) for layer in layers], axis=1)
                axes.fill_between(layers, *sizes.bootstrap.band(draws), color=MODEL_COLOURS[model], alpha=0.2, lw=0)
                axes.plot(layers, draws[0], color=MODEL_COLOURS[model])
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if sizes is not None:
            handles = [Line2D([], [], color=MODEL_COLOURS[model], label=f"{model}'s x") for model in MODELS]
            figure.legend(handles=handles, ncols=2, loc="outside upper right")
        panels[0].set_ylabel(r"$E\|\Delta W x\|\ /\ E\|W x\|$")
        figure.supxlabel("layer", fontsize=7.5)
    return figure


def table(summary: Mapping[str, Any]) -> str:
    """The result as text: a row per projection and part, then the statement and what is not available."""
    head = ("", "modules", "||dW||_F", "share", "per param.", "/||W||_F", "stable", "eff.", "r90", "r99", "overlap x",
            "intruders")  # fmt: skip
    order = {name: rank for rank, name in enumerate(ORDER)}
    projections = sorted(summary["projections"].items(), key=lambda item: order.get(item[0], len(order)))
    lines = [_cells(name, found) for name, found in [*projections, *summary["parts"].items()]]
    rows = [f"  {row[0]:<12}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in (head, *lines)]
    title = f"{summary['adapter']}: {summary['modules']} modules, rank {', '.join(map(str, summary['ranks']))}"
    text = [title, *rows]
    if sizes := summary["functional_size"]:
        text.append(f"  E||dW x|| / E||W x||, {sizes['pairs']} pairs of {sizes['groups']} graphs")
        for model in MODELS:
            for position in ("prompt", "decision"):
                cells = ", ".join(f"{part} {show(found)}" for part, found in sizes[model][position].items())
                text.append(f"    {model + ' activations, ' + position:<32}{cells}")
    text.append(f"  {summary['statement']}")
    text += [f"  not available in {count} modules: {why}" for why, count in summary["not_available"].items()]
    return "\n".join(text)


def _cells(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    ratios = [
        found[f"overlap_{side}"] / found[f"overlap_{side}_random"] for side in ("left", "right")
        if found[f"overlap_{side}"] is not None
    ]  # fmt: skip
    forms = {"frobenius": ".3f", "share": ".0%", "per_parameter": ".1e", "relative_frobenius": ".3f",
             "stable_rank": ".1f", "effective_rank": ".1f", "energy_rank_90": ".0f",
             "energy_rank_99": ".0f"}  # fmt: skip
    overlaps = " / ".join(f"{ratio:.1f}" for ratio in ratios) or "-"
    cells = [number(found[metric], form) for metric, form in forms.items()]
    return (name, str(found["modules"]), *cells, overlaps, number(found["intruders"], ".0f"))


def _lines(axes: Axes, found: pd.DataFrame, metric: str) -> None:
    for part, rows in found.groupby("part"):
        axes.plot(rows["layer"], rows[metric], color=PART_COLOURS[str(part)], marker=".", markersize=3)
    axes.set_ylim(bottom=0)


def _heat_map(figure: Figure, axes: Axes, modules: pd.DataFrame, projections: list[str]) -> None:
    """Relative size where the base weights are known, or else the size per parameter."""
    metric = "relative_frobenius" if modules["relative_frobenius"].notna().any() else "per_parameter"
    label = r"$\|\Delta W\|_F\,/\,\|W\|_F$" if metric == "relative_frobenius" else "per parameter"
    inside = modules[modules["layer"] >= 0]
    if inside.empty:
        note(axes, "no module in a layer")
        return
    wide = inside.pivot_table(index="projection", columns="layer", values=metric, aggfunc="mean")
    wide = wide.reindex(index=projections, columns=range(int(inside["layer"].max()) + 1))
    cells = wide.to_numpy(dtype=np.float64)
    top = np.nanmax(cells) or 1.0  # all zeros are the bottom of the scale, not its middle
    image = axes.imshow(cells, aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    axes.set_yticks(range(len(projections)), projections)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, orientation="horizontal", shrink=0.7, aspect=30, label=label)


def _projections(modules: pd.DataFrame) -> list[str]:
    """Those in layers, in the order in which a decoder layer applies them."""
    found = set(modules.loc[modules["layer"] >= 0, "projection"])
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def _part_handles(parts: pd.Series) -> list[Line2D]:
    present = set(parts)
    return [
        Line2D([], [], color=PART_COLOURS[part], marker=".", label=PART_NAMES[part])
        for part in PARTS
        if part in present
    ]
