"""Which passes help each other: synergy pairs of programs, and the graph that random walks go along.

(A, B) is a synergy pair of a program P if count(B(P)) < count(P) and count(B(A(P))) < count(B(P)): B helps alone, and
more after A. The global graph has an edge A -> B if the pair was found in at least one program (Compiler-R1, arXiv
2506.15701, section 3.1, after CFSAT). A walk starts at any pass that has successors and takes any edge, as in the
published code.

    python -m env.passes.synergy --programs 31      (goes on where the file ends; a longer list extends it)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path

from numpy.random import Generator
from tqdm import tqdm

from env.passes.catalogue import runnable
from env.passes.evaluator import Evaluator, shared_evaluator
from env.passes.llvm import VERSION, LLVMError
from env.passes.programs import Program, ProgramError, load_programs

DATA = Path(__file__).parent / "data" / "synergy.jsonl"
LARGEST = 200  # instructions
SHORTEST_WALK, LONGEST_WALK = 10, 30

Pair = tuple[str, str]


def synergy_pairs(program: Program, evaluator: Evaluator, passes: Sequence[str] | None = None) -> tuple[Pair, ...]:
    """The synergy pairs of a program, in the order of the passes. A pass that fails on it is in none.

    Args:
        program: what is measured.
        evaluator: what measures it.
        passes: the flags to choose from; None: all that LLVM 20 can run.
    """
    passes = runnable() if passes is None else tuple(passes)
    alone = dict(zip(passes, evaluator.evaluate_all(program.content, [[b] for b in passes]), strict=True))
    counts = {b: outcome.instructions for b, outcome in alone.items() if outcome.instructions is not None}
    helpful = [b for b in counts if counts[b] < program.instructions]
    pairs = [(a, b) for a in counts for b in helpful]
    outcomes = evaluator.evaluate_all(program.content, pairs)
    return tuple(
        pair
        for pair, outcome in zip(pairs, outcomes, strict=True)
        if outcome.instructions is not None and outcome.instructions < counts[pair[1]]
    )


@dataclass(frozen=True)
class SynergyGraph:
    """The global graph.

    Attributes:
        programs: in how many programs each pair was found.
    """

    programs: Mapping[Pair, int]

    @classmethod
    def of(cls, found: Iterable[Iterable[Pair]]) -> SynergyGraph:
        """The graph of the pairs of several programs."""
        return cls(Counter(pair for pairs in found for pair in set(pairs)))

    @cached_property
    def successors(self) -> dict[str, tuple[str, ...]]:
        """The passes that each pass helps, in the order of their names; passes that help none are not in it."""
        following: dict[str, list[str]] = {}
        for before, after in sorted(self.programs):
            following.setdefault(before, []).append(after)
        return {before: tuple(after) for before, after in following.items()}

    def walk_on(self, walk: Sequence[str], length: int, rng: Generator) -> list[str]:
        """A walk continued to a length, or to where no edge leads on."""
        walk = list(walk)
        while len(walk) < length and (following := self.successors.get(walk[-1])):
            walk.append(following[rng.integers(len(following))])
        return walk

    def walks(
        self, count: int, rng: Generator, shortest: int = SHORTEST_WALK, longest: int = LONGEST_WALK
    ) -> list[tuple[str, ...]]:
        """Random walks of `shortest` to `longest` passes, each length as likely; a walk that ends early is made anew.

        Raises:
            ValueError: if the graph has no walk of that length.
        """
        if not self._reaches(longest):
            raise ValueError(f"synergy graph: expected walks of {longest} passes, found none that is so long")
        starts = tuple(self.successors)
        walks: list[tuple[str, ...]] = []
        while len(walks) < count:
            length = int(rng.integers(shortest, longest + 1))
            walk = self.walk_on([starts[rng.integers(len(starts))]], length, rng)
            if len(walk) == length:
                walks.append(tuple(walk))
        return walks

    def _reaches(self, length: int) -> bool:
        """Whether some walk has so many passes."""
        reached = set(self.successors)
        for _ in range(length - 1):
            reached = {after for before in reached for after in self.successors.get(before, ())}
        return bool(reached)


def read_graph(path: Path | None = None) -> SynergyGraph:
    """The graph of a file that `main` wrote; None: the one that is part of this package.

    Raises:
        ProgramError: if the file holds no program's pairs.
        OSError: if it cannot be read.
    """
    source = path or files("env.passes").joinpath("data/synergy.jsonl")
    records = _records(source.read_text(encoding="utf-8"))
    if not records:
        raise ProgramError(f"{path or 'synergy.jsonl'}: expected pairs of at least one program, found none")
    flags = runnable()
    return SynergyGraph.of([(flags[a], flags[b]) for a, b in record["pairs"]] for record in records)


def _records(text: str) -> list[dict]:
    return [record for record in map(json.loads, text.splitlines()) if "pairs" in record]


def chosen(count: int, largest: int = LARGEST) -> list[Program]:
    """The training programs that the graph is made of: of those up to a size, the first by the hash of their names."""
    small = [program for program in load_programs("train") if program.instructions <= largest]
    return sorted(small, key=lambda program: hashlib.sha256(program.name.encode()).hexdigest())[:count]


def extend(out: Path, programs: Sequence[Program], largest: int, quiet: bool = False) -> None:
    """Add to a file the pairs of the programs that it does not have yet.

    Raises:
        LLVMError: if LLVM cannot be run.
        OSError: if the file cannot be read or written.
    """
    if not out.exists():
        about = "Synergy pairs of programs, one program a line, as positions among the passes that LLVM 20 can run"
        command = f"python -m env.passes.synergy --largest {largest}"
        out.write_text(json.dumps({"about": about, "llvm": VERSION, "command": command}) + "\n")
    done = {record["program"] for record in _records(out.read_text(encoding="utf-8"))}
    place = {flag: position for position, flag in enumerate(runnable())}
    todo = [program for program in programs if program.name not in done]
    for program in tqdm(todo, desc="programs", disable=quiet):
        pairs = [(place[a], place[b]) for a, b in synergy_pairs(program, shared_evaluator())]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"program": program.name, "pairs": pairs}, separators=(",", ":")) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=31)
    parser.add_argument("--largest", type=int, default=LARGEST, help="instructions of a program at most")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    try:
        extend(options.out, chosen(options.programs, options.largest), options.largest, options.quiet)
    except (LLVMError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
