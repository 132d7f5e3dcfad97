"""What the measured deltas come to: by layer, by part, by projection, and on the pairs' activations. No model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from interp.lora_delta import INTRUDER_COUNT, INTRUDER_MATCH
from interp.stats import LEVEL, RESAMPLES, ClusterBootstrap, Floats, Interval, derive_rng

MODELS, PARTS, POSITIONS = ("base", "trained"), ("attention", "mlp"), ("prompt", "decision")
PLACE = ["module", "layer", "part", "projection"]
MEDIANS = (
    "stable_rank", "effective_rank", "energy_rank_90", "energy_rank_99", "relative_frobenius", "relative_spectral",
    "overlap_left", "overlap_left_random", "overlap_right", "overlap_right_random",
)  # fmt: skip
EXACT = "The weights are no sample: their numbers are exact and have no interval. Intervals are over graphs."


def by_module(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per module, lowest layer first: `module`, `layer`, `part`, `projection` and a column per metric.

    Args:
        frame: of `interp.lora_svd.measure`.
    """
    rows = frame[(frame["pair"] == "") & (frame["index"] == 0)]
    wide = rows.pivot(index=PLACE, columns="metric", values="value").reset_index().rename_axis(columns=None)
    return wide.sort_values(["layer", "module"], ignore_index=True)


def profile(frame: pd.DataFrame) -> pd.DataFrame:
    """How much was written in each layer, attention and MLP apart.

    Args:
        frame: of `interp.lora_svd.measure`.

    Returns:
        Columns `layer`, `part` (`attention` or `mlp`), `frobenius`, the root of the sum of squares of all entries that
        the part's deltas have in the layer, and `per_parameter`, the root of their mean. A part that the adapter does
        not touch in a layer has no row.
    """
    modules = by_module(frame)
    modules = modules[modules["part"].isin(PARTS) & (modules["layer"] >= 0)]
    sums = _sums(modules).groupby(["layer", "part"], as_index=False)[["squares", "entries"]].sum()
    return pd.DataFrame({
        "layer": sums["layer"],
        "part": sums["part"],
        "frobenius": np.sqrt(sums["squares"]),
        "per_parameter": np.sqrt(sums["squares"] / sums["entries"]),
    })  # fmt: skip


@dataclass(frozen=True)
class Functional:
    """E ||dW x|| / E ||W x|| per module, in the sample and in resamples of graphs.

    Attributes:
        modules: (k,) rows with `module`, `layer`, `part`, `projection`.
        ratios: (model, position) -> (1 + resamples, k).
        n_pairs: how many pairs were measured.
    """

    bootstrap: ClusterBootstrap
    modules: pd.DataFrame
    ratios: Mapping[tuple[str, str], Floats]
    n_pairs: int

    def draws(self, model: str, position: str, part: str, layer: int | None = None) -> Floats:
        """(1 + resamples,) the mean over the modules of a part, or of a part in a layer; NaN if it has none."""
        chosen = self.modules["part"] == part
        if layer is not None:
            chosen &= self.modules["layer"] == layer
        ratios = self.ratios[model, position]
        return ratios[:, chosen.to_numpy()].mean(1) if chosen.any() else np.full(len(ratios), np.nan)


def functional(frame: pd.DataFrame, seed: int = 0) -> Functional | None:
    """The functional sizes in a frame, or None if it has none: a ratio of means over pairs for each module.

    Args:
        frame: of `interp.lora_svd.measure` with the rows of `interp.lora_activations.functional_size`, or these alone.
        seed: of the resampling.
    """
    rows = frame[frame["pair"] != ""]
    if rows.empty:
        return None
    groups = rows.drop_duplicates("pair").set_index("pair")["group"]
    modules = rows.drop_duplicates("module")[PLACE].sort_values(["layer", "module"], ignore_index=True)
    bootstrap = ClusterBootstrap.draw(list(groups), derive_rng(seed, "lora_svd", "functional_size"))
    wide = rows.pivot(index="pair", columns=["model", "position", "metric", "module"], values="value")
    wide = wide.loc[groups.index].sort_index(axis=1)
    ratios = {}
    for model in MODELS:
        for position in POSITIONS:
            delta, base = (
                bootstrap.means(wide[model, position, metric][modules["module"]].to_numpy())
                for metric in ("delta_output", "base_output")
            )
            ratios[model, position] = np.divide(delta, base, out=np.full_like(delta, np.nan), where=base > 0)
    return Functional(bootstrap, modules, ratios, len(groups))


def summarise(frame: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """The result, ready for JSON; what is undefined is None.

    Args:
        frame: of `interp.lora_svd.measure`, with or without functional sizes.
        seed: of the resampling over graphs.
    """
    modules = by_module(frame)
    sizes = functional(frame, seed)
    record: dict[str, Any] = {
        "adapter": str(frame["adapter"].iloc[0]),
        "modules": len(modules),
        "zero_modules": int((modules["spectral"] == 0).sum()),
        "ranks": sorted({int(rank) for rank in modules["rank"]}),
        "scales": sorted(set(modules["scale"].tolist())),
        "parts": _grouped(modules, "part"),
        "projections": _grouped(modules, "projection"),
        "layers": _layers(modules),
        "intruders": _intruders(modules),
        "functional_size": _functional_record(sizes, len(modules)) if sizes else None,
        "not_available": _not_available(frame),
        "profile": [_clean(row) for row in profile(frame).to_dict("records")],
        "intervals": EXACT,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": seed,
    }
    return {"statement": statement(record)} | record


def statement(record: Mapping[str, Any]) -> str:
    """The summary in a few sentences."""
    if record["zero_modules"] == record["modules"]:
        return f"The delta is zero in all {record['modules']} modules: ranks and directions are undefined."
    shares = ", ".join(f"{part} {100 * found['share']:.0f} %" for part, found in record["parts"].items())
    layers = record["layers"]
    text = [f"Of the squared size of the delta, over {record['modules']} modules: {shares}."]
    if layers["centre"] is not None:
        text.append(f"It is largest in layer {layers['largest']}, with its centre at layer {layers['centre']:.1f}.")
    ranks = _range(record["parts"], "effective_rank")
    text.append(f"Median effective rank by part {ranks} of {_span(record['ranks'])}.")
    if (found := record["intruders"]["count"]) is not None:
        text.append(
            f"{found} of the {record['intruders']['of']} leading singular vectors of W + dW match none of W's"
            + (f", {record['intruders']['undetermined']} undetermined." if record["intruders"]["undetermined"] else ".")
        )
    if sizes := record["functional_size"]:
        at = sizes["trained"]["decision"]
        shown = ", ".join(f"{part} {show(found)}" for part, found in at.items())
        text.append(f"At the decision ||dW x|| is, as a share of ||W x||: {shown}.")
    return " ".join(text)


def show(found: Mapping[str, float | None] | Interval, digits: int = 3) -> str:
    """`0.104 [0.101, 0.107]`."""
    record = found.to_json() if isinstance(found, Interval) else found
    if record["estimate"] is None:
        return "undefined"
    interval = f" [{record['low']:.{digits}f}, {record['high']:.{digits}f}]" if record["low"] is not None else ""
    return f"{record['estimate']:.{digits}f}{interval}"


def _sums(modules: pd.DataFrame) -> pd.DataFrame:
    return modules.assign(squares=modules["frobenius"] ** 2, entries=modules["rows"] * modules["columns"])


def _grouped(modules: pd.DataFrame, column: str) -> dict[str, Any]:
    """For each part or projection: its size, its share of the sum of squares, medians over its modules, intruders."""
    table = _sums(modules)
    total = table["squares"].sum()
    found = {}
    for name, rows in table.groupby(column):
        squares = rows["squares"].sum()
        found[str(name)] = _clean({
            "modules": len(rows),
            "frobenius": math.sqrt(squares),
            "share": squares / total if total > 0 else math.nan,
            "per_parameter": math.sqrt(squares / rows["entries"].sum()),
            **{metric: rows[metric].median() for metric in MEDIANS},
            "intruders": rows["intruders"].sum(min_count=1),
        })  # fmt: skip
    return found


def _layers(modules: pd.DataFrame) -> dict[str, Any]:
    """The layer that was changed most, and the mean layer weighted by squared size; None without layers or change."""
    squares = _sums(modules[modules["layer"] >= 0]).groupby("layer")["squares"].sum()
    if not squares.sum() > 0:
        return {"largest": None, "centre": None}
    layers, weights = squares.index.to_numpy(), squares.to_numpy()
    return {"largest": int(layers[weights.argmax()]), "centre": float(np.average(layers, weights=weights))}


def _intruders(modules: pd.DataFrame) -> dict[str, Any]:
    measured = modules.dropna(subset=["intruders"])
    asked = np.minimum(INTRUDER_COUNT, measured[["rows", "columns"]].min(axis=1)).sum()
    return {
        "count": int(measured["intruders"].sum()) if len(measured) else None,
        "undetermined": int(measured["intruders_undetermined"].sum()) if len(measured) else None,
        "of": int(asked),
        "match": INTRUDER_MATCH,
        "modules_with_any": int((measured["intruders"] > 0).sum()) if len(measured) else None,
    }


def _functional_record(sizes: Functional, modules: int) -> dict[str, Any]:
    """Mean over modules by part, for both models' activations and their paired difference."""
    parts = sorted(set(sizes.modules["part"]))
    record: dict[str, Any] = {
        "pairs": sizes.n_pairs,
        "groups": sizes.bootstrap.n_groups,
        "modules": len(sizes.modules),
        "modules_without": modules - len(sizes.modules),
    }
    for model in (*MODELS, "trained - base"):
        record[model] = {}
        for position in POSITIONS:
            record[model][position] = {
                part: sizes.bootstrap.interval(_draws(sizes, model, position, part)).to_json() for part in parts
            }
    return record


def _draws(sizes: Functional, model: str, position: str, part: str) -> Floats:
    if model in MODELS:
        return sizes.draws(model, position, part)
    return sizes.draws("trained", position, part) - sizes.draws("base", position, part)


def _not_available(frame: pd.DataFrame) -> dict[str, int]:
    """Reason -> how many modules lack a metric for it."""
    noted = frame[frame["note"] != ""]
    return {str(reason): int(rows["module"].nunique()) for reason, rows in noted.groupby("note")}


def _clean(record: Mapping[Any, Any]) -> dict[str, Any]:
    """Numbers as JSON has them: None for NaN."""
    return {
        str(key): value if isinstance(value, (str, int)) else float(value) if math.isfinite(value) else None
        for key, value in record.items()
    }


def _range(parts: Mapping[str, Any], metric: str) -> str:
    return ", ".join(f"{part} {found[metric]:.1f}" for part, found in parts.items() if found[metric] is not None)


def _span(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
