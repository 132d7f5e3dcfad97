"""What the environment rewards, by hardware preset.

The optimum over greedy, what fusion, tiles and retention are worth, how often retaining pays, constant answers and the
heuristic, and the README's claims beside what is measured; on random graphs, the fixed tasks and real networks.

python -m env.scheduler.audit --out reports/environment
python -m env.scheduler.audit --graphs 48 --preset expert --json audit.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
from tqdm import tqdm

from env.scheduler.audit.figure import draw, save
from env.scheduler.audit.measures import cases, measure
from env.scheduler.audit.summary import presets_table, summary, text
from env.scheduler.hardware import PRESETS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = _Parser(
        prog="python -m env.scheduler.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=24, help="random graphs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names the random graphs (%(default)s)")
    parser.add_argument("--preset", action="append", choices=PRESETS, help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there too")
    parser.add_argument("--out", type=Path, help="folder for results.parquet, summary.json, run.json and the figure")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no table")
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(arguments)
    if options.graphs < 1:
        parser.error(f"--graphs: expected 1 or more, found {options.graphs}")
    if options.seed < 0:
        parser.error(f"--seed: expected 0 or more, found {options.seed}")
    try:
        _audit(options, arguments)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _audit(options: argparse.Namespace, arguments: list[str]) -> None:
    start = time.monotonic()
    for folder in filter(None, (options.out, options.json and options.json.parent)):
        folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for case in tqdm(cases(options.preset or list(PRESETS), options.graphs, options.seed), disable=options.quiet):
        measured, missing = measure(case, options.seed)
        rows += measured
        left_out += missing
    frame = pd.DataFrame(rows)
    result = json.dumps(summary(frame, options.seed) | {"left_out": left_out}, indent=1)
    if options.json:
        options.json.write_text(result, encoding="utf-8")
    if options.out:
        frame.to_parquet(options.out / "results.parquet")
        (options.out / "summary.json").write_text(result, encoding="utf-8")
        save(draw(presets_table(frame, options.seed)), options.out, "audit")
        run = {
            "command": shlex.join(["python", "-m", "env.scheduler.audit", *arguments]),
            "seed": options.seed,
            "random_graphs": options.graphs,
            "wall_seconds": round(time.monotonic() - start, 1),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in ("numpy", "pandas")}},
            "left_out": left_out,
        }
        (options.out / "run.json").write_text(json.dumps(run, indent=1), encoding="utf-8")
    if not options.quiet:
        print(text(frame, options.seed), end="")
        print(f"\nLeft out: {len(left_out)}" + "".join(f"\n  {reason}" for reason in left_out))


if __name__ == "__main__":
    sys.exit(main())
