"""Any sweep of the patching result, in logits, with intervals over graphs: components, extra positions, controls.

A cell's shift is m_patched - m_B, how far the patch moves the recipient's logit difference; the pair's effect m_A - m_B
is what there is to move. Shifts are defined where effects are nil, so that base and trained can always be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from interp.flip import METRIC, MODELS
from interp.stats import (
    LEVEL,
    MIN_GROUPS,
    RESAMPLES,
    ClusterBootstrap,
    Floats,
    Interval,
    derive_rng,
    recovery,
)

TOP = 5
TOP_SHARE, FEWEST_TOP = 0.1, 3


@dataclass(frozen=True)
class Curve:
    """One sweep over the pairs that it was measured on. n pairs, c cells.

    Attributes:
        model, direction, position, component: as in `interp.patching.measure`.
        layers, heads: (c,) of each cell.
        shift: (n, c) logits.
        effect: (n,) m_A - m_B of the same model and pairs.
        groups: (n,) each pair's graph.
        seed: of the resampling.
        attribution: (n, c) the first-order estimate of the shift, NaN for pairs without, or None.
    """

    model: str
    direction: str
    position: str
    component: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[str, ...]
    seed: int
    bootstrap: ClusterBootstrap
    shift: Floats
    effect: Floats
    attribution: Floats | None

    @property
    def n_pairs(self) -> int:
        """How many pairs were measured."""
        return len(self.effect)

    @property
    def means(self) -> Floats:
        """(1 + resamples, c) mean shift."""
        return self.bootstrap.means(self.shift)

    @property
    def mean_effect(self) -> Interval:
        """Mean of A - B over the pairs, logits, with its interval over graphs."""
        return self.bootstrap.interval(self.bootstrap.means(self.effect))

    @property
    def peak(self) -> int:
        """The cell that shifts most, either way. Chosen on the same pairs: its interval is no test, and errs upward."""
        return int(np.abs(self.means[0]).argmax())

    def at(self, cell: int) -> Interval:
        """The mean shift of a cell."""
        return self.bootstrap.interval(self.means[:, cell])

    def recovery_at(self, cell: int) -> Interval:
        """The shift as a share of the effect, ratio of means."""
        tiny = np.finfo(np.float64).tiny
        return self.bootstrap.interval(recovery(self.means[:, cell], 0.0, self.bootstrap.means(self.effect), tiny))

    def p_values(self) -> Floats:
        """(c,) p of each cell's mean shift being 0, adjusted for all cells; NaN with fewer than `MIN_GROUPS` graphs.

        By flipping the signs of whole graphs at random, which is exact if shifts are symmetric around 0, against the
        largest statistic over cells (Westfall and Young 1993), |sum of x| / sqrt(sum of x^2) over the graphs' means x.
        """
        size = self.bootstrap.n_groups
        if size < MIN_GROUPS:
            return np.full(self.shift.shape[1], np.nan)
        per_graph = np.stack([self.shift[self.bootstrap.codes == g].mean(0) for g in range(size)])  # (graphs, c)
        signs = derive_rng(self.seed, "patching", "signs").choice((-1.0, 1.0), (RESAMPLES, size))
        length = np.sqrt((per_graph**2).sum(0))
        unit = np.divide(per_graph, length, out=np.zeros_like(per_graph), where=length > 0)
        largest = np.abs(signs @ unit).max(1)  # (flips,)
        reached = (largest[:, None] >= np.abs(unit.sum(0)) - 1e-9).sum(0)
        return (1 + reached) / (1 + RESAMPLES)

    def describe(self, cell: int) -> dict[str, Any]:
        """A cell, ready for JSON; recovery only where there is an effect."""
        place = {"layer": self.layers[cell], "head": self.heads[cell]} if self.component == "heads" else {
            "layer": self.layers[cell]
        }  # fmt: skip
        share = self.recovery_at(cell).to_json() if self.mean_effect.excludes_zero else None
        return {**place, "shift": self.at(cell).to_json(), "recovery": share}

    def summary(self) -> dict[str, Any]:
        """The sweep, ready for JSON: the cells that shift most, and the mean shift of each layer (not each head)."""
        means, p = self.means, self.p_values()
        order = np.argsort(-np.abs(means[0]), kind="stable")[:TOP]
        low, high = self.bootstrap.band(means)
        found: dict[str, Any] = {
            "pairs": self.n_pairs,
            "groups": self.bootstrap.n_groups,
            "effect": self.mean_effect.to_json(),
            "cells": len(p),
            "cells_beyond_chance": int((p <= 1 - LEVEL).sum()),
            "top": [{**self.describe(int(cell)), "p_adjusted": _number(p[cell])} for cell in order],
        }
        if self.component != "heads":
            found["shift_by_layer"] = [
                {"layer": layer, "mean": round(float(m), 4), "low": _number(lo), "high": _number(hi)}
                for layer, m, lo, hi in zip(self.layers, means[0], low, high, strict=True)
            ]
        return found

    def agreement(self) -> dict[str, Any] | None:
        """How far attribution agrees with the patch, over cells of means; None where it was not taken.

        `top_found`: of the cells that shift most, a tenth but at least three, the share that attribution ranks so too.
        """
        if self.attribution is None:
            return None
        both = np.asarray(~np.isnan(self.attribution).any(axis=1))
        bootstrap = bootstrap_of([g for g, one in zip(self.groups, both, strict=True) if one], self.seed, "attribution")
        exact, guess = bootstrap.means(self.shift[both]), bootstrap.means(self.attribution[both])
        size = min(exact.shape[1], max(FEWEST_TOP, math.ceil(TOP_SHARE * exact.shape[1])))
        first = [set(np.argsort(-np.abs(row), kind="stable")[:size].tolist()) for row in (exact[0], guess[0])]
        return {
            "pairs": int(both.sum()),
            "cells": exact.shape[1],
            "pearson": bootstrap.interval(_correlation(exact, guess)).to_json(),
            "spearman": bootstrap.interval(_correlation(rankdata(exact, axis=1), rankdata(guess, axis=1))).to_json(),
            "top_cells": size,
            "top_found": len(first[0] & first[1]) / size,
            "largest_exact": _number(np.abs(exact[0]).max()),
            "largest_attribution": _number(np.abs(guess[0]).max()),
        }


def curves(frame: pd.DataFrame, kind: str, seed: int) -> list[Curve]:
    """Every sweep of the pairs of one kind but noising and crossing, whose recipients are others."""
    if "component" not in frame:  # as results once were: the residual stream alone
        frame = frame.assign(component="residual", head=-1)
    part = frame[(frame["kind"] == kind) & frame["model"].isin(MODELS)]
    part = part[~part["direction"].isin(("noise", "cross", "facts"))]
    groups = part.groupby("pair", sort=False)["group"].first()
    sides = {
        key: rows.set_index("pair")["value"]
        for key, rows in part[(part["position"] == "none") & (part["metric"] == METRIC)].groupby(["model", "direction"])
    }
    patched = part[(part["position"] != "none") & part["metric"].isin((METRIC, "attribution"))]
    return list(_curves(patched, groups, sides, kind, seed))


def find(found: Sequence[Curve], **what: str) -> list[Curve]:
    """The curves with these attributes."""
    return [curve for curve in found if all(getattr(curve, name) == value for name, value in what.items())]


def bootstrap_of(groups: Sequence[str], seed: int, *names: str) -> ClusterBootstrap:
    """Resamples of some observations' graphs; the same graphs and names give the same ones."""
    return ClusterBootstrap.draw(list(groups), derive_rng(seed, "patching", *names))


def _curves(
    patched: pd.DataFrame, groups: pd.Series, sides: dict[Any, pd.Series], kind: str, seed: int
) -> Iterator[Curve]:
    for key, rows in patched.groupby(["model", "direction", "position", "component"], sort=False):
        model, direction, position, component = map(str, key)
        tables = {
            metric: some.pivot(index="pair", columns=["layer", "head"], values="value").sort_index(axis=1)
            for metric, some in rows.groupby("metric")
        }
        if METRIC not in tables:  # screened by attribution only
            continue
        table = tables[METRIC].reindex([pair for pair in groups.index if pair in tables[METRIC].index])
        recipient, donor = (sides[model, f"baseline_{side}"].reindex(table.index).to_numpy() for side in "ba")
        guess = tables.get("attribution")
        own = table.index
        yield Curve(
            model, direction, position, component,
            layers=tuple(map(int, table.columns.get_level_values("layer"))),
            heads=tuple(map(int, table.columns.get_level_values("head"))),
            groups=tuple(groups[own]),
            seed=seed,
            bootstrap=bootstrap_of(groups[own].tolist(), seed, kind),
            shift=table.to_numpy() - recipient[:, None],
            effect=donor - recipient,
            attribution=guess.reindex(index=own, columns=table.columns).to_numpy() if guess is not None else None,
        )  # fmt: skip


def _correlation(x: Floats, y: Floats) -> Floats:
    """(rows,) Pearson correlation along the last axis; NaN where one side is constant."""
    x, y = (z - z.mean(1, keepdims=True) for z in (x, y))
    scale = np.sqrt((x**2).sum(1) * (y**2).sum(1))
    return np.divide((x * y).sum(1), scale, out=np.full(len(scale), np.nan), where=scale > 0)


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
