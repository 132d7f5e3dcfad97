"""What the statistics claim where the truth is simulated: coverage of intervals, readers named in noise. No model."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from interp import retention_heads_summary
from interp.flip import MODELS
from interp.stats import ClusterBootstrap, derive_rng

Law = Literal["normal", "skewed"]
LAWS: tuple[Law, ...] = ("normal", "skewed")
LAYERS, HEADS = 4, 4
# What every head's measurements are in a frame of noise: it attends and writes, but blocking it has no mean effect.
LOOKS = {"attention": 0.5, "written": 0.5}


def covered(groups: int, law: Law, simulations: int, seed: int = 0) -> int:
    """In how many simulations the 95 % interval of a mean holds the true mean, 0.

    A group has 1 to 4 observations, each the group's own draw plus its own normal one, both of variance 1. The groups'
    draws are normal, or exponential less their mean (`skewed`).
    """
    rng = derive_rng(seed, "coverage", law, str(groups))
    return sum(_covers(groups, law, rng) for _ in range(simulations))


def falsely_named(groups: int, simulations: int, seed: int = 0) -> int:
    """In how many simulations a head is named as the trained model's reader though no head's blocking matters.

    The hardest noise that there is for the rule: all heads attend to the entry and write, none does elsewhere, and what
    blocking costs is normal around 0, one logit wide, so that its three criteria are one.
    """
    rng = derive_rng(seed, "noise", str(groups))
    return sum(_names(groups, rng, number) for number in range(simulations))


def _covers(groups: int, law: Law, rng: np.random.Generator) -> bool:
    sizes = rng.integers(1, 5, groups)
    names = np.repeat(np.arange(groups), sizes)
    shifts = rng.normal(size=groups) if law == "normal" else rng.exponential(size=groups) - 1
    bootstrap = ClusterBootstrap.draw(names.tolist(), rng)
    interval = bootstrap.interval(bootstrap.means(shifts[names] + rng.normal(size=len(names))))
    return interval.low <= 0 <= interval.high


def _names(groups: int, rng: np.random.Generator, number: int) -> bool:
    summary = retention_heads_summary.summarise(_noise(groups, rng), number)
    return bool(summary["models"]["trained"]["readers"])


def _noise(groups: int, rng: np.random.Generator) -> pd.DataFrame:
    """A frame as `interp.retention_heads.measure` makes it of pairs, one per group."""
    names = ["id", "model", "layer", "head"]
    axes = [range(groups), MODELS, range(LAYERS), range(HEADS)]
    cells = pd.MultiIndex.from_product(axes, names=names).to_frame(index=False)
    values = {metric: np.full(len(cells), value) for metric, value in LOOKS.items()}
    values["effect"] = rng.normal(size=len(cells))
    for metric in (*LOOKS, "effect"):
        values |= {f"{metric}_{control}": np.zeros(len(cells)) for control in ("other", "random")}
    frame = pd.concat([cells.assign(metric=metric, value=value) for metric, value in values.items()], ignore_index=True)
    return frame.assign(group="graph-" + frame["id"].astype(str), kind="value", key="k", answer="")
