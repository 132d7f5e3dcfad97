"""Which graph an episode is about.

Every draw of episode e comes from a generator of its own, named by the run's seed and e. (The published loop reseeded
the process-wide source whenever it loaded a fixed task, so that 344 of its 400 episodes were the same task.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from env.scheduler import TASKS, Graph, load_task
from env.scheduler.hardware import on
from env.scheduler.topologies import curriculum_graph

RANDOM_SHARE = 0.6
LEVELS = (0.2, 0.8)
SAMPLE = 48
SEED_OFFSET = 2_000_000


@dataclass(frozen=True)
class Curriculum:
    """The published mix: 60 % random graphs whose level climbs from 0.2 to 0.8, and 40 % fixed tasks.

    Attributes:
        episodes: how many the run has; the level climbs linearly over them.
        seed: of the run.
        hardware: `published`, or `bandwidth_bound`: every graph on the machine of its difficulty with less bandwidth.
        largest: caps the nodes of random graphs; the published ones have up to 50.
        only_task: a task that every episode is about instead, None for the mix.
    """

    episodes: int
    seed: int
    hardware: str = "published"
    largest: int = 12
    only_task: str | None = None

    def graph(self, episode: int) -> tuple[Graph, str]:
        """The graph of an episode, counted from 0, and where it comes from: `task2_residual`, `random 0.53`."""
        rng = np.random.default_rng([self.seed, *b"curriculum", episode])
        if self.only_task is not None:
            graph, source = load_task(self.only_task), self.only_task
        elif rng.random() < RANDOM_SHARE:
            level = LEVELS[0] + (LEVELS[1] - LEVELS[0]) * episode / max(1, self.episodes - 1)
            graph = curriculum_graph(level, rng=rng, largest=self.largest)
            source = f"random {level:.2f}"
        else:
            source = str(rng.choice(TASKS))
            graph = load_task(source)
        return on(self.hardware, graph), source

    def sample(self, count: int = SAMPLE) -> list[Graph]:
        """Graphs like the run's, from its first episode to its last, drawn with another seed."""
        other = replace(self, seed=self.seed + SEED_OFFSET)
        numbers = np.linspace(0, self.episodes - 1, count).round().astype(int)
        return [other.graph(int(number))[0] for number in numbers]
