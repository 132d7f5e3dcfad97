"""Episodes of the policy as it is, and what is to be learnt from them.

At each node the model proposes candidates, the teacher at times adds a hint, and all are scored by trying them in
copies of the episode (`env.training.scoring`). The episode then goes on with the model's first candidate, so that the
states are the policy's own. Episodes are played in step, so that one batch answers all of them.

Every draw is named by the run's seed, the episode and the node: what one episode draws changes nothing for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerBase

from env.scheduler import SchedulerEnv, parse_action
from env.scheduler.prompts import SYSTEM_PROMPT, messages
from env.training.actions import ActionTokens, listable
from env.training.curriculum import Curriculum
from env.training.sampling import sample
from env.training.scoring import TEACHERS, Teacher, score

IMITATED = ("won", "best")
MOST_PAIRS = 4
TIE = 1e-9


@dataclass(frozen=True)
class Recipe:
    """How episodes are rolled out. The defaults are the published numbers.

    Attributes:
        candidates: of the model, at each state that is learnt from.
        states: the most states of an episode that are learnt from, drawn from its nodes.
        hints: the share of states with a hint of the teacher, at the first and at the last episode; linear between.
        teacher: `heuristic` or `planner`.
        lookahead: `2` or `full`.
        margin_unit: a pair counts min(margin / unit, 1), the margin in units of greedy's latency.
        imitate: which hints are imitated too: `won`, those that beat all of the model's candidates (published), or
            `best`, those that none of them beats, also at states without a preference.
    """

    candidates: int = 4
    states: int = 12
    hints: tuple[float, float] = (0.5, 0.1)
    teacher: str = "heuristic"
    lookahead: str = "2"
    margin_unit: float = 1.0
    imitate: str = "won"


@dataclass(frozen=True)
class State:
    """What one state teaches.

    Attributes:
        prompt: token ids.
        candidates: the tokens of each distinct action, scored.
        pairs: (winner, loser, weight), indices of candidates.
        hint: the index of the hint if it is to be imitated, else None.
    """

    prompt: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int, float], ...]
    hint: int | None


@dataclass
class Played:
    """One episode: its states to learn from and what is logged of it."""

    number: int
    source: str
    env: SchedulerEnv
    teacher: Teacher
    learnt_at: frozenset[int]
    observation: str
    states: list[State] = field(default_factory=list)
    fused: list[bool] = field(default_factory=list)
    retained: list[bool] = field(default_factory=list)
    hints: list[bool] = field(default_factory=list)  # whether each hint won

    def record(self) -> dict[str, Any]:
        """A line of the log, but for the loss."""
        gain = 1.0 - self.env.episode.latency / self.env.greedy_latency
        return {
            "episode": self.number,
            "graph": self.env.graph.fingerprint[:16],
            "source": self.source,
            "nodes": len(self.env.graph),
            "score": round(gain, 6),
            "calibrated_score": round(float(np.clip(gain / 0.2, -1, 1)), 6),
            "fuse_rate": round(float(np.mean(self.fused)), 4),
            "retain_rate": round(float(np.mean(self.retained)), 4),
            "hints": len(self.hints),
            "hint_win_rate": round(float(np.mean(self.hints)), 4) if self.hints else None,
            "states": len(self.states),
            "pairs": sum(len(state.pairs) for state in self.states),
        }


class Rollouts:
    """Plays episodes of a curriculum with a model."""

    def __init__(self, recipe: Recipe, curriculum: Curriculum, tokenizer: PreTrainedTokenizerBase) -> None:
        self.recipe, self.curriculum, self.tokenizer = recipe, curriculum, tokenizer
        self.actions = ActionTokens(tokenizer)

    def play(self, model: Any, episodes: Sequence[int]) -> list[Played]:
        """Play episodes, by number, with a causal language model as it is switched now."""
        played = [self._start(number) for number in episodes]
        while running := [one for one in played if not one.env.episode.ended]:
            prompts = [self._prompt(one) for one in running]
            trees = [self.actions.tree(listable(one.observation)) for one in running]
            found = sample(model, prompts, trees, [self._rngs(one) for one in running])
            for one, prompt, candidates in zip(running, prompts, found, strict=True):
                self._step(one, prompt, candidates)
        return played

    def _start(self, number: int) -> Played:
        graph, source = self.curriculum.graph(number)
        env = SchedulerEnv(graph)
        observation, _ = env.reset()
        chosen = self._rng(number, "states").permutation(len(graph))[: self.recipe.states]
        teacher = TEACHERS[self.recipe.teacher](env)
        return Played(number, source, env, teacher, frozenset(map(int, chosen)), observation)

    def _step(self, one: Played, prompt: list[int], candidates: list[list[int]]) -> None:
        chosen = self.actions.action_text(candidates[0])
        if one.env.episode.position in one.learnt_at:
            self._learn(one, prompt, candidates)
        action = parse_action(chosen)
        one.fused.append(action.fuse_with_prev)
        one.retained.append(bool(action.retain))
        one.observation, *_ = one.env.step(chosen)

    def _learn(self, one: Played, prompt: list[int], candidates: list[list[int]]) -> None:
        distinct = list(dict.fromkeys(map(tuple, candidates)))
        hint = None
        rng = self._rng(one.number, "hint", one.env.episode.position)
        if rng.random() < self._hint_share(one.number):
            hint = tuple(self.actions.tokens(one.teacher.action(one.env)))
        offered = distinct if hint is None or hint in distinct else [*distinct, hint]
        texts = map(self.actions.action_text, offered)
        scores = [score(one.env, text, one.teacher, self.recipe.lookahead) for text in texts]
        imitated = None
        if hint is not None:
            at = offered.index(hint)
            others = max([value for i, value in enumerate(scores) if i != at], default=-np.inf)
            won = hint not in distinct and scores[at] > others + TIE
            one.hints.append(won)
            if won or (self.recipe.imitate == "best" and scores[at] > others - TIE):
                imitated = at
        pairs = preferences(scores, self.recipe.margin_unit)
        if pairs or (imitated is not None and len(offered) > 1):
            one.states.append(State(tuple(prompt), tuple(offered), pairs, imitated))

    def _prompt(self, one: Played) -> list[int]:
        chat = list(messages(one.observation, SYSTEM_PROMPT))
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _hint_share(self, number: int) -> float:
        first, last = self.recipe.hints
        return first + (last - first) * number / max(1, self.curriculum.episodes - 1)

    def _rngs(self, one: Played) -> list[Generator]:
        position = one.env.episode.position
        count = self.recipe.candidates if position in one.learnt_at else 1
        return [self._rng(one.number, "candidate", position, i) for i in range(count)]

    def _rng(self, number: int, name: str, *where: int) -> Generator:
        return np.random.default_rng([self.curriculum.seed, *name.encode(), number, *where])


def preferences(scores: Sequence[float], unit: float) -> tuple[tuple[int, int, float], ...]:
    """The best candidate against each worse one, the widest margins first, at most `MOST_PAIRS`.

    Returns:
        (winner, loser, weight) with weight min(margin / unit, 1).
    """
    best = int(np.argmax(scores))
    margins = sorted(((scores[best] - value, i) for i, value in enumerate(scores)), reverse=True)
    return tuple((best, i, min(margin / unit, 1.0)) for margin, i in margins[:MOST_PAIRS] if margin > TIE)
