"""Frames as `interp.patching.measure` makes them, from planted curves instead of models."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from interp.flip import positions_of


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def planted_curve(flip: float, position: str, layers: int = 31, width: float = 0.8) -> np.ndarray:
    """(layers,) recovery crossing 0.5 near `flip`: falls at the value, rises at the decision, exact at both ends."""
    rising = sigmoid((np.arange(layers) - flip) / width)
    rising = (rising - rising[0]) / (rising[-1] - rising[0])
    return rising if position == "decision" else 1 - rising


def planted_frame(
    *,
    effects: Mapping[str, float],
    flips: Mapping[str, float],
    groups: int = 12,
    per_group: int = 2,
    layers: int = 31,
    noise: float = 0.3,
    kind: str = "future_uses",
    seed: int = 0,
) -> pd.DataFrame:
    """A frame whose models have mean effects m_A - m_B `effects` and whose curves cross at `flips` (by position)."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for number in range(groups * per_group):
        pair = {"pair": f"{kind}-{number}", "group": f"g{number // per_group}", "kind": kind}
        shift = 4 * noise * rng.normal()
        ends = {}
        for model, effect in effects.items():
            ends[model] = (effect / 2 + noise * rng.normal(), -effect / 2 + noise * rng.normal())
            for side, difference in zip("ab", ends[model], strict=True):
                rows += _rows(pair, model, f"baseline_{side}", "none", [difference], first=-1)
        sweeps = [
            (model, way, *ends[model][:: -1 if way == "denoise" else 1])
            for model in effects
            for way in ("denoise", "noise")
        ]
        sweeps.append(("base", "cross", ends["base"][0], ends["trained"][0]))
        for model, direction, recipient, donor in sweeps:
            for position in positions_of(direction):
                flip = flips[position]
                later = 2 * noise if direction == "noise" else 0.0
                curve = planted_curve(flip + shift + later, position, layers)
                patched = recipient + (donor - recipient) * curve
                rows += _rows(pair, model, direction, position, patched, recipient=recipient, donor=donor)
    return pd.DataFrame(rows)


def _rows(pair, model, direction, position, differences, *, first=0, recipient=None, donor=None):
    rows = []
    for layer, difference in enumerate(np.asarray(differences, dtype=float), first):
        metrics = {
            "logit_difference": difference,
            "p_answer": sigmoid(difference),
            "p_first_answer": sigmoid(difference),
            "p_first_foil": sigmoid(-difference),
            "kl": 0.0,
        }
        if recipient is not None:
            metrics["recovery"] = (difference - recipient) / (donor - recipient)
        place = {**pair, "model": model, "direction": direction, "position": position, "layer": layer}
        rows += [{**place, "metric": metric, "value": value} for metric, value in metrics.items()]
    return rows
