"""The evaluation of agents that order passes, in numbers, as a table and as a figure; from the saved frame alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from interp.figures import BLUE, COLUMN, GREY, ORANGE, style
from interp.stats import ClusterBootstrap, Interval, derive_rng

KINDS = {"reference": GREY, "base": ORANGE, "adapter": BLUE}
DECISIONS = ("answer", "search", "other")
# Compiler-R1 (2506.15701), on LLVM 10: OverOz of its best model, and of its smallest; success rates of the protocol.
PUBLISHED = {"GRPO-7B": {"over_oz": 0.0846, "valid": 0.9671}, "GRPO-1.5B": {"over_oz": 0.0387, "valid": 0.8336}}
COMPARABLE = "The published numbers are for LLVM 10 and other programs: its -Oz leaves more to be gained."


def summarise(frame: pd.DataFrame, seed: int = 0) -> dict[str, Any]:
    """Means with 95 % bootstrap intervals over programs, ready for JSON.

    Args:
        frame: one row a policy and program: policy, kind, program, over_oz, over_orig, seconds; of agents also
            answered, valid_path, first_gain, decision.

    Returns:
        By policy: `over_oz`, `over_orig` (shares; without a measurable answer those of -Oz), `beats_oz` (share of
        programs), `seconds` a program; of agents `valid` and `answered` (shares of programs), and `decisions`: after
        a first sequence that beats -Oz, and after one that does not, the share that answers, searches, or does
        neither.
    """
    programs = frame.drop_duplicates("program")["program"].tolist()
    bootstrap = ClusterBootstrap.draw(programs, derive_rng(seed, "evaluate passes"))

    def mean(values: pd.Series[Any]) -> dict[str, float | None]:
        return _show(bootstrap.interval(bootstrap.means(values.loc[programs].to_numpy(dtype=float))))

    policies: dict[str, Any] = {}
    for policy, rows in frame.groupby("policy", sort=False):
        of = rows.set_index("program")
        found: dict[str, Any] = {name: mean(of[name]) for name in ("over_oz", "over_orig", "seconds")}
        found["beats_oz"] = mean(of["over_oz"] > 0)
        if rows["kind"].iloc[0] != "reference":
            found |= {"valid": mean(of["valid_path"]), "answered": mean(of["answered"])}
            found["decisions"] = {
                "beats -Oz": _decisions(rows[rows["first_gain"] > 0], seed),
                "does not": _decisions(rows[rows["first_gain"] <= 0], seed),
                "nothing measured": int(rows["first_gain"].isna().sum()),
            }
        policies[str(policy)] = {"kind": rows["kind"].iloc[0], **found}
    return {"programs": len(programs), "policies": policies, "published": PUBLISHED, "comparable": COMPARABLE}


def _decisions(rows: pd.DataFrame, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {"programs": len(rows)}
    if rows.empty:
        return found | dict.fromkeys(DECISIONS)
    bootstrap = ClusterBootstrap.draw(rows["program"].tolist(), derive_rng(seed, "evaluate passes", "decisions"))
    shares = {name: bootstrap.means((rows["decision"] == name).to_numpy(dtype=float)) for name in DECISIONS}
    return found | {name: _show(bootstrap.interval(draws)) for name, draws in shares.items()}


def _show(interval: Interval) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 5) for name, value in interval.to_json().items()}


def table(summary: Mapping[str, Any]) -> str:
    """The result as text."""
    rows = [
        ["policy", "OverOz %", "beats -Oz %", "OverOrig %", "s/program", "valid %", "right if better %", "if not %"]
    ]
    for name, found in sorted(summary["policies"].items(), key=lambda item: -item[1]["over_oz"]["estimate"]):
        decided = found.get("decisions")
        rows.append(
            [
                name,
                text(found["over_oz"], 100, 2),
                text(found["beats_oz"], 100, 0),
                text(found["over_orig"], 100, 1),
                text(found["seconds"], 1, 1),
                text(found.get("valid"), 100, 0),
                text(decided and decided["beats -Oz"]["answer"], 100, 0),
                text(decided and decided["does not"]["search"], 100, 0),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    note = f"{summary['programs']} programs of the split {summary['split']}; [95 % bootstrap over programs]"
    return "\n".join([note, *lines, summary["comparable"]])


def text(interval: Mapping[str, float | None] | None, unit: float, digits: int) -> str:
    """`12.3 [10.1, 14.5]`, in parts of 1 / unit; `-` for none."""
    if interval is None or interval["estimate"] is None:
        return "-"
    estimate = f"{unit * interval['estimate']:.{digits}f}"
    if interval["low"] is None or interval["high"] is None:
        return estimate
    return f"{estimate} [{unit * interval['low']:.{digits}f}, {unit * interval['high']:.{digits}f}]"


def plot(summary: Mapping[str, Any]) -> Figure:
    """OverOz with intervals, and the seconds that it takes."""
    ordered = sorted(summary["policies"].items(), key=lambda item: item[1]["over_oz"]["estimate"])
    with style():
        figure = Figure(figsize=(1.6 * COLUMN, 0.7 + 0.2 * len(ordered)))
        gains, times = figure.subplots(1, 2, sharey=True)
        for height, (_, found) in enumerate(ordered):
            colour, gain = KINDS[found["kind"]], found["over_oz"]
            ends = [100 * (gain[end] if gain[end] is not None else gain["estimate"]) for end in ("low", "high")]
            gains.plot(ends, [height] * 2, color=colour, linewidth=1.2)
            gains.plot(100 * gain["estimate"], height, "o", color=colour, markersize=3.5)
            if found["seconds"]["estimate"]:
                times.plot(found["seconds"]["estimate"], height, "o", color=colour, markersize=3.5)
        gains.axvline(0, color=GREY, linewidth=0.5, zorder=0)
        gains.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        gains.set_xlabel("OverOz, %")
        times.set_xscale("log")
        times.set_xlabel("seconds a program")
    return figure
