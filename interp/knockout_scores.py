"""What came of the episodes that were played with parts of the adapter off, in numbers: from the tidy frame alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from interp.flip import show
from interp.stats import MIN_GROUPS, ClusterBootstrap, Floats, Interval, derive_rng

EPISODE = "episode"
SCORES = ("score", "calibrated_score", "valid_share", "steps", "retained")

Played = tuple[str, str, str]  # model, switch, part
TRAINED: Played = ("trained", "none", "all")


@dataclass(frozen=True)
class Scores:
    """What came of the episodes that were played, by configuration in the order played.

    Attributes:
        found: configuration -> one of `SCORES` -> its mean.
        from_trained: configuration -> by how much the score differs from the trained model's, on the same graphs.
    """

    n_graphs: int
    found: Mapping[Played, Mapping[str, Interval]]
    from_trained: Mapping[Played, Interval]

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON: a record per configuration."""
        rows = [
            {"model": key[0], "switch": key[1], "part": key[2]}
            | {metric: interval.to_json() for metric, interval in found.items()}
            | {"score_minus_trained": self.from_trained[key].to_json()}
            for key, found in self.found.items()
        ]
        return {"graphs": self.n_graphs, "configurations": rows}


def read_scores(frame: pd.DataFrame, seed: int = 0) -> Scores | None:
    """The episodes of a frame, or None where it holds none."""
    rows = frame[frame["kind"] == EPISODE]
    if rows.empty:
        return None
    groups = rows.groupby("pair", sort=False)["group"].first()
    bootstrap = ClusterBootstrap.draw(groups.tolist(), derive_rng(seed, "knockout", EPISODE))
    draws: dict[tuple[str, ...], Floats] = {}
    for key, part in rows.groupby(["model", "switch", "part", "metric"], sort=False):
        draws[tuple(map(str, key))] = bootstrap.means(
            part.set_index("pair")["value"].reindex(groups.index).to_numpy(dtype=np.float64)
        )
    keys: list[Played] = list(dict.fromkeys((key[0], key[1], key[2]) for key in draws))
    trained = draws[(*TRAINED, "score")]
    return Scores(
        n_graphs=bootstrap.n_groups,
        found={key: {metric: bootstrap.interval(draws[(*key, metric)]) for metric in SCORES} for key in keys},
        from_trained={key: bootstrap.interval(draws[(*key, "score")] - trained) for key in keys},
    )


def score_statement(played: Scores | None) -> str:
    """One sentence: score and valid answers with everything on and off, and without what."""
    if played is None:
        return "No episodes were played: nothing is known of the score."

    def shown(key: Played) -> str:
        found = played.found[key]
        name = key[0] if key[1] == "none" else key[2]
        return f"{name} {show(found['score'], 3)} ({round(100 * found['valid_share'].estimate)} % valid)"

    few = f", too few for intervals (at least {MIN_GROUPS})" if played.n_graphs < MIN_GROUPS else ""
    return f"Score on {played.n_graphs} graphs{few}: {'; '.join(map(shown, played.found))}."
