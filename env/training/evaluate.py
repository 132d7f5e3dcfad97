"""What trained agents are worth, beside everything that they have to beat.

    python -m env.training.evaluate --adapter ckpt/ep400
    python -m env.training.evaluate --adapter ckpt/ep050 ckpt/ep400 --graphs 100 --out reports/training/published

Each policy schedules the five tasks and random graphs that no adapter of the call was trained on (told apart by their
fingerprints): the base model, the adapters, every constant answer, the heuristic, greedy and the planner. Models write
their answers freely, token by token, the likeliest each time; nothing is forced. All adapters of a call have to be
trained on the same hardware, which is the one that is played on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from env.scheduler import TASKS, Action, Graph, SchedulerEnv, load_task
from env.scheduler.cost import TILES
from env.scheduler.hardware import on
from env.scheduler.policies import greedy
from env.scheduler.prompts import messages
from env.scheduler.topologies import curriculum_graph
from env.scheduler.values import ValueTable
from env.training.curriculum import LEVELS
from env.training.evaluate_report import plot, summarise, table
from env.training.play import Answers, Game, play
from env.training.scoring import Heuristic, Planner, Teacher
from env.training.store import TrainingError, trained_on
from interp.answers import answer
from interp.base_models import BaseModelError
from interp.figures import save
from interp.subject import Subject, SubjectError

SEED_OFFSET = 3_000_000
BATCH = 32
GUESSES = 64


def unseen_graphs(count: int, seed: int, hardware: str, largest: int, seen: set[str]) -> list[tuple[str, Graph]]:
    """Random graphs of the curriculum's levels, evenly spread, none of which has been seen.

    Args:
        largest: caps the nodes, as in training.
        seen: fingerprints (16 digits).

    Returns:
        (source, graph), the source being `random 0.53`.
    """
    found: dict[str, tuple[str, Graph]] = {}
    draw = 0
    while len(found) < count:
        level = LEVELS[0] + (LEVELS[1] - LEVELS[0]) * len(found) / max(1, count - 1)
        rng = np.random.default_rng([seed + SEED_OFFSET, *b"unseen", draw])
        graph = on(hardware, curriculum_graph(level, rng=rng, largest=largest))
        if (key := graph.fingerprint[:16]) not in seen and key not in found:
            found[key] = (f"random {level:.2f}", graph)
        draw += 1
    return list(found.values())


def fixed_policies(graphs: Sequence[Graph]) -> dict[str, Answers]:
    """Everything that is no model, by name."""

    def by_teacher(make: Callable[[SchedulerEnv], Teacher]) -> Answers:
        teachers = {graph.fingerprint: make(SchedulerEnv(graph)) for graph in graphs}
        return lambda envs: [teachers[env.graph.fingerprint].action(env).to_text() for env in envs]

    def constant(fuse: bool, tile: int) -> Answers:
        return lambda envs: [Action(fuse, tile).to_text()] * len(envs)

    policies = {
        "planner": by_teacher(Planner),
        "heuristic": by_teacher(lambda env: Heuristic()),
        "greedy": lambda envs: [greedy(env.episode).to_text() for env in envs],
    }
    for fuse, tile in product((True, False), TILES):
        policies[f"{'fuse' if fuse else 'no fuse'}, {tile}, nothing"] = constant(fuse, tile)
    return policies


def model_answers(subject: Subject, batch: int = BATCH) -> Answers:
    """The model as it is switched when it is asked; what it has answered so far are guesses at what it will."""
    given: Counter[str] = Counter()

    def answers(envs: list[SchedulerEnv]) -> list[str]:
        prompts = [messages(env.observation()) for env in envs]
        texts = []
        for at in range(0, len(prompts), batch):
            guesses = [text for text, _ in given.most_common(GUESSES)]
            texts += answer(subject.causal_lm, subject.tokenizer, prompts[at : at + batch], guesses=guesses)
            given.update(texts[at:])
        return texts

    return answers


def rows_of(policy: str, kind: str, sources: Sequence[str], games: Sequence[Game]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row a game, and one row a retain decision that counted."""
    scores, decisions = [], []
    for source, game in zip(sources, games, strict=True):
        about = {"policy": policy, "kind": kind, "source": source, "group": game.graph.fingerprint[:16]}
        scores.append(
            about
            | {
                "nodes": len(game.graph),
                "score": game.gain,
                "calibrated_score": float(np.clip(game.gain / 0.2, -1, 1)),
                "valid": game.valid,
                "invalid": game.invalid,
                "finished": not game.env.episode.truncated,
            }
        )
        decisions += [about | vars(decision) for decision in game.decisions]
    return pd.DataFrame(scores), pd.DataFrame(decisions, columns=[*about, "position", "node", "label", "retained"])


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Play everything that has not been played yet, and write the table, the figure and the numbers.

    Raises:
        TrainingError: if the adapters were trained on different hardware, or have no record of it.
        SubjectError, BaseModelError: if one cannot be loaded.
    """
    start = time.monotonic()
    records = {folder: _record(folder) for folder in options.adapter}
    hardware = _one_hardware(records)
    seen = set().union(*map(trained_on, options.adapter))
    graphs = [(task, on(hardware, load_task(task))) for task in TASKS]
    graphs += unseen_graphs(options.graphs, options.seed, hardware, options.largest, seen)
    sources, played = [source for source, _ in graphs], [graph for _, graph in graphs]
    tables = [ValueTable(graph) for graph in tqdm(played, "planner", disable=options.quiet)]
    options.out.mkdir(parents=True, exist_ok=True)
    setting = [hardware, options.dtype, [graph.fingerprint for graph in played]]
    frames = []

    def run(name: str, kind: str, answers: Answers, *identity: str) -> None:
        key = hashlib.sha256(json.dumps([name, *setting, *identity]).encode()).hexdigest()[:24]
        frames.append(_kept(options.out / "results.partial" / key, lambda: rows_of(
            name, kind, sources, play(played, tables, answers))))  # fmt: skip

    for name, answers in tqdm(fixed_policies(played).items(), "fixed policies", disable=options.quiet):
        run(name, "fixed", answers)
    for folder in tqdm(options.adapter, "adapters", disable=options.quiet):
        subject = Subject.load(folder, options.base, dtype=options.dtype)
        if folder == options.adapter[0]:
            with subject.base():
                run("base model", "base", model_answers(subject), json.dumps(subject.base_identity))
        subject.model.merge_adapter()  # twice as fast, and never switched again
        run(folder.resolve().name, "adapter", model_answers(subject), subject.adapter_sha256)
    scores, decisions = (pd.concat(parts, ignore_index=True) for parts in zip(*frames, strict=True))
    scores.to_parquet(options.out / "results.parquet", index=False)
    decisions.to_parquet(options.out / "decisions.parquet", index=False)
    summary = summarise(scores, decisions, options.seed) | {
        "hardware": hardware,
        "graphs": options.graphs,
        "largest": options.largest,
        "dtype": options.dtype,
        "command": shlex.join(["python", "-m", "env.training.evaluate", *options.argv]),
        "wall_seconds": round(time.monotonic() - start, 1),
        "threads": torch.get_num_threads(),
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")
    save(plot(summary), options.out / "evaluation")
    return summary


def _kept(stem: Path, make: Callable[[], tuple[pd.DataFrame, pd.DataFrame]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What an interrupted call has left, or what is made now; the second file is the sign that both are whole."""
    files = [stem.with_name(f"{stem.name}.{part}.parquet") for part in ("scores", "decisions")]
    if not files[1].exists():
        stem.parent.mkdir(exist_ok=True)
        for frame, file in zip(make(), files, strict=True):
            unfinished = file.with_suffix(".unfinished")
            frame.to_parquet(unfinished, index=False)
            unfinished.replace(file)
    return pd.read_parquet(files[0]), pd.read_parquet(files[1])


def _record(folder: Path) -> dict[str, Any]:
    file = folder / "workbench.json"
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise TrainingError(f"{file}: expected the record of a training run, found {error}") from None
    return dict(record)


def _one_hardware(records: dict[Path, dict[str, Any]]) -> str:
    found = {str(record.get("hardware", "published")) for record in records.values()}
    if len(found) > 1:
        raise TrainingError(f"--adapter: expected adapters trained on the same hardware, found {', '.join(found)}")
    return found.pop()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m env.training.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--adapter", type=Path, nargs="+", required=True, metavar="DIR", help="adapter folders, of one hardware")
    add("--base", metavar="DIR|NAME", help="base model (default: what adapter_config.json names)")
    add("--graphs", type=int, default=100, help="unseen random graphs (%(default)s)")
    add("--largest", type=int, default=12, metavar="N", help="caps their nodes, as in training (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="trained in bfloat16 (%(default)s)")
    add("--out", type=Path, metavar="DIR", help="default: reports/training/<name of the last adapter folder>")
    add("--seed", type=int, default=0, help="of the graphs and of the resampling (%(default)s)")
    add("--quiet", action="store_true", help="no progress bar and no table")
    options = parser.parse_args(argv)
    options.argv = list(sys.argv[1:] if argv is None else argv)
    options.out = options.out or Path("reports/training") / options.adapter[-1].resolve().name
    try:
        summary = evaluate(options)
    except (TrainingError, SubjectError, BaseModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(table(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
