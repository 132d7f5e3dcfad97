"""The environment that was published, kept exact."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from env.scheduler import observation
from env.scheduler.action import Action, ActionError, parse_lenient
from env.scheduler.cost import TILES, KernelCost, Roofline
from env.scheduler.graph import Graph
from env.scheduler.policies import GREEDY_FILL
from env.scheduler.rules.base import Rules, calibrated
from env.scheduler.state import NO_KERNEL, Episode, Kernel

HOPELESS_LATENCY = 1e6  # cycles of a node that fits at no tile


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
