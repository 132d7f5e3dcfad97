"""The evaluation in numbers, as a table and as a figure; from the saved frames alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from env.scheduler import TASKS
from interp.figures import BLUE, COLUMN, GREEN, GREY, ORANGE, style
from interp.stats import ClusterBootstrap, Interval, derive_rng

LABELS = ("pays", "costs", "does not matter")
KINDS = {"fixed": GREY, "base": ORANGE, "adapter": BLUE}
# Published scores (calibrated, in the published environment): tasks in order, then generalization.
PUBLISHED = {
    "published Qwen2.5-3B": (0.084, -0.046, 0.023, 0.309, -0.070, -0.054),
    "published Llama-3.1-8B": (0.084, 0.015, 0.034, 0.573, 0.131, 0.252),
}
COMPARABLE = (
    "The published columns are calibrated scores under the published rules, on other random graphs of up to 50 nodes; "
    "only their order of magnitude can be compared with the calibrated scores here, which are under the documented "
    "rules."
)


def summarise(scores: pd.DataFrame, decisions: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over graphs, ready for JSON.

    Args:
        scores: one row a policy and graph: policy, kind, source, group, score (share of greedy's latency saved),
            calibrated_score, valid, invalid.
        decisions: one row a retain decision that counted: policy, source, group, label, retained.

    Returns:
        By policy: `score`, `calibrated_score` and `of_planner` (the share of the planner's improvement, a ratio of
        means) on unseen graphs, `minus_best_constant` (paired; the best constant is chosen on the same graphs, which
        favours it), `valid` (share of answers) on all graphs, `tasks` (calibrated), `retained` by label: the share of
        decisions in which the tensor was kept.
    """
    unseen = scores[scores["source"].str.startswith("random")]
    groups = unseen[unseen["policy"] == "planner"]["group"].tolist()
    bootstrap = ClusterBootstrap.draw(groups, derive_rng(seed, "evaluate"))
    by_policy = {
        policy: bootstrap.means(of.set_index("group").loc[groups, ["score", "calibrated_score"]].to_numpy())
        for policy, of in unseen.groupby("policy", sort=False)
    }
    constants = [policy for policy in by_policy if str(policy).endswith("nothing")]
    best = max(constants, key=lambda policy: by_policy[policy][0, 0])
    policies = {}
    for policy, draws in by_policy.items():
        mine = scores[scores["policy"] == policy]
        tasks = mine[mine["source"].isin(TASKS)].set_index("source")["calibrated_score"]
        answers = mine["valid"].sum() + mine["invalid"].sum()
        policies[str(policy)] = {
            "kind": mine["kind"].iloc[0],
            "score": _show(bootstrap.interval(draws[:, 0])),
            "calibrated_score": _show(bootstrap.interval(draws[:, 1])),
            "of_planner": _show(bootstrap.interval(draws[:, 0] / by_policy["planner"][:, 0])),
            "minus_best_constant": _show(bootstrap.interval(draws[:, 0] - by_policy[best][:, 0])),
            "valid": {"share": round(float(mine["valid"].sum() / answers), 5), "answers": int(answers)},
            "tasks": {task: round(float(tasks[task]), 4) for task in TASKS},
            "retained": _retained(decisions[decisions["policy"] == policy], seed),
        }
    return {"best_constant": str(best), "unseen_graphs": len(groups), "policies": policies, "comparable": COMPARABLE,
            "published": {name: dict(zip([*TASKS, "generalization"], row, strict=True))
                          for name, row in PUBLISHED.items()}}  # fmt: skip


def _retained(decisions: pd.DataFrame, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    unseen = decisions[decisions["source"].str.startswith("random")]
    for label in LABELS:
        mine = unseen[unseen["label"] == label]
        if mine.empty:
            found[label] = {"decisions": 0, "graphs": 0, "share": None}
            continue
        bootstrap = ClusterBootstrap.draw(mine["group"].tolist(), derive_rng(seed, "evaluate", label))
        share = bootstrap.interval(bootstrap.means(mine["retained"].to_numpy(dtype=float)))
        found[label] = {"decisions": len(mine), "graphs": bootstrap.n_groups, "share": _show(share)}
    return found


def _show(interval: Interval) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 5) for name, value in interval.to_json().items()}


def table(summary: Mapping[str, Any]) -> str:
    """The result as text."""
    head = ["policy", "score %", "of planner's %", "calibrated", "valid %", *(task[:5] for task in TASKS),
            "keeps: pays %", "costs %", "no matter %"]  # fmt: skip
    rows = [head]
    ordered = sorted(summary["policies"].items(), key=lambda item: -item[1]["score"]["estimate"])
    for name, found in ordered:
        rows.append(
            [
                name,
                _text(found["score"], 100, 1),
                _text(found["of_planner"], 100, 0),
                _text(found["calibrated_score"], 1, 3),
                f"{100 * found['valid']['share']:.1f}",
                *(f"{found['tasks'][task]:.3f}" for task in TASKS),
                *(_text(found["retained"][label]["share"], 100, 0) for label in LABELS),
            ]
        )
    for name, published in summary["published"].items():
        rows.append([name, "", "", f"{published['generalization']:.3f}", "",
                     *(f"{published[task]:.3f}" for task in TASKS), "", "", ""])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]  # fmt: skip
    note = f"{summary['unseen_graphs']} unseen graphs, {summary['hardware']} hardware; [95 % bootstrap over graphs]"
    return "\n".join([note, *lines, summary["comparable"]])


def _text(interval: Mapping[str, float | None] | None, unit: float, digits: int) -> str:
    if interval is None or interval["estimate"] is None:
        return "-"
    estimate = f"{unit * interval['estimate']:.{digits}f}"
    if interval["low"] is None or interval["high"] is None:
        return estimate
    return f"{estimate} [{unit * interval['low']:.{digits}f}, {unit * interval['high']:.{digits}f}]"


def plot(summary: Mapping[str, Any]) -> Figure:
    """Scores on unseen graphs with intervals, and what is kept by decision kind."""
    shown = {
        name: found
        for name, found in summary["policies"].items()
        if found["kind"] != "fixed" or name in ("planner", "heuristic", summary["best_constant"])
    }
    ordered = sorted(shown.items(), key=lambda item: item[1]["score"]["estimate"])
    with style():
        figure = Figure(figsize=(COLUMN, 0.9 + 0.2 * len(ordered)))
        scores, kept = figure.subplots(1, 2, sharey=True, width_ratios=[1.2, 1])
        for height, (_, found) in enumerate(ordered):
            score, colour = found["score"], KINDS[found["kind"]]
            low, high = (100 * (score[end] if score[end] is not None else score["estimate"]) for end in ("low", "high"))
            scores.plot([low, high], [height] * 2, color=colour, linewidth=1.2)
            scores.plot(100 * score["estimate"], height, "o", color=colour, markersize=3.5)
            for label, marker, kept_colour in zip(LABELS, "^v.", (GREEN, ORANGE, GREY), strict=True):
                share = found["retained"][label]["share"]
                if share is not None:
                    kept.plot(100 * share["estimate"], height, marker, color=kept_colour, markersize=4,
                              label=label if height == 0 else None)  # fmt: skip
        scores.axvline(0, color=GREY, linewidth=0.5, zorder=0)
        scores.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        scores.set_xlabel("latency saved, % of greedy's")
        kept.set_xlim(-4, 104)
        kept.set_xlabel("tensors kept, %")
        handles, labels = _legend(kept)
        figure.legend(handles, labels, loc="outside upper right", ncols=3, title="keeping", handletextpad=0.1)
    return figure


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """One entry a label, whichever policies have such decisions."""
    found: dict[str, Any] = {}
    for line in axes.get_lines():
        marker = line.get_marker()
        name = {"^": "pays", "v": "costs", ".": "does not matter"}.get(marker)
        if name is not None:
            found.setdefault(name, line)
    ordered = [name for name in LABELS if name in found]
    return [found[name] for name in ordered], ordered
