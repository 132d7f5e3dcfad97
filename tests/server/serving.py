"""A server in a process of its own, and episodes whose end is known."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from env.scheduler import SchedulerEnv, curriculum_graph, load_task
from env.scheduler.action import Action
from env.scheduler.policies import heuristic


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[str, int]]:
    """Address and process id of `python -m env.server` at a free port; interrupted at the end, quietly."""
    command = [sys.executable, "-m", "env.server", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        assert found, f"expected an address, found {line!r}: {process.communicate()[1]}"
        yield found[0], process.pid
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class KnownEpisode:
    """An episode played here.

    Attributes:
        reset: the body that asks for its graph.
        first: the first observation.
        actions: the texts.
        observations: what each is answered with.
        latency: cycles at the end.
        score: at the end.
    """

    reset: dict[str, Any]
    first: str
    actions: tuple[str, ...]
    observations: tuple[str, ...]
    latency: float
    score: float


def known_episode(seed: int) -> KnownEpisode:
    """An episode of a fixed task or of a random graph, played partly by the heuristic, partly at random, with a few
    invalid texts."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        reset: dict[str, Any] = {"random": True, "curriculum_level": 0.1, "seed": seed}
        graph = curriculum_graph(0.1, rng=np.random.default_rng(seed), name=f"curriculum-0.1-s{seed}")
    else:
        reset = {"task": ("task1_chain", "task2_residual", "task4_mixed")[seed // 2 % 3]}
        graph = load_task(reset["task"])
    env = SchedulerEnv(graph)
    first, _ = env.reset()
    texts: list[str] = []
    observations = [first]
    done = False
    while not done:
        draw = rng.random()
        if draw < 0.05:
            text = "fuse it"
        elif draw < 0.5:
            text = heuristic(json.loads(observations[-1])).to_text()
        else:
            retain = tuple(int(i) for i in rng.integers(0, len(graph), 2))
            text = Action(bool(rng.integers(2)), int(rng.choice([32, 64, 128, 256])), retain).to_text()
        observation, _, terminated, truncated, _ = env.step(text)
        texts.append(text)
        observations.append(observation)
        done = terminated or truncated
    return KnownEpisode(reset, first, tuple(texts), tuple(observations[1:]), env.episode.latency, env.score)
