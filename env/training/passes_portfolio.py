"""A few pass sequences that are good for many programs, from which an agent can learn to choose.

    python -m env.training.passes_portfolio --out ckpt/passes/portfolio.json

Which passes of a random walk help is hardly to be seen in a program's features, and a small model that imitates such
walks writes none of them to its end. So it is shown few sequences: of candidates, each the best of 100 random walks on
one training program less the passes that do nothing for it, those are taken, one after the other, that add most to the
mean over all training programs of the best OverOz (a greedy coreset, as in 2301.05104).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from env.passes import LLVMError, Program, load_programs, runnable
from env.passes.evaluator import Evaluator, shared_evaluator
from env.passes.search import WALKS, best_of_walks
from env.passes.synergy import read_graph

CANDIDATES, SIZE = 48, 8
FAILED = -1.0  # OverOz of what cannot be measured


def without_idle_passes(program: Program, sequence: Sequence[str], evaluator: Evaluator) -> tuple[str, ...]:
    """The sequence less every pass, from the last to the first, without which no more instructions are left."""
    kept = tuple(sequence)
    for place in reversed(range(len(kept))):
        shorter = kept[:place] + kept[place + 1 :]
        before, after = (outcome.instructions for outcome in evaluator.evaluate_all(program.content, [kept, shorter]))
        if shorter and before is not None and after is not None and after <= before:
            kept = shorter
    return kept


def gains(programs: Sequence[Program], sequences: Sequence[Sequence[str]], quiet: bool = False) -> NDArray[np.float64]:
    """(programs, sequences) OverOz of each sequence on each program."""
    rows = []
    for program in tqdm(programs, "measured", unit="program", disable=quiet):
        outcomes = shared_evaluator().evaluate_all(program.content, sequences)
        counts = [outcome.instructions for outcome in outcomes]
        rows.append([FAILED if count is None else program.over_oz(count) for count in counts])
    return np.array(rows)


def coreset(table: NDArray[np.float64], size: int) -> list[int]:
    """The columns that are taken, in the order in which they are: each adds most to the mean of the rows' maxima."""
    taken: list[int] = []
    best = np.full(len(table), -np.inf)
    for _ in range(min(size, table.shape[1])):
        means = np.maximum(best[:, None], table).mean(0)
        means[taken] = -np.inf
        taken.append(int(means.argmax()))
        best = np.maximum(best, table[:, taken[-1]])
    return taken


def build(candidates: int = CANDIDATES, size: int = SIZE, seed: int = 0, quiet: bool = False) -> dict[str, Any]:
    """The portfolio of the training programs, with its mean OverOz after each sequence, ready for JSON.

    Raises:
        LLVMError: if LLVM cannot be run.
    """
    programs, graph, rng = load_programs("train"), read_graph(), np.random.default_rng([seed, *b"portfolio"])
    found: dict[tuple[str, ...], None] = {}
    chosen = [programs[i] for i in rng.permutation(len(programs))[:candidates]]
    for program in tqdm(chosen, "candidates", unit="program", disable=quiet):
        best = best_of_walks(program, graph, shared_evaluator(), rng, WALKS).sequence
        found[without_idle_passes(program, best, shared_evaluator())] = None
    sequences = list(found)
    table = gains(programs, sequences, quiet)
    taken = coreset(table, size)
    means = [float(table[:, taken[: n + 1]].max(1).mean()) for n in range(len(taken))]
    return {
        "sequences": [list(sequences[i]) for i in taken],
        "mean_over_oz_of_the_best": [round(mean, 5) for mean in means],
        "programs": len(programs),
        "candidates": len(sequences),
        "seed": seed,
    }


def read_portfolio(path: Path) -> list[tuple[str, ...]]:
    """The sequences of a file.

    Raises:
        ValueError: if it holds none, or one with a pass that LLVM 20 cannot run.
        OSError: if it cannot be read.
    """
    try:
        sequences = [tuple(sequence) for sequence in json.loads(path.read_text(encoding="utf-8"))["sequences"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: sequences: expected lists of passes, found none ({error})") from None
    if unknown := {flag for sequence in sequences for flag in sequence} - set(runnable()):
        raise ValueError(f"{path}: sequences: expected passes that LLVM 20 can run, found {sorted(unknown)[0]!r}")
    return sequences


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.passes_portfolio",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--candidates", type=int, default=CANDIDATES, help="programs to walk on (%(default)s)")
    parser.add_argument("--size", type=int, default=SIZE, help="sequences at most (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    try:
        record = build(options.candidates, options.size, options.seed, options.quiet)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    except (LLVMError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
