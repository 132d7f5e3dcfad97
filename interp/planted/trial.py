"""One planting through the analyses themselves: what they name, beside what was planted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from interp import flip, lora_svd, patching, retention_heads
from interp.flip import MODELS, POSITIONS
from interp.lora_svd_summary import by_module
from interp.planted.models import Head, Kind, Planting, plant
from interp.planted.pairs import make_pairs
from interp.stats import derive_rng
from interp.subject import Subject
from interp.tokens import encode_pair
from interp.verdict import decide
from interp.verdict_rules import dig

GROUPS = 12  # the fewest of which readers are claimed


@dataclass(frozen=True)
class Outcome:
    """What was planted and what was found.

    Attributes:
        kind, number: of the planting.
        planted, named: model -> heads. Empty for `rank`.
        decoys: heads that attend and write nothing.
        ranking: AUROC of the planted heads among all of their model, by what scores a head: `effect` (blocking the
            edge), `attention`. One per model with a planted head.
        flips: (model, position, layer found, lowest right layer, highest right one); NaN for none found.
        case, case_planted: the verdict; None for `rank`.
        rank, rank_planted, module, module_planted: for `rank`.
    """

    kind: Kind
    number: int
    planted: Mapping[str, tuple[Head, ...]]
    named: Mapping[str, tuple[Head, ...]]
    ranking: Mapping[str, tuple[float, ...]]
    flips: tuple[tuple[str, str, float, int, int], ...]
    case: str | None = None
    case_planted: str | None = None
    rank: int = 0
    rank_planted: int = 0
    module: str = ""
    module_planted: str = ""
    decoys: tuple[Head, ...] = ()

    @property
    def named_decoys(self) -> tuple[Head, ...]:
        """Decoys that were named as readers."""
        return tuple(head for head in self.decoys if any(head in heads for heads in self.named.values()))


def try_planting(kind: Kind, number: int, seed: int = 0, groups: int = GROUPS) -> Outcome:
    """Plant, measure, summarise, decide; in a temporary folder.

    Args:
        groups: pairs, each a group of its own.
    """
    with TemporaryDirectory() as folder:
        planting = plant(kind, Path(folder), number, seed)
        return _rank(planting, number, seed) if kind == "rank" else _heads(planting, number, seed, groups)


def _heads(planting: Planting, number: int, seed: int, groups: int) -> Outcome:
    subject = Subject.load(planting.adapter)
    rng = derive_rng(seed, "planted pairs", planting.kind, str(number))
    pairs = [encode_pair(subject.tokenizer, pair) for pair in make_pairs(groups, rng, planting.slot)]
    heads = retention_heads.measure(subject, pairs)
    patched = patching.measure(subject, pairs, components=("residual",), positions=("value", "decision"))
    summaries: dict[str, dict[str, Any]] = {
        "patching": flip.summarise(patched, seed),  # the part of it that decides
        "retention_heads": retention_heads.summarise(heads, seed),
    }
    found = summaries["retention_heads"]["models"]
    return Outcome(
        kind=planting.kind,
        number=number,
        planted=planting.readers,
        named={model: tuple((r["layer"], r["head"]) for r in found[model]["readers"]) for model in MODELS},
        ranking={metric: _ranking(heads, metric, planting) for metric in ("effect", "attention")},
        flips=_flips(summaries["patching"], planting),
        case=decide(summaries, None).case,
        case_planted=planting.case,
        decoys=planting.decoys,
    )


def _ranking(frame: pd.DataFrame, metric: str, planting: Planting) -> tuple[float, ...]:
    """Per model with planted heads: the share of (planted, other) pairs of heads in which the planted one has more."""
    shares = []
    for model, planted in planting.readers.items():
        if not planted:
            continue
        rows = frame[(frame["model"] == model) & (frame["metric"] == metric)]
        means = rows.groupby(["layer", "head"])["value"].mean()
        ours = means.loc[list(planted)].to_numpy()
        others = means.drop(list(planted)).to_numpy()
        gaps = ours[:, None] - others
        shares.append(float(np.mean((gaps > 0) + 0.5 * (gaps == 0))))
    return tuple(shares)


def _flips(summary: Mapping[str, Any], planting: Planting) -> tuple[tuple[str, str, float, int, int], ...]:
    """A fact read in layer l is at its place in what enters l, and elsewhere in what enters l + 1: between them."""
    sweeps = next(iter(summary["kinds"].values()))["models"]
    found = []
    for model, planted in planting.readers.items():
        layers = [layer for layer, _ in planted]
        for position in POSITIONS if planted else ():
            layer = dig(sweeps, model, "sweeps", "denoise", "flips", position, "ratio_of_means", "estimate")
            found.append((model, position, float("nan") if layer is None else layer, min(layers), max(layers) + 1))
    return tuple(found)


def _rank(planting: Planting, number: int, seed: int) -> Outcome:
    modules = by_module(lora_svd.measure(planting.adapter, seed=seed))
    largest = modules.iloc[int(modules["frobenius"].argmax())]
    return Outcome(
        kind=planting.kind,
        number=number,
        planted={},
        named={},
        ranking={},
        flips=(),
        rank=int(largest["energy_rank_99"]),
        rank_planted=planting.rank,
        module=str(largest["module"]),
        module_planted=planting.module,
    )
