"""Ordinary scheduler states, with what the planner thinks of every tensor that could be retained there.

Episodes on random graphs of 8 to 14 nodes, for which the planner is instant; states off the teacher's path occur too
(`counterfactuals.scheduler.play`). The reference answer is the heuristic's.

A retain list takes effect when its kernel ends, and the last one of a kernel decides: a list in the middle of a kernel
is overwritten. So only states are taken at which the list has credit: played on by the heuristic, the kernel ends with
the current node, and at least one tensor with uses left can be kept.

Labels:
    planner_retains: id -> `pays`, `costs` or `does_not_matter`, of every tensor that the action can name with effect
        (`env.scheduler.planner.retain_values`). It is the value of the kernel that takes in the current node ending
        with the tensor in fast memory, everything else played best on either side.
    planner_value: id -> cycles saved by retaining it, in percent of greedy's latency; negative where it costs.
    heuristic_retain: the ids that the reference answer lists.
    kernel_must_end: whether no action at all could have gone on with this kernel (the planner's value is then that of
        this very list); otherwise it is the heuristic that ends it.
    off_path: whether an earlier action of the episode is not the heuristic's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.random import Generator

from counterfactuals.decision import Decision
from counterfactuals.pair import PairError
from counterfactuals.scheduler import play, random_graph
from env.scheduler import Action, Graph, SchedulerEnv
from env.scheduler.cost import TILES
from env.scheduler.hardware import HARDWARE
from env.scheduler.planner import RetainValue, retain_values
from env.scheduler.policies import heuristic
from env.scheduler.prompts import SYSTEM_PROMPT, messages
from env.scheduler.values import ValueTable

SIZES = (8, 14)
PER_GRAPH = 2
FIELDS = ("current_node", "current_group", "fast_mem", "future_uses", "lookahead")
_STREAM = 1000  # apart from the streams of the kinds of pairs, which are numbered from 0
_COUNT = re.compile(r'"(\d+)":(\d+)')


def generate_decisions(
    count: int,
    seed: int,
    *,
    system: str = SYSTEM_PROMPT,
    rules: str = "documented",
    hardware: str = "published",
) -> list[Decision]:
    """Decisions of random graphs, at most `PER_GRAPH` of each graph.

    Args:
        count: how many.
        seed: names the decisions for ever; a larger count with the same seed begins with the same ones.
        system: the system prompt that the agent was trained with.
        rules: the rule set that it was trained under.
        hardware: `published` or `bandwidth_bound`, the machines that it was trained on.

    Raises:
        PairError: if an argument is not as said. The planner and the heuristic know the documented rules only.
    """
    if rules != "documented":
        raise PairError(f"rules: expected documented, the ones that the planner knows, found {rules!r}")
    if hardware not in HARDWARE:
        raise PairError(f"hardware: expected one of {', '.join(HARDWARE)}, found {hardware!r}")
    prefix = "decision" if hardware == "published" else f"decision-{hardware}"
    decisions: list[Decision] = []
    draw = 0
    while len(decisions) < count:
        rng = np.random.default_rng([seed, _STREAM, draw])
        graph = random_graph(rng, hardware, SIZES)
        decisions += _of_graph(f"{prefix}-{seed}-{draw}", graph, rng, system)
        draw += 1
    return decisions[:count]


def _of_graph(name: str, graph: Graph, rng: Generator, system: str) -> list[Decision]:
    """Some of the states of one episode that qualify, drawn at random, in the order of the episode."""
    table = ValueTable(graph)
    actions = play(graph, len(graph) - 1, rng)
    found = []
    for env in _states(graph, actions):
        values = retain_values(table, env.episode)
        if values and _ends_kernel(env):
            found.append((env, values))
    chosen = [found[i] for i in sorted(rng.permutation(len(found))[:PER_GRAPH])]
    return [_decision(f"{name}-{env.episode.position}", env, values, actions, system) for env, values in chosen]


def _states(graph: Graph, actions: tuple[str, ...]) -> Iterator[SchedulerEnv]:
    """The states after each action, less the last one's: at the last node nothing has uses left."""
    env = SchedulerEnv(graph)
    env.reset()
    for action in actions[:-1]:
        env.step(action)
        yield env.clone()


def _ends_kernel(env: SchedulerEnv) -> bool:
    """Whether the heuristic, playing on, ends the kernel with the current node."""
    after = env.clone()
    text, *_ = after.step(_reference(env).to_text())
    return not _goes_on(after, heuristic(json.loads(text)))


def _must_end(env: SchedulerEnv) -> bool:
    """Whether the kernel ends with the current node even if the next action asks for the least demanding fusion."""
    after = env.clone()
    after.step(_reference(env).to_text())
    return not _goes_on(after, Action(True, TILES[0], ()))


def _goes_on(env: SchedulerEnv, action: Action) -> bool:
    """Whether the open kernel takes in the current node if it is placed so."""
    opened = env.episode.kernel.members
    env.step(action.to_text())
    return env.episode.kernel.members[: len(opened)] == opened


def _reference(env: SchedulerEnv) -> Action:
    return heuristic(json.loads(env.observation()))


def _decision(
    name: str, env: SchedulerEnv, values: tuple[RetainValue, ...], actions: tuple[str, ...], system: str
) -> Decision:
    text, action, graph, position = env.observation(), _reference(env), env.graph, env.episode.position
    greedy = env.greedy_latency
    return Decision(
        id=name,
        environment="scheduler",
        group=graph.fingerprint[:16],
        messages=messages(text, system),
        action=action.to_text(),
        slots=_slots(action),
        choices=_choices(env, action),
        spans=_spans(text),
        labels={
            "planner_retains": {str(v.node): v.label(greedy).replace(" ", "_") for v in values},
            "planner_value": {str(v.node): round(v.percent(greedy), 4) for v in values},
            "heuristic_retain": list(action.retain),
            "kernel_must_end": _must_end(env),
            "off_path": _off_path(graph, actions[:position]),
        },
        meta={"graph": graph.to_json(), "actions": list(actions[:position])},
    )


def _off_path(graph: Graph, actions: tuple[str, ...]) -> bool:
    env = SchedulerEnv(graph)
    for action in actions:
        if _reference(env).to_text() != action:
            return True
        env.step(action)
    return False


def _slots(action: Action) -> dict[str, tuple[int, int]]:
    text = action.to_text()
    slots = {}
    for name in ("fuse_with_prev", "tile", "retain"):
        opening = f'"{name}": '
        start = text.index(opening) + len(opening)
        _, end = json.JSONDecoder().raw_decode(text, start)
        slots[name] = (start, end)
    return slots


def _choices(env: SchedulerEnv, action: Action) -> dict[str, tuple[str, ...]]:
    """For `retain`: nothing, each tensor that may be listed alone, and the reference's own list."""
    episode = env.episode
    named = {*episode.fast, *episode.kernel.members, *episode.graph.inputs[episode.current], episode.current}
    lists: list[tuple[int, ...]] = [(), *((i,) for i in sorted(named)), action.retain]
    return {
        "fuse_with_prev": ("true", "false"),
        "tile": tuple(map(str, TILES)),
        "retain": tuple(dict.fromkeys(json.dumps(list(ids)) for ids in lists)),
    }


def _spans(text: str) -> dict[str, Any]:
    """Characters of an observation: whole fields, and the key and the value of every entry of `future_uses`."""
    spans = {}
    for name in FIELDS:
        opening = f'"{name}":'
        start = text.index(opening) + len(opening)
        _, end = json.JSONDecoder().raw_decode(text, start)
        spans[name] = (start, end)
    for entry in _COUNT.finditer(text, *spans["future_uses"]):
        spans |= {f"key:{entry[1]}": entry.span(1), f"value:{entry[1]}": entry.span(2)}
    return spans
