"""Steps and kernel costs per second of the scheduler, on one core.

    python tests/benchmarks/environment.py

A step is everything between an action text and the next observation text. The recorded episodes of the published
environment are replayed whole, under both rule sets, episodes and observations included; kernel costs are the recorded
direct calls, with the tables of a graph kept (as in an episode) and made anew for every call.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

from env.scheduler import Graph, SchedulerEnv
from env.scheduler.cost import Roofline
from env.scheduler.rules import UPSTREAM

DATA = Path(__file__).parents[1] / "data"


def _graphs():
    names = ("v2_tasks.json", "v2_graphs.json", "v2_extra_graphs.json")
    records = [record for name in names for record in json.loads((DATA / name).read_text())["graphs"]]
    return {record["id"]: Graph.from_json(record) for record in records}


def recorded_episodes(graphs, rules):
    """(environment, action texts) of the recorded episodes; hand-made graphs, some without memory, are left out."""
    records = map(json.loads, (DATA / "v2_episodes.jsonl").read_text().splitlines())
    return [
        (
            SchedulerEnv(graphs[record["graph"]], rules=rules),
            [step["action"].get("text") or json.dumps(step["action"]) for step in record["steps"]],
        )
        for record in records
        if not record["graph"].startswith("x")
    ]


def steps_per_second(episodes):
    steps = 0
    start = time.perf_counter()
    for env, texts in episodes:
        env.reset()
        for text in texts:
            env.step(text)
            steps += 1
    return steps / (time.perf_counter() - start)


def costs_per_second(graphs, keep_tables):
    calls = [json.loads(line) for line in (DATA / "v2_group_cost.jsonl").read_text().splitlines()]
    rooflines = {name: Roofline(graph) for name, graph in graphs.items()}
    arguments = [(c["graph"], tuple(c["node_ids"]), c["tile"], tuple(c["retained"]), set(c["fast_mem"])) for c in calls]
    for graph, *rest in arguments:
        UPSTREAM.kernel_cost(rooflines[graph], *rest)
    count = 0
    start = time.perf_counter()
    for _ in range(30):
        for graph, *rest in arguments:
            if not keep_tables:
                rooflines[graph].forget_kernels()
            UPSTREAM.kernel_cost(rooflines[graph], *rest)
            count += 1
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    graphs = _graphs()
    documented, upstream = (recorded_episodes(graphs, rules) for rules in ("documented", "upstream"))
    rows = {
        "steps/s, documented": lambda: steps_per_second(documented),
        "steps/s, upstream": lambda: steps_per_second(upstream),
        "kernel costs/s, tables kept": lambda: costs_per_second(graphs, True),
        "kernel costs/s, kernels looked at anew": lambda: costs_per_second(graphs, False),
    }
    for name, measure in rows.items():
        rates = sorted(measure() for _ in range(rounds))
        print(f"{name:40} {median(rates):>10,.0f}   (lowest {rates[0]:,.0f}, highest {rates[-1]:,.0f})")


if __name__ == "__main__":
    main()
