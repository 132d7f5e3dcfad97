"""Pairs of scheduler observations that the environment itself proves to differ in one count only.

Two graphs differ only in whether far consumers of a node k (beyond the lookahead) read it. The same actions are
replayed in both. The two observations are compared field by field and refused unless `future_uses["k"]` is their only
difference: c in A, 0 in B. What A and B call for is what the heuristic answers. A pair carries its graphs and
actions, so that `prove` can repeat all of it.

Kinds:
    future_uses: the main kind. k is the current node or a tensor in fast memory; A calls for `[k]`, B for `[]`.
    dose: the same, several pairs that share graph B and k, one for each count in `DOSES`.
    other_key: the count that differs is that of a tensor j that cannot be retained; answer and foil are still about the
        current node k, so the decision should not move.
    identical: A is B; nothing may move at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from counterfactuals.pair import CounterfactualPair, PairError
from env.scheduler import Action, Graph, SchedulerEnv, generate_graph
from env.scheduler.cost import TILES
from env.scheduler.hardware import HARDWARE, on
from env.scheduler.observation import LOOKAHEAD
from env.scheduler.policies import heuristic
from env.scheduler.prompts import SYSTEM_PROMPT, messages
from env.scheduler.topologies import DIFFICULTIES, SIDES, TOPOLOGIES

KINDS = ("future_uses", "dose", "other_key", "identical")
DOSES = (1, 2, 3, 5, 9)
LARGEST_COUNT = 9
SIZES = (8, 20)
TEACHER_SHARE = 0.75
ATTEMPTS = 2000


class PairRefused(PairError):
    """The environment does not prove that two observations differ in one count only."""


@dataclass(frozen=True)
class Difference:
    """Two states that differ in one fact.

    Attributes:
        graph: graph B, in which no node after `len(actions)` reads `node`.
        readers: the far nodes that read it in graph A.
        node: whose count differs.
        actions: texts played in both graphs before the observations are taken.
    """

    graph: Graph
    readers: tuple[int, ...]
    node: int
    actions: tuple[str, ...]

    @property
    def current(self) -> int:
        """The node that the observations ask about."""
        return self.graph.order[len(self.actions)]

    @property
    def graph_a(self) -> Graph:
        """The graph of A, in which `readers` read the node as well; that of B is `graph`."""
        nodes = [replace(n, inputs=(*n.inputs, self.node)) if n.id in self.readers else n for n in self.graph.nodes]
        return replace(self.graph, nodes=tuple(nodes))

    def observations(self) -> tuple[str, str]:
        """A's and B's observation, by replay.

        Raises:
            PairRefused: unless `future_uses[node]` is their only difference: the number of readers in A, 0 in B.
        """
        text_a, text_b = replay(self.graph_a, self.actions), replay(self.graph, self.actions)
        a, b = json.loads(text_a), json.loads(text_b)
        key, count = str(self.node), len(self.readers)
        differing = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        if differing not in (["future_uses"], []):
            raise PairRefused(f"expected observations that differ in future_uses only, found {', '.join(differing)}")
        uses_a, uses_b = a["future_uses"], b["future_uses"]
        differing = [name for name in {**uses_a, **uses_b} if uses_a.get(name) != uses_b.get(name)]
        if differing != ([key] if count else []):
            raise PairRefused(
                f"expected future_uses to differ in {key} only, found {', '.join(differing) or 'nothing'}"
            )
        if (uses_a.get(key), uses_b.get(key)) != (count, 0):
            raise PairRefused(f"expected counts {count} and 0 of {key}, found {uses_a.get(key)} and {uses_b.get(key)}")
        return text_a, text_b


def replay(graph: Graph, actions: Sequence[str]) -> str:
    """The observation after some action texts, under the documented rules."""
    env = SchedulerEnv(graph)
    observation, _ = env.reset()
    for action in actions:
        observation, *_ = env.step(action)
    return observation


def generate_pairs(
    count: int,
    seed: int,
    *,
    kind: str = "future_uses",
    system: str = SYSTEM_PROMPT,
    rules: str = "documented",
    hardware: str = "published",
) -> list[CounterfactualPair]:
    """Pairs of one kind, each from a graph of its own (the doses of one k share theirs).

    Args:
        count: how many pairs.
        seed: names the pairs for ever; a larger count with the same seed begins with the same pairs.
        kind: one of `KINDS`.
        system: the system prompt that the agent was trained with.
        rules: the rule set that it was trained under.
        hardware: the machines that it was trained on, one of `HARDWARE`: those of the published difficulties, or the
            same with less bandwidth (`env.scheduler.hardware`), on which retention pays.

    Raises:
        PairError: if an argument is not as said. The published rules never show a count of 0: no pair can be made.
    """
    if kind not in KINDS:
        raise PairError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    if rules != "documented":
        raise PairError(
            f"rules: expected documented, found {rules!r}; the published ones leave dead tensors out of future_uses: "
            "no pair of observations differs in one count only"
        )
    if hardware not in HARDWARE:
        raise PairError(f"hardware: expected one of {', '.join(HARDWARE)}, found {hardware!r}")
    pairs: list[CounterfactualPair] = []
    draw = 0
    while len(pairs) < count:
        rng = np.random.default_rng([seed, KINDS.index(kind), draw])
        prefix = kind if hardware == "published" else f"{kind}-{hardware}"
        pairs += _MAKERS[kind](f"{prefix}-{seed}-{draw}", system, rng, hardware)
        draw += 1
    return pairs[:count]


def prove(pair: CounterfactualPair) -> None:
    """Replay what a pair was made of and compare.

    Raises:
        PairRefused: if the environment does not give this pair again.
    """
    try:
        difference = Difference(
            Graph.from_json(pair.meta["graph"]),
            tuple(pair.meta["readers"]),
            pair.meta["node"],
            tuple(pair.meta["actions"]),
        )
        again = _pair(pair.id, pair.kind, difference, pair.meta["k"], pair.messages_a[0]["content"])
    except (KeyError, TypeError, ValueError) as error:
        raise PairRefused(f"pair {pair.id}: cannot be made again: {error}") from None
    if again.to_json() != pair.to_json():
        raise PairRefused(f"pair {pair.id}: expected what its graph and actions give, found another text")


def _future_uses(name: str, system: str, rng: Generator, hardware: str) -> list[CounterfactualPair]:
    count, role = int(rng.integers(1, LARGEST_COUNT + 1)), _ROLES[rng.integers(2)]
    difference = _search(rng, count, role, hardware)
    return [_pair(name, "future_uses", difference, difference.node, system)]


def _dose(name: str, system: str, rng: Generator, hardware: str) -> list[CounterfactualPair]:
    full = _search(rng, max(DOSES), "current", hardware)
    doses = [replace(full, readers=full.readers[:dose]) for dose in DOSES]
    return [_pair(f"{name}-{len(d.readers)}", "dose", d, d.node, system) for d in doses]


def _other_key(name: str, system: str, rng: Generator, hardware: str) -> list[CounterfactualPair]:
    difference = _search(rng, int(rng.integers(1, LARGEST_COUNT + 1)), "other", hardware)
    return [_pair(name, "other_key", difference, difference.current, system)]


def _identical(name: str, system: str, rng: Generator, hardware: str) -> list[CounterfactualPair]:
    difference = replace(_search(rng, 1, "current", hardware), readers=())
    return [_pair(name, "identical", difference, difference.node, system)]


_MAKERS = {"future_uses": _future_uses, "dose": _dose, "other_key": _other_key, "identical": _identical}
_ROLES = ("current", "resident", "other")


def _search(rng: Generator, count: int, role: str, hardware: str) -> Difference:
    """A random difference of a count in which the node plays a role.

    A current or a resident node is retained, alone, in A, and nothing is in B. Any other one is neither in fast memory
    nor in the kernel, and the current node, alone, or nothing is retained in both.
    """
    for _ in range(ATTEMPTS):
        difference = _draw(rng, count, role, hardware)
        if difference is None:
            continue
        try:
            a, b = map(json.loads, difference.observations())
        except PairRefused:
            continue
        retained_a, retained_b = heuristic(a).retain, heuristic(b).retain
        if role == "other":
            held = {*b["current_group"]["node_ids"], *b["fast_mem"]}
            suits = difference.node not in held and retained_a == retained_b in ((), (difference.current,))
        else:
            suits = retained_a == (difference.node,) and retained_b == ()
        if suits and (role != "resident" or difference.node in b["fast_mem"]):
            return difference
    raise PairRefused(f"expected a state in which the node is {role}, found none in {ATTEMPTS} random graphs")


def _draw(rng: Generator, count: int, role: str, hardware: str) -> Difference | None:
    """A random graph, moment, node and far readers; None where the graph has no room for them."""
    graph = random_graph(rng, hardware)
    last = len(graph) - count - LOOKAHEAD - 1
    if last < 3:
        return None
    moment = int(rng.integers(3, last + 1))
    node = graph.order[moment if role == "current" else rng.integers(moment - 2)]
    graph_b = _fork(graph, moment, node, role, current_unread=role != "other" or bool(rng.random() < 0.5))
    if graph_b.order[: moment + 1] != graph.order[: moment + 1]:
        return None
    actions = play(graph_b, moment, rng, keep=node)
    readers = tuple(int(i) for i in rng.permutation(graph_b.order[moment + LOOKAHEAD + 1 :])[:count])
    return Difference(graph_b, readers, node, actions)


def _fork(graph: Graph, moment: int, node: int, role: str, *, current_unread: bool) -> Graph:
    """The graph in which nothing from a moment on reads a node, and nothing later reads what the kernels there hold.

    An alive tensor in the open kernel or in fast memory would have to be retained as well. In first-in-first-out
    order the next node's last input stands at or after the current node's last input, so that one is held unless both
    read what was placed before the kernel: three ways part at the last node before it. A node that is to be resident
    is read once more, by the open kernel, and so can have been kept until then.
    """
    stem, branch, current = graph.order[moment - 2 : moment + 1]
    unread_later = {branch, node, current} if current_unread else {branch, node}
    nodes = []
    for reader in graph.nodes:
        position = graph.positions[reader.id]
        unread = {branch, node} if position == moment else unread_later if position > moment else set()
        inputs = tuple(i for i in reader.inputs if i not in unread)
        if reader.inputs and not inputs:
            inputs = (stem,)
        if role == "resident" and reader.id == branch and node not in inputs:
            inputs = (*inputs, node)
        nodes.append(replace(reader, inputs=inputs))
    return replace(graph, nodes=tuple(nodes))


def random_graph(rng: Generator, hardware: str = "published", sizes: tuple[int, int] = SIZES) -> Graph:
    """A graph of any family, machine and tensor size, small enough for a prompt of some 300 tokens.

    The draws are the same on all hardware; `sizes` are the fewest and the most nodes.
    """
    side = int(rng.choice(SIDES))
    size, difficulty = int(rng.integers(sizes[0], sizes[1] + 1)), str(rng.choice(DIFFICULTIES))
    graph = generate_graph(size, difficulty, str(rng.choice(TOPOLOGIES)), (side, side), rng=rng)
    return on(hardware, graph)


def play(graph: Graph, steps: int, rng: Generator, keep: int | None = None) -> tuple[str, ...]:
    """Action texts of an episode's first steps: mostly the heuristic's, the others any legal decision, so that states
    off the teacher's path occur too. With `keep`, no other node is ever retained, and the last step starts a kernel."""
    env = SchedulerEnv(graph)
    observation, _ = env.reset()
    actions: list[str] = []
    for step in range(steps):
        seen = json.loads(observation)
        action = heuristic(seen) if rng.random() < TEACHER_SHARE else _any_action(seen, rng)
        if keep is not None:
            fuse = action.fuse_with_prev and step < steps - 1
            action = replace(action, fuse_with_prev=fuse, retain=tuple(i for i in action.retain if i == keep))
        actions.append(action.to_text())
        observation, *_ = env.step(actions[-1])
    return tuple(actions)


def _any_action(seen: Mapping[str, Any], rng: Generator) -> Action:
    candidates = {*seen["fast_mem"], *seen["current_group"]["node_ids"], seen["current_node"]}
    retain = tuple(i for i in sorted(candidates) if rng.random() < 0.5)
    return Action(bool(rng.random() < 0.5), int(rng.choice(TILES)), retain)


def _pair(name: str, kind: str, difference: Difference, k: int, system: str) -> CounterfactualPair:
    """The pair that a difference proves; the decision is whether k is retained."""
    text_a, text_b = difference.observations()
    called_for = heuristic(json.loads(text_a))
    prefix, _ = _split(called_for)
    graph = difference.graph
    return CounterfactualPair(
        id=name,
        environment="scheduler",
        kind=kind,
        messages_a=messages(text_a, system),
        messages_b=messages(text_b, system),
        action_prefix=prefix,
        answer=_split(replace(called_for, retain=(k,)))[1],
        foil=_split(replace(called_for, retain=()))[1],
        spans=_spans(text_a, difference.node),
        group=graph.fingerprint[:16],
        meta={
            "k": k,
            "node": difference.node,
            "count": len(difference.readers),
            "called_for": list(called_for.retain),
            "readers": list(difference.readers),
            "actions": list(difference.actions),
            "graph": graph.to_json(),
        },
    )


def _split(action: Action) -> tuple[str, str]:
    """An action's text up to the retain list, and from it."""
    head, key, rest = action.to_text().partition('"retain": ')
    return head + key, rest


def _spans(text: str, node: int) -> dict[str, tuple[int, int]]:
    """Characters of an observation: the changed value and its key, another key and its value, and whole fields."""
    fields = {name: _value_span(text, name) for name in ("current_node", "current_group", "fast_mem", "lookahead")}
    start, end = fields["future_uses"] = _value_span(text, "future_uses")
    counts = {int(m[1]): m for m in _COUNT.finditer(text, start, end)}
    other = next(i for i in counts if i != node)
    spans = {"value": counts[node].span(2), "key": counts[node].span(1), **fields}
    return spans | {"other_value": counts[other].span(2), "other_key": counts[other].span(1)}


_COUNT = re.compile(r'"(\d+)":(\d+)')


def _value_span(text: str, name: str) -> tuple[int, int]:
    """Where the value of a top-level field stands; field names occur once in an observation."""
    opening = f'"{name}":'
    start = text.index(opening) + len(opening)
    _, end = json.JSONDecoder().raw_decode(text, start)
    return start, end
