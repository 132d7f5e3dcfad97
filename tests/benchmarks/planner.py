"""Seconds to plan a graph to proven optimality, to value every retain decision of an episode, and the table's size.

    python tests/benchmarks/planner.py

Mixed graphs of the published generator on the published machines and with a fraction of the bandwidth; the episode is
the greedy schedule.
"""

import argparse
import time
from statistics import median

import numpy as np

from env.scheduler import generate_graph
from env.scheduler.hardware import DIFFICULTIES
from env.scheduler.planner import plan, retain_values
from env.scheduler.policies import greedy
from env.scheduler.rules import DOCUMENTED
from env.scheduler.state import Episode
from env.scheduler.values import ValueTable

SIZES = (8, 16, 24, 32, 50)


def seconds(function, argument):
    start = time.perf_counter()
    result = function(argument)
    return time.perf_counter() - start, result


def label_episode(table):
    episode = Episode(table.roofline)
    decisions = 0
    while episode.current >= 0:
        decisions += len(retain_values(table, episode))
        DOCUMENTED.place(episode, greedy(episode), 1.0)
    return decisions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=3, help="for each size and machine (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machines = [*DIFFICULTIES, *(f"{name}_bandwidth_bound" for name in DIFFICULTIES)]
    print(f"{'nodes':>5} {'plan, median s':>15} {'worst s':>8} {'states':>7} {'labels, median s':>17} {'worst s':>8}")
    for size in SIZES:
        rng = np.random.default_rng([options.seed, size])
        graphs = [generate_graph(size, machine, rng=rng) for machine in machines for _ in range(options.graphs)]
        plans = [seconds(plan, graph) for graph in graphs]
        assert all(found.optimal for _, found in plans)
        labels = [seconds(label_episode, ValueTable(graph))[0] for graph in graphs]
        times = [elapsed for elapsed, _ in plans]
        states = max(found.states for _, found in plans)
        print(
            f"{size:5} {median(times):15.3f} {max(times):8.3f} {states:7} {median(labels):17.3f} {max(labels):8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
