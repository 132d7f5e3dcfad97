"""The verdict: did the adapter create the use of a fact, move it, leave it as it was, or is the fact unused?

    unused      the trained model's effect of the fact lies inside the equivalence band around 0
    created     the base model's effect lies inside the band, the trained model's beyond it
    relocated   both effects lie beyond it, and a flip layer differs by more than `SAME_LAYERS`
    prior       both lie beyond it, and neither flip layers nor effects differ by more than what counts
    undecided   anything else, with what is missing

The effect is m_A - m_B, by how many logits the fact moves the decision. Every rule needs a whole 95 % interval on one
side, an equivalence as well as a difference (two one-sided tests, each at 2.5 %): no difference is concluded from a
wide interval, and widening intervals can only turn a case into `undecided`. A pure function of the summaries that the
analyses write: no model, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from interp.corroboration import Finding, corroborate
from interp.flip import MODELS, POSITIONS
from interp.stats import MIN_GROUPS
from interp.verdict_audit import Audit, Axis, choose_axis, judge_audit
from interp.verdict_rules import Reason, dig, ends, is_beyond, is_inside, shown, size

Case = Literal["unused", "prior", "relocated", "created", "undecided"]

# Logits. Half a logit between A and B moves the choice between answer and foil by 12 percentage points at the most
# (the logistic function's slope is at most 1/4). Less is no use of a fact, whatever its interval excludes.
BAND = 0.5
# Layers. A flip is interpolated between two neighbouring layers: what is closer than one layer is the same place.
SAME_LAYERS = 1.0


@dataclass(frozen=True)
class Verdict:
    """What was decided, and from what.

    Attributes:
        case: one of the five.
        sentence: the case with its numbers.
        kind, pairs, groups: what was compared, how many pairs and graphs.
        reasons: the rules in the order in which they were applied.
        missing: what would decide an undecided case; empty otherwise.
        corroboration: whether the other analyses agree. None of it changes the case.
        audit: what the fact is worth in the environment in which the adapter was trained.
        axis: what to push on.
    """

    case: Case
    sentence: str
    kind: str
    pairs: int
    groups: int
    reasons: tuple[Reason, ...]
    missing: tuple[str, ...]
    corroboration: tuple[Finding, ...]
    audit: Audit
    axis: Axis

    def to_json(self) -> dict[str, Any]:
        """Ready for `verdict.json`."""
        return {
            "case": self.case,
            "sentence": self.sentence,
            "kind": self.kind,
            "pairs": self.pairs,
            "groups": self.groups,
            "band_logits": BAND,
            "same_layers": SAME_LAYERS,
            "reasons": [reason.to_json() for reason in self.reasons],
            "missing": list(self.missing),
            "corroboration": [finding.to_json() for finding in self.corroboration],
            "audit": self.audit.to_json(),
            "axis": self.axis.to_json(),
        }


def decide(summaries: Mapping[str, Mapping[str, Any]], audit: Mapping[str, Any] | None) -> Verdict:
    """Apply the rules.

    Args:
        summaries: analysis -> what its `summarise` returned. Patching decides; the others corroborate, and may be
            missing.
        audit: what the fact is worth where the adapter was trained (`interp.verdict_audit.judge_audit`), or None.
    """
    patching = summaries.get("patching")
    kind, found = _main_kind(patching)
    reasons, missing = _validity(patching, found)
    case: Case = "undecided"
    if not missing:
        case, steps, missing = _case(found)
        reasons += steps
    where = {position: _flip(found, "trained", position) for position in POSITIONS}
    judged = judge_audit(audit)
    return Verdict(
        case=case,
        sentence=_sentence(case, kind, found, missing),
        kind=kind,
        pairs=int(found.get("pairs", 0)),
        groups=int(found.get("groups", 0)),
        reasons=tuple(reasons),
        missing=tuple(missing),
        corroboration=corroborate(summaries, where, BAND, SAME_LAYERS),
        audit=judged,
        axis=choose_axis(case, _effect(found, "trained"), summaries, audit, judged),
    )


def _main_kind(patching: Mapping[str, Any] | None) -> tuple[str, Mapping[str, Any]]:
    kinds = dig(patching, "kinds") or {}
    return next(iter(kinds.items()), ("", {}))


def _effect(found: Mapping[str, Any], model: str) -> Mapping[str, Any] | None:
    return dig(found, "models", model, "sweeps", "denoise", "effect")


def _flip(found: Mapping[str, Any], model: str, position: str) -> Mapping[str, Any] | None:
    return dig(found, "models", model, "sweeps", "denoise", "flips", position, "ratio_of_means")


def _validity(patching: Mapping[str, Any] | None, found: Mapping[str, Any]) -> tuple[list[Reason], list[str]]:
    """The rules without which nothing is decided, and what is missing where one of them does not hold."""
    if not found:
        return [Reason("Patching was measured.", False)], ["the patching analysis"]
    groups = int(found.get("groups", 0))
    enough = groups >= MIN_GROUPS
    reasons = [Reason(f"At least {MIN_GROUPS} graphs were used.", enough, {"graphs": str(groups)})]
    missing = [] if enough else [f"more graphs ({groups} were used, at least {MIN_GROUPS} are needed for an interval)"]
    errors = _engine_errors(patching, found)
    exact = all(error <= BAND for error in errors.values())
    numbers = {name: f"{error:.2g} logits" for name, error in errors.items()}
    reasons.append(Reason(f"Patching meets the ends that are known, within {BAND} logits.", exact, numbers))
    if not exact:
        missing.append(
            f"a patching engine that meets the known ends: it misses one by {max(errors.values()):.2g} logits"
        )
    return reasons, missing


def _engine_errors(patching: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, float]:
    """By how much, at worst, patching misses what it must give."""
    errors = {
        f"ends of the curves, {model}": dig(found, "models", model, "sweeps", "denoise", "end_error")
        for model in MODELS
    }
    errors["self-patch"] = dig(patching, "controls", "self", "largest_change")
    for model in MODELS:
        errors[f"patched everywhere, {model}"] = dig(
            patching, "controls", "everything", model, "largest_difference_from_a"
        )
    return {name: float(error) for name, error in errors.items() if error is not None}


def _case(found: Mapping[str, Any]) -> tuple[Case, list[Reason], list[str]]:
    """The case, the rules that led to it, and what is missing."""
    trained, base = (_effect(found, model) for model in ("trained", "base"))
    reasons = [
        Reason(f"The trained model's effect lies inside ±{BAND} logits.", is_inside(trained, BAND),
               {"trained": shown(trained)}),
    ]  # fmt: skip
    if (of_trained := size(trained, BAND)) == "inside":
        return "unused", reasons, []
    if of_trained == "unclear":
        return "undecided", reasons, [_narrower("the trained model's effect", trained)]
    reasons.append(
        Reason(f"The base model's effect lies inside ±{BAND} logits.", is_inside(base, BAND), {"base": shown(base)})
    )
    if (of_base := size(base, BAND)) == "inside":
        return "created", reasons, []
    if of_base == "unclear":
        return "undecided", reasons, [_narrower("the base model's effect", base)]
    case, steps, missing = _moved(found)
    return case, reasons + steps, missing


def _moved(found: Mapping[str, Any]) -> tuple[Case, list[Reason], list[str]]:
    """Both models use the fact: at the same layers, and equally?"""
    flips = {position: dig(found, "trained_minus_base", "flips", "denoise", position) for position in POSITIONS}
    numbers = {f"at the {position}": f"{shown(flip)} layers" for position, flip in flips.items()}
    sizes = {position: size(flip, SAME_LAYERS) for position, flip in flips.items()}
    differs = True if "beyond" in sizes.values() else False if set(sizes.values()) == {"inside"} else None
    reasons = [Reason(f"A flip layer, trained - base, differs by more than {SAME_LAYERS:g} layer.", differs, numbers)]
    if differs:
        return "relocated", reasons, []
    if differs is None:
        unclear = [position for position, found_size in sizes.items() if found_size == "unclear"]
        return "undecided", reasons, [
            f"narrower flip layers at the {' and the '.join(unclear)}: the difference must lie within, or beyond, "
            f"{SAME_LAYERS:g} layer"
        ]  # fmt: skip
    change = dig(found, "trained_minus_base", "effect")
    reasons.append(
        Reason(f"The effects, trained - base, differ by less than {BAND} logits.", is_inside(change, BAND),
               {"trained - base": shown(change)})
    )  # fmt: skip
    if is_inside(change, BAND):
        return "prior", reasons, []
    if is_beyond(change, BAND):
        return "undecided", reasons, [
            f"none of the four cases: the fact is used at the base model's layers, and the adapter changed by "
            f"{shown(change)} logits how much it moves the decision; more pairs would not decide it"
        ]  # fmt: skip
    return "undecided", reasons, [_narrower("the difference of the effects", change)]


def _narrower(what: str, interval: Mapping[str, Any] | None) -> str:
    low, high = ends(interval)
    if math.isinf(low) or math.isinf(high):
        return f"an interval for {what}"
    return f"a narrower interval for {what}, {shown(interval)} logits: it lies neither inside ±{BAND} nor beyond it"


def _sentence(case: Case, kind: str, found: Mapping[str, Any], missing: Sequence[str]) -> str:
    trained, base = (f"{shown(_effect(found, model))} logits" for model in ("trained", "base"))
    if case == "undecided":
        numbers = f" A - B is {trained} in the trained model, {base} in the base model." if found else ""
        return f"Undecided.{numbers} Missing: {'; '.join(missing)}."
    flips = [_flip(found, "trained", position) for position in POSITIONS]
    place = (
        f"it leaves its tokens at layer {shown(flips[0])} and is at the decision from layer {shown(flips[1])} on"
        if all(flips)
        else "where it is read could not be located"
    )
    if case == "unused":
        return (
            f"Unused: {kind} moves the trained model's decision by {trained}, which is inside ±{BAND} "
            f"(base model: {base})."
        )
    if case == "created":
        return (
            f"Created: {kind} does not move the base model's decision ({base}), but moves the trained model's by "
            f"{trained}; {place}."
        )
    if case == "prior":
        return (
            f"Prior: {kind} moves the base model's decision already, by {base}, and the trained model's by {trained}, "
            f"at the same layers; {place}."
        )
    before = [shown(_flip(found, "base", position)) for position in POSITIONS]
    return (
        f"Relocated: {kind} moves both models' decisions (base {base}, trained {trained}), but in other layers; "
        f"{place} (base model: {before[0]} and {before[1]})."
    )
