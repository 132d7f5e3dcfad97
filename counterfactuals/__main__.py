"""Write a pair file, or a file of ordinary decisions.

python -m counterfactuals --count 64 --seed 0 --out pairs.jsonl
python -m counterfactuals --count 60 --kind dose --out dose.jsonl
python -m counterfactuals --count 80 --decisions --out decisions.jsonl
python -m counterfactuals --prove pairs.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from counterfactuals.decision import write_decisions
from counterfactuals.pair import PairError, read_pairs, write_pairs
from counterfactuals.scheduler import KINDS, generate_pairs, prove
from counterfactuals.scheduler_decisions import generate_decisions
from env.scheduler.hardware import HARDWARE
from env.scheduler.prompts import SYSTEM_PROMPT


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m counterfactuals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=64, help="pairs of each kind, or decisions (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names the pairs (%(default)s)")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="kind of pair, may be repeated (default: future_uses)"
    )
    parser.add_argument("--decisions", action="store_true", help="ordinary states and their labels instead of pairs")
    parser.add_argument("--hardware", choices=HARDWARE, default="published", help="machines (%(default)s)")
    parser.add_argument("--system", type=Path, help="file with the system prompt (default: the project's own)")
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--prove", type=Path, metavar="FILE", help="replay the pairs of a file instead, and compare")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    options = parser.parse_args(argv)
    if (options.out is None) == (options.prove is None):
        parser.error("expected --out FILE or --prove FILE")
    if options.count < 1:
        parser.error(f"--count: expected 1 or more, found {options.count}")
    if options.decisions and (options.kind or options.prove):
        parser.error("--decisions: expected neither --kind nor --prove with it, they are about pairs")
    try:
        if options.prove:
            return _prove(options.prove, options.quiet)
        said = _write(options)
    except (PairError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.quiet:
        print(said)
    return 0


def _write(options: argparse.Namespace) -> str:
    """Write what is asked for; what was written, in one line."""
    system = options.system.read_text(encoding="utf-8") if options.system else SYSTEM_PROMPT
    setting = {"system": system, "hardware": options.hardware}
    if options.decisions:
        decisions = generate_decisions(options.count, options.seed, **setting)
        write_decisions(decisions, options.out)
        return f"{options.out}: {len(decisions)} decisions; {len({d.group for d in decisions})} graphs"
    kinds = tqdm(options.kind or ["future_uses"], "kinds", disable=options.quiet)
    pairs = [pair for kind in kinds for pair in generate_pairs(options.count, options.seed, kind=kind, **setting)]
    write_pairs(pairs, options.out)
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(pair.kind for pair in pairs).items())
    return f"{options.out}: {counts}; {len({pair.group for pair in pairs})} graphs"


def _prove(path: Path, quiet: bool) -> int:
    pairs = read_pairs(path)
    for pair in tqdm(pairs, "pairs replayed", disable=quiet):
        prove(pair)
    if not quiet:
        print(f"{path}: {len(pairs)} pairs, all as the environment gives them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
