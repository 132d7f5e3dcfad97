"""The whole patching result in numbers and sentences: flip layers, components, controls, doses, places, attribution.

Everything comes from the tidy frame of `interp.patching.measure`. What was not measured is not there, or null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from interp import flip
from interp.controls import ADAPTERS, CONTROLS
from interp.flip import METRIC, MODELS, Located, is_located, locate, show
from interp.patching_curves import Curve, bootstrap_of, curves, find
from interp.stats import ClusterBootstrap, Floats, Interval, flip_layer, recovery

THIRDS = ("first third", "middle third", "last third")
SPANS = ("lora_span", "lora_complement", "random_span")


def summarise(frame: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """The result, ready for JSON.

    Returns:
        `statement`, the result of the main kind of pairs in a sentence per model; what `interp.flip.summarise` gives;
        and for the main kind `positions` (key and between), `components`, `controls`, `doses`, `other_key_pairs`,
        `by_place` and `attribution`.
    """
    located = locate(frame, None, seed)
    found = curves(frame, located.kind, seed)
    return {
        "statement": statement(located),
        **flip.summarise(frame, seed),
        "positions": _by_model([c for c in find(found, component="residual", direction="denoise")
                                if c.position in ("key", "between")]),
        "components": {
            component: _by_model(find(found, component=component, direction="denoise"))
            for component in ("attention", "mlp", "heads")
        },
        "controls": controls(frame, located, found, seed),
        "doses": doses(frame, seed),
        "other_key_pairs": other_key_pairs(frame, seed),
        "by_place": by_place(frame, located.kind, seed),
        "attribution": {
            "note": "a first-order screen (arXiv 2310.10348, 2403.00745); no claim rests on it",
            "agreement": {
                f"{c.model}, {c.component}, {c.position}": agreement
                for c in found
                if (agreement := c.agreement()) is not None
            },
        },
    }  # fmt: skip


def statement(located: Located) -> str:
    """The main result in one sentence per model."""
    parts = []
    for model in reversed(MODELS):
        text = flip.statement(located, model)
        if is_located(located, model, "denoise"):
            text += f" (A - B = {show(located.sweeps[model, 'denoise'].effect)} logits)"
        parts.append(f"{model}: {text}")
    return "; ".join(parts)


def reference_cell(located: Located) -> int:
    """The first whole layer at which the trained model's decision position has flipped; the last one without a flip."""
    layer = located.flip("trained", "denoise", "decision").estimate
    last = located.sweeps["trained", "denoise"].curves["decision"].shape[1] - 1
    return min(last, math.ceil(layer)) if is_located(located, "trained", "denoise") and layer == layer else last


def controls(frame: pd.DataFrame, located: Located, found: Sequence[Curve], seed: int) -> dict[str, Any] | None:
    """Each control's shift in logits beside the pairs' own effect; None if no control was measured.

    Patches are given where they shift most, those along the adapter's directions at `reference_layer`.
    """
    measured = {name: find(found, direction=name) for name in CONTROLS}
    if not any(measured.values()):
        return None
    cell = reference_cell(located)
    result: dict[str, Any] = {"pairs": max(c.n_pairs for c in measured["self"]), "reference_layer": cell}
    for name, sweeps in measured.items():
        result[name] = {c.model: _control(c, name, cell) for c in sweeps} or "not available in any pair"
    result["self"] = {
        "largest_change": max(float(np.abs(c.shift).max()) for c in measured["self"]),
        "pairs": result["pairs"],
    }
    for model in ADAPTERS:
        result[model] = adapter_control(frame, model, located.kind, seed)
    return result


def adapter_control(frame: pd.DataFrame, model: str, kind: str, seed: int) -> dict[str, Any] | None:
    """The effect m_A - m_B of another adapter, beside base and trained on the same pairs."""
    sides = baselines(frame, kind)
    if model not in sides:
        return None
    pairs = sides[model].index
    groups = frame.drop_duplicates("pair").set_index("pair")["group"][pairs].tolist()
    bootstrap = bootstrap_of(groups, seed, model)
    found: dict[str, Any] = {"pairs": len(pairs), "groups": bootstrap.n_groups}
    for name in (model, *MODELS):
        effect = sides[name].loc[pairs, "a"] - sides[name].loc[pairs, "b"]
        found["effect" if name == model else f"effect_{name}"] = bootstrap.interval(bootstrap.means(effect)).to_json()
    difference = sides[model] - sides["base"].loc[pairs]
    found["largest_difference_from_base"] = float(np.abs(difference.to_numpy()).max())
    return found


def baselines(frame: pd.DataFrame, kind: str) -> dict[str, pd.DataFrame]:
    """Model -> the logit differences of its own runs, columns `a` and `b`, indexed by pair."""
    rows = frame[(frame["kind"] == kind) & (frame["metric"] == METRIC)]
    rows = rows[rows["direction"].isin(("baseline_a", "baseline_b"))]
    return {
        str(model): some.assign(side=some["direction"].str[-1]).pivot(index="pair", columns="side", values="value")
        for model, some in rows.groupby("model")
    }


def doses(frame: pd.DataFrame, seed: int, kind: str = "dose") -> dict[str, Any] | None:
    """The logit difference against the count; None without pairs of the kind.

    `largest_minus_one` tells a graded reading from one of zero against any: 0 is what the latter predicts.
    """
    facts = _facts(frame, kind, "count")
    if facts.empty:
        return None
    result: dict[str, Any] = {"pairs": len(facts), "groups": 0, "models": {}}
    counts = sorted(facts.unique())
    groups = frame.drop_duplicates("pair").set_index("pair")["group"]
    for model in MODELS:
        sides = baselines(frame, kind)[model].assign(count=facts, group=groups).dropna()
        table = sides.pivot_table(index="group", columns="count", values="a").assign(
            **{"0": sides.groupby("group")["b"].mean()}
        )
        table = table[["0", *counts]].rename(columns={"0": 0.0})  # (graphs, counts)
        bootstrap = bootstrap_of(table.index.tolist(), seed, kind)
        means = bootstrap.means(table.to_numpy())
        result["groups"] = bootstrap.n_groups
        result["models"][model] = {
            "by_count": {
                str(int(count)): bootstrap.interval(means[:, i]).to_json() for i, count in enumerate(table.columns)
            },
            "one_minus_zero": bootstrap.interval(means[:, 1] - means[:, 0]).to_json(),
            "largest_minus_one": bootstrap.interval(means[:, -1] - means[:, 1]).to_json(),
        }
    return result


def other_key_pairs(frame: pd.DataFrame, seed: int) -> dict[str, Any] | None:
    """The effect of another key's count, by model; None without pairs of kind `other_key`."""
    sides = baselines(frame, "other_key")
    if not sides:
        return None
    groups = frame.drop_duplicates("pair").set_index("pair")["group"][sides["base"].index]
    bootstrap = bootstrap_of(groups.tolist(), seed, "other_key")
    effects = {model: bootstrap.means(sides[model]["a"] - sides[model]["b"]) for model in MODELS}
    return {
        "pairs": len(groups),
        "groups": bootstrap.n_groups,
        "effect": {model: bootstrap.interval(effect).to_json() for model, effect in effects.items()},
    }


def by_place(frame: pd.DataFrame, kind: str, seed: int) -> dict[str, Any]:
    """Effect and flip layers of both models, by where the value stands in its field and by the key's role."""
    place, current = _facts(frame, kind, "place"), _facts(frame, kind, "role_current")
    bins = {name: place.index[np.clip((place * 3).astype(int), 0, 2) == i] for i, name in enumerate(THIRDS)}
    bins |= {"key: current node": current.index[current == 1], "key: another node": current.index[current == 0]}
    return {name: _bin(frame, kind, list(pairs), seed, name) for name, pairs in bins.items() if len(pairs)}


def _bin(frame: pd.DataFrame, kind: str, pairs: list[str], seed: int, name: str) -> dict[str, Any]:
    rows = flip.residual_rows(frame)
    rows = rows[rows["pair"].isin(pairs) & (rows["metric"] == METRIC) & (rows["direction"] == "denoise")]
    sides = baselines(frame[frame["pair"].isin(pairs)], kind)
    groups = frame.drop_duplicates("pair").set_index("pair")["group"][pairs].tolist()
    bootstrap = bootstrap_of(groups, seed, "place", name)
    found: dict[str, Any] = {"pairs": len(pairs), "groups": bootstrap.n_groups}
    for model in MODELS:
        a, b = (sides[model].loc[pairs, side].to_numpy() for side in "ab")
        effect = bootstrap.interval(bootstrap.means(a - b))
        found[model] = {"effect": effect.to_json(), "flips": None}
        if effect.excludes_zero:
            found[model]["flips"] = {
                position: _flip(rows, model, position, pairs, (a, b), bootstrap).to_json()
                for position in flip.POSITIONS
            }
    return found


def _flip(
    rows: pd.DataFrame,
    model: str,
    position: str,
    pairs: list[str],
    ends: tuple[Floats, Floats],
    bootstrap: ClusterBootstrap,
) -> Interval:
    chosen = rows[(rows["model"] == model) & (rows["position"] == position)]
    table = chosen.pivot(index="pair", columns="layer", values="value").loc[pairs].to_numpy()
    donor, recipient = (bootstrap.means(end)[:, None] for end in ends)
    share = recovery(bootstrap.means(table), recipient, donor, np.finfo(np.float64).tiny)
    return bootstrap.interval(flip_layer(share, flip.POSITIONS[position]))


def _control(curve: Curve, name: str, reference: int) -> dict[str, Any]:
    if name == "everything":  # at every layer, by how much it misses A at worst
        missed = float(np.abs(curve.shift - curve.effect[:, None]).max())
        return {"pairs": curve.n_pairs, "largest_difference_from_a": missed}
    cell = curve.layers.index(reference) if name in SPANS else curve.peak
    return {"pairs": curve.n_pairs, "groups": curve.bootstrap.n_groups, "effect": curve.mean_effect.to_json(),
            **curve.describe(cell)}  # fmt: skip


def _by_model(found: Sequence[Curve]) -> dict[str, dict[str, Any]]:
    return {model: {c.position: c.summary() for c in find(found, model=model)} for model in MODELS}


def _facts(frame: pd.DataFrame, kind: str, metric: str) -> pd.Series:
    """(pairs,) a fact, indexed by pair, of the pairs that have it."""
    rows = frame[(frame["direction"] == "facts") & (frame["kind"] == kind) & (frame["metric"] == metric)]
    return rows.set_index("pair")["value"]
