"""Playing whole episodes with whatever answers chat messages: what an analysis may know of an environment's scoring."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from counterfactuals.pair import PairError
from counterfactuals.scheduler import random_graph
from env.scheduler import ActionError, Graph, SchedulerEnv, load_task
from env.scheduler.action import parse_strict
from env.scheduler.hardware import HARDWARE
from env.scheduler.prompts import SYSTEM_PROMPT, messages
from env.scheduler.rules import RULES

Messages = Sequence[Mapping[str, str]]

SIZES = (8, 12)
ATTEMPTS = 100  # draws for each graph that is asked for, where some have been seen


@dataclass(frozen=True)
class Outcome:
    """What came of one episode.

    Attributes:
        score: under `documented` the share of greedy's latency that was saved; the unit of the rules under others.
        calibrated_score: clip(saved share / 0.2, -1, 1), the unit of the published tables.
        valid, invalid: how many answers were an action to the letter, and how many were not. Invalid ones place nothing
            under `documented`, while the published rules make what they can of them.
        steps: nodes that were placed by answers.
        retained: how many valid answers listed a tensor to retain.
    """

    score: float
    calibrated_score: float
    valid: int
    invalid: int
    steps: int
    retained: int


@dataclass(frozen=True)
class Episode:
    """One graph to be scheduled from its first node to its last.

    Attributes:
        id: unique among the episodes of one call.
        group: the statistical unit, the graph's fingerprint, as for pairs.
        graph, system, rules: what is played, the system prompt, and the rule set.
    """

    id: str
    group: str
    graph: Graph
    system: str
    rules: str

    def play(self, answer: Callable[[Messages], str]) -> Outcome:
        """Play it with one answer at a time."""
        return play_together([self], lambda prompts: [answer(prompt) for prompt in prompts])[0]


class _Game:
    """An episode while it is played."""

    def __init__(self, episode: Episode) -> None:
        self.system = episode.system
        self.env = SchedulerEnv(episode.graph, episode.rules)
        self.observation, self.info = self.env.reset()
        self.valid = self.invalid = self.retained = 0

    @property
    def ended(self) -> bool:
        return self.env.episode.ended

    @property
    def prompt(self) -> Messages:
        return messages(self.observation, self.system)

    def answer(self, text: str) -> None:
        try:
            self.retained += bool(parse_strict(text).retain)
            self.valid += 1
        except ActionError:
            self.invalid += 1
        self.observation, _, _, _, self.info = self.env.step(text)

    def outcome(self) -> Outcome:
        score, calibrated = float(self.info["score"]), float(self.info["calibrated_score"])
        return Outcome(score, calibrated, self.valid, self.invalid, self.env.episode.step, self.retained)


def play_together(episodes: Sequence[Episode], answer_many: Callable[[list[Messages]], list[str]]) -> list[Outcome]:
    """Play episodes in step, so that all prompts of one moment can be answered in one batch.

    Args:
        answer_many: chat messages, of every episode that has not ended, to as many texts.

    Returns:
        The outcomes, in the order of the episodes.

    Raises:
        ValueError: if there are not as many texts as prompts.
    """
    games = [_Game(episode) for episode in episodes]
    while running := [game for game in games if not game.ended]:
        texts = answer_many([game.prompt for game in running])
        for game, text in zip(running, texts, strict=True):
            game.answer(text)
    return [game.outcome() for game in games]


def scheduler_episodes(
    count: int,
    seed: int,
    *,
    system: str = SYSTEM_PROMPT,
    rules: str = "documented",
    hardware: str = "published",
    tasks: Sequence[str] = (),
    seen: Collection[str] = (),
) -> list[Episode]:
    """Episodes on random graphs of 8 to 12 nodes, of every family, machine and tensor size.

    Args:
        count: how many random graphs.
        seed: names the graphs for ever; a larger count begins with the same ones.
        system: the system prompt that the agent was trained with.
        rules: the rule set that it was trained under.
        hardware: `published`, or `bandwidth_bound`, on which retention pays (`env.scheduler.hardware`).
        tasks: names of fixed tasks (`env.scheduler.TASKS`) that are played as well, before the others, on their own
            machines.
        seen: groups (fingerprints) that the agent was trained on, which are not drawn.

    Raises:
        PairError: if an argument is not as said, or nearly all graphs of these sizes have been seen.
    """
    for name, value, known in (("rules", rules, tuple(RULES)), ("hardware", hardware, HARDWARE)):
        if value not in known:
            raise PairError(f"{name}: expected one of {', '.join(known)}, found {value!r}")
    try:
        graphs = {name: load_task(name) for name in tasks}
    except ValueError as error:
        raise PairError(f"tasks: {error}") from None
    wanted = len(graphs) + count
    for draw in range(ATTEMPTS * count):
        if len(graphs) == wanted:
            break
        graph = random_graph(np.random.default_rng([seed, *b"episodes", draw]), hardware, SIZES)
        if _group(graph) not in seen:
            graphs[f"episode-{seed}-{draw}"] = graph
    if len(graphs) < wanted:
        raise PairError(
            f"seen: expected graphs of {SIZES[0]} to {SIZES[1]} nodes that are not among them, found too few"
        )
    return [Episode(name, _group(graph), graph, system, rules) for name, graph in graphs.items()]


def _group(graph: Graph) -> str:
    return graph.fingerprint[:16]
