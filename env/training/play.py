"""Whole episodes of a policy, and what it did at every retain decision that counted.

A retain list takes effect when its kernel ends, so only the list of a kernel's last action is a decision. Each tensor
that such a list could name with effect is one: the planner says whether keeping it pays, costs or does not matter,
given the episode so far and the best play after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from env.scheduler import Action, ActionError, Graph, SchedulerEnv
from env.scheduler.action import parse_strict
from env.scheduler.planner import Label, retain_values
from env.scheduler.values import ValueTable

Answers = Callable[[list[SchedulerEnv]], list[str]]


@dataclass(frozen=True)
class RetainDecision:
    """Whether a tensor was kept, at a moment at which that counted."""

    position: int
    node: int
    label: Label
    retained: bool


@dataclass
class Game:
    """One episode.

    Attributes:
        graph: what is scheduled.
        table: the planner's, of this graph.
        env: the environment, at its end when the game is over.
        valid, invalid: answers that are an action to the letter, and that are not.
        decisions: the retain decisions that counted.
    """

    graph: Graph
    table: ValueTable
    env: SchedulerEnv = field(init=False)
    valid: int = 0
    invalid: int = 0
    decisions: list[RetainDecision] = field(default_factory=list)
    _open: list[RetainDecision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = SchedulerEnv(self.graph)
        self.env.reset()

    def answer(self, text: str) -> None:
        """Take a step."""
        try:
            action = parse_strict(text)
        except ActionError:
            self.invalid += 1
        else:
            self.valid += 1
            self._decide(action)
        self.env.step(text)

    def _decide(self, action: Action) -> None:
        episode = self.env.episode
        values = retain_values(self.table, episode)
        after = self.env.clone()
        after.step(action.to_text())
        kernel = after.episode.kernels[-1] if after.episode.ended else after.episode.kernel
        if kernel.members != (*episode.kernel.members, episode.current) or not episode.kernel.members:
            self.decisions += self._open  # a new kernel: the list before it was the last one of its kernel
        self._open = [
            RetainDecision(
                episode.position, value.node, value.label(self.env.greedy_latency), value.node in action.retain
            )
            for value in values
        ]

    @property
    def gain(self) -> float:
        """The share of greedy's latency that was saved, of the whole episode."""
        return 1.0 - self.env.episode.latency / self.env.greedy_latency


def play(graphs: Sequence[Graph], tables: Sequence[ValueTable], answers: Answers) -> list[Game]:
    """Play all graphs in step, so that the answers of one moment can be given in one batch."""
    games = [Game(graph, table) for graph, table in zip(graphs, tables, strict=True)]
    while running := [game for game in games if not game.env.episode.ended]:
        for game, text in zip(running, answers([game.env for game in running]), strict=True):
            game.answer(text)
    return games
