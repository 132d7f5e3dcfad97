"""What the logit lens shows, in numbers: curves over layers with their resamples, and how they go with the LoRA deltas.

Numbers in, numbers out: everything comes from the tidy frame of `interp.logit_lens.measure` and the profile of
`interp.lora_svd`. Curves are means over texts; that of log rank makes the rank a geometric mean.

The divergence after layer l has passed, KL at row l + 1, is compared with that layer's delta by Spearman's rank
correlation, as it is (`level`) and as what layer l added to it (`step`). A level adds up over depth, and so goes with
whatever grows or falls with depth; the step is the fairer one, and the one stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control, permutation_test, rankdata

from interp.flip import MODELS, show
from interp.stats import LEVEL, MIN_GROUPS, RESAMPLES, ClusterBootstrap, Floats, Interval, derive_rng, flip_layer

CURVES = ("p", "p_others", "log10_rank", "chosen", "entropy", "kl_final")
SETTLING = ("settling", "settling_vocabulary")
SIZES = ("frobenius", "per_parameter")
PERMUTATIONS = 9999
# A hundredth of a nat is less than one answer in a hundred moved by one percent: there is no divergence to locate.
DIVERGENCE_EPS = 0.01
CAUTION = (
    "Early layers are unreliable: the final norm and the unembedding fit the last layer's stream, not theirs "
    "(arXiv 2303.08112). Read the probability beside the rank and the KL to the final distribution."
)


@dataclass(frozen=True)
class SlotLens:
    """One slot of the texts of one kind. R resamples, L + 1 layers.

    Attributes:
        curves: (model, one of `CURVES`) -> (1 + R, L + 1) means; row 0 is the sample. `p` and `log10_rank` are the
            reference's, `p_others` the sum over the other choices, `chosen` the share of texts whose top choice is the
            reference.
        choices: (model, choice) -> (1 + R, L + 1) mean probability, of the choices that every text has.
        divergence: (1 + R, L + 1) mean KL(trained || base) in nats.
        settling: (model, one of `SETTLING`) -> (1 + R,) mean layer.
    """

    kind: str
    slot: str
    n_texts: int
    bootstrap: ClusterBootstrap
    curves: Mapping[tuple[str, str], Floats]
    choices: Mapping[tuple[str, str], Floats]
    divergence: Floats
    settling: Mapping[tuple[str, str], Floats]

    def interval(self, model: str, curve: str, layer: int = -1) -> Interval:
        """A curve's value at a layer, by default the model's own output."""
        return self.bootstrap.interval(self.curves[model, curve][:, layer])

    def settles(self, model: str, name: str = "settling") -> Interval:
        """The mean layer from which the final top choice (`settling_vocabulary`: the final top token) stays on top."""
        return self.bootstrap.interval(self.settling[model, name])

    def rise(self) -> Interval:
        """The layer from which the divergence stays above half of what it is at the end; NaN where there is none."""
        final = self.divergence[:, -1:]
        shares = np.divide(
            self.divergence, final, out=np.full_like(self.divergence, np.nan), where=final > DIVERGENCE_EPS
        )
        return self.bootstrap.interval(flip_layer(shares, "rising"))


def read(frame: pd.DataFrame, seed: int = 0) -> list[SlotLens]:
    """Every kind and slot of a frame, in its order. Slots with the same graphs share their resamples."""
    return [
        _read_slot(part, str(kind), str(slot), seed)
        for (kind, slot), part in frame.groupby(["kind", "slot"], sort=False)
    ]


def summarise(frame: pd.DataFrame, seed: int = 0, profile: pd.DataFrame | None = None) -> dict[str, Any]:
    """The result in numbers and sentences, ready for JSON.

    Args:
        profile: of `interp.lora_svd.profile`: layer, part, frobenius, per_parameter. None: nothing to compare with.
    """
    slots = read(frame, seed)
    alignments = [] if profile is None else align(slots, profile, seed)
    errors = frame.loc[frame["metric"] == "lens_error", "value"]
    kinds: dict[str, dict[str, Any]] = {}
    for slot in slots:
        kinds.setdefault(slot.kind, {})[slot.slot] = _summarise_slot(slot)
    return {
        "statement": " ".join([statement(slots[0]), alignment_statement(slots[0], alignments)]),
        "caution": CAUTION,
        "last_row_error": float(errors.max()),
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": seed,
        "kinds": kinds,
        "alignment": {"permutations": PERMUTATIONS, "tests": alignments} if profile is not None else None,
    }


def statement(slot: SlotLens) -> str:
    """One or two sentences: what the lens shows of a slot, or why nothing can be said."""
    p, settled = (
        ", ".join(f"{show(found[model])} {model}" for model in MODELS)
        for found in (
            {model: slot.interval(model, "p") for model in MODELS},
            {model: slot.settles(model, "settling_vocabulary") for model in MODELS},
        )
    )
    shown = f"P(reference) {p}; the final top token is on top from layer {settled}."
    head = f"{slot.kind}, {slot.slot} ({slot.n_texts} texts of {slot.bootstrap.n_groups} graphs)"
    if slot.bootstrap.n_groups < MIN_GROUPS:
        return f"{head}: no claim from so few graphs, at least {MIN_GROUPS} are needed: {shown}"
    final, rise = slot.bootstrap.interval(slot.divergence[:, -1]), slot.rise()
    where = "nothing to locate" if np.isnan(rise.estimate) else f"more than half of it from layer {show(rise)} on"
    return f"{head}: {shown} KL(trained || base) is {show(final)} nats at the output, {where}."


def align(slots: list[SlotLens], profile: pd.DataFrame, seed: int = 0) -> list[dict[str, Any]]:
    """Rank correlation of the divergence with the size of the LoRA delta over layers, for every slot, part and size.

    `p` is of a permutation test over layers, `p_bh` corrected over all tests returned (Benjamini and Hochberg 1995).
    Both are None, and so is the correlation, where one of the two is the same in all layers.

    Raises:
        ValueError: if the profile names a layer that the divergence has none of.
    """
    tests = []
    for slot in slots:
        for part, rows in profile.groupby("part", sort=False):
            for size in SIZES:
                written = _by_layer(rows, size, slot.divergence.shape[1] - 1)
                for curve, draws in (("step", np.diff(slot.divergence)), ("level", slot.divergence[:, 1:])):
                    rng = derive_rng(seed, "logit_lens", "alignment", slot.kind, slot.slot, str(part), size, curve)
                    names = {"kind": slot.kind, "slot": slot.slot, "part": str(part), "size": size, "curve": curve}
                    rho = slot.bootstrap.interval(spearman(draws, written))
                    tests.append({**names, "rho": rho.to_json(), "p": permutation_p(draws[0], written, rng)})
    defined = [test for test in tests if test["p"] is not None]
    corrected = false_discovery_control([test["p"] for test in defined]) if defined else []
    adjusted = {id(test): float(p) for test, p in zip(defined, corrected, strict=True)}
    return [test | {"p_bh": adjusted.get(id(test))} for test in tests]


def spearman(curves: Floats, reference: Floats) -> Floats:
    """Spearman's rank correlation of each curve (..., n) with a reference (n,); NaN where either is constant."""
    x, y = rankdata(curves, axis=-1), rankdata(reference)
    x, y = x - x.mean(-1, keepdims=True), y - y.mean()
    norms = np.sqrt((x**2).sum(-1) * (y**2).sum())
    return np.divide(x @ y, norms, out=np.full(norms.shape, np.nan), where=norms > 0)


def permutation_p(curve: Floats, reference: Floats, rng: np.random.Generator) -> float | None:
    """Two-sided p of Spearman's correlation of (n,) with (n,), permuting layers; None where it is undefined."""
    if np.isnan(spearman(curve, reference)):
        return None
    y = rankdata(reference)

    def statistic(x: Floats, axis: int = -1) -> Floats:
        return np.moveaxis(x, axis, -1) @ y  # of ranks: grows with the correlation, and with nothing else

    test = permutation_test(
        (rankdata(curve),), statistic, permutation_type="pairings", n_resamples=PERMUTATIONS, rng=rng
    )
    return float(test.pvalue)


def alignment_statement(slot: SlotLens, alignments: list[dict[str, Any]]) -> str:
    """One sentence on a slot's steps of divergence beside the deltas' Frobenius norms, part by part."""
    found = [
        test
        for test in alignments
        if (test["kind"], test["slot"], test["curve"], test["size"]) == (slot.kind, slot.slot, "step", "frobenius")
    ]
    if not found:
        return "There is no profile of the adapter's layers to compare KL(trained || base) with."
    listed = ", ".join(_shown_test(test) for test in found)
    return f"Rank correlation over layers of what each adds to KL(trained || base) with its ||dW||_F: {listed}."


def _shown_test(test: Mapping[str, Any]) -> str:
    if test["p"] is None:
        return f"undefined ({test['part']})"
    rho = Interval(*(np.nan if test["rho"][name] is None else test["rho"][name] for name in _INTERVAL))
    return f"{show(rho)} ({test['part']}; permutation p = {test['p']:.3f}, {test['p_bh']:.3f} corrected)"


_INTERVAL = ("estimate", "low", "high", "undefined")


def _by_layer(rows: pd.DataFrame, size: str, n_layers: int) -> Floats:
    """(n_layers,) sizes of a part's deltas; a layer that the adapter leaves alone has a delta of 0."""
    beyond = rows.loc[~rows["layer"].between(0, n_layers - 1), "layer"]
    if len(beyond):
        raise ValueError(f"profile.layer: expected layers from 0 to {n_layers - 1}, found {beyond.iloc[0]}")
    return rows.set_index("layer")[size].reindex(range(n_layers), fill_value=0.0).to_numpy(dtype=np.float64)


def _read_slot(part: pd.DataFrame, kind: str, slot: str, seed: int) -> SlotLens:
    groups = part.groupby("id", sort=False)["group"].first()
    bootstrap = ClusterBootstrap.draw(groups.tolist(), derive_rng(seed, "logit_lens", kind))
    curves: dict[tuple[str, str], Floats] = {}
    choices: dict[tuple[str, str], Floats] = {}
    settling: dict[tuple[str, str], Floats] = {}

    def means(rows: pd.DataFrame) -> Floats:
        """(1 + R, layers) means over the slot's texts, of the sums over the choices in a text."""
        wide = rows.pivot_table(index="id", columns="layer", values="value", aggfunc="sum").reindex(groups.index)
        return bootstrap.means(wide.to_numpy(dtype=np.float64))

    for model in MODELS:
        rows = {str(metric): found for metric, found in part[part["model"] == model].groupby("metric", sort=False)}
        own = {name: rows[name][rows[name]["choice"] == rows[name]["reference"]] for name in ("p", "rank")}
        curves[model, "p"] = means(own["p"])
        curves[model, "p_others"] = means(rows["p"].drop(own["p"].index))
        curves[model, "log10_rank"] = means(own["rank"].assign(value=np.log10(own["rank"]["value"])))
        for metric in ("chosen", "entropy", "kl_final"):
            curves[model, metric] = means(rows[metric])
        for choice, found in rows["p"].groupby("choice", sort=False):
            if found["id"].nunique() == len(groups):
                choices[model, str(choice)] = means(found)
        for name in SETTLING:
            settling[model, name] = means(rows[name])[:, 0]
    divergence = means(part[part["metric"] == "kl_base"])
    return SlotLens(kind, slot, len(groups), bootstrap, curves, choices, divergence, settling)


def _summarise_slot(slot: SlotLens) -> dict[str, Any]:
    interval = slot.bootstrap.interval
    return {
        "statement": statement(slot),
        "texts": slot.n_texts,
        "groups": slot.bootstrap.n_groups,
        "models": {model: _summarise_model(slot, model) for model in MODELS},
        "trained_minus_base": {
            "p": interval(slot.curves["trained", "p"][:, -1] - slot.curves["base", "p"][:, -1]).to_json(),
            **{
                name: interval(slot.settling["trained", name] - slot.settling["base", name]).to_json()
                for name in SETTLING
            },
        },
        "divergence": {
            "final": interval(slot.divergence[:, -1]).to_json(),
            "half_from_layer": slot.rise().to_json(),
            "by_layer": _by_layer_json(slot, slot.divergence),
        },
    }


def _summarise_model(slot: SlotLens, model: str) -> dict[str, Any]:
    own = {choice: draws for (of, choice), draws in slot.choices.items() if of == model}
    return {
        "p": slot.interval(model, "p").to_json(),
        "reference_is_top_choice": slot.interval(model, "chosen").to_json(),
        **{name: slot.settles(model, name).to_json() for name in SETTLING},
        "choices": {choice: slot.bootstrap.interval(draws[:, -1]).to_json() for choice, draws in own.items()},
        "by_layer": {name: _by_layer_json(slot, slot.curves[model, name]) for name in CURVES},
    }


def _by_layer_json(slot: SlotLens, draws: Floats) -> dict[str, list[float | None]]:
    """Estimate and band, one entry per layer."""
    low, high = slot.bootstrap.band(draws)
    return {
        name: [None if np.isnan(x) else float(x) for x in values]
        for name, values in (("estimate", draws[0]), ("low", low), ("high", high))
    }
