"""What the page draws of an episode: one JSON object that holds everything, whatever the agent is shown."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from env.scheduler.boundary import PlannerError
from env.scheduler.graph import Graph
from env.scheduler.planner import best_latency, plan, retain_values
from env.scheduler.planner_work import MOST_PLANNER_WORK, planner_work
from env.scheduler.rules import DOCUMENTED, calibrated
from env.scheduler.scheduler import SchedulerEnv
from env.scheduler.values import ValueTable


def view(env: SchedulerEnv) -> dict[str, Any]:
    """The state of an episode for drawing, JSON-safe.

    Returns:
        `name`, `rules`, `ended`; `nodes` (`id`, `op`, `shape`, `inputs`, `bytes`, `uses_left`; `state`: pending,
        in_kernel or done; `kernel`: an index into `kernels` once that one has run), `order`, `current` (null when all
        are placed), `kernels` (`nodes`, `tile`, `retained`, `latency` in cycles), `open_kernel` (`nodes`, `tile`,
        `retain`), `fast_mem` (`id`, `bytes`), `capacity` (bytes), `max_fusion`; in cycles `latency` (of the kernels
        that have run), `greedy`, `naive`, `optimum` and `best_from_here` (the fastest schedule, and the fastest that
        agrees with the episode so far; null where the planner does not apply); `score` in the unit of the rules and
        `calibrated_score`, both of the latency so far.
    """
    episode, graph = env.episode, env.graph
    kernel_of = {i: index for index, kernel in enumerate(episode.kernels) for i in kernel.members}
    opened = episode.kernel
    gain = (env.greedy_latency - episode.latency) / env.greedy_latency if env.greedy_latency else 0.0
    return {
        "name": graph.id,
        "rules": env.rules.name,
        "ended": episode.ended,
        "nodes": [
            {
                "id": node.id,
                "op": node.op,
                "shape": list(node.shape),
                "inputs": list(node.inputs),
                "bytes": node.output_bytes,
                "uses_left": episode.uses[node.id],
                "state": "done" if node.id in kernel_of else "in_kernel" if node.id in opened.members else "pending",
                "kernel": kernel_of.get(node.id),
            }
            for node in graph.nodes
        ],
        "order": list(graph.order),
        "current": episode.current if episode.current >= 0 else None,
        "kernels": [
            {
                "nodes": list(kernel.members),
                "tile": kernel.tile,
                "retained": _ids(kernel.retain),
                "latency": kernel.latency,
            }
            for kernel in episode.kernels
        ],
        "open_kernel": {"nodes": list(opened.members), "tile": opened.tile, "retain": _ids(opened.retain)},
        "fast_mem": [{"id": i, "bytes": graph.sizes[i]} for i in sorted(episode.fast)],
        "capacity": graph.hardware.fast_mem_capacity,
        "latency": episode.latency,
        "greedy": env.greedy_latency,
        "optimum": optimum(env),
        "best_from_here": _best_from_here(env),
        "naive": env.naive_latency,
        "score": env.score,
        "calibrated_score": calibrated(gain),
        "max_fusion": graph.hardware.max_fusion_depth,
    }


def optimum(env: SchedulerEnv) -> float | None:
    """Cycles of the fastest schedule; None if it is not known: other rules, too large a graph, or one not proved."""
    return _optimum(env.graph) if why_no_planner(env) is None else None


def worth(env: SchedulerEnv) -> dict[str, Any]:
    """What keeping each tensor is worth at this moment, under optimal play on either side.

    Returns:
        `retain`: by tensor `id`, `worth_cycles` (negative where keeping it costs), `worth_share_of_greedy` (the same
        over greedy's latency) and `kind` (pays, costs, does_not_matter); `why_not`: why it is empty, or null.
    """
    reason = why_no_planner(env)
    if reason is None and env.episode.ended:
        reason = "the episode has ended"
    if reason is not None:
        return {"retain": [], "why_not": reason}
    try:
        values = retain_values(value_table(env.graph), env.episode)
    except PlannerError as error:
        return {"retain": [], "why_not": str(error)}
    retain = [
        {
            "id": value.node,
            "worth_cycles": value.cycles,
            "worth_share_of_greedy": value.cycles / env.greedy_latency,
            "kind": value.label(env.greedy_latency).replace(" ", "_"),
        }
        for value in values
    ]
    return {"retain": retain, "why_not": None}


def why_no_planner(env: SchedulerEnv) -> str | None:
    """Why the planner says nothing of an episode, or None if it does."""
    if env.rules is not DOCUMENTED:
        return f"the planner knows the documented rules, not the {env.rules.name} ones"
    if planner_work(env.graph) > MOST_PLANNER_WORK:
        return "graph too large for the planner"
    return None


@lru_cache(maxsize=32)
def value_table(graph: Graph) -> ValueTable:
    """The value table of a graph, kept for the steps that ask for it."""
    return ValueTable(graph)


@lru_cache(maxsize=256)
def _optimum(graph: Graph) -> float | None:
    best = plan(graph)
    return best.latency if best.optimal else None


def _best_from_here(env: SchedulerEnv) -> float | None:
    if why_no_planner(env) is not None or not value_table(env.graph).exact:
        return None
    return best_latency(value_table(env.graph), env.episode)


def _ids(retain: tuple[float, ...]) -> list[int]:
    """A retain list's ids: the published rules let other numbers into it."""
    return [int(i) for i in retain if i == int(i)]
