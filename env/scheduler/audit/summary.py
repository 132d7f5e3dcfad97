"""The audit's numbers: means with intervals, and the README's claims beside what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd

from env.scheduler.hardware import DIFFICULTIES, preset
from env.scheduler.planner import Label
from env.scheduler.real import REAL_GRAPHS, load_real
from env.scheduler.tasks import TASKS, load_task

RESAMPLES = 2000
PUBLISHED = DIFFICULTIES
BANDWIDTH_BOUND = tuple(f"{name}_bandwidth_bound" for name in DIFFICULTIES)


@dataclass(frozen=True)
class Interval:
    """A mean over graphs with its 95 % percentile-bootstrap interval, and the 5th and 95th percentile of the values."""

    mean: float
    low: float
    high: float
    percentile_5: float
    percentile_95: float
    graphs: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclass(frozen=True)
class Claim:
    """A property that the README claims to have verified, and how it is measured here (see `measures`)."""

    name: str
    claimed: str
    metric: str
    of: str = ""
    topologies: tuple[str, ...] = ()
    digits: int = 1


CLAIMS = (
    Claim("retention gap on skip graphs, %", "12 to 18", "retention_gap", topologies=("long_skip", "adversarial")),
    Claim("tile sensitivity of a kernel, %", "218", "kernel_tile_sensitivity"),
    Claim("tile sensitivity of a schedule, %", "218", "tile_sensitivity"),
    Claim("optimum over greedy, %", "5 to 17", "improvement", "optimum"),
    Claim("reward spread", "0.07 to 0.33", "reward_spread", digits=3),
)

COLUMNS = (
    ("optimum", "improvement", "optimum"),
    ("fusion", "worth", "fusion"),
    ("tiles", "worth", "tiles"),
    ("retention", "worth", "retention"),
    ("fuse,128", "improvement", "fuse, 128, nothing"),
    ("fuse,256", "improvement", "fuse, 256, nothing"),
    ("heuristic", "improvement", "heuristic"),
)
LABELS: tuple[str, ...] = get_args(Label)


def interval(frame: pd.DataFrame, seed: int) -> Interval | None:
    """Mean of the values of a part of the results; graphs are resampled whole. None if there are no values."""
    if frame.empty:
        return None
    values = frame["value"].to_numpy()
    by_graph = frame.groupby("graph")["value"].mean().to_numpy()
    draws = np.random.default_rng([seed, len(by_graph)]).integers(len(by_graph), size=(RESAMPLES, len(by_graph)))
    low, high = np.percentile(by_graph[draws].mean(axis=1), [2.5, 97.5])
    p5, p95 = np.percentile(values, [5, 95])
    return Interval(float(by_graph.mean()), float(low), float(high), float(p5), float(p95), len(by_graph))


def presets_table(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    """One row for each preset, rule set, metric and what it is of: the interval over the random graphs."""
    random = frame[frame["kind"] == "random"]
    rows = []
    for keys, part in random.groupby(["preset", "rules", "metric", "of"], sort=False):
        found = interval(part, seed)
        assert found is not None  # groups of a frame are not empty
        rows.append(dict(zip(("preset", "rules", "metric", "of"), keys, strict=True)) | asdict(found))
    return pd.DataFrame(rows)


def claims_table(frame: pd.DataFrame, seed: int) -> list[dict[str, Any]]:
    """Each claim with what is measured on the random graphs, by group of presets and rule set."""
    rows = []
    for claim in CLAIMS:
        part = frame[(frame["kind"] == "random") & (frame["metric"] == claim.metric) & (frame["of"] == claim.of)]
        if claim.topologies:
            part = part[part["topology"].isin(claim.topologies)]
        for machines, names in (("published", PUBLISHED), ("bandwidth-bound", BANDWIDTH_BOUND)):
            for rules in ("documented", "upstream"):
                found = interval(part[part["preset"].isin(names) & (part["rules"] == rules)], seed)
                if found:
                    row = {"claim": claim.name, "claimed": claim.claimed, "machines": machines, "rules": rules}
                    rows.append(row | asdict(found) | {"digits": claim.digits})
    return rows


def summary(frame: pd.DataFrame, seed: int) -> dict[str, Any]:
    """Everything that the tables show, for JSON."""
    graphs: dict[str, Any] = {}
    for keys, part in frame[frame["kind"] != "random"].groupby(["graph", "preset", "rules"], sort=False):
        name, machine, rules = keys
        values = {_key(metric, of): value for metric, of, value in part[["metric", "of", "value"]].to_numpy()}
        graphs.setdefault(str(name), {}).setdefault(machine, {})[rules] = values
    presets: dict[str, Any] = {}
    for row in presets_table(frame, seed).to_dict("records"):
        machine, rules, metric, of = (row.pop(name) for name in ("preset", "rules", "metric", "of"))
        presets.setdefault(machine, {}).setdefault(rules, {})[_key(metric, of)] = row
    return {"random_graphs": presets, "graphs": graphs, "claims": claims_table(frame, seed)}


def text(frame: pd.DataFrame, seed: int) -> str:
    """The tables for a terminal."""
    parts = []
    for rules, what in (
        ("documented", "Documented rules. Random graphs, % of greedy's latency, mean [95 % interval over graphs]"),
        ("upstream", "Published rules, the same actions replayed (planned and played under the documented rules)"),
    ):
        if (frame["rules"] == rules).any():
            parts.append(f"{what}\n{_machines_text(frame[frame['rules'] == rules], seed)}")
    if graphs := _graphs_text(frame):
        what = "Documented rules. Fixed and real graphs, on their own machine and with less bandwidth, % of greedy"
        parts.append(f"{what}\n{graphs}")
    if claims := claims_table(frame, seed):
        parts.append(f"Properties that the README calls verified\n{_claims_text(claims)}")
    return "\n\n".join(parts) + "\n"


def _machines_text(frame: pd.DataFrame, seed: int) -> str:
    with_interval = {"optimum", "retention"}
    lines = []
    for machine in frame["preset"].unique():
        part = frame[(frame["preset"] == machine) & (frame["kind"] == "random")]
        line = [machine]
        for name, metric, of in COLUMNS:
            found = interval(part[(part["metric"] == metric) & (part["of"] == of)], seed)
            line.append("-" if found is None else str(found) if name in with_interval else f"{found.mean:.1f}")
        lines.append([*line, _shares(part)])
    return _grid([["preset", *(name for name, *_ in COLUMNS), "pays/costs/neither"], *lines])


def _graphs_text(frame: pd.DataFrame) -> str:
    lines = []
    for name in (*TASKS, *REAL_GRAPHS):
        graph = load_task(name) if name in TASKS else load_real(name)
        own = next(machine for machine in PUBLISHED if preset(machine, graph).hardware == graph.hardware)
        for machine in (own, f"{own}_bandwidth_bound"):
            part = frame[(frame["graph"] == name) & (frame["preset"] == machine) & (frame["rules"] == "documented")]
            if not part.empty:
                values = part.set_index(["metric", "of"])["value"]
                numbers = [f"{values.loc[(metric, of)]:.1f}" for _, metric, of in COLUMNS]
                lines.append([name, machine, *numbers, _shares(part)])
    return _grid([["graph", "preset", *(name for name, *_ in COLUMNS), "pays/costs/neither"], *lines]) if lines else ""


def _claims_text(claims: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in claims:
        numbers = [f"{row[key]:.{row['digits']}f}" for key in ("mean", "low", "high", "percentile_5", "percentile_95")]
        mean, low, high, p5, p95 = numbers
        lines.append(
            [row["claim"], row["claimed"], row["machines"], row["rules"], f"{mean} [{low}, {high}]", f"{p5} to {p95}"]
        )
    head = ["property", "claimed", "machines", "rules", "mean [95 %]", "5th to 95th percentile"]
    return _grid([head, *lines])


def _shares(part: pd.DataFrame) -> str:
    shares = part[part["metric"] == "decisions"].groupby("of")["value"].mean()
    return "/".join(f"{shares[label]:.0f}" for label in LABELS) if len(shares) else "-"


def _grid(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _key(metric: str, of: str) -> str:
    return f"{metric}: {of}" if of else metric
