"""Beside the verdict: what the decision was worth where the adapter was trained, and what to push on from there.

The audit is what an optimal scheduler gets in the environment of the training run, with and without the decision. It
tells "the model does not" from "it would not pay".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from interp.base_models import read_json
from interp.cli import InputError
from interp.verdict_rules import Reason, dig, ends, is_above, shown

Push = Literal["nothing", "reward or hardware", "lookahead", "capacity", "training", "evidence"]

# Percent of greedy's latency. The published scores divide the improvement by 20 %: this is a tenth of their unit.
WORTH = 2.0
# Tensors that it pays to retain, in ordinary states: with fewer, the share that is retained says little.
ENOUGH_FAILURES = 10
USED = ("prior", "relocated", "created")
INTERVALS = ("optimum", "optimum_without_retention", "retention", "heuristic", "best_constant")

PUSH = {
    "nothing": "Nothing in the model: it reads the fact and uses it.",
    "reward or hardware": "A reward or hardware where retention pays.",
    "lookahead": "A deeper lookahead: what the observation shows is not enough to tell when retention pays.",
    "capacity": "Full fine-tuning, or other target modules.",
    "training": "The training itself.",
    "evidence": "Nothing yet: more evidence comes first.",
}


@dataclass(frozen=True)
class Audit:
    """Attributes:
    available: whether the training run recorded one.
    pays: whether retention is worth more than `WORTH`; None if that is not known.
    sentence: that, with the numbers.
    numbers: name -> percent of greedy's latency, with intervals; empty if not available.
    """

    available: bool
    pays: bool | None
    sentence: str
    numbers: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Axis:
    """What to push on: a word, why, and the rules that led there."""

    push: Push
    why: str
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON, with the sentence that `push` stands for."""
        return {"push": self.push, "text": PUSH[self.push], "why": self.why,
                "reasons": [reason.to_json() for reason in self.reasons]}  # fmt: skip


def load_audit(adapter: Path) -> dict[str, Any] | None:
    """The audit that the adapter's training run recorded in `workbench.json`; None if there is none.

    Raises:
        InputError: if it is not of the form that `judge_audit` describes.
    """
    file = adapter / "workbench.json"
    audit = read_json(file, "the record of a training run").get("audit") if file.exists() else None
    if audit is None:
        return None
    if not isinstance(audit, dict):
        raise InputError(f"{file}: audit: expected an object, found {audit!r}")
    for name in INTERVALS:
        interval = audit.get(name)
        ends = [interval.get(end) for end in ("estimate", "low", "high")] if isinstance(interval, dict) else [None]
        if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in ends):
            raise InputError(
                f"{file}: audit.{name}: expected an object with the numbers estimate, low and high, found {interval!r}"
            )
    return audit


def judge_audit(audit: Mapping[str, Any] | None) -> Audit:
    """Read an audit: `retention` and the other `INTERVALS` with estimate, low, high, in percent of greedy's latency;
    `best_constant` with its `answer`; `decisions_percent`, kind -> percent of the decisions."""
    if audit is None:
        return Audit(
            False, None,
            "Not available: the training run recorded no audit, so it is not known whether retention would pay there. "
            "That the model does not use a fact cannot be told from that it would not pay.", {},
        )  # fmt: skip
    worth = audit.get("retention")
    pays = is_above(worth, WORTH)
    verdict = {
        True: "it pays",
        False: f"it does not pay (less than {WORTH:g} %)",
        None: f"whether that is more than {WORTH:g} % is not certain",
    }[pays]
    sentence = (
        f"Under optimal play in the environment that the adapter was trained in, retention is worth {_percent(worth)} "
        f"of greedy's latency: {verdict}."
    )
    if optimum := audit.get("optimum"):
        sentence += f" The optimum is {_percent(optimum)} faster than greedy"
        without = audit.get("optimum_without_retention")
        sentence += f", {_percent(without)} without retention." if without else "."
    return Audit(True, pays, sentence, dict(audit))


def choose_axis(
    case: str,
    effect: Mapping[str, Any] | None,
    summaries: Mapping[str, Mapping[str, Any]],
    audit: Mapping[str, Any] | None,
    judged: Audit,
) -> Axis:
    """What to push on, by written rules: the first that applies.

    Args:
        case: of the verdict.
        effect: the trained model's, in logits.
        summaries: of `retention_heads` (what becomes of tensors that it pays to retain) and `lora_svd` (whether
            anything was trained), where they are there.
        audit, judged: as recorded, and as read.
    """
    if case == "undecided":
        return Axis("evidence", "The case is undecided.", (Reason("The case is decided.", False),))
    if case in USED:
        return _axis_if_used(effect, summaries, audit, judged)
    return _axis_if_unused(summaries, audit, judged)


def _axis_if_used(
    effect: Mapping[str, Any] | None,
    summaries: Mapping[str, Mapping[str, Any]],
    audit: Mapping[str, Any] | None,
    judged: Audit,
) -> Axis:
    positive = ends(effect)[0] > 0
    reasons = [Reason("The fact moves the decision the way the environment calls for.", positive,
                      {"A - B, trained": shown(effect)})]  # fmt: skip
    if not positive:
        return Axis("training", "The fact is read, and answered the other way round.", tuple(reasons))
    failures = dig(summaries, "retention_heads", "models", "trained", "failures") or {}
    pays, retained = failures.get("pays", 0), failures.get("retained", 0)
    rule = "In ordinary states it retains most of what pays."
    if pays >= ENOUGH_FAILURES:
        mostly = retained * 2 >= pays
        counts = failures.get("counts") or {}
        numbers = {"retained": f"{retained} of {pays}"} | {name: str(count) for name, count in counts.items()}
        reasons.append(Reason(rule, mostly, numbers))
        if not mostly:
            return _axis_of_failures(counts, audit, reasons)
    else:
        few = f"{pays}, at least {ENOUGH_FAILURES} are needed"
        reasons.append(Reason(rule, None, {"tensors that it pays to retain": few}))
    worth = dig(audit, "retention")
    if judged.pays is False:
        why = (
            f"Where it was trained the most that can come of it is {_percent(worth)} of greedy's latency: a better "
            "score needs a reward or hardware where retention pays."
        )
    else:
        why = "The fact is read and moves the decision the right way."
    return Axis("nothing", why, tuple(reasons))


def _axis_of_failures(counts: Mapping[str, int], audit: Mapping[str, Any] | None, reasons: list[Reason]) -> Axis:
    read, late = counts.get("retrieval", 0), counts.get("downstream", 0)
    if read + late > counts.get("unresolved", 0):
        where = (
            "the number is not read there" if read >= late else "the number is read, and does not become the decision"
        )
        return Axis("capacity", f"Where retention would pay and is left out, mostly {where}.", tuple(reasons))
    return _axis_by_observation(audit, reasons)


def _axis_if_unused(summaries: Mapping[str, Mapping[str, Any]], audit: Mapping[str, Any] | None, judged: Audit) -> Axis:
    svd = summaries.get("lora_svd", {})
    if svd.get("modules") and svd.get("modules") == svd.get("zero_modules"):
        return Axis("training", "The adapter's delta is zero in every module: nothing was trained.",
                    (Reason("The adapter changes something.", False),))  # fmt: skip
    rule = f"Retention is worth more than {WORTH:g} % of greedy's latency where the adapter was trained."
    numbers = {"retention": _percent(dig(audit, "retention"))} if judged.available else {"audit": "not available"}
    reasons = [Reason(rule, judged.pays, numbers)]
    if judged.pays is None:
        why = "an audit of more graphs" if judged.available else "an audit of the environment"
        return Axis(
            "evidence", f"Whether it would pay to use the fact is not known: {why} comes first.", tuple(reasons)
        )
    if not judged.pays:
        why = "A habit that brings nothing cannot be learned from a latency signal."
        return Axis("reward or hardware", why, tuple(reasons))
    return _axis_by_observation(audit, reasons)


def _axis_by_observation(audit: Mapping[str, Any] | None, reasons: list[Reason]) -> Axis:
    """The heuristic sees the observation only, and retains; the best constant answer sees nothing."""
    heuristic, constant = dig(audit, "heuristic"), dig(audit, "best_constant")
    gains = None
    if ends(heuristic)[0] > ends(constant)[1]:
        gains = True
    elif ends(heuristic)[1] < ends(constant)[0]:
        gains = False
    numbers = {"heuristic": _percent(heuristic), "best constant answer": _percent(constant)}
    reasons = [*reasons, Reason("A policy that sees the observation only does better than a constant answer.", gains,
                                numbers)]  # fmt: skip
    if gains is None:
        why = "Whether the observation suffices to gain from retention is not known."
        return Axis("evidence", why, tuple(reasons))
    if gains:
        why = "It pays, and the observation shows enough: the adapter could not, or did not, learn it."
        return Axis("capacity", why, tuple(reasons))
    return Axis("lookahead", "It pays under optimal play, but no policy that was tried gains it from the observation.",
                tuple(reasons))  # fmt: skip


def _percent(interval: Mapping[str, Any] | None) -> str:
    """`0.6 % [0.2, 1.1]`."""
    if interval is None or interval.get("estimate") is None:
        return "not measured"
    estimate = f"{interval['estimate']:.1f} %"
    low, high = ends(interval)
    return estimate if abs(low) == float("inf") else f"{estimate} [{low:.1f}, {high:.1f}]"
