"""Optimal schedules, and what it is worth to retain a tensor, under the documented rules.

    best = plan(load_task("task4_mixed"))
    best.latency, best.optimal                       # cycles, proved
    without = plan(graph, retention=False)           # the best that fusion and tiles alone can do

    table = ValueTable(graph)                        # once a graph
    for value in retain_values(table, env.episode):  # at any step of any episode
        value.node, value.cycles                     # 3, 1536.0 saved by keeping tensor 3
        value.label(env.greedy_latency)              # "pays"

A retain list takes effect when its kernel ends, and the list of its last action decides. The value of retaining tensor
k is therefore a property of the kernel that takes in the current node: the fewest cycles in which the whole graph can
still be done if that kernel ends without k in fast memory, minus the fewest if it ends with k there. Everything else is
free to be chosen best on either side: whether the node is fused, which nodes join the kernel after it, tiles, and what
else is retained, now and later. Where the kernel goes on to the last reader of k, k is dead when it ends, listing it is
harmless, and such a schedule counts on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from env.scheduler.action import Action
from env.scheduler.boundary import MOST_STATES, Boundary, Floats, PlannerError
from env.scheduler.cost import TILES
from env.scheduler.graph import Graph
from env.scheduler.rules import DOCUMENTED
from env.scheduler.state import Episode
from env.scheduler.values import Residents, ValueTable

TOLERANCE = 1e-4
Label = Literal["pays", "costs", "does not matter"]


@dataclass(frozen=True)
class Plan:
    """A schedule.

    Attributes:
        actions: one for each node, in topological order. The last action of a kernel has the tile and the list that
            count; those before it have the ones that would be best if the kernel ended there, as far as that fits, or
            else the smallest tile and an empty list.
        latency: cycles, as the environment counts them.
        optimal: whether no schedule of the kind asked for is faster.
        lower_bound: cycles that every schedule of that kind takes at least; the latency itself if it is optimal.
        states: entries of the value table.
    """

    actions: tuple[Action, ...]
    latency: float
    optimal: bool
    lower_bound: float
    states: int

    @property
    def gap(self) -> float:
        """The most that a better schedule could save, as a fraction of the latency."""
        return 1.0 - self.lower_bound / self.latency


def plan(
    graph: Graph,
    *,
    fusion: bool = True,
    tile: int | None = None,
    retention: bool = True,
    most_states: int = MOST_STATES,
) -> Plan:
    """The fastest schedule of a graph, or the fastest without some of the freedoms.

    Args:
        graph: what is scheduled, on its machine.
        fusion: False makes every kernel one node.
        tile: asked for in every action; None leaves it free. Where one node alone does not fit at it, the environment
            takes the next smaller one that does.
        retention: False retains nothing, ever.
        most_states: the limit of `ValueTable`. Within it, as with all graphs of the published families, the plan is
            optimal.

    Raises:
        GraphError: if the graph cannot be scheduled under the documented rules.
        PlannerError: if the tile is none of the environment's.
    """
    if tile is not None and tile not in TILES:
        raise PlannerError(f"tile: expected one of {', '.join(map(str, TILES))}, found {tile!r}")
    table = ValueTable(graph, fusion=fusion, tile=tile, retention=retention, most_states=most_states)
    actions, latency = _read_off(table)
    bound = latency if table.exact else table.least_cycles()
    return Plan(actions, latency, table.exact, bound, table.states)


def _read_off(table: ValueTable) -> tuple[tuple[Action, ...], float]:
    """The best actions from the start, and their latency in the environment."""
    episode = Episode(table.roofline)
    actions: list[Action] = []
    fast: dict[int, bool] = {}
    while episode.position < len(table.graph):
        state = table.boundaries[episode.position].state(fast)
        members, retain = table.choice(episode.position, state)
        residents = table.residents[episode.position]
        fast = {i: fast[i] for i, held in zip(residents.tensors, residents.held[state], strict=True) if held}
        for count in range(1, len(members) + 1):
            actions.append(_action(table, members[:count], retain, fast))
            DOCUMENTED.place(episode, actions[-1], 1.0)
        fast = {i: fast.get(i, i not in members) for i in retain}
    DOCUMENTED.end(episode, 1.0)
    return tuple(actions), episode.latency


def _action(table: ValueTable, members: tuple[int, ...], retain: tuple[int, ...], fast: dict[int, bool]) -> Action:
    """The action that takes in the last member, as if the kernel ended with it. Of tiles that compute equally fast, as
    pointwise operations do at any, it is the widest: what a matmul that joins later needs."""
    inputs, _ = table.roofline.tensors(members)
    retain = tuple(i for i in retain if i in fast or i in members or i in inputs)
    fitting = [
        tile
        for tile in table.tiles
        if DOCUMENTED.working_set(table.roofline, members, tile, retain, fast) <= table.graph.hardware.fast_mem_capacity
    ]
    if not fitting:
        return Action(len(members) > 1, table.tiles[0], ())
    tile = min(fitting, key=lambda tile: (table.roofline.compute(members, tile), -tile))
    return Action(len(members) > 1, tile, retain)


@dataclass(frozen=True)
class RetainValue:
    """What it is worth that the kernel which takes in the current node keeps a tensor.

    Attributes:
        node: the tensor.
        keep: cycles of the fastest schedule that agrees with the episode so far and in which the kernel ends with the
            tensor in fast memory.
        drop: the same for ending without it.
    """

    node: int
    keep: float
    drop: float

    @property
    def cycles(self) -> float:
        """Cycles that keeping saves; negative where it costs."""
        return self.drop - self.keep

    def percent(self, greedy_latency: float) -> float:
        """The same in percent of greedy's latency."""
        return 100.0 * self.cycles / greedy_latency

    def label(self, greedy_latency: float, tolerance: float = TOLERANCE) -> Label:
        """Whether keeping *pays*, *costs* or *does not matter*: saves or costs at most `tolerance` (a fraction; 0.01 %
        unless said otherwise) of greedy's latency."""
        if abs(self.cycles) <= tolerance * greedy_latency:
            return "does not matter"
        return "pays" if self.cycles > 0 else "costs"


def best_latency(table: ValueTable, episode: Episode) -> float:
    """Cycles of the fastest schedule that agrees with an episode so far.

    Raises:
        PlannerError: as `retain_values`.
    """
    if episode.ended:
        return episode.latency
    return float(min(totals.min() for _, _, totals in _completions(table, episode)))


def best_action(table: ValueTable, episode: Episode, *, keep_more: bool = False) -> Action:
    """The action that begins the fastest schedule which agrees with an episode so far. Where its kernel goes on, tile
    and list are those that would be best if it ended here, as in `Plan.actions`.

    Args:
        keep_more: of lists that are equally fast take a longest one, not the first.

    Raises:
        PlannerError: as `retain_values`.
    """
    best = np.inf
    members: tuple[int, ...] = ()
    retain: tuple[int, ...] = ()
    for grown, after, totals in _completions(table, episode):
        if (found := float(totals.min())) < best:
            best, members = found, grown
            fastest = np.flatnonzero(totals == totals.min())
            kept = after.kept[fastest[after.kept[fastest].sum(axis=1).argmax() if keep_more else 0]]
            retain = tuple(sorted(i for i, keep in zip(after.tensors, kept, strict=True) if keep))
    fast = episode.fast
    if episode.current == members[0]:  # a new kernel: the open one ends first
        started = episode.clone()
        DOCUMENTED.finalize(started)
        state = table.boundaries[episode.position].state(started.fast)
        held = table.residents[episode.position]
        staying = {i for i, stays in zip(held.tensors, held.held[state], strict=True) if stays}
        fast = {i: written for i, written in started.fast.items() if i in staying}
    return _action(table, members[: members.index(episode.current) + 1], retain, fast)


def retain_values(table: ValueTable, episode: Episode) -> tuple[RetainValue, ...]:
    """What it is worth to retain each tensor that the current action may name with effect, by id: those in fast memory,
    in the kernel or read by it, the current node included, with uses left after it, that some schedule can keep.

    Raises:
        PlannerError: if the episode is of another graph or has ended, or holds something that a narrowed table leaves
            out.
    """
    completions = list(_completions(table, episode))
    node, graph, opened = episode.current, episode.graph, episode.kernel.members
    reachable = {*episode.fast, *opened, *table.roofline.tensors(opened)[0], *graph.inputs[node], node}
    alive = [i for i in sorted(reachable) if episode.uses[i] > graph.inputs[node].count(i)]
    values = []
    for i in alive:
        keep = drop = np.inf
        for _, after, totals in completions:
            if i in after.tensors:
                kept = after.kept[:, after.tensors.index(i)]
                keep = totals.min(initial=keep, where=kept)
                drop = totals.min(initial=drop, where=~kept)
            else:
                drop = totals.min(initial=drop)
                if max(graph.positions[c] for c in graph.consumers[i]) < after.position:
                    keep = totals.min(initial=keep)
        if keep < np.inf:
            values.append(RetainValue(i, float(keep), float(drop)))
    return tuple(values)


def _completions(table: ValueTable, episode: Episode) -> Iterator[tuple[tuple[int, ...], Boundary, Floats]]:
    """The kernel that the current node may end up in, the boundary at its end, and by set retained there the cycles of
    the whole graph if all goes best from then on."""
    graph, position = table.graph, episode.position
    if episode.graph != graph or episode.current < 0 or episode.ended:
        raise PlannerError(
            f"episode: expected one of graph {graph.id} with a node to place, found "
            f"{'its end' if episode.graph == graph else f'graph {episode.graph.id}'}"
        )
    opened = episode.kernel.members
    if opened:
        yield from _growing(table, position, opened, _residents(episode), episode.latency)
        episode = episode.clone()
        DOCUMENTED.finalize(episode)
    state = table.boundaries[position].state(episode.fast)
    yield from _growing(table, position, (), table.residents[position][np.array([state])], episode.latency)


def _growing(
    table: ValueTable, position: int, opened: tuple[int, ...], residents: Residents, spent: float
) -> Iterator[tuple[tuple[int, ...], Boundary, Floats]]:
    for members in table.kernels(position, opened):
        if len(members) > 1 and not table.fits_so_far(residents, members)[0]:
            return
        after = table.boundaries[table.graph.positions[members[-1]] + 1]
        yield members, after, spent + table.totals(residents, members)[0]


def _residents(episode: Episode) -> Residents:
    """What the open kernel of an episode started with."""
    unwritten = np.array([[not written for written in episode.fast.values()]], dtype=float).reshape(1, -1)
    spilled = float(sum(episode.graph.sizes[i] for i in episode.kernel.evicted))
    return Residents(
        tensors=tuple(episode.fast),
        held=np.ones_like(unwritten),
        unwritten=unwritten,
        spilled=np.array([spilled]),
        released=np.array([False]),
    )
