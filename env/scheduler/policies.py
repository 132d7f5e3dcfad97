"""Fixed policies. `heuristic` and `constant` see an observation, as a model does; `greedy` and `naive`, the baselines
of the score, see the episode itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from env.scheduler.action import Action
from env.scheduler.graph import BYTES_PER_ELEMENT, COMPUTE_OPS
from env.scheduler.state import Episode

ObservationPolicy = Callable[[Mapping[str, Any]], Action]

GREEDY_FILL = 0.8


def naive(episode: Episode) -> Action:
    """Every node its own kernel at tile 128, nothing retained."""
    return Action(False, 128, ())


def greedy(episode: Episode) -> Action:
    """The published greedy schedule as decisions: fuse what is connected while the group's tensors take at most 80 % of
    fast memory, tile 128, and retain what the very next node reads of the group."""
    graph, node, group = episode.graph, episode.current, episode.kernel.members
    hardware = graph.hardware
    size = sum(graph.sizes[i] for i in group) + graph.sizes[node]
    fuse = (
        not set(graph.inputs[node]).isdisjoint(group)
        and len(group) < hardware.max_fusion_depth
        and size <= hardware.fast_mem_capacity * GREEDY_FILL
    )
    following = graph.order[episode.position + 1 : episode.position + 2]
    wanted = graph.inputs[following[0]] if following else ()
    members = (*group, node) if fuse else (node,)
    return Action(fuse, 128, tuple(i for i in members if i in wanted))


def constant(fuse: bool, tile: int) -> ObservationPolicy:
    """The policy that always gives the same answer and retains nothing."""
    action = Action(fuse, tile, ())
    return lambda observation: action


def heuristic(observation: Mapping[str, Any]) -> Action:
    """The teacher: fuse what is connected and fits, keep what is alive and fits. Sees a documented observation only.

    Tile 128, or 64 for matmul and conv2d when two or more tensors are resident. Retained are residents, members of the
    kernel and the current node with uses left after the current node has read: those that the lookahead reads first,
    then by uses, then by id; listed in id order. What is not shown is estimated: every tensor is taken to be as large
    as the current node's, a kernel that ends is taken to keep all that is alive, and what the earlier members of the
    kernel read from slow memory is taken to need no room.
    """
    node, op, inputs, size = _current(observation)
    uses = {int(i): count for i, count in observation["future_uses"].items()}
    group, residents = observation["current_group"]["node_ids"], observation["fast_mem"]
    carried_over = {i for i in (*residents, *group) if uses[i] > 0}
    for i in inputs:
        uses[i] -= 1
    capacity = observation["capacity"]
    tile = 64 if op in COMPUTE_OPS and len(residents) >= 2 else 128
    slice_bytes = min(size, BYTES_PER_ELEMENT * tile * tile)

    def fits(fused: bool, retain: set[int]) -> bool:
        whole = retain.union(residents if fused else carried_over)
        outputs = {i for i in group if uses[i] > 0} if fused else set()
        inside = set(group) if fused else set()
        sliced = (outputs | {node} | (set(inputs) - inside)) - whole
        return len(whole) * size + len(sliced) * slice_bytes <= capacity

    fuse = not set(inputs).isdisjoint(group) and len(group) < observation["max_fusion"] and fits(True, set())
    soon = {i for following in observation["lookahead"] for i in following["inputs"]}
    alive = [i for i in {*residents, *group, node} if uses[i] > 0]
    retain: set[int] = set()
    for i in sorted(alive, key=lambda i: (i not in soon, -uses[i], i)):
        if fits(fuse, retain | {i}):
            retain.add(i)
    return Action(fuse, tile, tuple(sorted(retain)))


def _current(observation: Mapping[str, Any]) -> tuple[int, str, list[int], int]:
    """Id, op, inputs and output bytes of the current node."""
    node = observation["current_node"]
    info = observation.get("current_node_info")
    if info is None:
        info = observation["nodes"][node]
    rows, columns = info["shape"]
    return node, info["op"], info["inputs"], rows * columns * BYTES_PER_ELEMENT
