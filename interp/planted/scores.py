"""From outcomes to rates: precision, recall, accuracy and false claims, with intervals and the bounds to be met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import beta

from interp.flip import POSITIONS
from interp.planted.models import KINDS
from interp.planted.simulated import LAWS, Law, covered, falsely_named
from interp.planted.trial import Outcome
from interp.stats import LEVEL, MIN_GROUPS

PRECISION, RECALL, AUROC = 0.95, 0.8, 0.95
LAYER, VERDICT, RANK = 0.95, 0.9, 0.95
FALSE_CLAIMS = 0.05
USES = ("created", "prior", "relocated")  # verdicts that claim a use
USES_IN_BASE = ("prior", "relocated")  # and one in the base model
WITHOUT_BASE = ("reader", "decoy", "redundant")  # kinds whose base model has no mechanism, but whose adapter has
COVERAGE = (0.93, 0.97)
GROUPS = (MIN_GROUPS, 12, 32, 64)  # of the simulations


@dataclass(frozen=True)
class Score:
    """A rate.

    Heads of one planting count one by one, as if they were independent.

    Attributes:
        name: what is counted.
        estimate: from 0 to 1; NaN where there is nothing to count.
        low, high: 95 % interval of Clopper and Pearson. For a mean of n numbers from 0 to 1 it is that of as large a
            share of n: of all such numbers with this mean, those that are 0 or 1 vary most.
        hits, count: of a mean, the sum of the numbers and how many there are.
        at_least, at_most: the bound; None where none is stated.
        nominal: whether the rate should lie near its bound, so that chance alone misses it: then the bound is missed
            only if the whole interval lies beyond it. Otherwise the estimate has to meet it.
    """

    name: str
    estimate: float
    low: float
    high: float
    hits: float
    count: int
    at_least: float | None = None
    at_most: float | None = None
    nominal: bool = False

    @classmethod
    def of_count(cls, name: str, flags: Iterable[bool], **bound: Any) -> Score:
        """Of things that are right or not."""
        found = list(flags)
        return cls.of_hits(name, sum(found), len(found), **bound)

    @classmethod
    def of_hits(cls, name: str, hits: float, count: int, **bound: Any) -> Score:
        """Of a count, or of the sum of `count` numbers from 0 to 1."""
        if not count:
            return cls(name, math.nan, math.nan, math.nan, 0, 0, **bound)
        tail = (1 - LEVEL) / 2
        low = float(beta.ppf(tail, hits, count - hits + 1)) if hits > 0 else 0.0
        high = float(beta.ppf(1 - tail, hits + 1, count - hits)) if hits < count else 1.0
        return cls(name, hits / count, low, high, hits, count, **bound)

    @property
    def missed(self) -> bool:
        """Whether a stated bound is not met."""
        best_low, best_high = (self.high, self.low) if self.nominal else (self.estimate, self.estimate)
        too_low = self.at_least is not None and best_low < self.at_least
        return too_low or (self.at_most is not None and best_high > self.at_most)

    def to_json(self) -> dict[str, Any]:
        """The fields, None for NaN, and `missed`."""
        record = {name: None if value != value else value for name, value in asdict(self).items()}
        return record | {"missed": self.missed}


def scores(outcomes: Sequence[Outcome]) -> list[Score]:
    """Of all plantings. What there is nothing to count of has no score."""
    result = _of_heads(outcomes)
    flips = [flip for outcome in outcomes for flip in outcome.flips]
    for position in POSITIONS:
        right = [low <= layer <= high for _, at, layer, low, high in flips if at == position]
        result.append(Score.of_count(f"layer: flip at the {position} in place", right, at_least=LAYER))
    kinds: dict[str, list[Outcome]] = {kind: [o for o in outcomes if o.kind == kind] for kind in KINDS}
    for kind, found in kinds.items():
        if kind != "rank":
            right = [outcome.case == outcome.case_planted for outcome in found]
            result.append(Score.of_count(f"verdict: {kind}", right, at_least=VERDICT))
    absent, ranks = kinds["absent"], kinds["rank"]
    bare = [outcome for kind in WITHOUT_BASE for outcome in kinds[kind]]
    named, used = ([any(o.named.values()) for o in absent], [o.case in USES for o in absent])
    named_in_base, used_in_base = ([bool(o.named["base"]) for o in bare], [o.case in USES_IN_BASE for o in bare])
    rank, module = ([o.rank == o.rank_planted for o in ranks], [o.module == o.module_planted for o in ranks])
    result += [
        Score.of_count("no mechanism: a head is named", named, at_most=FALSE_CLAIMS),
        Score.of_count("no mechanism: a use is claimed", used, at_most=FALSE_CLAIMS),
        Score.of_count("none in the base: a head is named in it", named_in_base, at_most=FALSE_CLAIMS),
        Score.of_count("none in the base: a use in it is claimed", used_in_base, at_most=FALSE_CLAIMS),
        Score.of_count("delta: rank", rank, at_least=RANK),
        Score.of_count("delta: module and layer", module, at_least=RANK),
    ]
    return [score for score in result if score.count]


def _of_heads(outcomes: Sequence[Outcome]) -> list[Score]:
    sides = [_named_and_planted(outcome) for outcome in outcomes]
    right = sum(len(named & planted) for named, planted in sides)
    named, planted = (sum(len(side[i]) for side in sides) for i in (0, 1))
    result = [
        Score.of_hits("heads: precision", right, named, at_least=PRECISION),
        Score.of_hits("heads: recall", right, planted, at_least=RECALL),
    ]
    ranked = [outcome for outcome in outcomes if outcome.ranking.get("effect")]
    for metric, bound in (("effect", AUROC), ("attention", None)):  # no claim rests on attention alone
        total = sum(float(np.mean(outcome.ranking[metric])) for outcome in ranked)
        result.append(Score.of_hits(f"heads: AUROC by {metric}", total, len(ranked), at_least=bound))
    decoys = [bool(outcome.named_decoys) for outcome in outcomes if outcome.kind == "decoy"]
    return [*result, Score.of_count("heads: decoy named", decoys, at_most=FALSE_CLAIMS)]


def simulations(count: int, seed: int = 0) -> list[Callable[[], Score]]:
    """Coverage of the bootstrap's intervals, and how often a reader is named in noise; the longest ones first.

    Bounds on coverage are stated from 32 groups on, for normal groups. With fewer groups, or skewed ones, percentile
    intervals are too narrow (arXiv 1411.5279): how much is reported, and no bound claims otherwise.

    Args:
        count: of simulations of each coverage; of the noise, which costs more, a tenth.
    """
    noise = [partial(_of_noise, groups, max(1, count // 10), seed) for groups in (32, 12)]
    return [*noise, *(partial(_of_coverage, groups, law, count, seed) for law in LAWS for groups in GROUPS)]


def _of_noise(groups: int, count: int, seed: int) -> Score:
    hits = falsely_named(groups, count, seed)
    return Score.of_hits(f"noise, {groups} groups: a head is named", hits, count, at_most=FALSE_CLAIMS, nominal=True)


def _of_coverage(groups: int, law: Law, count: int, seed: int) -> Score:
    low, high = COVERAGE if law == "normal" and groups >= 32 else (None, None)
    hits = covered(groups, law, count, seed)
    name = f"coverage: {groups} groups, {law}"
    return Score.of_hits(name, hits, count, at_least=low, at_most=high, nominal=True)


def table(found: Sequence[Score]) -> str:
    """One line per score: estimate, interval, count, bound."""
    lines = [f"  {'':<40}{'share':>7}  {'95 % interval':<17}{'of':>6}  bound"]
    for score in found:
        bounds = [] if score.at_least is None else [f">= {score.at_least:.2f}"]
        bounds += [] if score.at_most is None else [f"<= {score.at_most:.2f}"]
        verdict = f"{', '.join(bounds)}{'  MISSED' if score.missed else ''}" if bounds else "none stated"
        interval = f"[{score.low:.3f}, {score.high:.3f}]"
        lines.append(f"  {score.name:<40}{score.estimate:>7.3f}  {interval:<17}{score.count:>6}  {verdict}")
    return "\n".join(lines)


def _named_and_planted(outcome: Outcome) -> tuple[set[Any], set[Any]]:
    """(model, head) that were named, and that were planted."""
    named, planted = (
        {(model, head) for model, heads in side.items() for head in heads} for side in (outcome.named, outcome.planted)
    )
    return named, planted
