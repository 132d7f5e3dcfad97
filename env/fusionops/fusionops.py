"""Fusing operations as a Gymnasium environment: observations and actions are texts."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from env.fusionops import observation
from env.fusionops.action import Action, ActionError, parse_action
from env.fusionops.cost import kernel_cost, naive_latency
from env.fusionops.episode import Episode, Outcome
from env.fusionops.graph import Graph
from env.fusionops.rules import Refusal, refusal

LONGEST_TEXT = 1_000_000
INCOMPLETE_SHARE = 0.1
UNREADABLE = Refusal("unreadable")


class FusionOpsEnv(gymnasium.Env[str, str]):
    """One graph, scheduled kernel by kernel: which ops run together, in which tiles, and what stays in fast memory.

    The agent reads an observation (prose in sections) and answers
    `SCHEDULE ops=[0,1] config=[128,128,1] retain=[2]`. This is the published environment to the last digit. Where its
    README says otherwise, in this module:

    * Fast memory is replaced at every step: it holds what the last kernel retained, so a tensor survives one step
      unless it is made again (said in the README's design notes, not in its tasks).
    * The reward for completing the graph is 0.5 * naive / total, no multiple of the score.
    * A text that cannot be read costs 0.10 and no step: it never ends an episode. An empty list of ops is valid, takes
      no time, costs 0.03 and empties fast memory. Steps after the end still run.

    Nothing here is random: the same texts give the same episode. `reset` and `step` return in `info`: `total_latency`,
    `naive_latency` (time), `step_count`, `error` (None, or `class`, `kind` and the numbers of the check that failed);
    after a kernel has run `latency`, `working_set` (elements), `iterations`; when the episode has ended `score`.

    Args:
        graph: what is scheduled.
        max_steps: valid and refused steps before the episode is truncated; None or 0: the graph's own limit.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(self, graph: Graph, max_steps: int | None = None) -> None:
        self.graph = graph
        self.max_steps = max_steps or graph.step_limit
        self.naive_latency = naive_latency(graph)
        self.observation_space = Text(LONGEST_TEXT, charset=string.printable)
        self.action_space = Text(LONGEST_TEXT, min_length=0, charset=string.printable)
        self.episode = Episode(graph)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. The seed is taken for Gymnasium's sake: no draw is made."""
        super().reset(seed=seed)
        self.episode = Episode(self.graph)
        return self.observation(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a kernel as the text says, or say why not."""
        try:
            asked = parse_action(action, self.graph.hardware.native_granularity)
        except ActionError:
            self.episode = replace(self.episode, last=Outcome(refusal=UNREADABLE), terminated=False, truncated=False)
            return self.observation(), UNREADABLE.penalty, False, False, self._info()
        return self.act(asked)

    def act(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """`step` with an action in the place of its text."""
        reward = self._run(action)
        return self.observation(), reward, self.episode.terminated, self.episode.truncated, self._info()

    def _run(self, action: Action) -> float:
        """Move on by one step; returns its reward."""
        episode, graph = self.episode, self.graph
        out_of_steps = episode.step_count + 1 >= self.max_steps
        refused = refusal(graph, episode.scheduled, episode.fast, action)
        if refused:
            self.episode = replace(
                episode,
                step_count=episode.step_count + 1,
                last=Outcome(action, refusal=refused),
                terminated=False,
                truncated=out_of_steps,
            )
            return refused.penalty
        cost = kernel_cost(graph, action.ops, action.config, action.retain, action.traversal, episode.fast)
        scheduled = episode.scheduled.union(action.ops)
        covered = len(scheduled) == len(graph)
        self.episode = Episode(
            graph,
            scheduled,
            frozenset(action.retain),
            episode.latency + cost.latency,
            episode.step_count + 1,
            Outcome(action, cost=cost),
            terminated=covered,
            truncated=out_of_steps and not covered,
        )
        reward = 0.02 - 0.1 * cost.latency / (self.naive_latency / len(graph)) + 0.05 * (len(action.ops) - 1)
        return reward + 0.5 * self.naive_latency / self.episode.latency if covered else reward

    def observation(self) -> str:
        """The observation of the present state."""
        return observation.observe(self.episode, self.max_steps, self.naive_latency, self.score)

    @property
    def score(self) -> float:
        """(naive - total) / (naive + total), at least 0; until all ops have run, a tenth of the share that has.

        The published README divides by naive alone and gives nothing for an incomplete schedule; its table follows the
        code.
        """
        episode = self.episode
        if episode.latency <= 0:
            return 0.0
        if not episode.covered:
            return INCOMPLETE_SHARE * len(episode.scheduled) / len(self.graph)
        return max(0.0, min(1.0, 2 * (self.naive_latency / (self.naive_latency + episode.latency) - 0.5)))

    def clone(self) -> FusionOpsEnv:
        """An independent copy in the same state."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def _info(self) -> dict[str, Any]:
        episode, last = self.episode, self.episode.last
        info: dict[str, Any] = {
            "total_latency": episode.latency,
            "naive_latency": self.naive_latency,
            "step_count": episode.step_count,
            "error": _named(last.refusal) if last else None,
        }
        if last and last.cost:
            info |= {
                "latency": last.cost.latency,
                "working_set": last.cost.working_set,
                "iterations": last.cost.iterations,
            }
        return info | {"score": self.score} if episode.ended else info


def _named(refused: Refusal | None) -> Mapping[str, Any] | None:
    return {"class": refused.error_class, "kind": refused.kind, **refused.details} if refused else None
