"""Controls of the patching result: patches that must move nothing, or everything, and ones that say what moved.

Unless said otherwise a control patches B's run of the same model, as denoising does, and has that model's rows:

    self             B's own activations, at the value and at the decision: moves nothing, exactly
    everything       A's activations at all positions from the value on: the decision is A's
    other_position   A's activations at another token of the same type after the value, drawn by the pair's id
    other_key        A's activations at the value of another key
    other_donor_a    the decision position of another pair's A, of as many tokens; other_donor_b: of its B
    lora_span        trained model, decision position: the part of A - B inside the directions that the adapter writes
                     (`interp.lora_weights.written_directions`); lora_complement: the rest; random_span: the part in a
                     random subspace of as many dimensions, scaled to lora_span's length (arXiv 2311.17030)

The first four are measured in every third layer and the last, the others in all.

Two controls are other models, with baselines only: `zero_b`, the adapter with B = 0, which is the base model, and
`random_b`, the adapter with a random B that leaves each module's delta its Frobenius norm, drawn anew for every pair.
A control that a pair has no room for has no rows; the summary counts the pairs that each was measured on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from interp.flip import MODELS
from interp.lora_weights import Factors, random_b, replaced_b, zero_b
from interp.pair_runs import NONE, PairRuns, every_third, metrics_of, places, switched
from interp.stats import derive_rng
from interp.sweep import Run, run_pair
from interp.tokens import EncodedPair

CONTROLS = (
    "self", "everything", "other_position", "other_key", "other_donor_a", "other_donor_b",
    "lora_span", "lora_complement", "random_span",
)  # fmt: skip
ADAPTERS = ("zero_b", "random_b")


def control_rows(
    found: PairRuns, donor: EncodedPair | None, directions: Sequence[Tensor], seed: int
) -> list[pd.DataFrame]:
    """All controls of one pair, `logit_difference` and `recovery` of each cell.

    Args:
        donor: another pair of as many tokens, None where there is none.
        directions: of `interp.lora_weights.written_directions`.
    """
    blocks = [block for model in MODELS for block in _position_rows(found, model, seed)]
    if donor is not None:
        blocks += _donor_rows(found, donor)
    if any(basis.shape[1] for basis in directions):
        blocks += _subspace_rows(found, directions, seed)
    makers: dict[str, Callable[[Factors], Tensor]] = {
        "zero_b": zero_b,
        "random_b": random_b(seed, "patching", "random_b", found.pair.id),
    }
    for name, make in makers.items():
        with found.subject.trained(), replaced_b(found.subject.causal_lm, make):
            runs = run_pair(found.subject, found.pair)
        for side, run in zip(("baseline_a", "baseline_b"), runs, strict=True):
            blocks.append(found.rows(metrics_of(run, runs[0], found.pair, light=True), name, side, **NONE))
    return blocks


def other_positions(pair: EncodedPair, is_number: Callable[[int], bool], seed: int) -> tuple[int, ...]:
    """As many other number tokens as the value has, drawn among those after it, in its field if that is a span.

    Args:
        is_number: whether a token id is of the value's type.

    Returns:
        Ascending positions; none where there are too few.
    """
    value = pair.value_positions
    end = pair.spans["future_uses"][1] if "future_uses" in pair.spans else pair.decision
    found = [i for i in range(value[-1] + 1, end) if is_number(pair.ids_a[i])]
    if len(found) < len(value):
        return ()
    drawn = derive_rng(seed, "patching", "other_position", pair.id).choice(found, len(value), replace=False)
    return tuple(sorted(int(i) for i in drawn))


def find_donor(pair: EncodedPair, pairs: Sequence[EncodedPair], seed: int) -> EncodedPair | None:
    """Another pair of another graph with as many tokens, drawn by the pair's id; None where there is none."""
    found = [p for p in pairs if p.group != pair.group and len(p.ids_a) == len(pair.ids_a)]
    return found[int(derive_rng(seed, "patching", "other_donor", pair.id).integers(len(found)))] if found else None


def _position_rows(found: PairRuns, model: str, seed: int) -> list[pd.DataFrame]:
    pair, tokenizer = found.pair, found.subject.tokenizer
    a, b = found.runs[model, "baseline_a"], found.runs[model, "baseline_b"]
    named, layers = places(pair), every_third(found.subject.n_layers + 1)
    wanted: list[tuple[str, str, Run, Sequence[int]]] = [
        *(("self", position, b, named[position]) for position in ("value", "decision")),
        ("everything", "everything", a, range(b.start, pair.decision + 1)),
        (
            "other_position", "other_position", a,
            other_positions(pair, lambda token: tokenizer.decode([token]).strip().isdigit(), seed),
        ),
        ("other_key", "other_value", a, [i for i in range(*pair.spans.get("other_value", (0, 0))) if i >= b.start]),
    ]  # fmt: skip
    return [
        found.patched(model, control, position, b, donor, positions, layers=layers, light=True)
        for control, position, donor, positions in wanted
        if positions
    ]


def _donor_rows(found: PairRuns, donor: EncodedPair) -> list[pd.DataFrame]:
    blocks = []
    for model in MODELS:
        with switched(found.subject, model):
            runs = run_pair(found.subject, donor)
        for control, run in zip(("other_donor_a", "other_donor_b"), runs, strict=True):
            recipient, place = found.runs[model, "baseline_b"], (found.pair.decision,)
            blocks.append(found.patched(model, control, "decision", recipient, run, place, light=True))
    return blocks


def _subspace_rows(found: PairRuns, directions: Sequence[Tensor], seed: int) -> list[pd.DataFrame]:
    a, b = found.runs["trained", "baseline_a"], found.runs["trained", "baseline_b"]
    rng = derive_rng(seed, "patching", "random_span", found.pair.id)
    width = a.residual.shape[-1]
    parts: dict[str, list[Tensor]] = {"lora_span": [], "lora_complement": [], "random_span": []}
    for basis, difference in zip(directions, (a.residual - b.residual)[:, -1].float(), strict=True):
        drawn = torch.from_numpy(rng.standard_normal((width, basis.shape[1]))).to(difference)
        inside, elsewhere = (_project(q, difference) for q in (basis.to(difference), torch.linalg.qr(drawn).Q))
        length = elsewhere.norm()
        scaled = elsewhere * (inside.norm() / length) if length > 0 else elsewhere
        for name, part in zip(parts, (inside, difference - inside, scaled), strict=True):
            parts[name].append(part)
    blocks = []
    for control, part in parts.items():
        residual = b.residual.clone()
        residual[:, -1] += torch.stack(part).to(residual.dtype)
        place = (found.pair.decision,)
        blocks.append(
            found.patched("trained", control, "decision", b, replace(a, residual=residual), place, light=True)
        )
    return blocks


def _project(basis: Tensor, vector: Tensor) -> Tensor:
    return basis @ (basis.mT @ vector)
