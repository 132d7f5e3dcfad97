"""At which layer the decision flips: recovery curves of a patching sweep, their crossings and intervals.

Numbers in, numbers out: everything here comes from the tidy frame of `interp.patching.measure`.

A sweep has a recipient and a donor, two runs with logit differences m_recipient and m_donor:

    denoise   A's activations into B      recipient B, donor A      is this enough to decide as in A?
    noise     B's activations into A      recipient A, donor B      is this needed to decide as in A?
    cross     trained's into base's run   both on A                 is the trained model's decision made by here?

Recovery is (m_patched - m_recipient) / (m_donor - m_recipient): 0 is the recipient's decision, 1 the donor's. The main
curve is the ratio of means over pairs, which no pair with a small denominator can dominate and for which none is left
out; the mean of the pairs' own ratios stands beside it. Patched at the value's tokens the curve falls when the
information has left them; patched at the decision position it rises when it has arrived. Between them is the transit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from interp.stats import (
    LEVEL,
    MIN_GROUPS,
    RESAMPLES,
    ClusterBootstrap,
    Direction,
    Floats,
    Interval,
    count_crossings,
    derive_rng,
    flip_layer,
    recovery,
)

METRIC = "logit_difference"
BASELINE_METRICS = ("logit_difference", "p_answer", "p_first_answer", "p_first_foil")
POSITIONS: dict[str, Direction] = {"value": "falling", "decision": "rising"}
MODELS = ("base", "trained")
# Across models, both runs have the same token at the value, so nothing can fall there: see the decision position only.
CROSS_POSITIONS: dict[str, Direction] = {"decision": "rising"}
# (model, direction) -> (recipient, donor), each a model and one of its baselines.
SWEEPS = {
    ("base", "denoise"): (("base", "baseline_b"), ("base", "baseline_a")),
    ("base", "noise"): (("base", "baseline_a"), ("base", "baseline_b")),
    ("trained", "denoise"): (("trained", "baseline_b"), ("trained", "baseline_a")),
    ("trained", "noise"): (("trained", "baseline_a"), ("trained", "baseline_b")),
    ("base", "cross"): (("base", "baseline_a"), ("trained", "baseline_a")),
}
# With less than a tenth of a logit between donor and recipient, a pair's own ratio magnifies all else tenfold or more.
RECOVERY_EPS = 0.1


def positions_of(direction: str) -> dict[str, Direction]:
    """The positions that a direction is measured at, and how recovery runs there from the first layer to the last."""
    return CROSS_POSITIONS if direction == "cross" else POSITIONS


@dataclass(frozen=True)
class Sweep:
    """One model patched in one direction, all pairs together. R resamples, L + 1 layers.

    Attributes:
        effect: m_donor - m_recipient in logits: what there is to recover.
        curves: position -> (1 + R, L + 1) recovery, ratio of means; row 0 is the sample.
        mean_ratios: position -> (1 + R, L + 1) recovery, mean of the pairs' own ratios.
        undefined_pairs: how many pairs have a gap below `RECOVERY_EPS`, and so no ratio of their own.
        changed, cells: how many patched logit differences differ from the recipient's, of how many.
        end_error: logits by which, at worst, a pair's curve misses an end at which it is known: patched below all
            layers at the value, and above all at the decision, the recipient becomes the donor; above all at the value
            it stays as it is. It should be rounding, unless a trained unembedding is crossed.
    """

    effect: Interval
    curves: Mapping[str, Floats]
    mean_ratios: Mapping[str, Floats]
    undefined_pairs: int
    changed: int
    cells: int
    end_error: float


@dataclass(frozen=True)
class Located:
    """All sweeps over the pairs of one kind, on the same resamples, so that differences between them are paired."""

    kind: str
    n_pairs: int
    bootstrap: ClusterBootstrap
    baselines: Mapping[tuple[str, str, str], Interval]  # (model, baseline, metric)
    sweeps: Mapping[tuple[str, str], Sweep]  # (model, direction)
    effect_difference: Interval

    def flip(self, model: str, direction: str, position: str, *, mean_ratios: bool = False) -> Interval:
        """The flip layer of one curve, with its interval."""
        return self.bootstrap.interval(self._flips(model, direction, position, mean_ratios))

    def flip_difference(self, direction: str, position: str) -> Interval:
        """Trained minus base, in layers."""
        trained, base = (self._flips(model, direction, position, False) for model in ("trained", "base"))
        return self.bootstrap.interval(trained - base)

    def transit(self, model: str, direction: str) -> Interval:
        """Layers from the crossing at the value to the one at the decision; negative if they overlap."""
        value, decision = (self._flips(model, direction, position, False) for position in ("value", "decision"))
        return self.bootstrap.interval(decision - value)

    def _flips(self, model: str, direction: str, position: str, mean_ratios: bool) -> Floats:
        sweep = self.sweeps[model, direction]
        curves = sweep.mean_ratios if mean_ratios else sweep.curves
        return flip_layer(curves[position], POSITIONS[position])


def kinds(frame: pd.DataFrame) -> list[str]:
    """The kinds of pairs that were patched, the main kind (the first pair's) first."""
    return list(dict.fromkeys(residual_rows(frame).loc[lambda rows: rows["direction"] == "denoise", "kind"]))


def residual_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the two models' own runs and of their sweeps of the residual stream.

    A frame without the column `component`, as results once were, holds no others.
    """
    directions = {direction for _, direction in SWEEPS} | {"baseline_a", "baseline_b"}
    chosen = frame["model"].isin(MODELS) & frame["direction"].isin(directions)
    if "component" in frame:
        chosen &= frame["component"].isin(("residual", "none"))
    return frame[chosen]


def locate(frame: pd.DataFrame, kind: str | None = None, seed: int = 0) -> Located:
    """Curves and resamples of the pairs of one kind; None is the main kind.

    Raises:
        ValueError: if the frame holds no pair of this kind.
    """
    kind = kinds(frame)[0] if kind is None else kind
    part = residual_rows(frame)
    part = part[(part["kind"] == kind) & part["metric"].isin(BASELINE_METRICS)]
    if part.empty:
        raise ValueError(f"kind: expected one of {', '.join(kinds(frame))}, found {kind!r}")
    groups = part.groupby("pair", sort=False)["group"].first()
    bootstrap = ClusterBootstrap.draw(groups.tolist(), derive_rng(seed, "patching", kind))
    tables = _tables(part, groups.index)

    def baseline(model: str, side: str, metric: str = METRIC) -> Floats:
        return tables[model, side, "none", metric][:, 0]  # (n_pairs,)

    effect = {model: baseline(model, "baseline_a") - baseline(model, "baseline_b") for model in MODELS}
    return Located(
        kind=kind,
        n_pairs=len(groups),
        bootstrap=bootstrap,
        baselines={
            (model, side, metric): bootstrap.interval(bootstrap.means(baseline(model, side, metric)))
            for model in MODELS
            for side in ("baseline_a", "baseline_b")
            for metric in BASELINE_METRICS
        },
        sweeps={
            (model, direction): _sweep(
                bootstrap,
                {position: tables[model, direction, position, METRIC] for position in positions_of(direction)},
                baseline(*recipient)[:, None],
                baseline(*donor)[:, None],
            )
            for (model, direction), (recipient, donor) in SWEEPS.items()
        },
        effect_difference=bootstrap.interval(bootstrap.means(effect["trained"] - effect["base"])),
    )


def summarise(frame: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """The result in numbers and sentences, ready for JSON, one entry per kind of pairs."""
    return {
        "metric": METRIC,
        "curve": "ratio_of_means",
        "recovery_eps": RECOVERY_EPS,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": seed,
        "kinds": {kind: _summarise_kind(locate(frame, kind, seed)) for kind in kinds(frame)},
    }


def statement(located: Located, model: str) -> str:
    """One sentence: where the model decides, or why that cannot be said."""
    sweep = located.sweeps[model, "denoise"]
    effect = f"A - B = {show(sweep.effect)} logits"
    if located.bootstrap.n_groups < MIN_GROUPS:
        return f"no claim from {located.bootstrap.n_groups} graphs, at least {MIN_GROUPS} are needed: {effect}"
    if not sweep.effect.excludes_zero:
        return f"no effect to locate: {effect}"
    if not sweep.changed:
        return f"patching changed none of {sweep.cells} cells, so nothing can be located: {effect}"
    value, decision = (located.flip(model, "denoise", position) for position in POSITIONS)
    return f"the fact leaves its tokens at layer {show(value)} and is at the decision from layer {show(decision)} on"


def show(interval: Interval, digits: int = 2) -> str:
    """`1.23 [1.10, 1.40]`, without the interval where there is none, `none` where there is no estimate."""
    if np.isnan(interval.estimate):
        return "none"
    # Adding 0 turns a rounded -0 into 0.
    estimate, low, high = (
        f"{round(x, digits) + 0:.{digits}f}" for x in (interval.estimate, interval.low, interval.high)
    )
    return estimate if np.isnan(interval.low) else f"{estimate} [{low}, {high}]"


def is_located(located: Located, model: str, direction: str) -> bool:
    """Whether there is an effect to locate and patching acted on it; no flip layer is claimed otherwise."""
    sweep = located.sweeps[model, direction]
    return sweep.effect.excludes_zero and sweep.changed > 0


def _tables(part: pd.DataFrame, pairs: pd.Index) -> dict[tuple[str, ...], Floats]:
    """(model, direction, position, metric) -> (n_pairs, layers), pairs in the order given."""
    tables: dict[tuple[str, ...], Floats] = {}
    for key, rows in part.groupby(["model", "direction", "position", "metric"], sort=False):
        wide = rows.pivot(index="pair", columns="layer", values="value").reindex(pairs)
        tables[tuple(map(str, key))] = wide.to_numpy(dtype=np.float64)
    return tables


def _sweep(bootstrap: ClusterBootstrap, patched: Mapping[str, Floats], recipient: Floats, donor: Floats) -> Sweep:
    means = bootstrap.means
    tiny = np.finfo(np.float64).tiny  # means are divided as they are; whether they differ is the interval's to say
    changed = [table != recipient for table in patched.values()]
    misses = [patched["decision"][:, -1:] - donor]
    if "value" in patched:
        misses += [patched["value"][:, :1] - donor, patched["value"][:, -1:] - recipient]
    return Sweep(
        effect=bootstrap.interval(means(donor - recipient)[:, 0]),
        curves={
            position: recovery(means(table), means(recipient), means(donor), tiny)
            for position, table in patched.items()
        },
        mean_ratios={
            position: means(recovery(table, recipient, donor, RECOVERY_EPS)) for position, table in patched.items()
        },
        undefined_pairs=int((np.abs(donor - recipient) < RECOVERY_EPS).sum()),
        changed=int(sum(table.sum() for table in changed)),
        cells=sum(table.size for table in changed),
        end_error=float(np.abs(misses).max()),
    )


def _summarise_kind(located: Located) -> dict[str, Any]:
    both = all(is_located(located, model, "denoise") for model in MODELS)
    return {
        "pairs": located.n_pairs,
        "groups": located.bootstrap.n_groups,
        "models": {model: _summarise_model(located, model) for model in MODELS},
        "trained_minus_base": {
            "effect": located.effect_difference.to_json(),
            "flips": {
                direction: {p: located.flip_difference(direction, p).to_json() for p in POSITIONS}
                for direction in ("denoise", "noise")
            }
            if both
            else None,
        },
        "trained_into_base": _summarise_sweep(located, "base", "cross"),
    }


def _summarise_model(located: Located, model: str) -> dict[str, Any]:
    return {
        "statement": statement(located, model),
        "baselines": {
            metric: {
                side[-1]: located.baselines[model, side, metric].to_json() for side in ("baseline_a", "baseline_b")
            }
            for metric in BASELINE_METRICS
        },
        "sweeps": {direction: _summarise_sweep(located, model, direction) for direction in ("denoise", "noise")},
    }


def _summarise_sweep(located: Located, model: str, direction: str) -> dict[str, Any]:
    sweep = located.sweeps[model, direction]
    claimed = is_located(located, model, direction)
    return {
        "effect": sweep.effect.to_json(),
        "effect_present": sweep.effect.excludes_zero,
        "undefined_pairs": sweep.undefined_pairs,
        "changed_cells": sweep.changed,
        "cells": sweep.cells,
        "end_error": sweep.end_error,
        "flips": {place: _summarise_flip(located, model, direction, place) for place in positions_of(direction)}
        if claimed
        else None,
        "transit_layers": located.transit(model, direction).to_json() if claimed and direction != "cross" else None,
    }


def _summarise_flip(located: Located, model: str, direction: str, position: str) -> dict[str, Any]:
    return {
        "ratio_of_means": located.flip(model, direction, position).to_json(),
        "mean_of_ratios": located.flip(model, direction, position, mean_ratios=True).to_json(),
        "crossings": count_crossings(located.sweeps[model, direction].curves[position][0]),
    }
