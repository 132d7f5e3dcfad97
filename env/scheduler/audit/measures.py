"""The graphs of the audit, and what is measured of each: one value a row, nothing averaged.

Schedules come from the planner and from policies, all under the documented rules; the same actions are then replayed in
the published environment. What is measured (unit), under both rule sets unless said otherwise:

* improvement (% of greedy): (greedy - latency) / greedy of a schedule, greedy's latency being that of the same rules.
* worth (% of greedy): the improvement of the optimum less that of the best schedule without fusion, with tile 128 only,
  or without retention.
* retention_gap (%): latency that retention takes off the best schedule without it.
* tile_sensitivity (%): latency of the slowest of the four answers "fuse, tile t, retain nothing" above the fastest.
* kernel_tile_sensitivity (%): the same for a kernel of one node and the tiles that it fits at; the most of any node.
* reward_spread: standard deviation of the return (sum of rewards) of random episodes.
* decisions (% of all decisions; documented only): retain decisions that pay, cost or do not matter, along the optimal
  schedule and the heuristic's. Every tensor that an action may name with effect is one decision (`retain_values`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from env.scheduler.action import Action
from env.scheduler.cost import TILES, Roofline
from env.scheduler.graph import Graph, GraphError
from env.scheduler.hardware import preset
from env.scheduler.planner import Label, plan, retain_values
from env.scheduler.policies import heuristic, naive
from env.scheduler.real import REAL_GRAPHS, load_real
from env.scheduler.rules import DOCUMENTED, RULES
from env.scheduler.scheduler import SchedulerEnv
from env.scheduler.state import Episode
from env.scheduler.tasks import TASKS, load_task
from env.scheduler.topologies import SIDES, TOPOLOGIES, generate_graph
from env.scheduler.values import ValueTable

SMALLEST, LARGEST = 12, 32
RANDOM_EPISODES = 16
FREEDOMS: Mapping[str, Mapping[str, Any]] = {
    "fusion": {"fusion": False},
    "tiles": {"tile": 128},
    "retention": {"retention": False},
}

Row = dict[str, Any]
Actions = Sequence[Action]


@dataclass(frozen=True)
class Case:
    """A graph on a machine; `kind` is random, task or real, `topology` the family of a random graph."""

    preset: str
    kind: str
    topology: str
    graph: Graph


def cases(presets: Sequence[str], count: int, seed: int) -> list[Case]:
    """The same graphs on each machine: `count` random ones (the published families in turn, 12 to 32 nodes, square
    tensors of one size), the fixed tasks and the real graphs."""
    graphs: list[tuple[str, str, Graph]] = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        topology = TOPOLOGIES[number % len(TOPOLOGIES)]
        size, side = int(rng.integers(SMALLEST, LARGEST + 1)), int(rng.choice(SIDES))
        name = f"random{number}_{topology}_{size}_{side}"
        graphs.append(("random", topology, generate_graph(size, "medium", topology, (side, side), rng=rng, name=name)))
    graphs += [("task", "", load_task(name)) for name in TASKS]
    graphs += [("real", "", load_real(name)) for name in REAL_GRAPHS]
    return [Case(name, kind, topology, preset(name, graph)) for name in presets for kind, topology, graph in graphs]


def measure(case: Case, seed: int) -> tuple[list[Row], list[str]]:
    """Rows of a case, and what had to be left out of it and why."""
    graph = case.graph
    about = {"preset": case.preset, "kind": case.kind, "graph": graph.id, "topology": case.topology}
    about["nodes"] = str(len(graph))
    try:
        schedules = documented_schedules(graph)
    except GraphError as error:
        return [], [f"{case.preset}: {error}"]
    rng = np.random.default_rng([seed, *graph.id.encode()])
    random_actions = [random_schedule(graph, rng) for _ in range(RANDOM_EPISODES)]
    found: list[tuple[str, str, str, float]] = []
    left_out = []
    for rules in RULES:
        if rules == "upstream" and (hopeless := hopeless_nodes(graph)):
            reason = f"upstream: nodes {hopeless} do not fit at tile 128, its fallback"
            left_out.append(f"{case.preset}: graph {graph.id}, {reason}")
            continue
        env = SchedulerEnv(graph, rules=rules)
        found += [(rules, *row) for row in _of_schedules(env, schedules)]
        spread = float(np.std([_replay(env, actions)[1] for actions in random_actions]))
        found.append((rules, "reward_spread", "", spread))
        found.append((rules, "kernel_tile_sensitivity", "", kernel_tile_sensitivity(env)))
    found += [("documented", "decisions", label, share) for label, share in decision_shares(graph, schedules).items()]
    names = ("rules", "metric", "of", "value")
    return [about | dict(zip(names, row, strict=True)) for row in found], left_out


def documented_schedules(graph: Graph) -> dict[str, Actions]:
    """The planner's and the policies' actions, by name.

    Raises:
        GraphError: if the graph cannot be scheduled under the documented rules.
    """
    schedules: dict[str, Actions] = {"optimum": plan(graph).actions}
    for freedom, without in FREEDOMS.items():
        schedules[f"optimum without {freedom}"] = plan(graph, **without).actions
    for tile in TILES:
        schedules[f"fuse, {tile}, nothing"] = [Action(True, tile)] * len(graph)
    env = SchedulerEnv(graph)
    text, _ = env.reset()
    taught = []
    for _ in graph.nodes:
        taught.append(heuristic(json.loads(text)))
        text, *_ = env.step(taught[-1].to_text())
    schedules["heuristic"] = taught
    schedules["naive"] = [naive(env.episode)] * len(graph)
    return schedules


def random_schedule(graph: Graph, rng: np.random.Generator) -> Actions:
    """Random answers: fuse or not, any tile, and each tensor with uses left retained or not."""
    last_use = [max((graph.positions[c] for c in readers), default=-1) for readers in graph.consumers]
    actions = []
    for position in range(len(graph)):
        alive = [i for i in graph.order[: position + 1] if last_use[i] > position]
        retain = tuple(i for i in alive if rng.random() < 0.5)
        actions.append(Action(bool(rng.random() < 0.5), int(rng.choice(TILES)), retain))
    return actions


def hopeless_nodes(graph: Graph) -> list[int]:
    """Nodes that the published environment's fallback, alone at tile 128, cannot run: each costs a million cycles
    there, which drowns everything else."""
    roofline, upstream = Roofline(graph), RULES["upstream"]
    return [i for i in graph.order if not upstream.kernel_cost(roofline, (i,), 128, (), {}).fits]


def kernel_tile_sensitivity(env: SchedulerEnv) -> float:
    """Percent by which the slowest tile of a kernel of one node is above the fastest, at most over the nodes."""
    most = 0.0
    for node in env.graph.order:
        costs = [env.rules.kernel_cost(env.roofline, (node,), tile, (), {}) for tile in TILES]
        totals = [cost.total for cost in costs if cost.fits]
        if totals:
            most = max(most, 100 * (max(totals) / min(totals) - 1))
    return most


def decision_shares(graph: Graph, schedules: Mapping[str, Actions]) -> dict[str, float]:
    """Percent of the retain decisions by label; empty if there is none."""
    table, counts = ValueTable(graph), Counter[str]()
    greedy = SchedulerEnv(graph).greedy_latency
    for name in ("optimum", "heuristic"):
        episode = Episode(table.roofline)
        for action in schedules[name]:
            counts.update(value.label(greedy) for value in retain_values(table, episode))
            DOCUMENTED.place(episode, action, greedy)
    return {label: 100 * counts[label] / counts.total() for label in get_args(Label)} if counts else {}


def _of_schedules(env: SchedulerEnv, schedules: Mapping[str, Actions]) -> list[tuple[str, str, float]]:
    greedy = env.greedy_latency
    latencies = {name: _replay(env, actions)[0] for name, actions in schedules.items()}
    gains = {name: 100 * (greedy - latency) / greedy for name, latency in latencies.items()}
    rows = [("improvement", name, gain) for name, gain in gains.items()]
    rows += [("worth", name, gains["optimum"] - gains[f"optimum without {name}"]) for name in FREEDOMS]
    rows.append(("retention_gap", "", 100 * (1 - latencies["optimum"] / latencies["optimum without retention"])))
    by_tile = [latencies[f"fuse, {tile}, nothing"] for tile in TILES]
    rows.append(("tile_sensitivity", "", 100 * (max(by_tile) / min(by_tile) - 1)))
    return rows


def _replay(env: SchedulerEnv, actions: Actions) -> tuple[float, float]:
    """Latency in cycles, and return."""
    env.reset()
    steps = [env.step(action.to_text()) for action in actions]
    return steps[-1][-1]["total_latency"], sum(reward for _, reward, *_ in steps)
