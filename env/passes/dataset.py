"""Transcripts to learn the protocol from: thought, tool call, tool response, answer (Compiler-R1, section 3.2.1).

For each program the best of 100 random walks is the first candidate. If it beats -Oz the transcript is path A: call
`instrcount`, answer with the candidate. If not it is path B: call `instrcount`, then `find_best_pass_sequence`, and
answer with what that found, or with -Oz if it found nothing better. Every response is the tool's own, and every
transcript is played through `PassesEnv`, which must find it on a valid path.

    python -m env.passes.dataset --split train --out FILE.jsonl        (goes on where the file ends)
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

from env.passes.action import answer_text, call_text
from env.passes.catalogue import OZ
from env.passes.evaluator import Evaluator, shared_evaluator
from env.passes.llvm import LLVMError
from env.passes.passes import PassesEnv
from env.passes.programs import SPLITS, Program, load_programs
from env.passes.prompts import messages
from env.passes.search import WALKS, Genetics, best_of_walks
from env.passes.synergy import SynergyGraph, read_graph
from env.passes.tools import FIND_BEST, INSTRCOUNT

PUBLISHED = Genetics()


@dataclass(frozen=True)
class Transcript:
    """One worked example.

    Attributes:
        program: its name.
        path: "A" or "B".
        messages: the whole chat: system, question, turns and responses by turns.
        candidate_over_oz: OverOz of the first candidate.
        over_oz: OverOz of the answer.
        reward: of the episode, by the paper's rewards.
    """

    program: str
    path: str
    messages: tuple[dict[str, str], ...]
    candidate_over_oz: float
    over_oz: float
    reward: float

    def to_json(self) -> dict[str, Any]:
        """A line of the dataset."""
        return {**vars(self), "messages": list(self.messages)}


def candidate(
    program: Program, graph: SynergyGraph, evaluator: Evaluator, seed: int = 0, walks: int = WALKS
) -> tuple[str, ...]:
    """The sequence that a program's transcript begins with: the best of its random walks. Draws by seed and name."""
    name = int.from_bytes(hashlib.sha256(program.name.encode()).digest()[:8], "big")
    return best_of_walks(program, graph, evaluator, np.random.default_rng([seed, name]), walks).sequence


def transcript(env: PassesEnv, sequence: Sequence[str]) -> Transcript:
    """The transcript that starts from a sequence, played in the environment.

    Raises:
        ValueError: if the environment does not find it on a valid path: a tool failed on the sequence.
    """
    observation, _ = env.reset()
    chat = list(messages(observation))
    reward, turns = 0.0, 0
    info: dict[str, Any] = {}
    for text in _turns(env, sequence):
        observation, reward, *_, info = env.step(text)
        chat.append({"role": "assistant", "content": text})
        turns += 1
        if not env.episode.terminated:
            chat.append({"role": "user", "content": observation})
    if not info.get("valid_path"):
        raise ValueError(f"{env.program.name}: expected a transcript on a valid path, found {info}")
    first = env.episode.exchanges[0].response or {}
    path = "A" if turns == 2 else "B"
    return Transcript(env.program.name, path, tuple(chat), first["improvement_over_oz"], info["score"], reward)


def _turns(env: PassesEnv, sequence: Sequence[str]) -> Iterator[str]:
    """The turns of the protocol; each looks at the response to the one before."""
    name = env.program.name
    yield call_text(_first_thought(env.program, sequence), INSTRCOUNT, _arguments(name, sequence))
    gain = (env.episode.exchanges[-1].response or {}).get("improvement_over_oz")
    if gain is None:
        return
    if gain > 0:
        yield answer_text(f"improvement_over_oz is {gain}, above 0: this sequence beats -Oz. I recommend it.", sequence)
        return
    yield call_text(
        f"improvement_over_oz is {gain}, not above 0: this sequence does not beat -Oz. I search for a better one.",
        FIND_BEST,
        {"filename": name},
    )
    found = env.episode.exchanges[-1].response or {}
    percentage = found.get("improvement_percentage", 0)
    if percentage > 0:
        thought = f"improvement_percentage is {percentage}, above 0: the sequence found beats -Oz. I recommend it."
        yield answer_text(thought, found["best_pass_sequence"])
    else:
        thought = f"improvement_percentage is {percentage}, not above 0: nothing beats -Oz here. I recommend -Oz."
        yield answer_text(thought, [OZ])


def _arguments(name: str, sequence: Sequence[str]) -> dict[str, Any]:
    return {"filename": name, "optimization_flags": list(sequence)}


def _first_thought(program: Program, sequence: Sequence[str]) -> str:
    of = program.named_features()
    return (
        f"The program has {of['TotalInsts']} instructions in {of['TotalBlocks']} blocks: {of['TotalMemInst']} touch "
        f"memory or call, {of['NumAllocaInst']} are stack slots, {of['BranchCount']} are branches. I try "
        f"{', '.join(sequence)}. First I measure it with {INSTRCOUNT}. If improvement_over_oz is above 0 I answer with "
        f"it, otherwise I call {FIND_BEST}."
    )


def write(options: argparse.Namespace) -> None:
    """Add to a file the transcripts of a split that it does not have yet.

    Raises:
        LLVMError: if LLVM cannot be run.
        OSError: if the file cannot be read or written.
    """
    lines = options.out.read_text(encoding="utf-8").splitlines() if options.out.exists() else []
    done = {json.loads(line)["program"] for line in lines}
    graph, evaluator = read_graph(), shared_evaluator()
    genetics = Genetics(options.population, options.generations)
    todo = [program for program in load_programs(options.split)[: options.limit] if program.name not in done]
    for program in tqdm(todo, desc="programs", disable=options.quiet):
        env = PassesEnv(program, evaluator=evaluator, graph=graph, genetics=genetics)
        made = transcript(env, candidate(program, graph, evaluator, options.seed, options.walks))
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(made.to_json()) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="programs at most")
    parser.add_argument("--walks", type=int, default=WALKS)
    parser.add_argument("--population", type=int, default=PUBLISHED.population)
    parser.add_argument("--generations", type=int, default=PUBLISHED.generations)
    parser.add_argument("--quiet", action="store_true")
    try:
        write(parser.parse_args(argv))
    except (LLVMError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
