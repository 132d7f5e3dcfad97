"""Intervals over graphs, and the layer at which a curve flips. Pure numpy: nothing here knows a model.

Pairs made from one graph are not independent, so the graph is what is drawn again (cluster bootstrap; Davison and
Hinkley 1997, chapter 3.8). Resampling G graphs with replacement is the same as weighting them with multinomial counts,
so the mean of every resample is one matrix product and all statistics of a run share the same resamples: a difference
between two of them is paired by construction.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Direction = Literal["rising", "falling"]

LEVEL = 0.95
RESAMPLES = 2000
# Of G values with a symmetric law around 0, all have one sign with probability 2^(1-G), and then every resample has
# that sign too. With fewer than six graphs that happens by chance more often than 5 % of the time.
MIN_GROUPS = 6


def derive_rng(seed: int, *names: str) -> np.random.Generator:
    """A generator that depends on the seed and on what it is for, and on nothing else.

    A new analysis, with a name of its own, changes no draw of another one.
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest))


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval.

    Attributes:
        estimate: the statistic of the sample; NaN where it is undefined.
        low, high: the percentile interval over the resamples in which the statistic is defined; NaN with fewer than
            `MIN_GROUPS` groups, or if it is defined in none.
        undefined: the share of resamples in which it is not.
    """

    estimate: float
    low: float
    high: float
    undefined: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0. False where there is no interval."""
        return self.low > 0 or self.high < 0

    def to_json(self) -> dict[str, float | None]:
        """The four numbers, None for NaN."""
        numbers = {"estimate": self.estimate, "low": self.low, "high": self.high, "undefined": self.undefined}
        return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


@dataclass(frozen=True)
class ClusterBootstrap:
    """Resamples of whole groups, drawn once and used for every statistic.

    Attributes:
        codes: (n,) the number of each observation's group.
        weights: (1 + resamples, groups) how often each group is drawn; row 0 is the sample itself, all ones.
    """

    codes: NDArray[np.intp]
    weights: Floats

    @classmethod
    def draw(cls, groups: Sequence[Hashable], rng: np.random.Generator, resamples: int = RESAMPLES) -> ClusterBootstrap:
        """Resample the groups of n observations, one group name each.

        Raises:
            ValueError: if there is no observation.
        """
        if len(groups) == 0:
            raise ValueError("groups: expected at least one observation, found none")
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        size = len(numbers)
        drawn = rng.multinomial(size, np.full(size, 1 / size), size=resamples)
        weights = np.concatenate([np.ones((1, size)), drawn])
        return cls(np.array([numbers[group] for group in groups], dtype=np.intp), weights)

    @property
    def n_groups(self) -> int:
        """How many clusters are resampled."""
        return self.weights.shape[1]

    def means(self, values: ArrayLike) -> Floats:
        """Mean over observations of values (n, ...), NaN left out, in the sample and every resample.

        Returns:
            (1 + resamples, ...): row 0 is the sample's mean. NaN where a resample holds no defined value.

        Raises:
            ValueError: if there are not n values.
        """
        table = np.asarray(values, dtype=np.float64)
        if table.shape[:1] != self.codes.shape:
            raise ValueError(f"values: expected {len(self.codes)} rows, one per observation, found shape {table.shape}")
        defined = ~np.isnan(table)
        sums = self._per_resample(np.where(defined, table, 0.0))
        counts = self._per_resample(defined.astype(np.float64))
        return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

    def _per_resample(self, table: Floats) -> Floats:
        """Sums over groups (G, ...), then over each resample's groups (1 + resamples, ...)."""
        per_group = np.zeros((self.n_groups, *table.shape[1:]))
        np.add.at(per_group, self.codes, table)
        return np.tensordot(self.weights, per_group, axes=1)

    def interval(self, draws: ArrayLike, level: float = LEVEL) -> Interval:
        """The estimate and percentile interval of a statistic (1 + resamples,), computed from `means`."""
        values = np.asarray(draws, dtype=np.float64)
        if values.shape != self.weights.shape[:1]:
            raise ValueError(f"draws: expected shape {self.weights.shape[:1]}, found {values.shape}")
        resampled = values[1:]
        defined = resampled[~np.isnan(resampled)]
        low = high = math.nan
        if self.n_groups >= MIN_GROUPS and len(defined):
            low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
        return Interval(float(values[0]), float(low), float(high), float(1 - len(defined) / len(resampled)))

    def band(self, draws: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats]:
        """Pointwise band (k,), (k,) of a curve (1 + resamples, k); NaN with fewer than `MIN_GROUPS` groups."""
        values = np.asarray(draws, dtype=np.float64)
        if self.n_groups < MIN_GROUPS:
            return np.full(values.shape[1:], np.nan), np.full(values.shape[1:], np.nan)
        low, high = np.quantile(values[1:], [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high


def recovery(patched: ArrayLike, recipient: ArrayLike, donor: ArrayLike, eps: float) -> Floats:
    """(m_patched - m_recipient) / (m_donor - m_recipient): 0 is the recipient, 1 the donor.

    Undefined, and NaN, where donor and recipient differ by less than `eps`: a ratio to almost nothing is noise.
    The arguments broadcast.
    """
    patched, recipient, donor = (np.asarray(x, dtype=np.float64) for x in (patched, recipient, donor))
    numerator, gap = np.broadcast_arrays(patched - recipient, donor - recipient)
    return np.divide(numerator, gap, out=np.full(gap.shape, np.nan), where=np.abs(gap) >= eps)


def flip_layer(curves: ArrayLike, direction: Direction, threshold: float = 0.5) -> Floats:
    """Where each curve (..., n_layers) crosses the threshold for good, interpolated between two layers.

    A rising curve flips where it comes to stay at or above the threshold, a falling one where it comes to stay at or
    below it.
    With several crossings that is the last one: a later layer at which the patch still works (or does not yet) shows
    that an earlier crossing was not the end of the matter.

    Returns:
        (...): the layer, from 0 to n_layers - 1; NaN where there is no flip, because the curve begins on the far side
        and stays there, ends on the near side, or is NaN anywhere.
    """
    values = np.asarray(curves, dtype=np.float64)
    beyond = values - threshold if direction == "rising" else threshold - values
    near = ~(beyond >= 0)
    last = values.shape[-1] - 1
    before = last - np.argmax(near[..., ::-1], axis=-1)
    flips = near.any(axis=-1) & (before < last) & ~np.isnan(values).any(axis=-1)
    left = np.take_along_axis(beyond, before[..., None], axis=-1)[..., 0]
    right = np.take_along_axis(beyond, np.minimum(before + 1, last)[..., None], axis=-1)[..., 0]
    gap = np.where(flips, right - left, 1.0)
    return np.where(flips, before - left / gap, np.nan)


def count_crossings(curve: ArrayLike, threshold: float = 0.5) -> int:
    """How often a curve (n_layers,) changes sides of the threshold; more than 1 makes a flip layer less telling."""
    sides = np.asarray(curve, dtype=np.float64) >= threshold
    return int(np.count_nonzero(sides[1:] != sides[:-1]))
