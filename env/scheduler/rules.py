"""The two rule sets: the one file in which they differ.

`DOCUMENTED` is the environment that the published README describes, `UPSTREAM` the one that was published, kept exact
so that adapters trained there can be analysed under it. A rule set is stateless: it reads texts, moves an `Episode`
and says what is seen and what is scored. Both share the graph, the topological order and the roofline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

from env.scheduler import observation
from env.scheduler.action import Action, ActionError, parse_lenient, parse_strict
from env.scheduler.cost import TILES, KernelCost, Roofline
from env.scheduler.graph import BYTES_PER_ELEMENT, Graph, GraphError
from env.scheduler.policies import GREEDY_FILL, greedy, naive
from env.scheduler.state import NO_KERNEL, Episode, Kernel

INVALID_TEXT_REWARD = -0.10
INVALID_TEXTS_IN_A_ROW = 3
CALIBRATION = 0.2
HOPELESS_LATENCY = 1e6


def calibrated(score: float) -> float:
    """The unit of the published tables: clip(score / 0.2, -1, 1)."""
    return max(-1.0, min(1.0, score / CALIBRATION))


class Rules(ABC):
    """What a rule set decides."""

    name: ClassVar[str]

    @abstractmethod
    def parse(self, text: Any) -> Action:
        """Read an action text; raises ActionError."""

    @abstractmethod
    def observe(self, episode: Episode, greedy_latency: float) -> str:
        """What the agent sees, as compact JSON."""

    @abstractmethod
    def check(self, graph: Graph) -> None:
        """Raise GraphError if the graph cannot be scheduled under these rules."""

    @abstractmethod
    def kernel_cost(
        self, roofline: Roofline, members: tuple[int, ...], tile: int, retain: tuple[int, ...], fast: Any
    ) -> KernelCost:
        """Cost of a kernel that starts with `fast` in fast memory and ends by keeping `retain` of it."""

    @abstractmethod
    def place(self, episode: Episode, action: Action, greedy_latency: float) -> float:
        """Place the current node; returns the step's reward before `end`.

        Raises:
            ActionError: if the action cannot be carried out; the episode is then unchanged.
        """

    @abstractmethod
    def end(self, episode: Episode, greedy_latency: float) -> float:
        """Finish an episode whose last step has been taken; returns what that adds to the reward."""

    @abstractmethod
    def baselines(self, roofline: Roofline) -> tuple[float, float]:
        """Latency in cycles of the naive and of the greedy schedule."""

    @abstractmethod
    def score(self, latency: float, greedy_latency: float) -> float:
        """The score of a latency in cycles."""


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
            self._finalize(episode)
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

    def _finalize(self, episode: Episode) -> None:
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
        self._finalize(episode)
        episode.ended = True
        return 1.0 + (before - episode.latency) / greedy_latency

    def baselines(self, roofline: Roofline) -> tuple[float, float]:
        return tuple(self._latency(roofline, policy) for policy in (naive, greedy))  # type: ignore[return-value]

    def _latency(self, roofline: Roofline, policy: Callable[[Episode], Action]) -> float:
        episode = Episode(roofline)
        while episode.current >= 0:
            self.place(episode, policy(episode), 1.0)
        self._finalize(episode)
        return episode.latency

    def score(self, latency: float, greedy_latency: float) -> float:
        """(greedy - agent) / greedy."""
        return (greedy_latency - latency) / greedy_latency


class Upstream(Rules):
    """The published environment, as it is: shaped rewards, a score in units of 0.2, and its known surprises.

    A retained tensor is dropped at its last use before the kernel runs; any id can be retained for free; a kernel that
    does not fit is noticed only when it ends, and is then run op by op. Where the published code crashes on a text, the
    text is invalid here. Where it crashes on a decimal number in a retain list while costing a kernel, the number is
    dropped and named in the error.
    """

    name = "upstream"

    def parse(self, text: Any) -> Action:
        return parse_lenient(text)

    def observe(self, episode: Episode, greedy_latency: float) -> str:
        return observation.upstream(episode, greedy_latency)

    def check(self, graph: Graph) -> None:
        """Every graph is taken."""

    def kernel_cost(
        self, roofline: Roofline, members: tuple[int, ...], tile: int, retain: tuple[int, ...], fast: Collection[int]
    ) -> KernelCost:
        """Cost of a kernel; residents that it reads take space twice, as a slice and in full."""
        sizes = roofline.graph.sizes
        inputs, outputs = roofline.tensors(members)
        area = 4 * tile * tile
        working_set = sum([min(sizes[i], area) for i in inputs])
        working_set += sum([min(sizes[i], area) for i in outputs])
        working_set += sum([sizes[i] for i in fast if i not in members])
        working_set += sum([sizes[i] for i in retain if i not in fast])
        loaded = [i for i in inputs if i not in fast]
        stored = [i for i in outputs if i not in retain]
        return roofline.cost(members, tile, loaded, stored, working_set)

    def place(self, episode: Episode, action: Action, greedy_latency: float) -> float:
        graph, uses, node = episode.graph, episode.uses, episode.current
        tile = action.tile if action.tile in TILES else 128
        try:
            retain = tuple([+r for r in action.retain if 0 <= r < len(graph)])  # + turns a boolean into 0 or 1
        except TypeError:
            raise ActionError("retain: expected numbers, found an entry that is none") from None
        episode.error = None
        reward = self._join_or_open(episode, node, action.fuse_with_prev, tile, retain)
        for i in graph.inputs[node]:
            uses[i] -= 1
            if uses[i] <= 0:
                episode.fast.pop(i, None)
        for r in retain:
            reward += 0.01 if r == int(r) and uses[int(r)] > 0 else -0.01
        for i in graph.inputs[node]:
            if i not in episode.fast:
                episode.reloads += 1
                reward -= 0.005
        episode.position += 1
        return reward

    def _join_or_open(self, episode: Episode, node: int, fuse: bool, tile: int, retain: tuple[int, ...]) -> float:
        graph, members = episode.graph, episode.kernel.members
        limit = graph.hardware.max_fusion_depth
        reward = 0.0
        if fuse and members:
            if set(graph.inputs[node]).isdisjoint(members):
                reward, episode.error = -0.005, {"kind": "not_connected"}
            elif len(members) >= limit:
                reward, episode.error = -0.005, {"kind": "max_depth", "limit": limit}
            else:
                trial = Kernel((*members, node), tile, retain)
                cost = self._episode_cost(episode, trial)
                if cost.fits:
                    episode.kernel = trial
                    return 0.02
                capacity = graph.hardware.fast_mem_capacity
                reward = -0.01
                episode.error = {"kind": "oom", "working_set": cost.working_set, "capacity": capacity}
        self._finalize(episode)
        episode.kernel = Kernel((node,), tile, retain)
        return reward

    def _episode_cost(self, episode: Episode, kernel: Kernel) -> KernelCost:
        """Cost of a kernel in an episode; numbers in its retain list that are no ids are dropped and named."""
        ids = tuple([int(r) for r in kernel.retain if isinstance(r, int) or r in episode.fast])
        if len(ids) < len(kernel.retain):
            bad = [r for r in kernel.retain if not (isinstance(r, int) or r in episode.fast)]
            episode.error = {"kind": "retain_not_an_id", "entries": bad}
        return self.kernel_cost(episode.roofline, kernel.members, kernel.tile, ids, episode.fast)

    def _finalize(self, episode: Episode) -> None:
        kernel, roofline = episode.kernel, episode.roofline
        if not kernel.members:
            return
        cost = self._episode_cost(episode, kernel)
        if cost.fits:
            episode.latency += cost.total
            episode.launches += 1
            kept = {int(r) for r in kernel.retain if isinstance(r, int) or r in episode.fast}
            kept.update(i for i in episode.fast if episode.uses[i] > 0)
            episode.fast = dict.fromkeys(kept, True)
            episode.fast_bytes = sum([episode.graph.sizes[i] for i in kept])
        else:
            for member in kernel.members:
                alone = self.kernel_cost(roofline, (member,), 128, (), episode.fast)
                episode.latency += alone.total if alone.fits else HOPELESS_LATENCY
                episode.launches += 1
        episode.kernels.append(kernel._replace(latency=cost.total))
        episode.kernel = NO_KERNEL

    def end(self, episode: Episode, greedy_latency: float) -> float:
        self._finalize(episode)
        episode.ended = True
        gain = (greedy_latency - episode.latency) / greedy_latency
        return 0.5 * gain if gain >= 0 else 0.1 * gain

    def baselines(self, roofline: Roofline) -> tuple[float, float]:
        graph = roofline.graph
        singles = [self._alone(roofline, node.id, ()) for node in graph.nodes]
        return sum(singles), self._greedy_latency(roofline)

    def _alone(self, roofline: Roofline, node: int, fast: Collection[int]) -> float:
        cost = self.kernel_cost(roofline, (node,), 128, (), fast)
        return cost.total if cost.fits else HOPELESS_LATENCY

    def _greedy_latency(self, roofline: Roofline) -> float:
        graph, hardware = roofline.graph, roofline.graph.hardware
        latency = 0.0
        fast: Collection[int] = ()
        group: list[int] = []
        size = 0

        def close(retain: tuple[int, ...]) -> None:
            nonlocal latency, fast
            cost = self.kernel_cost(roofline, tuple(group), 128, retain, fast)
            if cost.fits:
                latency, fast = latency + cost.total, set(retain)
                return
            for member in group:
                latency, fast = latency + self._alone(roofline, member, fast), ()

        for node in graph.order:
            joins = (
                not set(graph.inputs[node]).isdisjoint(group)
                and len(group) < hardware.max_fusion_depth
                and size + graph.sizes[node] <= hardware.fast_mem_capacity * GREEDY_FILL
            )
            if not joins:
                if group:
                    close(tuple(i for i in group if i in graph.inputs[node]))
                group, size = [], 0
            group.append(node)
            size += graph.sizes[node]
        close(())
        return latency

    def score(self, latency: float, greedy_latency: float) -> float:
        """clip((greedy - agent) / greedy / 0.2, -1, 1), and 0 while nothing has run."""
        return calibrated((greedy_latency - latency) / greedy_latency) if latency > 0 else 0.0


DOCUMENTED = Documented()
UPSTREAM = Upstream()
RULES: Mapping[str, Rules] = {rules.name: rules for rules in (DOCUMENTED, UPSTREAM)}
