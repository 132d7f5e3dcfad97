"""Whether the other analyses agree with the patching result. Stated with numbers; none of it changes the verdict.

A fact gets from its tokens to the decision through attention: a curve that crosses between the inputs of layers l and
l + 1 was moved by layer l. The reading is expected from one layer below the first crossing to one above the last
(`window`). Agreement can be yes, no, or not known: nothing measured, or nothing located to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from interp.verdict_rules import Record, dig, ends, is_above, is_inside, shown

Window = range
NOT_LOCATED = "no flip of the trained model to compare with"


@dataclass(frozen=True)
class Finding:
    """What one analysis says of a claim: the claim, whether it agrees (None: not known), and the numbers in words."""

    analysis: str
    claim: str
    agrees: bool | None
    numbers: str

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def corroborate(
    summaries: Mapping[str, Record], flips: Mapping[str, Record | None], band: float, same_layers: float
) -> tuple[Finding, ...]:
    """All findings, one per claim; an analysis that was not run says so.

    Args:
        summaries: analysis -> its summary.
        flips: position -> the trained model's flip layer (denoising), None where nothing is located.
        band: logits inside which an effect counts as none.
        same_layers: layers within which two places count as the same.
    """
    layers = window(flips)
    checks: dict[str, list[Callable[[Record], Finding]]] = {
        "patching": [
            lambda s: _noising(s, flips, same_layers),
            lambda s: _other_key(s, band),
            lambda s: _random_adapter(s, band),
        ],
        "retention_heads": [lambda s: _readers(s, layers)],
        "logit_lens": [lambda s: _lens(s, flips, same_layers)],
        "knockout": [lambda s: _knockout(s, layers)],
        "lora_svd": [lambda s: _svd(s, layers)],
    }
    return tuple(
        check(summaries[analysis]) if analysis in summaries else Finding(analysis, "", None, "not run")
        for analysis, found in checks.items()
        for check in (found if analysis in summaries else found[:1])
    )


def window(flips: Mapping[str, Record | None]) -> Window | None:
    """The layers in which the reading is expected; None if the flips are not located."""
    found = [ends(flip) for flip in flips.values() if flip is not None]
    if not found or any(math.isinf(edge) for pair in found for edge in pair):
        return None
    first, last = min(low for low, _ in found), max(high for _, high in found)
    return range(max(0, math.floor(first) - 1), math.floor(last) + 2)


def _noising(summary: Record, flips: Mapping[str, Record | None], same_layers: float) -> Finding:
    claim = f"noising (B into A) flips within {same_layers:g} layer of denoising, in the trained model"
    kind: Record = next(iter(summary["kinds"].values()))
    other = dig(kind, "models", "trained", "sweeps", "noise", "flips")
    if other is None or any(flip is None for flip in flips.values()):
        return Finding("patching", claim, None, NOT_LOCATED)
    both = {position: (flips[position], dig(other, position, "ratio_of_means")) for position in flips}
    numbers = "; ".join(f"at the {position} {shown(a)} and {shown(b)}" for position, (a, b) in both.items())
    pairs = [(dig(a, "estimate"), dig(b, "estimate")) for a, b in both.values()]
    if any(x is None or y is None for x, y in pairs):
        return Finding("patching", claim, None, numbers)
    return Finding("patching", claim, all(abs(x - y) <= same_layers for x, y in pairs), numbers)


def _other_key(summary: Record, band: float) -> Finding:
    claim = f"another key's count moves the trained model's decision by less than {band} logits"
    found = dig(summary, "other_key_pairs", "effect", "trained")
    return Finding("patching", claim, is_inside(found, band), f"{shown(found)} logits" if found else "not measured")


def _random_adapter(summary: Record, band: float) -> Finding:
    claim = f"an adapter of the same norm with a random B has an effect of less than {band} logits"
    found = dig(summary, "controls", "random_b", "effect")
    return Finding("patching", claim, is_inside(found, band), f"{shown(found)} logits" if found else "not measured")


def _readers(summary: Record, layers: Window | None) -> Finding:
    claim = "the confirmed reader heads of the trained model lie where it flips"
    found = dig(summary, "models", "trained") or {}
    readers = found.get("readers") or []
    if found.get("claim") != "made":
        return Finding("retention_heads", claim, None, found.get("claim") or "not measured")
    if layers is None:
        return Finding("retention_heads", claim, None, f"{len(readers)} readers; {NOT_LOCATED}")
    if not readers:
        return Finding("retention_heads", claim, False, f"no confirmed reader; expected in layers {_span(layers)}")
    effects = {(reader["layer"], reader["head"]): max(0.0, reader["effect"]["estimate"]) for reader in readers}
    inside = sum(effect for (layer, _), effect in effects.items() if layer in layers)
    share = inside / sum(effects.values()) if sum(effects.values()) else 0.0
    named = ", ".join(f"L{layer}H{head}" for layer, head in list(effects)[:6])
    numbers = f"{100 * share:.0f} % of the logits that they carry in layers {_span(layers)} ({named})"
    return Finding("retention_heads", claim, share >= 0.5, numbers)


def _lens(summary: Record, flips: Mapping[str, Record | None], same_layers: float) -> Finding:
    claim = "the answer takes shape no earlier than the fact has arrived at the decision"
    slots: Record = next(iter((dig(summary, "kinds") or {}).values()), {})
    rises = {name: dig(slot, "divergence", "half_from_layer") for name, slot in slots.items()}
    known = {name: rise for name, rise in rises.items() if dig(rise, "estimate") is not None}
    flip = flips.get("decision")
    if not known or flip is None or math.isinf(ends(flip)[0]):
        return Finding("logit_lens", claim, None, "no divergence to locate" if not known else NOT_LOCATED)
    arrived = float(flip["estimate"]) - same_layers
    agrees = [is_above(rise, arrived) for rise in known.values()]
    numbers = "half of KL(trained ‖ base) from layer " + "; ".join(
        f"{shown(rise)} ({name})" for name, rise in known.items()
    )
    return Finding("logit_lens", claim, _all(agrees), f"{numbers}; arrived at {shown(flip)}")


def _knockout(summary: Record, layers: Window | None) -> Finding:
    claim = "the adapter's attention in a layer in which the fact is read is needed"
    needed = [f"{m['part']} {m['layer']}" for m in summary["modules"] if m["needed"]]
    if layers is None:
        return Finding("knockout", claim, None, f"{len(needed)} parts of layers are needed; {NOT_LOCATED}")
    if not needed:
        numbers = f"no part costs some of the effect for certain, with {summary['groups']} graphs"
        return Finding("knockout", claim, None, numbers)
    reading = [name for name in needed if name in {f"attention {layer}" for layer in layers}]
    numbers = f"needed in layers {_span(layers)}: {', '.join(reading) or 'no attention'}; {len(needed)} parts in all"
    return Finding("knockout", claim, bool(reading), numbers)


def _svd(summary: Record, layers: Window | None) -> Finding:
    claim = "the adapter wrote more in the layers in which the fact is read than in an average layer"
    profile = [row for row in summary.get("profile", []) if row["frobenius"] is not None]
    if layers is None:
        return Finding("lora_svd", claim, None, NOT_LOCATED)
    by_layer: dict[int, float] = {}
    for row in profile:
        by_layer[row["layer"]] = by_layer.get(row["layer"], 0.0) + row["frobenius"] ** 2
    inside = [squares for layer, squares in by_layer.items() if layer in layers]
    if not inside or not sum(by_layer.values()):
        return Finding("lora_svd", claim, None, "nothing was written there")
    ratio = (sum(inside) / len(inside)) / (sum(by_layer.values()) / len(by_layer))
    return Finding("lora_svd", claim, ratio > 1, f"{ratio:.2f} times the mean ||dW||_F² in layers {_span(layers)}")


def _all(answers: list[bool | None]) -> bool | None:
    """True if all are, False if one is False, None if one is open."""
    return None if None in answers and False not in answers else all(answers)


def _span(layers: Window) -> str:
    return f"{layers[0]} to {layers[-1]}"
