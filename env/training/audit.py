"""What the environment of a run pays for, so that "does not" is never taken for "would not pay".

Recorded with every adapter, over graphs of the kind that it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from env.scheduler import Graph
from env.scheduler.audit.measures import decision_shares, documented_schedules
from env.scheduler.rules import DOCUMENTED
from env.scheduler.scheduler import SchedulerEnv

CONSTANTS = tuple(f"fuse, {tile}, nothing" for tile in (32, 64, 128, 256))


def audit(graphs: Sequence[Graph]) -> dict[str, Any]:
    """Means in percent of greedy's latency, with 95 % bootstrap intervals over graphs.

    Returns:
        `optimum`, `optimum_without_retention`, `retention` (their difference), `heuristic`, `best_constant` (the one
        with the best mean), each {estimate, low, high}; and by label the percentage of retain decisions.
    """
    gains: list[dict[str, float]] = []
    shares: list[dict[str, float]] = []
    for graph in graphs:
        env = SchedulerEnv(graph)
        schedules = documented_schedules(graph)
        gain = {}
        for name, actions in schedules.items():
            env.reset()
            for action in actions:
                DOCUMENTED.place(env.episode, action, env.greedy_latency)
            DOCUMENTED.end(env.episode, env.greedy_latency)
            gain[name] = 100 * (1 - env.episode.latency / env.greedy_latency)
        gains.append(gain)
        if found := decision_shares(graph, schedules):
            shares.append(found)
    columns = {name: np.array([gain[name] for gain in gains]) for name in gains[0]}
    best = max(CONSTANTS, key=lambda name: columns[name].mean())
    without = columns["optimum without retention"]
    return {
        "graphs": len(graphs),
        "unit": "percent of greedy's latency",
        "optimum": _interval(columns["optimum"]),
        "optimum_without_retention": _interval(without),
        "retention": _interval(columns["optimum"] - without),
        "heuristic": _interval(columns["heuristic"]),
        "best_constant": {"answer": best, **_interval(columns[best])},
        "decisions_percent": {label: round(float(np.mean([s[label] for s in shares])), 2) for label in shares[0]},
    }


def _interval(values: np.ndarray) -> dict[str, float]:
    mean = float(values.mean())
    if np.ptp(values) == 0:
        low = high = mean
    else:
        found = bootstrap((values,), np.mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0))
        low, high = map(float, found.confidence_interval)
    return {"estimate": round(mean, 3), "low": round(low, 3), "high": round(high, 3)}
