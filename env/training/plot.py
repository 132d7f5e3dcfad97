"""Curves of training runs, from their logs alone.

    python -m env.training.plot ckpt/training.jsonl --out reports/training
    python -m env.training.plot ckpt/training.jsonl ckpt/bandwidth-bound/training.jsonl --out reports/training

Writes training.pdf and training.png, a column a run, and run.json, the command. A point is a mean over the episodes of
one optimizer step's group, a line a mean over the last 50 episodes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from env.training.store import TrainingError
from interp.figures import BLUE, COLUMN, GREY, save, style

WINDOW = 50
CURVES = (
    ("score", "latency saved by\nsampled actions", True),
    ("loss", "loss", False),
    ("fuse_rate", "fuses", True),
    ("retain_rate", "retains anything", True),
    ("hint_win_rate", "hints that win", True),
)


def read_log(path: Path) -> pd.DataFrame:
    """One row an episode, in order.

    Raises:
        TrainingError: if it is no log of a training run.
    """
    try:
        frame = pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])
        return frame[["episode", "step", "source", *(name for name, _, _ in CURVES)]]
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{path}: expected the log of a training run, found {error}") from None


def plot(logs: dict[str, pd.DataFrame]) -> Figure:
    """A column for each run, by name."""
    with style():
        figure = Figure(figsize=(COLUMN * len(logs), 1.0 * len(CURVES) + 0.5))
        panels = figure.subplots(len(CURVES), len(logs), sharex=True, sharey="row", squeeze=False)
        for column, (name, log) in enumerate(logs.items()):
            panels[0][column].set_title(name)
            panels[-1][column].set_xlabel("episode")
            for row, (curve, label, percent) in enumerate(CURVES):
                axes, values = panels[row][column], log[curve].astype(float) * (100 if percent else 1)
                groups = pd.DataFrame({"episode": log["episode"], "value": values}).groupby(log["step"]).mean()
                axes.plot(groups["episode"], groups["value"], ".", color=GREY, markersize=2.5)
                axes.plot(log["episode"], values.rolling(WINDOW, min_periods=WINDOW // 2).mean(), color=BLUE)
                if column == 0:
                    axes.set_ylabel(label + (", %" if percent else ""))
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+", metavar="FILE", help="training.jsonl of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for training.pdf and .png")
    options = parser.parse_args(argv)
    try:
        save(plot({str(path.parent): read_log(path) for path in options.logs}), options.out / "training")
        command = shlex.join(["python", "-m", "env.training.plot", *(sys.argv[1:] if argv is None else argv)])
        (options.out / "run.json").write_text(json.dumps({"command": command}, indent=1) + "\n")
    except (TrainingError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
