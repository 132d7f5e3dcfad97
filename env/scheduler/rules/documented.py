"""The environment that the published README describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from env.scheduler import observation
from env.scheduler.action import Action, parse_strict
from env.scheduler.cost import TILES, KernelCost, Roofline
from env.scheduler.graph import BYTES_PER_ELEMENT, Graph, GraphError
from env.scheduler.policies import greedy, naive
from env.scheduler.rules.base import Rules
from env.scheduler.state import NO_KERNEL, Episode, Kernel


class Documented(Rules):
    """The environment of the README: one latency signal, explicit retention, everything that does not fit said at once.

    Reward of a step: minus the latency finalized in it over greedy's total; + 1 at the end. The return of an episode is
    its score, less the penalties of invalid texts. An episode cut short is completed naively, so stopping never pays.
    """

    name = "documented"

    def parse(self, text: Any) -> Action:
        return parse_strict(text)

    def observe(self, episode: Episode, greedy_latency: float) -> str:
        return observation.documented(episode)

    def check(self, graph: Graph) -> None:
        roofline = Roofline(graph)
        capacity = graph.hardware.fast_mem_capacity
        for node in graph.nodes:
            needed = self.working_set(roofline, (node.id,), TILES[0], (), ())
            if needed > capacity:
                raise GraphError(
                    f"graph {graph.id}, node {node.id}: expected a working set of at most {capacity} bytes in empty "
                    f"fast memory at some tile, found {needed} at tile {TILES[0]}"
                )

    def kernel_cost(
        self,
        roofline: Roofline,
        members: tuple[int, ...],
        tile: int,
        retain: tuple[int, ...],
        fast: dict[int, bool],
        uses: list[int] | None = None,
        evicted: tuple[int, ...] = (),
    ) -> KernelCost:
        """Cost of a kernel.

        Loaded is what it reads and is not in fast memory. Stored are outputs that are not retained, graph outputs, and
        residents that leave with uses left and were never written.

        Args:
            roofline: the graph's cost tables.
            members: the kernel's nodes.
            tile: edge of its tiles.
            retain: what it keeps; ids that may be kept only (see `retainable`).
            fast: what is in fast memory: id -> written.
            uses: reads still to come after this kernel, by id; None leaves out what leaves fast memory unwritten.
            evicted: residents that left to make room (not in `fast`), unwritten and with uses left.
        """
        consumers = roofline.graph.consumers
        inputs, outputs = roofline.tensors(members)
        loaded = [i for i in inputs if i not in fast]
        stored = [i for i in outputs if i not in retain or not consumers[i]]
        if uses is not None:
            stored += [i for i, written in fast.items() if not written and i not in retain and uses[i] > 0]
        stored += evicted
        working_set = self.working_set(roofline, members, tile, retain, fast)
        return roofline.cost(members, tile, loaded, stored, working_set)

    @staticmethod
    def working_set(
        roofline: Roofline, members: tuple[int, ...], tile: int, retain: tuple[int, ...], fast: Iterable[int]
    ) -> int:
        """Bytes of fast memory that a kernel needs: residents and retained tensors once, in full, and of the other
        inputs and outputs what a tile needs, min(bytes, 4 tile^2)."""
        sizes = roofline.graph.sizes
        inputs, outputs = roofline.tensors(members)
        area = BYTES_PER_ELEMENT * tile * tile
        whole = {*retain, *fast}
        working_set = sum([sizes[i] for i in whole])
        for i in inputs + outputs:
            if i not in whole:
                working_set += sizes[i] if sizes[i] < area else area
        return working_set

    def place(self, episode: Episode, action: Action, greedy_latency: float) -> float:
        before = episode.latency
        node = episode.current
        notes: list[str] = []
        if not (action.fuse_with_prev and episode.kernel.members and self._fuse(episode, node, action, notes)):
            self.finalize(episode)
            self._open(episode, node, action, notes)
        for i in episode.graph.inputs[node]:
            episode.uses[i] -= 1
        episode.position += 1
        episode.error = "; ".join(notes) or None
        return (before - episode.latency) / greedy_latency

    def _fuse(self, episode: Episode, node: int, action: Action, notes: list[str]) -> bool:
        """Add the node to the open kernel, or say why not."""
        graph, kernel = episode.graph, episode.kernel
        limit, capacity = graph.hardware.max_fusion_depth, graph.hardware.fast_mem_capacity
        if not set(graph.inputs[node]).intersection(kernel.members):
            notes.append(f"not fused: {node} reads nothing of the current group")
            return False
        if len(kernel.members) >= limit:
            notes.append(f"not fused: the group holds {limit}, the most allowed")
            return False
        members = (*kernel.members, node)
        retain, ignored = self.retainable(episode, members, action.retain)
        needed = self.working_set(episode.roofline, members, action.tile, retain, episode.fast)
        if needed > capacity:
            notes.append(f"not fused: needs {needed} of {capacity} bytes")
            return False
        if ignored:
            notes.append(f"retain ignored: {ignored}")
        episode.kernel = kernel._replace(members=members, tile=action.tile, retain=retain)
        return True

    def retainable(
        self, episode: Episode, members: tuple[int, ...], retain: tuple[int, ...]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Split a retain list into what may be kept (once each, in order) and what is ignored.

        An id may be kept if it is in fast memory, in the kernel, or read by it.
        """
        if not retain:
            return (), []
        inputs, _ = episode.roofline.tensors(members)
        listed = dict.fromkeys(retain)
        kept = tuple([i for i in listed if i in members or i in episode.fast or i in inputs])
        return kept, [i for i in listed if i not in kept] if len(kept) < len(listed) else []

    def _open(self, episode: Episode, node: int, action: Action, notes: list[str]) -> None:
        """Start a kernel of one node, giving up what does not fit: retained ids, then the tile, then residents."""
        capacity = episode.graph.hardware.fast_mem_capacity
        roofline, fast, members = episode.roofline, episode.fast, (node,)
        retain, ignored = self.retainable(episode, members, action.retain)
        if ignored:
            notes.append(f"retain ignored: {ignored}")

        def fits(tile: int, retain: tuple[int, ...]) -> bool:
            return self.working_set(roofline, members, tile, retain, fast) <= capacity

        dropped = []
        while retain and not fits(action.tile, retain):
            dropped.append(retain[-1])
            retain = retain[:-1]
        if dropped:
            notes.append(f"retain dropped: {dropped}, does not fit in {capacity} bytes")

        evicted: list[int] = []
        unwritten: list[int] = []
        reads = episode.graph.inputs[node]
        leaving = sorted(fast, key=lambda i: (i not in reads, i))  # the last one leaves first
        tile = self._largest_tile(fits, action.tile)
        while tile is None:
            evicted.append(leaving.pop())
            if not fast.pop(evicted[-1]) and episode.uses[evicted[-1]] > 0:
                unwritten.append(evicted[-1])
            tile = self._largest_tile(fits, action.tile)
        if tile != action.tile:
            notes.append(f"tile {tile} used: {action.tile} does not fit in {capacity} bytes")
        if evicted:
            notes.append(f"released: {evicted}, no room in {capacity} bytes")
        episode.kernel = Kernel(members, tile, retain, tuple(unwritten))

    @staticmethod
    def _largest_tile(fits: Callable[[int, tuple[int, ...]], bool], asked: int) -> int | None:
        return next((tile for tile in reversed(TILES) if tile <= asked and fits(tile, ())), None)

    def finalize(self, episode: Episode) -> None:
        """End the open kernel, if there is one."""
        kernel, fast, uses = episode.kernel, episode.fast, episode.uses
        if not kernel.members:
            return
        cost = self.kernel_cost(
            episode.roofline, kernel.members, kernel.tile, kernel.retain, fast, uses, kernel.evicted
        )
        episode.fast = {i: fast.get(i, i not in kernel.members) for i in kernel.retain if uses[i] > 0}
        episode.fast_bytes = sum([episode.graph.sizes[i] for i in episode.fast])
        episode.latency += cost.total
        episode.launches += 1
        episode.reloads += len(cost.loaded)
        episode.kernels.append(kernel._replace(latency=cost.total))
        episode.kernel = NO_KERNEL

    def end(self, episode: Episode, greedy_latency: float) -> float:
        before = episode.latency
        while episode.current >= 0:
            error = episode.error
            self.place(episode, naive(episode), greedy_latency)
            episode.error = error
        self.finalize(episode)
        episode.ended = True
        return 1.0 + (before - episode.latency) / greedy_latency

    def baselines(self, roofline: Roofline) -> tuple[float, float]:
        return tuple(self._latency(roofline, policy) for policy in (naive, greedy))  # type: ignore[return-value]

    def _latency(self, roofline: Roofline, policy: Callable[[Episode], Action]) -> float:
        episode = Episode(roofline)
        while episode.current >= 0:
            self.place(episode, policy(episode), 1.0)
        self.finalize(episode)
        return episode.latency

    def score(self, latency: float, greedy_latency: float) -> float:
        """(greedy - agent) / greedy."""
        return (greedy_latency - latency) / greedy_latency
