"""Actions that the observation proposes: at most four, most of them valid.

The README calls them valid by construction. Those of last resort are not checked, and the sizes 128, 64 and 32 are the
same whatever the native tile is.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from env.fusionops.action import Action
from env.fusionops.graph import MATMUL, Graph
from env.fusionops.rules import ready, refusal

SHOWN = 4
CHAIN = 3
SHARED_DEPTH = 32


def hints(graph: Graph, scheduled: Set[int], fast: Set[int]) -> tuple[Action, ...]:
    """The actions proposed in a state, best first by the published order: a pair, a chain, the first ready op."""
    runnable = ready(graph, scheduled)
    if not runnable:
        return (Action((0,), (128, 128, 1)),)
    candidates = list(_candidates(graph, scheduled, runnable))
    if valid := [c for c in candidates if refusal(graph, scheduled, fast, c) is None]:
        return tuple(valid[:SHOWN])
    if graph.ops[runnable[0]].type == MATMUL:
        for depth in (32, 16, 8):
            last_resort = Action((runnable[0],), (64, 64, depth))
            if refusal(graph, scheduled, fast, last_resort) is None:
                return (last_resort,)
    return (candidates[0],)


def _candidates(graph: Graph, scheduled: Set[int], runnable: tuple[int, ...]) -> Iterator[Action]:
    if pair := _pair(graph, scheduled, runnable):
        yield Action(pair, (128, 128, _depth(graph, pair)))
    chain = max((_chain(graph, scheduled, op) for op in runnable), key=len)
    if len(chain) >= CHAIN:
        yield Action(chain[:CHAIN], (128, 128, _depth(graph, chain[:CHAIN])))
    first = graph.ops[runnable[0]]
    depth = graph.tensors[first.inputs[0]].width if first.type == MATMUL else 1
    yield Action((first.id,), (128, 128, depth))
    if graph.consumers[first.outputs[0]]:
        yield Action((first.id,), (128, 128, depth), (first.outputs[0],))
    if first.type == MATMUL:
        yield Action((first.id,), (64, 64, depth))


def _pair(graph: Graph, scheduled: Set[int], runnable: tuple[int, ...]) -> tuple[int, int] | None:
    """The first ready op, and consumer of it, that can run together."""
    for op in runnable:
        for tensor in graph.ops[op].outputs:
            for consumer in graph.consumers[tensor]:
                others = {graph.producers.get(t) for t in graph.ops[consumer].inputs if t != tensor}
                if consumer not in scheduled and others <= scheduled | {None}:
                    return op, consumer
    return None


def _chain(graph: Graph, scheduled: Set[int], op: int) -> tuple[int, ...]:
    """The op, a consumer of it, a consumer of that one, and so on, as long as nothing else is missing."""
    chain = [op]
    while True:
        available = scheduled | set(chain)
        consumers = (c for tensor in graph.ops[chain[-1]].outputs for c in graph.consumers[tensor])
        following = next((c for c in consumers if c not in available and graph.predecessors[c] <= available), None)
        if following is None:
            return tuple(chain)
        chain.append(following)


def _depth(graph: Graph, ops: tuple[int, ...]) -> int:
    return SHARED_DEPTH if any(graph.ops[op].type == MATMUL for op in ops) else 1
