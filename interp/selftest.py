"""Do the analyses name what is there? Mechanisms are planted in small models by hand, and looked for.

Every planting goes through the analyses themselves and the verdict. What is planted is a head that reads a value and
writes it to the decision: in the adapter, alone or beside a head that only looks (`reader`, `decoy`); in the base model
(`prior`); in both, in different layers (`relocated`); in two heads, each with half (`redundant`); nowhere, under an
adapter of like norm (`absent`). And a delta of known rank in one module (`rank`). The models are far simpler than a
trained one, their heads do one thing each: finding these is necessary, not sufficient.

    python -m interp.selftest --plantings 50 --seed 0
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from interp import cli
from interp.planted.models import KINDS, Kind
from interp.planted.scores import Score, scores, simulations, table
from interp.planted.trial import Outcome, try_planting
from interp.run_record import PACKAGES

MISSED = 1
DESCRIPTION = "Plant known mechanisms in small models, and count how often the analyses name them."
EXAMPLE = "python -m interp.selftest --plantings 50 --seed 0"
SIMULATIONS_PER_PLANTING = 40

Task = Callable[[], Outcome | Score]


def tasks(count: int, seed: int, kinds: Sequence[Kind] = KINDS) -> list[Task]:
    """So many plantings of each kind."""
    return [partial(try_planting, kind, number, seed) for number in range(count) for kind in kinds]


def run(todo: Sequence[Task], jobs: int = 1) -> Iterator[Outcome | Score]:
    """What the tasks return, in their order.

    Args:
        jobs: processes; with 1, none beside this one.
    """
    if jobs == 1:
        yield from (task() for task in todo)
        return
    # Processes are spawned: a forked one would inherit the locks of this one's threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare) as pool:
        futures: list[Future[Outcome | Score]] = [pool.submit(task) for task in todo]
        try:
            yield from (future.result() for future in futures)
        finally:
            pool.shutdown(cancel_futures=True)


@cli.command
def main(argv: Sequence[str]) -> int:
    """Plant, measure, print; 1 if a stated bound is missed."""
    args = _parser().parse_args(argv)
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise cli.InputError(f"--json: expected a file in a folder that exists, found {str(args.json)!r}")
    start = time.monotonic()
    simulated = simulations(SIMULATIONS_PER_PLANTING * args.plantings, args.seed)
    todo: list[Task] = [*tasks(args.plantings, args.seed), *simulated]
    bar = tqdm(run(todo, args.jobs), desc="planted", unit="task", total=len(todo), file=sys.stderr, disable=args.quiet)
    done = list(bar)
    found = scores([result for result in done if isinstance(result, Outcome)])
    found += [result for result in done if isinstance(result, Score)]
    missed = [score.name for score in found if score.missed]
    if args.json is not None:
        record = _about(args, time.monotonic() - start) | {"scores": [score.to_json() for score in found]}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    kinds = ", ".join(KINDS)
    cli.say(args, f"{args.plantings} plantings of each kind ({kinds}), seed {args.seed}\n{table(found)}")
    cli.say(args, f"missed: {'; '.join(missed)}" if missed else "every stated bound is met")
    return MISSED if missed else cli.DONE


def _about(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "plantings": args.plantings, "seed": args.seed, "processes": args.jobs, "wall_seconds": round(seconds, 1),
        "cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version(),
        "versions": versions,
    }  # fmt: skip


def _prepare() -> None:
    """A worker has one thread, and leaves what libraries tell developers unsaid, as `cli.command` does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)


def _parser() -> argparse.ArgumentParser:
    parser = cli._Parser(
        prog="python -m interp.selftest",
        description=DESCRIPTION,
        epilog=f"example:\n  {EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--plantings", type=cli._positive, default=50, metavar="N", help="of each kind (default: %(default)s)")
    add("--seed", type=cli._seed, default=0, help="of everything that is drawn (default: %(default)s)")
    add("--jobs", type=cli._positive, default=os.cpu_count() or 1, metavar="N", help="processes (default: all cores)")
    add("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    add("--quiet", action="store_true", help="no progress bar and no table")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
