"""The logit lens for people: figures and the table on stdout, from the saved frame and the adapter's profile alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from interp.figures import COLUMN, DASHED, GREEN, GREY, MODEL_COLOURS, ORANGE, curve, mark, note, style
from interp.flip import MODELS, show
from interp.logit_lens_summary import CAUTION, SlotLens, read

LAYER = "layer whose input is read (last: the output)"
SLOT_COLOURS = (ORANGE, GREEN, "#CC79A7", "#56B4E9", "#E69F00", "black", "#F0E442", GREY)  # blue is the trained model
PART_COLOURS = ("#333333", "#AAAAAA", "#777777")
SMALL_KL = 0.1  # nats
CAPTIONS = {
    "logit_lens": "Probability of the reference's choice (solid) and of all other choices together (dashed), read from "
    "the stream entering each layer; means with 95 % bootstrap bands over graphs. Dots: mean layer from which the "
    f"final top token stays on top of all tokens. {CAUTION}",
    "rank": "Rank of the reference's token among all tokens (1 is the top), geometric mean with its 95 % bootstrap "
    f"band over graphs. {CAUTION}",
    "heatmap": "KL of each layer's reading to the model's own output, KL(final ‖ layer), mean over texts: where it is "
    f"large, the reading says little. {CAUTION}",
    "divergence": "Above: KL(trained ‖ base) read at the same layer, mean with its 95 % bootstrap band over graphs. "
    "Below: Frobenius norm of what the adapter adds to the weights of each layer, drawn between the readings before "
    f"and after it. {CAUTION}",
}


def figures(frame: pd.DataFrame, profile: pd.DataFrame | None = None, *, seed: int = 0) -> dict[str, Figure]:
    """All figures by name, a text for each is in `CAPTIONS`: of the main kind of pairs, the first, and of decisions.

    Args:
        frame: of `interp.logit_lens.measure`.
        profile: of `interp.lora_svd.profile`; without it the divergence stands alone.
        seed: of the resampling, as for `interp.logit_lens_summary.summarise`.
    """
    slots = read(frame, seed)
    slots = [slot for slot in slots if slot.kind in (slots[0].kind, "decision")]
    with style():
        return {
            "logit_lens": _small_multiples(slots, "probability", _probabilities),
            "rank": _small_multiples(slots, "rank among all tokens", _ranks),
            "heatmap": _heatmap(slots),
            "divergence": _divergence(slots, profile),
        }


def table(
    frame: pd.DataFrame, summary: Mapping[str, Any], *, title: str, left_out: str, folder: object, seed: int = 0
) -> str:
    """The result as text, base beside trained, one block per slot."""
    blocks = [_block(slot, title) for slot in read(frame, seed)]
    lines = [summary["statement"], CAUTION, f"left out: {left_out}", f"written to {folder}"]
    return "\n".join([*blocks, *lines])


def name_of(slot: SlotLens) -> str:
    """How a slot is called in a figure: `answer in A`, `retain`, `retain, then`."""
    return slot.slot.replace(":2", ", then")


def _small_multiples(slots: Sequence[SlotLens], y_label: str, draw: Callable[[Axes, SlotLens], None]) -> Figure:
    """One panel a slot, in two columns with shared axes."""
    rows = math.ceil(len(slots) / 2)
    figure = Figure(figsize=(COLUMN, 0.75 + 1.05 * rows))
    grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    panels = grid.flatten().tolist()
    for axes, slot in zip(panels, slots, strict=False):
        draw(axes, slot)
        axes.set_title(name_of(slot), loc="left", fontsize=7.5)
        axes.set_title(f"n = {slot.n_texts}", loc="right", fontsize=6.5, color=GREY)
    for axes in panels[len(slots) :]:
        axes.set_visible(False)
    for axes in panels[max(0, len(slots) - 2) : len(slots)]:
        axes.tick_params(labelbottom=True)
    last = slots[0].divergence.shape[1] - 1
    panels[0].set_xlim(-0.02 * last, 1.02 * last)
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    figure.supxlabel(LAYER, fontsize=7.5)
    figure.supylabel(y_label, fontsize=7.5)
    handles = [Line2D([], [], color=MODEL_COLOURS[model], linewidth=1.3) for model in MODELS]
    names: list[str] = list(MODELS)
    if draw is _probabilities:
        handles += [Line2D([], [], color="black", linewidth=1.3), Line2D([], [], color="black", **DASHED)]
        names += ["reference", "all others"]
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), handlelength=1.6, columnspacing=1.0)
    return figure


def _probabilities(axes: Axes, slot: SlotLens) -> None:
    for level in (0, 1):
        axes.axhline(level, color=GREY, linewidth=0.4, alpha=0.6, zorder=0)
    for height, model in zip((-0.16, -0.08), MODELS, strict=True):
        draws = slot.curves[model, "p"]
        curve(axes, slot.curves[model, "p_others"][0], colour=MODEL_COLOURS[model], dashed=True)
        curve(axes, draws[0], colour=MODEL_COLOURS[model], band=slot.bootstrap.band(draws))
        mark(axes, slot.settles(model, "settling_vocabulary"), height, colour=MODEL_COLOURS[model])
    axes.set_ylim(-0.22, 1.06)
    axes.set_yticks([0, 0.5, 1])


def _ranks(axes: Axes, slot: SlotLens) -> None:
    for model in MODELS:
        draws = slot.curves[model, "log10_rank"]
        low, high = slot.bootstrap.band(draws)
        curve(axes, 10 ** draws[0], colour=MODEL_COLOURS[model], band=(10**low, 10**high))
    axes.set_yscale("log")
    axes.set_ylim(0.7, None)


def _heatmap(slots: Sequence[SlotLens]) -> Figure:
    figure = Figure(figsize=(COLUMN, 1.2 + 0.36 * len(slots)))
    panels = figure.subplots(len(MODELS), 1, sharex=True)
    tables = {model: np.stack([slot.curves[model, "kl_final"][0] for slot in slots]) for model in MODELS}
    top = max(float(found.max()) for found in tables.values())
    norm = LogNorm(SMALL_KL, max(top, 10 * SMALL_KL), clip=True)  # layer 0 is far off, and what matters is near 1
    for axes, model in zip(panels, MODELS, strict=True):
        image = axes.imshow(tables[model], aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
        axes.set_title(model, loc="left", fontweight="bold")
        axes.set_yticks(range(len(slots)), [name_of(slot) for slot in slots])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
    panels[-1].set_xlabel(LAYER)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(image, ax=panels, pad=0.02, aspect=35, format="%g")
    bar.set_label(f"KL(final ‖ layer), nats ({SMALL_KL} and below: darkest)")
    bar.outline.set_visible(False)
    return figure


def _divergence(slots: Sequence[SlotLens], profile: pd.DataFrame | None) -> Figure:
    figure = Figure(figsize=(COLUMN, 3.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
    handles = []
    for slot, colour in zip(slots, SLOT_COLOURS, strict=False):
        curve(above, slot.divergence[0], colour=colour, band=slot.bootstrap.band(slot.divergence))
        handles.append(Line2D([], [], color=colour, linewidth=1.3, label=name_of(slot)))
    figure.legend(handles=handles, loc="outside upper center", ncols=3, handlelength=1.4, columnspacing=1.0)
    above.set_ylabel("KL(trained ‖ base), nats")
    last = slots[0].divergence.shape[1] - 1
    if profile is None or profile.empty:
        note(below, "no profile of the adapter's layers")
    else:
        _profile(below, profile, last)
    below.set_xlim(-0.02 * last, 1.02 * last)
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_xlabel(LAYER)
    return figure


def _profile(axes: Axes, profile: pd.DataFrame, n_layers: int) -> None:
    """What layer l adds shows in the reading at l + 1, so its bar stands between the two."""
    parts = list(dict.fromkeys(profile["part"]))
    width = 0.8 / len(parts)
    for number, part in enumerate(parts):
        rows = profile[profile["part"] == part].set_index("layer")["frobenius"]
        heights = rows.reindex(range(n_layers), fill_value=0.0).to_numpy(dtype=np.float64)
        centres = np.arange(n_layers) + 0.1 + width * (number + 0.5)
        axes.bar(centres, heights, width, color=PART_COLOURS[number % len(PART_COLOURS)], label=str(part))
    axes.set_ylabel("‖ΔW‖, Frobenius")
    axes.set_ylim(0, 1.3 * max(float(profile["frobenius"].max()), np.finfo(float).tiny))  # room for the legend
    axes.legend(loc="upper left", ncols=len(parts), handlelength=1.0)


def _block(slot: SlotLens, title: str) -> str:
    rows: list[tuple[str, ...]] = [("", *MODELS)]
    for name, metric in (
        ("P(reference)", "p"),
        ("reference is the top choice", "chosen"),
        ("entropy, nats", "entropy"),
    ):
        rows.append((name, *(show(slot.interval(model, metric)) for model in MODELS)))
    for name, settling in (("on top of the choices", "settling"), ("on top of all tokens", "settling_vocabulary")):
        rows.append((f"{name} from layer", *(show(slot.settles(model, settling)) for model in MODELS)))
    rows.append(("KL(trained || base), nats", "", show(slot.bootstrap.interval(slot.divergence[:, -1]))))
    rows.append(("half of it from layer", "", show(slot.rise())))
    lines = [f"  {label:<39}{base:<23}{trained}".rstrip() for label, base, trained in rows]
    head = f"{title}, {slot.kind}, {slot.slot}: {slot.n_texts} texts of {slot.bootstrap.n_groups} graphs"
    return "\n".join([head, *lines])
