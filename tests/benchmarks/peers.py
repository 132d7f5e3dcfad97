"""The patching engine against TransformerLens, nnsight and plain forwards: time and agreement, in one process.

    python -m tests.benchmarks.peers [--pairs N] [--rounds N] [--threads N] [--peers NAME ...] [--out DIR]

Every round takes every pair through every side in turn (`tests.benchmarks.peer_sides`), so that a slow minute of the
machine falls on all of them. Compared are, on the trained model in float32:

caches           both prompts' activations
decision, value  the residual stream of every layer at that position, in one direction
heads            every head of the middle layer at the decision
gradient         the first-order effect of every layer's stream at the decision
job              caches, and decision and value in both directions: the default work on a pair and model

Times are medians over rounds and pairs. A ratio is the median, over them, of a side's time divided by the engine's in
the same round. Agreement is the largest difference of a logit difference from the engine's, over all cells. The
status is 1 if a side differs by more than the tolerance; goals that are missed are only reported.

`--out` receives results.parquet (a row per cell and round, written after each), summary.json, and peers.pdf, .png.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")  # TransformerLens shows a bar for every sweep

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from counterfactuals import generate_pairs, read_pairs
from interp import figures
from interp.subject import Subject
from interp.tokens import EncodedPair, encode_pairs
from tests.benchmarks.machine import machine, positive, timed, write_json
from tests.benchmarks.peer_sides import DIRECTIONS, SIDES, Side

CELLS = ("caches", "decision", "value", "heads", "gradient", "job")
NOTHING_FOUND = ("caches", "job")  # times only
ENGINE, REFERENCE = "engine", "TransformerLens"
GOALS = {"job": 30.0, "decision": 100.0, "value": 15.0, "heads": 10.0}  # times faster than TransformerLens
TOLERANCE = 1e-4  # logits
PACKAGES = {"TransformerLens": "transformer-lens", "nnsight": "nnsight"}
COLOURS = {"engine": figures.BLUE, "engine, prompt": "#56B4E9", "TransformerLens": figures.ORANGE,
           "nnsight": figures.GREEN, "forwards": figures.GREY}  # fmt: skip
Found = dict[tuple[str, str], Tensor]  # (cell, direction) -> what was found


def measure(side: Side, pair: EncodedPair) -> tuple[dict[tuple[str, str], float], Found]:
    """Seconds and findings by cell and direction of one side's work on one pair."""
    seconds: dict[tuple[str, str], float] = {}
    found: Found = {}
    seconds["caches", "both"], runs = timed(lambda: side.caches(pair))
    places = {"decision": pair.decision, "value": pair.first_difference}
    for (cell, position), direction in itertools.product(places.items(), DIRECTIONS):

        def sweep(direction: str = direction, position: int = position) -> Tensor:
            return side.residual(pair, runs, direction, position)

        seconds[cell, direction], found[cell, direction] = timed(sweep)
    seconds["job", "both"] = sum(seconds.values())
    seconds["heads", "denoise"], found["heads", "denoise"] = timed(lambda: side.heads(pair, runs))
    seconds["gradient", "denoise"], found["gradient", "denoise"] = timed(lambda: side.gradient(pair, runs))
    return seconds, found


def rows(
    number: int, pair: EncodedPair, name: str, seconds: Mapping[tuple[str, str], float], found: Found, expected: Found
) -> list[dict[str, Any]]:
    """A row per cell and direction; `difference` from what the engine found, None for cells that find nothing."""
    differences = {key: float((found[key] - expected[key]).abs().max()) for key in found}
    return [
        {"round": number, "pair": pair.id, "side": name, "cell": cell, "direction": direction, "seconds": value,
         "difference": differences.get((cell, direction))}
        for (cell, direction), value in seconds.items()
    ]  # fmt: skip


def rounds(sides: Mapping[str, Side], pairs: Sequence[EncodedPair], count: int) -> Iterator[pd.DataFrame]:
    """All rows so far, after each round. The engine is the first of the sides."""
    table: list[dict[str, Any]] = []
    for number, pair in itertools.product(range(count), pairs):
        expected: Found = {}
        for name, side in sides.items():
            seconds, found = measure(side, pair)
            expected = expected or found
            table += rows(number, pair, name, seconds, found, expected)
            print(f"round {number + 1}, {pair.id}: {name}: job {seconds['job', 'both']:.2f} s", file=sys.stderr)
        if pair is pairs[-1]:
            yield pd.DataFrame(table)


def summarise(frame: pd.DataFrame) -> dict[str, Any]:
    """Per cell and side: median seconds, median ratio to the engine with its range, and largest difference.

    A difference that is no number is None, and no agreement. `goal` stands with TransformerLens, and `met` beside it.
    """
    wide = frame.pivot(index=["round", "pair", "cell", "direction"], columns="side", values="seconds")
    ratios = wide.div(wide[ENGINE], axis=0)
    summary: dict[str, Any] = {}
    for cell in CELLS:
        summary[cell] = {}
        for side in frame["side"].unique():
            part = frame[(frame["cell"] == cell) & (frame["side"] == side)]
            ratio = ratios.xs(cell, level="cell")[side]
            difference = float(part["difference"].astype(float).max(skipna=False))
            entry: dict[str, Any] = {
                "seconds": float(part["seconds"].median()),
                "ratio": float(ratio.median()),
                "ratio_range": [float(ratio.min()), float(ratio.max())],
            }
            if cell not in NOTHING_FOUND:
                known = None if math.isnan(difference) else difference  # JSON has no NaN
                entry |= {"difference": known, "agrees": difference <= TOLERANCE}
            if side == REFERENCE and cell in GOALS:
                entry |= {"goal": GOALS[cell], "met": entry["ratio"] >= GOALS[cell]}
            summary[cell][side] = entry
    return summary


def disagreements(summary: Mapping[str, Any]) -> list[str]:
    """One line per cell and side whose difference is not within the tolerance."""
    return [
        f"{side}, {cell}: expected agreement within {TOLERANCE:g} logits, found {entry['difference']}"
        for cell, sides in summary.items()
        for side, entry in sides.items()
        if not entry.get("agrees", True)
    ]


def table(summary: Mapping[str, Any]) -> str:
    """Seconds, and how many times as long as the engine."""
    sides = list(summary["job"])
    lines = [f"{'':10}" + "".join(f"{side:>22}" for side in sides) + "   goal"]
    for cell, found in summary.items():
        entries = [f"{found[side]['seconds']:.3f} s {found[side]['ratio']:6.1f} x" for side in sides]
        goal = f"   {GOALS[cell]:.0f} x" if cell in GOALS else ""
        lines.append(f"{cell:10}" + "".join(f"{entry:>22}" for entry in entries) + goal)
    worst = {side: max(found[side].get("difference") or 0.0 for found in summary.values()) for side in sides}
    lines.append(f"{'differs by':10}" + "".join(f"{worst[side]:>22.1g}" for side in sides) + f"   {TOLERANCE:g}")
    return "\n".join(lines)


def plot(summary: Mapping[str, Any]) -> Figure:
    """Seconds per cell and side, on a logarithmic axis, with the ratio to the engine at each bar."""
    sides = list(summary["job"])
    with figures.style():
        figure = Figure(figsize=(figures.COLUMN, 0.6 + 0.13 * len(CELLS) * len(sides)))
        axes = figure.subplots()
        height = 0.8 / len(sides)
        for number, side in enumerate(sides):
            seconds = [summary[cell][side]["seconds"] for cell in CELLS]
            at = [row + (number - (len(sides) - 1) / 2) * height for row in range(len(CELLS))]
            axes.barh(at, seconds, height, color=COLOURS[side], label=side)
            for y, x, cell in zip(at, seconds, CELLS, strict=True):
                if side != ENGINE:
                    figures.label(axes, f"{summary[cell][side]['ratio']:.3g}×", (x, y), (3, 0), colour=COLOURS[side])
        axes.set_xscale("log")
        axes.margins(x=0.15, y=0.01)
        axes.set_yticks(range(len(CELLS)), CELLS)
        axes.invert_yaxis()
        axes.set_xlabel("seconds per pair (× the engine's time)")
        figure.legend(loc="outside upper center", ncols=3)
    return figure


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--adapter", type=Path, default=Path("ckpt/imitation"), help="default: %(default)s")
    made.add_argument("--base", help="base model (default: what the adapter names)")
    made.add_argument("--pairs-file", type=Path, metavar="FILE", help="pair file (default: pairs made from --seed)")
    made.add_argument("--seed", type=int, default=0, help="of the pairs that are made (default: %(default)s)")
    made.add_argument("--pairs", type=positive, default=1, help="pairs to use (default: %(default)s)")
    made.add_argument("--rounds", type=positive, default=2, help="default: %(default)s")
    made.add_argument("--threads", type=positive, default=2, help="of every side (default: %(default)s)")
    others = [name for name in SIDES if name != ENGINE]
    made.add_argument("--peers", nargs="+", choices=others, default=others, help="beside the engine (default: all)")
    made.add_argument("--out", type=Path, default=Path("reports/benchmarks"), help="default: %(default)s")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a side disagrees with the engine."""
    args = parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    subject = Subject.load(args.adapter, args.base)
    given = read_pairs(args.pairs_file) if args.pairs_file else generate_pairs(args.pairs, seed=args.seed)
    pairs, left_out = encode_pairs(subject.tokenizer, given[: args.pairs])
    for identifier, reason in left_out:
        print(f"left out: {identifier}: {reason}", file=sys.stderr)
    chosen, layer = [ENGINE, *(name for name in SIDES if name in args.peers and name != ENGINE)], subject.n_layers // 2
    ran_on = machine(["torch", "transformers", "peft", *(PACKAGES[name] for name in chosen if name in PACKAGES)])
    sides = {name: SIDES[name](subject, layer) for name in chosen}
    for side in sides.values():  # first calls compile, allocate, and compare the engine with the model's own forward
        side.heads(pairs[0], side.caches(pairs[0]))
    args.out.mkdir(parents=True, exist_ok=True)
    for frame in rounds(sides, pairs, args.rounds):
        frame.to_parquet(args.out / "results.parquet", index=False)
    summary = summarise(frame)
    setting = {
        "adapter": args.adapter.name,
        "base": dict(subject.base_identity),
        "model": "trained",
        "dtype": "float32",
        "layers": subject.n_layers,
        "head_layer": layer,
        "rounds": args.rounds,
        "pairs": [{"id": pair.id, "tokens": len(pair.ids_a), "value": pair.first_difference} for pair in pairs],
        "answer_tokens": sorted({len(pair.answer) for pair in pairs}),
        "tolerance": TOLERANCE,
    }
    write_json(args.out / "summary.json", {"machine": ran_on, "setting": setting, "cells": summary})
    figures.save(plot(summary), args.out / "peers")
    print(table(summary))
    failures = disagreements(summary)
    print("\n".join(failures) if failures else f"all sides agree within {TOLERANCE:g} logits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
