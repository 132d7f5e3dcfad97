"""What the learner of the pass-ordering dialogue is shown: whole episodes on a valid path, with short thoughts.

The sequence that is tried first is the one of a small portfolio (`env.training.passes_portfolio`) that is best for the
program. If it beats -Oz and another one does not, there is a second sample of the program, which begins with that: of
it only the turn after the response is learnt, and the episode ends there, so that both signs are shown and bad
sequences are not taught. Every response is the environment's own, which finds the first samples on a valid path.

    python -m env.training.passes_portfolio --out ckpt/passes/portfolio.json
    python -m env.training.passes_samples --portfolio ckpt/passes/portfolio.json --out ckpt/passes/samples.jsonl

The second command goes on where the file ends. A line holds what was measured; sequences are positions among the passes
that LLVM 20 can run. The texts are made from it again. The search tool is smaller than the published one, so that the
file takes minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from counterfactuals.passes_moments import DECIDE, instrcount_text, search_text
from env.passes import LLVMError, PassesEnv, Program, ProgramError, load_program, load_programs, runnable
from env.passes.action import answer_text, response_text
from env.passes.catalogue import OZ
from env.passes.programs import SPLITS
from env.passes.prompts import messages, question
from env.passes.search import Genetics
from env.training.passes_portfolio import read_portfolio

SEARCH = Genetics(population=20, generations=4, kept=4)
CONCLUDE = "Is improvement_percentage above 0?"


@dataclass(frozen=True)
class Sample:
    """An episode, or the beginning of one.

    Attributes:
        program: its name.
        sequence: that is measured first.
        gain: `improvement_over_oz` of it, as the tool says.
        found: by the search; () if it was not called.
        percentage: `improvement_percentage` of that, None if it was not called.
        learnt_from: the first of the agent's turns that is to be learnt. 0: the whole episode. 1: the second turn, with
            which the sample ends.
    """

    program: str
    sequence: tuple[str, ...]
    gain: float
    found: tuple[str, ...]
    percentage: float | None
    learnt_from: int

    def turns(self) -> list[str]:
        """The agent's turns: two (path A, or a sample that ends there) or three (path B)."""
        first = instrcount_text(self.program, self.sequence)
        if self.gain > 0:
            return [first, answer_text(DECIDE, self.sequence)]
        if self.learnt_from:
            return [first, search_text(self.program)]
        best = self.found if (self.percentage or 0) > 0 else (OZ,)
        return [first, search_text(self.program), answer_text(CONCLUDE, best)]

    def responses(self) -> list[str]:
        """The tools' responses to all turns but the last."""
        measured = {"filename": self.program, "status": "success", "improvement_over_oz": self.gain}
        found = {
            "status": "success",
            "best_pass_sequence": list(self.found),
            "improvement_percentage": self.percentage,
        }
        return [response_text(response) for response in (measured, found)][: len(self.turns()) - 1]

    def chat(self) -> list[dict[str, str]]:
        """The whole chat, from the system's message to the last turn."""
        chat = list(messages(question(load_program(self.program))))
        for turn, response in zip(self.turns(), [*self.responses(), None], strict=True):
            chat.append({"role": "assistant", "content": turn})
            if response is not None:
                chat.append({"role": "user", "content": response})
        return chat

    def to_json(self) -> str:
        """A line of the file."""
        place = {flag: position for position, flag in enumerate(runnable())}
        sequences = {name: [place[flag] for flag in getattr(self, name)] for name in ("sequence", "found")}
        return json.dumps(vars(self) | sequences, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Sample:
        """The sample that a line holds.

        Raises:
            ValueError: if it holds none.
        """
        try:
            record = json.loads(line)
            flags = runnable()
            for name in ("sequence", "found"):
                record[name] = tuple(flags[position] for position in record[name])
            return cls(**record)
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"expected a sample, found {line[:60]!r} ({error})") from None


def samples_of(program: Program, portfolio: Sequence[tuple[str, ...]], seed: int = 0) -> list[Sample]:
    """The one or two samples of a program; draws by seed and name.

    Raises:
        ValueError: if nothing of the portfolio can be measured, or the environment does not find the first sample on a
            valid path.
    """
    name = int.from_bytes(hashlib.sha256(program.name.encode()).digest()[:8], "big")
    env = PassesEnv(program, genetics=SEARCH)
    counts = [outcome.instructions for outcome in env.evaluator.evaluate_all(program.content, portfolio)]
    known = [(count, place) for place, count in enumerate(counts) if count is not None]
    if not known:
        raise ValueError(f"{program.name}: expected a sequence of the portfolio that can be measured, found none")
    samples = [played(env, portfolio[min(known)[1]])]
    worse = [place for count, place in known if count >= program.oz_instructions]
    if samples[0].gain > 0 and worse:
        sequence = portfolio[int(np.random.default_rng([seed, name]).choice(worse))]
        env.reset()
        env.step(instrcount_text(program.name, sequence))
        gain = (env.episode.exchanges[-1].response or {})["improvement_over_oz"]
        samples.append(Sample(program.name, sequence, gain, (), None, learnt_from=1))
    return samples


def played(env: PassesEnv, sequence: Sequence[str]) -> Sample:
    """The episode that begins with a sequence, as the environment plays it.

    Raises:
        ValueError: if the environment does not find it on a valid path, or its texts differ from the sample's.
    """
    name = env.program.name
    seen = [env.reset()[0], env.step(instrcount_text(name, sequence))[0]]
    gain = (env.episode.exchanges[-1].response or {}).get("improvement_over_oz", 0.0)
    found: dict[str, Any] = {}
    if gain <= 0:
        seen.append(env.step(search_text(name))[0])
        found = env.episode.exchanges[-1].response or {}
    best = tuple(found.get("best_pass_sequence", ()))
    sample = Sample(name, tuple(sequence), gain, best, found.get("improvement_percentage"), learnt_from=0)
    *_, info = env.step(sample.turns()[-1])
    if not info.get("valid_path") or seen[1:] != sample.responses():
        raise ValueError(f"{name}: expected an episode on a valid path, found {info}")
    return sample


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file.

    Raises:
        ValueError: naming the file and the line that holds none, or if there is no line.
        OSError: if the file cannot be read.
    """
    samples = list(_read(path))
    if not samples:
        raise ValueError(f"{path}: expected at least one sample, found none")
    return samples


def _read(path: Path) -> Iterator[Sample]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Sample.from_json(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None


def extend(
    out: Path, programs: Sequence[Program], portfolio: Sequence[tuple[str, ...]], seed: int = 0, quiet: bool = False
) -> None:
    """Add to a file the samples of the programs that it does not have yet, all of a program at once.

    Raises:
        ValueError, LLVMError: as `samples_of`.
        OSError: if the file cannot be read or written.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {sample.program for sample in _read(out)} if out.exists() else set()
    for program in tqdm([p for p in programs if p.name not in done], desc="programs", disable=quiet):
        lines = "".join(sample.to_json() + "\n" for sample in samples_of(program, portfolio, seed))
        with out.open("a", encoding="utf-8") as file:
            file.write(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.passes_samples",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write or to go on with")
    parser.add_argument("--portfolio", type=Path, required=True, help="file of env.training.passes_portfolio")
    parser.add_argument("--split", choices=SPLITS, default="train", help="programs (%(default)s)")
    parser.add_argument("--limit", type=int, help="programs at most")
    parser.add_argument("--seed", type=int, default=0, help="names the draws (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    try:
        portfolio = read_portfolio(options.portfolio)
        extend(options.out, load_programs(options.split)[: options.limit], portfolio, options.seed, options.quiet)
    except (LLVMError, ProgramError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
