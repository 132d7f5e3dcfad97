"""Which heads are retention readers, from the frame of `interp.retention_heads.measure`.

The plain definition: attention from the decision position to k's entry, mean over decisions in which the model retains
k, at least `THRESHOLD`; from `NEEDED` decisions on.

The stronger one. For every head and pair, in prompt A, `CRITERIA` are differences that are positive in a reader:
attention, and what it writes, on k's entry less those on the other entry and on spans as long; the logits lost when the
edge to the entry is blocked, and those less what is lost by blocking the controls. The graphs are split in two. On one
half a head becomes a candidate if all its means are positive and blocking costs at least `MIN_EFFECT` logits. On the
other half each criterion is tested one-sided by flipping the signs of the graphs' means (exact where there are few);
a candidate's p-value is its largest, since all have to hold (intersection-union), and Holm's procedure corrects over
the candidates. The estimates come from the second half only: no choice was made there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from interp.flip import MODELS, RECOVERY_EPS, show
from interp.retention_failures import DECISION, keys_with, sort_failures
from interp.stats import LEVEL, MIN_GROUPS, RESAMPLES, ClusterBootstrap, Floats, Interval, derive_rng

THRESHOLD, NEEDED = 0.1, 50
MIN_EFFECT = RECOVERY_EPS  # logits: less than what counts as a difference between two runs is no effect of a head
ALPHA = 1 - LEVEL
FLIPS = 2**16
NAME = "retention_heads"
# criterion -> (metric, what is taken off it)
CRITERIA = {
    "excess_other": ("attention", "attention_other"),
    "excess_random": ("attention", "attention_random"),
    "written_excess_other": ("written", "written_other"),
    "written_excess_random": ("written", "written_random"),
    "effect": ("effect", None),
    "effect_excess_other": ("effect", "effect_other"),
    "effect_excess_random": ("effect", "effect_random"),
}
ESTIMATES = (
    "attention", "attention_key", "attention_value", "attention_other", "attention_random", "written", "written_other",
    "written_random", "effect", "effect_value", "effect_other", "effect_random",
)  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """One model's measurements of all heads, n observations (pairs, or decisions), L layers of H heads.

    Attributes:
        groups: (n,) names.
        values: metric -> (n, L, H).
    """

    groups: tuple[str, ...]
    values: Mapping[str, Floats]

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Heads:
        """From rows of one model with a head; several keys of one decision are averaged."""
        rows = rows[rows["head"] >= 0]
        groups = rows.groupby("id", sort=False)["group"].first()
        layers, heads = (int(rows[axis].max()) + 1 if len(rows) else 0 for axis in ("layer", "head"))
        columns = pd.MultiIndex.from_product([range(layers), range(heads)])
        values = {}
        for metric, part in rows.groupby("metric", sort=False):
            wide = part.groupby(["id", "layer", "head"])["value"].mean().unstack(["layer", "head"])
            table = wide.reindex(index=groups.index, columns=columns).to_numpy(dtype=np.float64)
            values[str(metric)] = table.reshape(-1, layers, heads)
        return cls(tuple(groups), values)

    def criteria(self) -> dict[str, Floats]:
        """Criterion -> (n, L, H); those that need what the pairs do not name (another entry) are left out."""
        found = {}
        for name, (metric, control) in CRITERIA.items():
            if metric in self.values and (control is None or control in self.values):
                found[name] = self.values[metric] - (0 if control is None else self.values[control])
        return found

    def where(self, chosen: Sequence[bool]) -> Heads:
        """Those of some pairs, `chosen` of shape (n_pairs,)."""
        keep = np.asarray(chosen, dtype=bool)
        return Heads(
            tuple(group for group, kept in zip(self.groups, keep, strict=True) if kept),
            {metric: table[keep] for metric, table in self.values.items()},
        )

    def bootstrap(self, seed: int, *names: str) -> ClusterBootstrap:
        """Resamples of the graphs, drawn under the names given."""
        return ClusterBootstrap.draw(self.groups, derive_rng(seed, NAME, *names))


def summarise(frame: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """The result in numbers and sentences, ready for JSON. Pairs of other kinds than the first one's are not used."""
    pairs, decisions = frame[frame["kind"] != DECISION], frame[frame["kind"] == DECISION]
    kind = str(pairs["kind"].iloc[0]) if len(pairs) else ""
    pairs = pairs[pairs["kind"] == kind]
    heads = {model: Heads.of(pairs[pairs["model"] == model]) for model in MODELS}
    models = {}
    for model, other in zip(MODELS, reversed(MODELS), strict=True):
        ordinary = decisions[decisions["model"] == model]
        found = _readers(heads[model], heads[other], seed)
        models[model] = {
            "statement": _sentence(model, found),
            **found,
            "plain_definition": _plain(ordinary, seed),
            "failures": sort_failures(ordinary, [(r["layer"], r["head"]) for r in found["readers"]], seed),
        }
    return {
        "statement": " ".join(models[model]["statement"] for model in MODELS),
        "failures": " ".join(f"{model}: {models[model]['failures']['statement']}" for model in MODELS),
        "kind": kind,
        "pairs": int(pairs["id"].nunique()),
        "decisions": int(decisions["id"].nunique()),
        "groups": int(frame["group"].nunique()),
        "models": models,
        "overlap": _overlap(models),
        "criteria": list(CRITERIA),
        "min_effect_logits": MIN_EFFECT,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "seed": seed,
    }


def halves(groups: Sequence[str], seed: int) -> tuple[set[str], set[str]]:
    """The graphs on which heads are chosen, and those on which they are confirmed; the same for both models."""
    names = sorted(set(groups))
    shuffled = [names[i] for i in derive_rng(seed, NAME, "halves").permutation(len(names))]
    middle = len(names) // 2
    return set(shuffled[:middle]), set(shuffled[middle:])


def sign_flip_p(values: Floats, groups: Sequence[str], rng: np.random.Generator) -> Floats:
    """One-sided p-values that the means of the graphs' means are above 0, of (n, heads) values; (heads,).

    All sign patterns are tried where there are at most `FLIPS`, else as many random ones, the pattern as it is among
    them. Rounding does not make two equal means different.
    """
    means = pd.DataFrame(values).groupby(list(groups)).mean().to_numpy()  # (graphs, heads)
    graphs = len(means)
    if 2**graphs <= FLIPS:
        signs = 1.0 - 2.0 * ((np.arange(2**graphs)[:, None] >> np.arange(graphs)) & 1)
    else:
        signs = np.concatenate([np.ones((1, graphs)), rng.choice([-1.0, 1.0], (FLIPS - 1, graphs))])
    sums = signs @ means  # (patterns, heads); row 0 is the pattern as it is
    return (sums >= sums[0] - 1e-9 * np.abs(means).sum(axis=0)).mean(axis=0)


def holm(p_values: Floats) -> Floats:
    """Holm's step-down adjusted p-values (n,) (Holm 1979)."""
    order = np.argsort(p_values)
    stepped = np.maximum.accumulate(p_values[order] * np.arange(len(p_values), 0, -1))
    adjusted = np.empty_like(p_values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _readers(heads: Heads, other: Heads, seed: int) -> dict[str, Any]:
    """Candidates and readers of a model, each with the same head's estimates in the other one."""
    if not heads.groups:
        return {"readers": [], "candidates": [], "heads": 0, "claim": "no pairs", "strongest": None}
    first, second = halves(heads.groups, seed)
    chosen_on = heads.where([group in first for group in heads.groups])
    confirmed_on, in_other = (
        measured.where([group in second for group in measured.groups]) for measured in (heads, other)
    )
    bootstrap = confirmed_on.bootstrap(seed, "confirm")  # of both models: they have the same pairs

    def estimated(layer: int, head: int) -> dict[str, Any]:
        found = _estimates(confirmed_on, bootstrap, layer, head)
        return found | {"other_model": _estimates(in_other, bootstrap, layer, head)}

    strongest, candidates = None, []
    if first:
        means = {name: table.mean(axis=0) for name, table in chosen_on.criteria().items()}  # (L, H)
        passed = np.all([mean > 0 for mean in means.values()], axis=0) & (means["effect"] >= MIN_EFFECT)
        order = [divmod(int(i), passed.shape[1]) for i in np.argsort(-means["effect"], axis=None)]
        strongest = estimated(*order[0])
        candidates = [estimated(layer, head) for layer, head in order if passed[layer, head]]
    _test(candidates, confirmed_on, derive_rng(seed, NAME, "sign flips"))
    enough = min(len(first), len(second)) >= MIN_GROUPS
    graphs = len(first) + len(second)
    return {
        "claim": "made" if enough else f"no claim: expected at least {2 * MIN_GROUPS} graphs, found {graphs}",
        "heads": next(iter(heads.values.values()))[0].size,
        "chosen_on_graphs": len(first),
        "confirmed_on_graphs": len(second),
        "readers": [candidate for candidate in candidates if enough and candidate["p_holm"] < ALPHA],
        "candidates": candidates,
        "strongest": strongest,
    }


def _estimates(heads: Heads, bootstrap: ClusterBootstrap, layer: int, head: int) -> dict[str, Any]:
    found: dict[str, Any] = {"layer": layer, "head": head}
    columns = {name: heads.values[name] for name in ESTIMATES if name in heads.values} | heads.criteria()
    for name, table in columns.items():
        found[name] = bootstrap.interval(bootstrap.means(table[:, layer, head])).to_json()
    return found


def _test(candidates: Sequence[dict[str, Any]], heads: Heads, rng: np.random.Generator) -> None:
    """Put `p` of each criterion, the largest, and Holm's adjusted one into the candidates."""
    if not candidates:
        return
    layers, numbers = ([candidate[axis] for candidate in candidates] for axis in ("layer", "head"))
    by_criterion = {
        name: sign_flip_p(table[:, layers, numbers], heads.groups, rng) for name, table in heads.criteria().items()
    }
    largest = np.max(list(by_criterion.values()), axis=0)
    for index, (candidate, adjusted) in enumerate(zip(candidates, holm(largest), strict=True)):
        candidate["p_by_criterion"] = {name: float(p[index]) for name, p in by_criterion.items()}
        candidate |= {"p": float(largest[index]), "p_holm": float(adjusted)}


def _plain(rows: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Heads by attention alone, over decisions in which the model retains k."""
    retained = rows.merge(keys_with(rows, retains=1), on=["id", "key"])
    number = int(retained["id"].nunique())
    found: list[dict[str, Any]] = []
    if number:
        heads = Heads.of(retained)
        bootstrap = heads.bootstrap(seed, "plain")
        means = heads.values["attention"].mean(axis=0)
        for flat in np.argsort(-means, axis=None):
            layer, head = divmod(int(flat), means.shape[1])
            if means[layer, head] < THRESHOLD:
                break
            found.append(_estimates(heads, bootstrap, layer, head))
    lists = rows[rows["metric"] == "list_length"]["value"]
    return {
        "threshold": THRESHOLD,
        "decisions_needed": NEEDED,
        "decisions_that_retain": number,
        "enough": number >= NEEDED,
        "decisions": len(lists),
        "no_list": int(lists.isna().sum()),
        "unfinished_list": int(rows.loc[rows["metric"] == "unfinished", "value"].sum()),
        "empty_list": int((lists == 0).sum()),
        "unknown_ids": int(rows.loc[rows["metric"] == "unknown_ids", "value"].sum()),
        "heads": found,
    }


def _sentence(model: str, found: Mapping[str, Any]) -> str:
    """What was found in a model, a null result with its interval."""
    if not found["heads"]:
        return f"{model}: not measured, there are no pairs."
    if found["claim"] != "made":
        return f"{model}: {found['claim']}."
    strongest = found["strongest"]
    if found["readers"]:
        named = "; ".join(
            f"{name_of(r)} (attention {_show(r['attention'])}, blocked: {_show(r['effect'])} logits lost)"
            for r in found["readers"][:3]
        )
        count = len(found["readers"])
        more = f", the strongest {named}" if count > 3 else f": {named}"
        return (
            f"{model}: {count} of {found['heads']} heads read the entry, confirmed on {found['confirmed_on_graphs']} "
            f"graphs that they were not chosen on{more}."
        )
    candidates = len(found["candidates"])
    chosen = f"{candidates} were candidates, none was confirmed" if candidates else "none was a candidate"
    return (
        f"{model}: no head reads the entry: of {found['heads']}, {chosen}; blocking the one that mattered most where "
        f"heads were chosen, {name_of(strongest)}, loses {_show(strongest['effect'])} logits on the other graphs."
    )


def name_of(head: Mapping[str, Any]) -> str:
    """`L22H3`."""
    return f"L{head['layer']}H{head['head']}"


def _show(record: Mapping[str, float | None]) -> str:
    return show(Interval(**{name: float("nan") if x is None else x for name, x in record.items()}))


def _overlap(models: Mapping[str, Any]) -> dict[str, Any]:
    readers = {model: {name_of(r) for r in models[model]["readers"]} for model in MODELS}
    plain = {model: {name_of(r) for r in models[model]["plain_definition"]["heads"]} for model in MODELS}
    return {
        "readers_of_both_models": sorted(readers["base"] & readers["trained"]),
        **{
            model: {
                "plain_and_reader": sorted(plain[model] & readers[model]),
                "plain_only": sorted(plain[model] - readers[model]),
                "reader_only": sorted(readers[model] - plain[model]),
            }
            for model in MODELS
        },
    }
