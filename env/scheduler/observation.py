"""What the agent sees: the state of an episode as compact JSON, keys in a fixed order.

An observation is written at every step of every rollout, so what a graph says of its nodes is written once and put in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from env.scheduler.graph import Graph, Node
from env.scheduler.state import Episode

LOOKAHEAD = 2

_encode = json.JSONEncoder(separators=(",", ":")).encode


class _Texts(NamedTuple):
    """The parts of a graph's observations that do not change.

    Attributes:
        info: `current_node_info` by node id.
        lookahead: by position in the topological order.
        reached: ids of the nodes reached, the current one and the lookahead, in id order, by position.
        nodes: the whole graph.
        upstream_nodes: the same as the published environment shows it.
    """

    info: tuple[str, ...]
    lookahead: tuple[str, ...]
    reached: tuple[tuple[int, ...], ...]
    nodes: str
    upstream_nodes: str


@lru_cache(maxsize=1024)
def _texts(graph: Graph) -> _Texts:
    ahead = [graph.order[position + 1 : position + 1 + LOOKAHEAD] for position in range(len(graph) + 1)]
    return _Texts(
        info=tuple(_encode(_node_info(node)) for node in graph.nodes),
        lookahead=tuple(_encode([_node_ahead(graph.nodes[i]) for i in ids]) for ids in ahead),
        reached=tuple(tuple(sorted(graph.order[: position + 1 + LOOKAHEAD])) for position in range(len(graph) + 1)),
        upstream_nodes=_encode(
            [_upstream_node(node, with_shape=len(graph) <= 20 or node.id == 0) for node in graph.nodes]
        ),
        nodes=_encode(
            [{"id": n.id, "op": n.op, "shape": list(n.shape), "inputs": list(n.inputs)} for n in graph.nodes]
        ),
    )


def documented(episode: Episode) -> str:
    """The README's observation. `future_uses` lists all nodes reached, the current one and the lookahead, dead as 0."""
    graph, position, uses = episode.graph, episode.position, episode.uses
    hardware, texts = graph.hardware, _texts(graph)
    parts = [f'{{"nodes":{texts.nodes},"current_node":' if position == 0 else '{"current_node":', str(episode.current)]
    if 0 < position < len(graph):
        parts.append(f',"current_node_info":{texts.info[episode.current]}')
    counts = ",".join([f'"{i}":{uses[i]}' for i in texts.reached[position]])
    parts.append(
        f',"current_group":{{"node_ids":[{_join(episode.kernel.members)}],"tile":{episode.kernel.tile}}}'
        f',"fast_mem":[{_join(sorted(episode.fast))}],"capacity":{hardware.fast_mem_capacity}'
        f',"max_fusion":{hardware.max_fusion_depth},"future_uses":{{{counts}}},"lookahead":{texts.lookahead[position]}'
    )
    if episode.error is not None:
        parts.append(f',"error":{_encode(episode.error)}')
    parts.append("}")
    return "".join(parts)


def upstream(episode: Episode, greedy_latency: float) -> str:
    """The published observation: dead tensors left out, the whole graph only at step 0, and there no lookahead."""
    graph, position = episode.graph, episode.position
    hardware, texts = graph.hardware, _texts(graph)
    counts = ",".join([f'"{i}":{count}' for i, count in enumerate(episode.uses) if count > 0])
    parts = [
        f'{{"step":{episode.step},"current_node":{episode.current}'
        f',"current_group":{{"node_ids":[{_join(episode.kernel.members)}],"tile":{episode.kernel.tile}}}'
        f',"fast_mem":[{_join(sorted(episode.fast))}],"fast_mem_used":{episode.fast_bytes}'
        f',"capacity":{hardware.fast_mem_capacity},"max_fusion":{hardware.max_fusion_depth}'
        f',"future_uses":{{{counts}}},"total_latency":{round(episode.latency, 1)!r}'
        f',"kernel_launches":{episode.launches},"greedy_baseline":{round(greedy_latency, 1)!r}'
    ]
    if episode.error is not None:
        parts.append(f',"error":{_encode(episode.error)}')
    if episode.step == 0:
        parts.append(f',"nodes":{texts.upstream_nodes},"tensor_bytes":{graph.sizes[0]}')
    elif position < len(graph):
        parts.append(f',"current_node_info":{texts.info[episode.current]}')
        if position + 1 < len(graph):
            parts.append(f',"lookahead":{texts.lookahead[position]}')
    parts.append("}")
    return "".join(parts)


def _join(ids: Iterable[int]) -> str:
    return ",".join(map(str, ids))


def _node_info(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "op": node.op,
        "shape": list(node.shape),
        "inputs": list(node.inputs),
        "output_bytes": node.output_bytes,
    }


def _node_ahead(node: Node) -> dict[str, Any]:
    return {"id": node.id, "op": node.op, "inputs": list(node.inputs)}


def _upstream_node(node: Node, *, with_shape: bool) -> dict[str, Any]:
    return _node_ahead(node) | ({"shape": list(node.shape)} if with_shape else {})
