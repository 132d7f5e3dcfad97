"""How a delta grows and turns from one adapter to the next: checkpoints of a run, or any adapters of one base.

The directions that hold 90 % of a delta's energy span a subspace; two adapters' subspaces are compared, module by
module, by their principal angles. Checkpoints of one run begin with the same random A: their right (input) subspaces
agree even where nothing was learnt, so it is the left (output) ones that tell.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from interp import cli
from interp.figures import COLUMN, style
from interp.lora_delta import SVD, delta_svd, random_overlap, spectrum_metrics
from interp.lora_files import LoraFiles, LoraModule
from interp.lora_svd_report import PART_COLOURS, PART_NAMES
from interp.lora_svd_summary import PARTS
from interp.run_record import AdapterIdentity, RunFolder

COLUMNS = ("adapter", "step", "other", "module", "layer", "part", "projection", "side", "metric", "value")
SIZES = ("frobenius", "per_parameter", "spectral", "stable_rank", "effective_rank")


def measure(
    adapters: Sequence[str | Path], *, progress: Callable[[Iterable], Iterable] = iter
) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """Measure every adapter, and every two of them, in the modules that all of them change.

    Args:
        adapters: folders, in the order of the series.
        progress: wraps the modules, to show how far it is.

    Returns:
        (frame, [(module, reason)] of what is left out). The frame has one row per module, adapter and metric, with
        adapter: its folder's name. step: its number in the series.
        other: the adapter that it is compared with, an earlier one; empty in rows of one adapter.
        module, layer, part, projection: as in `interp.lora_files.LoraModule`.
        side: `left` (outputs) or `right` (inputs) subspaces; empty in rows of one adapter.
        metric: of one adapter, those of `interp.lora_delta.spectrum_metrics` in `SIZES`; of two, with principal angles
            theta (degrees) between i and j dimensional subspaces: `overlap`, the mean of cos^2 theta,
            `overlap_random`, its expectation for random ones, max(i, j) / d, `angle_smallest` and `angle_largest`.
        value: the number; NaN where a delta is zero.

    Raises:
        InputError: if there are fewer than two adapters, they share no module, or are of different models.
        SubjectError, BaseModelError: as `interp.lora_files.LoraFiles.open`.
    """
    series = [LoraFiles.open(adapter) for adapter in adapters]
    if len(series) < 2:
        raise cli.InputError(f"--adapter: expected at least two adapters to compare, found {len(series)}")
    by_name = [{module.name: module for module in files.modules} for files in series]
    shared = [name for name in by_name[0] if all(name in modules for modules in by_name)]
    if not shared:
        raise cli.InputError("--adapter: expected adapters that change some of the same modules, found none in common")
    rows: list[dict[str, Any]] = []
    for name in progress(shared):
        rows += _rows_of_module(series, [modules[name] for modules in by_name])
    absent = dict.fromkeys(name for modules in by_name for name in modules if name not in set(shared))
    return pd.DataFrame(rows)[list(COLUMNS)], [(name, "not in every adapter") for name in absent]


def principal_angles(first: Tensor, second: Tensor) -> Tensor:
    """(min(i, j),) principal angles in degrees, smallest first, of orthonormal (d, i) and (d, j)."""
    cosines = torch.linalg.svdvals(first.double().mT @ second.double()).clamp(0, 1)
    return torch.rad2deg(torch.arccos(cosines))


def _rows_of_module(series: Sequence[LoraFiles], modules: Sequence[LoraModule]) -> Iterator[dict[str, Any]]:
    wrote: list[SVD | None] = []
    for step, (files, module) in enumerate(zip(series, modules, strict=True)):
        if module.shape != modules[0].shape:
            raise cli.InputError(
                f"{files.folder}: {module.name}: expected the shape {modules[0].shape} as in {series[0].folder}, "
                f"found {module.shape}"
            )
        b, a = files.factors([module])
        delta = delta_svd(b[0], a[0], module.scale)
        metrics = spectrum_metrics(delta.sigma, module.shape)
        wrote.append(delta.directions(int(metrics["energy_rank_90"])) if metrics["spectral"] > 0 else None)
        for metric in SIZES:
            yield _row(series, step, None, module, "", metric, float(metrics[metric]))
    for earlier, step in itertools.combinations(range(len(series)), 2):
        for side in ("left", "right"):
            for metric, value in _compare(wrote[earlier], wrote[step], side).items():
                yield _row(series, step, earlier, modules[step], side, metric, value)


def _compare(first: SVD | None, second: SVD | None, side: str) -> dict[str, float]:
    if first is None or second is None:
        return dict.fromkeys(("overlap", "overlap_random", "angle_smallest", "angle_largest"), math.nan)
    p, q = getattr(first, side), getattr(second, side)
    angles = principal_angles(p, q)
    return {
        "overlap": float(torch.deg2rad(angles).cos().square().mean()),
        "overlap_random": random_overlap(p.shape[1], q.shape[1], p.shape[0]),
        "angle_smallest": float(angles[0]),
        "angle_largest": float(angles[-1]),
    }


def _row(
    series: Sequence[LoraFiles],
    step: int,
    other: int | None,
    module: LoraModule,
    side: str,
    metric: str,
    value: float,
) -> dict[str, Any]:
    return {
        "adapter": series[step].name, "step": step, "other": "" if other is None else series[other].name,
        "module": module.name, "layer": module.layer, "part": module.part, "projection": module.projection,
        "side": side, "metric": metric, "value": value,
    }  # fmt: skip


def summarise(frame: pd.DataFrame) -> dict[str, Any]:
    """Size and rank of every adapter by part, and the median overlap of neighbours, ready for JSON."""
    names = list(frame.drop_duplicates("step")["adapter"])
    totals = _totals(frame)
    neighbours = []
    for before, after in itertools.pairwise(names):
        found = {side: _median(frame, after, before, side, "overlap") for side in ("left", "right")}
        random = {side: _median(frame, after, before, side, "overlap_random") for side in ("left", "right")}
        neighbours.append({"from": before, "to": after, "overlap": found, "overlap_random": random})
    steps = [
        {"adapter": name, "parts": {part: _row_of(totals, name, part) for part in sorted(set(totals["part"]))}}
        for name in names
    ]
    whole = {name: math.sqrt((totals.loc[totals["adapter"] == name, "frobenius"] ** 2).sum()) for name in names}
    ends = {
        side: (_median(frame, names[-1], names[0], side, "overlap"),
               _median(frame, names[-1], names[0], side, "overlap_random")) for side in ("left", "right")
    }  # fmt: skip
    text = f"||dW||_F goes from {whole[names[0]]:.3f} in {names[0]} to {whole[names[-1]]:.3f} in {names[-1]}."
    shown = [f"{side} {pair[0]:.3f} (random {pair[1]:.3f})" for side, pair in ends.items() if None not in pair]
    text += f" Median overlap of their subspaces: {', '.join(shown) or 'undefined, since a delta is zero'}."
    return {"statement": text, "adapters": steps, "neighbours": neighbours}


def plot_growth(frame: pd.DataFrame) -> Figure:
    """Size and median effective rank over the series, attention and MLP apart.

    The axis has the numbers of names like ep050 where all adapters have one, else the names in the order of the series.
    """
    totals = _totals(frame)
    names = list(frame.drop_duplicates("step")["adapter"])
    places, ticks, label = _axis(names)
    with style():
        figure = Figure(figsize=(COLUMN, 1.75))
        for axes, metric, title in zip(
            figure.subplots(1, 2), ("frobenius", "effective_rank"), (r"$\|\Delta W\|_F$", "effective rank"), strict=True
        ):
            for part in PARTS:
                rows = totals[totals["part"] == part].set_index("adapter").reindex(names)
                axes.plot(places, rows[metric], color=PART_COLOURS[part], marker=".", label=PART_NAMES[part])
            axes.set_title(title, loc="left")
            axes.set_ylim(0, 1.15 * totals[metric].max() or 1)
            axes.set_xticks(places, ticks, rotation=90 if len(places) > 4 or ticks == names else 0)
        figure.axes[0].legend(loc="best")
        figure.supxlabel(label, fontsize=7.5)
    return figure


def plot_angles(frame: pd.DataFrame) -> Figure:
    """Median overlap of every two adapters' subspaces, outputs beside inputs, and the random expectation."""
    names = list(frame.drop_duplicates("step")["adapter"])
    with style():
        figure = Figure(figsize=(COLUMN, 2.1))
        panels, random = figure.subplots(1, 2, sharey=True), {}
        sizes = frame[frame["metric"] == "frobenius"].groupby("adapter")["value"].max()
        zero = sizes.reindex(names).to_numpy() == 0
        for axes, side in zip(panels, ("left", "right"), strict=True):
            rows = frame[frame["side"] == side]
            overlaps = rows[rows["metric"] == "overlap"]
            medians = overlaps.groupby(["adapter", "other"], as_index=False)["value"].median()
            random[side] = rows[rows["metric"] == "overlap_random"]["value"].median()
            table = np.diag(np.where(zero, np.nan, 1.0))
            for later, earlier, value in medians.itertuples(index=False):
                i, j = names.index(later), names.index(earlier)
                table[i, j] = table[j, i] = value
            image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            axes.set_title("left: outputs" if side == "left" else "right: inputs", loc="left")
            axes.set_xlabel(f"random: {random[side]:.3f}" if random[side] == random[side] else "undefined")
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        figure.colorbar(image, ax=panels, shrink=0.7, label="median overlap")
    return figure


def analyse(args: argparse.Namespace, argv: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Compare several adapters in `OUT/<series>/lora_svd_growth/`, print the statement, return the summary."""
    name = args.series or f"{folders[0].name}-{folders[-1].name}"
    series = [LoraFiles.open(folder) for folder in folders]
    digest = hashlib.sha256("".join(f"{files.sha256}  {files.name}\n" for files in series).encode())
    base = {"name": series[0].config.base_model_name_or_path, "sha256": None, "why": "no base weight is read"}
    identity = AdapterIdentity(name, digest.hexdigest(), base)
    run = RunFolder.open("lora_svd_growth", args, argv, identity, command="lora_svd")
    frame, left_out = measure(folders, progress=cli.progress_bar(args, f"series {name}", unit="module"))
    record = [{"id": module, "reason": reason} for module, reason in left_out]
    summary = summarise(frame) | {"left_out": record}
    run.finish(None, frame, summary, {"growth": plot_growth(frame), "angles": plot_angles(frame)})
    cli.say(args, f"{name}: {summary['statement']}\nleft out: {len(record)} modules\nwritten to {run.folder}")
    return summary


def _totals(frame: pd.DataFrame) -> pd.DataFrame:
    """Per adapter and part: `frobenius`, the root of the sum of squares, and the median of `effective_rank`."""
    own = frame[(frame["other"] == "") & frame["part"].isin(PARTS)]
    wide = own.pivot(index=["step", "adapter", "part", "module"], columns="metric", values="value")
    grouped = wide.groupby(["step", "adapter", "part"])
    sizes = grouped["frobenius"].apply(lambda values: math.sqrt((values**2).sum()))
    return pd.DataFrame({"frobenius": sizes, "effective_rank": grouped["effective_rank"].median()}).reset_index()


def _row_of(totals: pd.DataFrame, name: str, part: str) -> dict[str, float | None]:
    row = totals[(totals["adapter"] == name) & (totals["part"] == part)].iloc[0]
    rank = float(row["effective_rank"])
    return {"frobenius": float(row["frobenius"]), "effective_rank": None if math.isnan(rank) else rank}


def _median(frame: pd.DataFrame, later: str, earlier: str, side: str, metric: str) -> float | None:
    chosen = (frame["adapter"] == later) & (frame["other"] == earlier) & (frame["side"] == side)
    values = frame[chosen & (frame["metric"] == metric)]["value"].dropna()
    return float(values.median()) if len(values) else None


def _axis(names: Sequence[str]) -> tuple[list[int], list[str], str]:
    numbers = [re.search(r"ep(\d+)", name) for name in names]
    found = [int(number[1]) for number in numbers if number]
    if len(found) == len(names) and len(set(found)) == len(names):
        return found, [str(number) for number in found], "episodes of training"
    return list(range(1, len(names) + 1)), list(names), "adapter, in the order given"
