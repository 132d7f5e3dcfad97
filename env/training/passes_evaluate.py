"""What agents that order passes are worth, beside -Oz and searches that need no model.

    python -m env.training.passes_evaluate --adapter ckpt/passes/sft
    python -m env.training.passes_evaluate --adapter ckpt/passes/sft --split validation --programs 12 --out /tmp/look

Each policy is asked about programs that the adapters were not trained on. Agents write freely, token by token, the
likeliest each time; a dialogue has at most three turns, which is what a valid path needs. Their search tool is smaller
than the published one, as in training; searches of both sizes are among the references. A search's seconds are those of
one program at a time in a worker that knows nothing yet; an agent's are those of a batch, divided by its size.

What has been measured is kept in `results.partial/` and not measured again. `--fresh` drops it.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.random import Generator
from tqdm import tqdm

from env.passes import LLVMError, PassesEnv, Program, ProgramError, load_program, load_programs
from env.passes.evaluator import Evaluator
from env.passes.programs import SPLITS
from env.passes.prompts import messages
from env.passes.search import Found, Genetics, best_of_walks, genetic_search, hill_climb
from env.passes.synergy import read_graph
from env.passes.tools import FIND_BEST, INSTRCOUNT
from env.training.passes_report import plot, summarise, table
from env.training.passes_samples import SEARCH, Sample, read_samples
from env.training.passes_store import trained_programs
from env.training.store import TrainingError
from interp.answers import answer
from interp.base_models import BaseModelError
from interp.figures import save
from interp.subject import Subject, SubjectError

SAMPLES = Path("ckpt/passes/samples.jsonl")
MAX_TURNS = 3
MAX_NEW_TOKENS = 320  # the longest turn that agents are shown has 250
BATCH = 8
Search = Callable[[Program, Evaluator, Generator], Found]


class NearestNeighbour:
    """The best sequence that is known of the training program whose AutoPhase features are nearest.

    Features are shares of the program's instructions, each in units of its standard deviation over the known programs;
    the distance is Euclidean.

    Args:
        known: samples of `env.training.passes_samples`.
    """

    def __init__(self, known: Sequence[Sample]) -> None:
        best = {sample.program: sample.turns()[-1] for sample in known if not sample.learnt_from}
        self._answers = {name: tuple(json.loads(text.split("<answer>")[1].split("</answer>")[0])) for name, text in
                         best.items()}  # fmt: skip
        self._names = list(self._answers)
        shares = np.array([_shares(load_program(name)) for name in self._names])
        self._unit = np.where(shares.std(0) > 0, shares.std(0), 1.0)
        self._places = shares / self._unit

    def nearest(self, program: Program) -> str:
        """The name of the known program."""
        distances = np.linalg.norm(self._places - _shares(program) / self._unit, axis=1)
        return self._names[int(distances.argmin())]

    def __call__(self, program: Program, evaluator: Evaluator, rng: Generator) -> Found:
        """Its sequence, measured on this program. Nothing is drawn.

        Raises:
            ValueError: if it cannot be measured.
        """
        sequence = self._answers[self.nearest(program)]
        count = evaluator.evaluate(program.content, sequence).instructions
        if count is None:
            raise ValueError(f"{program.name}: the neighbour's sequence cannot be measured")
        return Found(sequence, count, 1)


def _shares(program: Program) -> np.ndarray[Any, Any]:
    return np.array(program.features, dtype=float) / program.instructions


def searches(known: Sequence[Sample]) -> dict[str, Search]:
    """The references that need no model, by name."""
    graph, published = read_graph(), Genetics()

    def genetic(size: Genetics) -> Search:
        return lambda program, evaluator, rng: genetic_search(program, graph, evaluator, rng, size)

    return {
        "best of 100 random walks": lambda program, evaluator, rng: best_of_walks(program, graph, evaluator, rng),
        f"genetic search, {SEARCH.population} x {SEARCH.generations}, the agent's tool": genetic(SEARCH),
        f"genetic search, {published.population} x {published.generations}": genetic(published),
        "hill climbing, 400 sequences": hill_climb,
        "nearest neighbour's sequence": NearestNeighbour(known),
    }


def search_rows(search: Search, program: Program, seed: int) -> list[dict[str, Any]]:
    """What a search is worth on a program, one row; without a result, what -Oz is."""
    draws = np.random.default_rng([seed, int.from_bytes(hashlib.sha256(program.name.encode()).digest()[:8], "big")])
    with Evaluator() as evaluator:
        start = time.perf_counter()
        try:
            found = search(program, evaluator, draws)
        except ValueError as error:
            return [_row(program, program.oz_instructions, time.perf_counter() - start) | {"note": str(error)}]
        return [_row(program, found.instructions, time.perf_counter() - start) | {"measured": found.measured}]


def agent_rows(subject: Subject, programs: Sequence[Program]) -> list[dict[str, Any]]:
    """A dialogue about each program, in one batch, of the model as it is switched now."""
    with Evaluator() as evaluator:
        envs = [PassesEnv(p, max_turns=MAX_TURNS, evaluator=evaluator, genetics=SEARCH) for p in programs]
        chats = [list(messages(env.reset()[0])) for env in envs]
        infos: list[dict[str, Any]] = [{}] * len(envs)
        start = time.perf_counter()
        while running := [i for i, env in enumerate(envs) if not env.episode.ended]:
            texts = answer(
                subject.causal_lm, subject.tokenizer, [chats[i] for i in running], max_new_tokens=MAX_NEW_TOKENS
            )
            for i, text in zip(running, texts, strict=True):
                observation, *_, infos[i] = envs[i].step(text)
                chats[i] += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
        seconds = (time.perf_counter() - start) / len(envs)
    return [_agent_row(env, info, seconds) for env, info in zip(envs, infos, strict=True)]


def _agent_row(env: PassesEnv, info: dict[str, Any], seconds: float) -> dict[str, Any]:
    program, exchanges = env.program, env.episode.exchanges
    left = env.episode.instructions
    row = _row(program, program.oz_instructions if left is None else left, seconds)
    row |= {"answered": left is not None, "valid_path": info["valid_path"], "turns": len(exchanges)}
    first = exchanges[0]
    gain = (first.response or {}).get("improvement_over_oz")
    if first.turn is None or first.turn.tool != INSTRCOUNT or gain is None:
        return row | {"first_gain": None, "decision": None}
    turn = exchanges[1].turn if len(exchanges) > 1 else None
    decision = "other" if turn is None else "answer" if not turn.tool else "other"
    if turn is not None and turn.tool == FIND_BEST:
        decision = "search"
    return row | {"first_gain": gain, "decision": decision}


def _row(program: Program, instructions: int, seconds: float) -> dict[str, Any]:
    return {
        "program": program.name,
        "instructions": instructions,
        "over_oz": program.over_oz(instructions),
        "over_orig": program.over_orig(instructions),
        "seconds": seconds,
    }


def chosen(split: str, count: int | None, seen: set[str], seed: int) -> list[Program]:
    """Programs of a split, in an order that the seed draws, so that fewer of them are a part of more.

    Raises:
        TrainingError: if an adapter was trained on one of them.
    """
    programs = load_programs(split)
    if known := sorted(seen & {program.name for program in programs}):
        raise TrainingError(f"--split {split}: expected programs that no adapter was trained on, found {known[0]}")
    order = np.random.default_rng([seed, *b"programs"]).permutation(len(programs))
    return [programs[i] for i in order[:count]]


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what has not been measured yet, and write the table, the figure and the numbers.

    Raises:
        TrainingError: if an adapter has no list of what it was trained on, or was trained on these programs.
        SubjectError, BaseModelError: if one cannot be loaded.
        ValueError, OSError: if the samples cannot be read, or the folder cannot be written.
    """
    seen = set().union(*map(trained_programs, options.adapter))
    programs = chosen(options.split, options.programs, seen, options.seed)
    known = read_samples(options.samples)
    partial = options.out / "results.partial"
    if options.fresh and partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True, exist_ok=True)
    frames = [_frame("-Oz", "reference", [_row(program, program.oz_instructions, 0.0) for program in programs])]
    for name, search in searches(known).items():
        rows: list[dict[str, Any]] = []
        for program in tqdm(programs, name, unit="program", disable=options.quiet):
            key = [name, program.name, options.seed]
            rows += _kept(partial, key, functools.partial(search_rows, search, program, options.seed))
        frames.append(_frame(name, "reference", rows))
    frames += _agents(options, programs, partial)
    frame = pd.concat(frames, ignore_index=True)
    frame.to_parquet(options.out / "results.parquet", index=False)
    summary = summarise(frame, options.seed) | {
        "split": options.split,
        "dtype": options.dtype,
        "command": shlex.join(["python", "-m", "env.training.passes_evaluate", *options.argv]),
        "threads": torch.get_num_threads(),
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    save(plot(summary), options.out / "evaluation")
    return summary


def _agents(options: argparse.Namespace, programs: Sequence[Program], partial: Path) -> Iterator[pd.DataFrame]:
    parts = [programs[at : at + BATCH] for at in range(0, len(programs), BATCH)]
    about = [options.dtype, MAX_NEW_TOKENS]

    def played(name: str, kind: str, subject: Subject, identity: str) -> pd.DataFrame:
        rows = []
        for part in tqdm(parts, name, unit="batch", disable=options.quiet):
            key = [name, identity, *about, *(program.name for program in part)]
            rows += _kept(partial, key, functools.partial(agent_rows, subject, part))
        return _frame(name, kind, rows)

    for folder in options.adapter:
        subject = Subject.load(folder, options.base, dtype=options.dtype)
        if folder == options.adapter[0]:
            with subject.base():
                yield played("base model", "base", subject, json.dumps(subject.base_identity))
        subject.model.merge_adapter()  # never switched again
        yield played(folder.resolve().name, "adapter", subject, subject.adapter_sha256)


def _frame(policy: str, kind: str, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows).assign(policy=policy, kind=kind)


def _kept(folder: Path, key: Sequence[Any], make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What an interrupted call has left, or what is made now."""
    file = folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(make()), encoding="utf-8")
        unfinished.replace(file)
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.passes_evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--adapter", type=Path, nargs="+", required=True, metavar="DIR", help="adapter folders")
    add("--base", metavar="DIR|NAME", help="base model (default: what adapter_config.json names)")
    add("--split", choices=SPLITS, default="test", help="programs (%(default)s)")
    add("--programs", type=int, metavar="N", help="programs at most, drawn by the seed (default: all)")
    add("--samples", type=Path, default=SAMPLES, help="what is known of training programs (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="trained in bfloat16 (%(default)s)")
    add("--out", type=Path, default=Path("reports/passes/evaluation"), metavar="DIR", help="(%(default)s)")
    add("--seed", type=int, default=0, help="of programs, searches and the resampling (%(default)s)")
    add("--fresh", action="store_true", help="measure everything again")
    add("--quiet", action="store_true", help="no progress bar and no table")
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        summary = evaluate(options)
    except (TrainingError, SubjectError, BaseModelError, LLVMError, ProgramError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(table(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
