"""What switching off and on shows, in numbers: what each part costs and brings, cumulative curves, and the SVD profile.

Numbers in, numbers out: everything comes from the tidy frame of `interp.knockout`, and the profile of
`interp.lora_svd`. The unit is the graph. The effect is the logit difference in A minus that in B; with e for means,

    lost    e_trained - e_off            gained    e_on - e_base
    share   (e - e_base) / (e_trained - e_base)     0 is the base model's effect, 1 the trained one's

`share` is taken along the cumulative curves, over the boundary k: the adapter on in the k layers below it (0 at the
left end, 1 at the right one), or in all layers above it (1 at the left end). Where they cross one half, half of the
effect is there.

Sixty intervals at a time are too many to read one by one: `simultaneous` ones hold all together at 95 %, being as wide
as the largest studentised deviation over all parts in a resample (Davison and Hinkley 1997, chapter 4.2.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from interp.flip import MODELS, show
from interp.knockout_scores import EPISODE, read_scores, score_statement
from interp.logit_lens_summary import permutation_p, spearman
from interp.stats import (
    LEVEL,
    MIN_GROUPS,
    RESAMPLES,
    ClusterBootstrap,
    Direction,
    Floats,
    Interval,
    derive_rng,
    flip_layer,
    recovery,
)

METRIC = "effect"
METRICS = ("logit_difference_a", "logit_difference_b", METRIC)
SIZES = ("frobenius", "per_parameter")
ENDS: dict[str, Direction] = {"below": "rising", "above": "falling"}
SHARES = (0.5, 0.9)

Configuration = tuple[str, str, str, int]  # model, switch, part, layer
BASE: Configuration = ("base", "none", "all", -1)
TRAINED: Configuration = ("trained", "none", "all", -1)


@dataclass(frozen=True)
class Knockouts:
    """All configurations of the pairs, on the same resamples. R resamples, M parts of layers, L layers.

    Attributes:
        means: (configuration, metric) -> (1 + R,) mean in logits; row 0 is the sample.
        modules: (layer, part) of the M columns of what is lost and gained.
        engine_error: logits by which driving the layers one by one misses the model's own, at worst.
    """

    kind: str
    n_pairs: int
    n_layers: int
    bootstrap: ClusterBootstrap
    means: Mapping[tuple[Configuration, str], Floats]
    modules: tuple[tuple[int, str], ...]
    engine_error: float

    @property
    def parts(self) -> list[str]:
        """The parts of layers that are adapted."""
        return list(dict.fromkeys(part for layer, part in self.modules if layer >= 0))

    def lost(self, metric: str = METRIC) -> Floats:
        """(1 + R, M) logits that switching one part off takes from the trained model."""
        off = [self.means[("trained", "off", part, layer), metric] for layer, part in self.modules]
        return self.means[TRAINED, metric][:, None] - np.stack(off, axis=1)

    def gained(self, metric: str = METRIC) -> Floats:
        """(1 + R, M) logits that switching one part on brings to the base model."""
        on = [self.means[("base", "on", part, layer), metric] for layer, part in self.modules]
        return np.stack(on, axis=1) - self.means[BASE, metric][:, None]

    def effect(self, model: str) -> Interval:
        """A - B of a model, in logits."""
        return self.bootstrap.interval(self.means[TRAINED if model == "trained" else BASE, METRIC])

    def brought(self) -> Interval:
        """What the whole adapter changes of the effect, in logits."""
        return self.bootstrap.interval(self.means[TRAINED, METRIC] - self.means[BASE, METRIC])

    @property
    def is_claimed(self) -> bool:
        """Whether there is an effect of the adapter whose place can be told."""
        return self.brought().excludes_zero

    def share(self, end: str) -> Floats:
        """(1 + R, L + 1) share of the effect, by boundary, with the adapter on `below` it or `above` it."""
        base = self.means[BASE, METRIC]
        switch = "on_up_to" if end == "below" else "on_from"
        columns = [self.means[("base", switch, "all", layer), METRIC] for layer in range(self.n_layers)]
        columns = [base, *columns] if end == "below" else [*columns, base]
        trained = self.means[TRAINED, METRIC][:, None]
        tiny = np.finfo(np.float64).tiny  # whether they differ is the interval's to say
        return recovery(np.stack(columns, axis=1), base[:, None], trained, tiny)

    def crossing(self, end: str, share: float) -> Interval:
        """The boundary at which this share of the effect is reached for good (`below`), or lost for good (`above`)."""
        return self.bootstrap.interval(flip_layer(self.share(end), ENDS[end], share))


def read(frame: pd.DataFrame, seed: int = 0) -> Knockouts:
    """The pairs of a frame, with their resamples.

    Raises:
        ValueError: if the frame holds no pair, or a pair lacks a configuration.
    """
    pairs = frame[frame["kind"] != EPISODE]
    if pairs.empty:
        raise ValueError("frame: expected at least one pair, found none")
    groups = pairs.groupby("pair", sort=False)["group"].first()
    bootstrap = ClusterBootstrap.draw(groups.tolist(), derive_rng(seed, "knockout"))
    wide = pairs[pairs["metric"].isin(METRICS)].pivot(
        index="pair", columns=["model", "switch", "part", "layer", "metric"], values="value"
    )
    table = wide.reindex(groups.index).to_numpy(dtype=np.float64)
    if np.isnan(table).any():
        pair = groups.index[np.isnan(table).any(axis=1)][0]
        raise ValueError(f"frame: expected every pair under the same configurations, found fewer of {pair}")
    labels: list[Any] = list(wide.columns)
    columns: list[tuple[Configuration, str]] = [(label[:4], label[4]) for label in labels]
    switched_off = {key[2:] for key, _ in columns if key[1] == "off"}
    return Knockouts(
        kind=str(pairs["kind"].iloc[0]),
        n_pairs=len(groups),
        n_layers=1 + max(key[3] for key, _ in columns if key[1] == "on_up_to"),
        bootstrap=bootstrap,
        means=dict(zip(columns, bootstrap.means(table).T, strict=True)),
        modules=tuple((layer, part) for part, layer in sorted(switched_off)),
        engine_error=float(pairs.loc[pairs["metric"] == "engine_error", "value"].max()),
    )


def importance(frame: pd.DataFrame) -> pd.Series:
    """Layer -> mean logits of what the adapter brings that are lost when its parts are off one by one, summed."""
    found = frame[(frame["metric"] == METRIC) & (frame["kind"] != EPISODE)]
    base, trained = (
        found.loc[(found["model"] == model) & (found["switch"] == "none"), "value"].mean() for model in MODELS
    )
    off = found[(found["switch"] == "off") & (found["layer"] >= 0)]
    lost = trained - off.groupby(["layer", "part"])["value"].mean()
    return (lost * np.sign(trained - base)).groupby("layer").sum()


def simultaneous(draws: Floats) -> tuple[Floats, Floats]:
    """95 % limits (M,), (M,) of M statistics (1 + R, M) that hold all together."""
    deviations = np.abs(draws[1:] - draws[0])
    spread = draws[1:].std(axis=0)
    studentised = np.divide(deviations, spread, out=np.zeros_like(deviations), where=spread > 0)
    width = np.quantile(studentised.max(axis=1), LEVEL) * spread
    return draws[0] - width, draws[0] + width


def needed(knockouts: Knockouts) -> list[int]:
    """Columns of the parts that cost some of the effect, all of them at 95 %, the dearest first; none if no claim."""
    lost = knockouts.lost()
    low, _ = simultaneous(lost * np.sign(knockouts.brought().estimate))
    ranked = np.argsort(-np.abs(lost[0]))
    return [int(column) for column in ranked if low[column] > 0] if knockouts.is_claimed else []


def summarise(frame: pd.DataFrame, seed: int = 0, *, profile: pd.DataFrame | None = None) -> dict[str, Any]:
    """The result in numbers and sentences, ready for JSON.

    Args:
        profile: of `interp.lora_svd.profile`: layer, part, frobenius, per_parameter.
    """
    knockouts = read(frame, seed)
    tests = [] if profile is None else align(knockouts, profile, seed)
    played = read_scores(frame, seed)
    interval, means = knockouts.bootstrap.interval, knockouts.means
    return {
        "statement": " ".join([statement(knockouts), profile_statement(tests), score_statement(played)]),
        "metric": METRIC,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": seed,
        "kind": knockouts.kind,
        "pairs": knockouts.n_pairs,
        "groups": knockouts.bootstrap.n_groups,
        "engine_error": knockouts.engine_error,
        "models": {
            model: {metric: interval(means[key, metric]).to_json() for metric in METRICS}
            for model, key in (("base", BASE), ("trained", TRAINED))
        },
        "trained_minus_base": knockouts.brought().to_json(),
        "modules": _summarise_modules(knockouts),
        "cumulative": {
            end: {
                "crossings": {str(share): knockouts.crossing(end, share).to_json() for share in SHARES}
                if knockouts.is_claimed
                else None,
                "share": knockouts.share(end)[0].tolist() if knockouts.is_claimed else None,
            }
            for end in ENDS
        },
        "profile": {"tests": tests} if profile is not None else None,
        "score": played.to_json() if played else None,
    }


def statement(knockouts: Knockouts) -> str:
    """Which layers are needed and which suffice, or why that cannot be said."""
    found = f"{knockouts.n_pairs} pairs of {knockouts.bootstrap.n_groups} graphs"
    effects = ", ".join(f"{show(knockouts.effect(model))} {model}" for model in MODELS)
    head = f"A - B in logits: {effects} ({found})."
    if knockouts.bootstrap.n_groups < MIN_GROUPS:
        return f"{head} No claim from so few graphs, at least {MIN_GROUPS} are needed."
    if not knockouts.is_claimed:
        return f"{head} No effect of the adapter to locate: trained - base is {show(knockouts.brought())}."
    interval, lost, gained = knockouts.bootstrap.interval, knockouts.lost(), knockouts.gained()
    costly, best = needed(knockouts), int(np.abs(gained[0]).argmax())
    most = costly[0] if costly else int(np.abs(lost[0]).argmax())
    which = f"{name_of(knockouts.modules[most])}, costs {show(interval(lost[:, most]))}"
    number = f"{len(costly)} of {len(knockouts.modules)}" if costly else f"none of {len(knockouts.modules)}"
    half, most_of = ([show(knockouts.crossing(end, share), 1) for end in ENDS] for share in SHARES)
    return (
        f"{head} Switched off one by one, {number} parts of layers cost some of it (intervals that hold together); the "
        f"dearest, {which}. Switched on alone in the base model, the best, {name_of(knockouts.modules[best])}, brings "
        f"{show(interval(gained[:, best]))}. Half of it is there with the adapter on below layer {half[0]} only, or "
        f"from layer {half[1]} on only; 90 % below {most_of[0]}, or from {most_of[1]} on."
    )


def name_of(module: tuple[int, str]) -> str:
    """`attention of layer 3`."""
    layer, part = module
    return f"{part} of layer {layer}" if layer >= 0 else "the part outside the layers"


def align(knockouts: Knockouts, profile: pd.DataFrame, seed: int = 0) -> list[dict[str, Any]]:
    """Rank correlation over layers of the size of the delta with the size of what is lost, and gained, by part.

    The interval is over graphs, `p` of a permutation test over layers (two-sided), `p_bh` corrected over all tests
    returned (Benjamini and Hochberg 1995). All are None where one of the two is the same in all layers. Neighbouring
    layers are alike, so that p is rather too small. `layers` is how many have both a size and a change.
    """
    changes = {"lost": np.abs(knockouts.lost()), "gained": np.abs(knockouts.gained())}
    tests = []
    for part in knockouts.parts:
        for size in SIZES:
            columns, sizes = sizes_of(knockouts, profile, part, size)
            for change, draws in changes.items():
                rng = derive_rng(seed, "knockout", "profile", part, size, change)
                rho = knockouts.bootstrap.interval(spearman(draws[:, columns], sizes))
                names = {"part": part, "size": size, "change": change, "layers": len(columns)}
                tests.append({**names, "rho": rho.to_json(), "p": permutation_p(draws[0, columns], sizes, rng)})
    defined = [test for test in tests if test["p"] is not None]
    corrected = false_discovery_control([test["p"] for test in defined]) if defined else []
    adjusted = {id(test): float(p) for test, p in zip(defined, corrected, strict=True)}
    return [test | {"p_bh": adjusted.get(id(test))} for test in tests]


def sizes_of(knockouts: Knockouts, profile: pd.DataFrame, part: str, size: str) -> tuple[list[int], Floats]:
    """The columns of one part in what is lost and gained, and the sizes (n,) of its deltas, where there are both."""
    known = profile[profile["part"] == part].set_index("layer")[size]
    columns = [i for i, (layer, name) in enumerate(knockouts.modules) if name == part and layer in known.index]
    return columns, known.loc[[knockouts.modules[i][0] for i in columns]].to_numpy(dtype=np.float64)


def profile_statement(tests: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: how well the SVD profile predicts what switching off costs."""
    if not tests:
        return "No profile of the adapter was given to compare this with."
    chosen = [test for test in tests if (test["change"], test["size"]) == ("lost", "frobenius")]
    return f"What a part costs goes with its ||dW||_F by a rank correlation of {', '.join(map(show_test, chosen))}."


def show_test(test: Mapping[str, Any]) -> str:
    """`0.52 [0.31, 0.70] (attention; p = 0.003, 0.006 corrected)`."""
    if test["p"] is None:
        return f"undefined ({test['part']})"
    return f"{show_json(test['rho'])} ({test['part']}; p = {test['p']:.3f}, {test['p_bh']:.3f} corrected)"


def show_json(record: Mapping[str, float | None], digits: int = 2) -> str:
    """`interp.flip.show` of what `Interval.to_json` wrote."""
    numbers = (record[name] for name in ("estimate", "low", "high", "undefined"))
    return show(Interval(*(np.nan if number is None else number for number in numbers)), digits)


def _summarise_modules(knockouts: Knockouts) -> list[dict[str, Any]]:
    interval, for_certain = knockouts.bootstrap.interval, set(needed(knockouts))
    changes = {
        name: {metric: change(metric) for metric in METRICS}
        for name, change in (("lost", knockouts.lost), ("gained", knockouts.gained))
    }
    limits = {name: simultaneous(found[METRIC]) for name, found in changes.items()}
    wide_enough = knockouts.bootstrap.n_groups >= MIN_GROUPS
    return [
        {"layer": layer, "part": part}
        | {
            name: {metric: interval(draws[:, column]).to_json() for metric, draws in found.items()}
            | {"simultaneous": [float(side[column]) for side in limits[name]] if wide_enough else None}
            for name, found in changes.items()
        }
        | {"needed": column in for_certain}
        for column, (layer, part) in enumerate(knockouts.modules)
    ]
