"""Ordering passes as a Gymnasium environment of several turns: observations and actions are texts."""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium.spaces import Text

from env.passes.action import ActionError, parse_turn, response_text
from env.passes.catalogue import PassError
from env.passes.evaluator import Evaluator, shared_evaluator
from env.passes.programs import Program
from env.passes.prompts import question
from env.passes.rewards import REWARDS, Exchange, checks, total_reward
from env.passes.search import Genetics
from env.passes.synergy import SynergyGraph, read_graph
from env.passes.tools import Tools, error

LONGEST_TEXT = 1_000_000
MAX_TURNS = 6


@dataclass(frozen=True)
class Episode:
    """Where an episode is.

    Attributes:
        exchanges: the agent's turns and the responses.
        observation: what it reads now.
        instructions: how many its answer leaves; None before the answer, and if the answer could not be measured.
        answer: the sequence that it recommends; None before that.
        error: what was wrong with the last text, or "".
        terminated: it has answered.
        truncated: it has used up its turns.
    """

    observation: str
    exchanges: tuple[Exchange, ...] = ()
    instructions: int | None = None
    answer: tuple[str, ...] | None = None
    error: str = ""
    terminated: bool = False
    truncated: bool = False

    @property
    def ended(self) -> bool:
        """Whether no turn is left to take."""
        return self.terminated or self.truncated


class PassesEnv(gymnasium.Env[str, str]):
    """One program, in a dialogue: the agent thinks, calls tools, reads their responses, and recommends a sequence.

    The first observation is the question about the program; after a call it is the tool's response; after a text that
    is no turn, a response that says why. Each text uses a turn. The reward comes with the last step, from the whole
    transcript. Nothing here is random: the same texts give the same episode, and the search's draws are the program's.

    `step` and `reset` return in `info`: `instructions`, `oz_instructions` (of the program before any pass and after
    -Oz), `error` (None, or what was wrong); when the episode has ended `score` (OverOz of the answer; 0, that is -Oz,
    if there was none that could be measured), `over_orig` (the same against the unoptimised program), and `valid_path`.

    Args:
        program: what passes are ordered for.
        rewards: "paper" or "published", see `env.passes.rewards`.
        max_turns: texts before the episode is truncated; None or 0: six.
        evaluator: what measures programs; None: the one that this process shares.
        graph: what the search goes along; None: the stored one.
        genetics: the size of the search; None: the published one, up to 1,000 sequences.

    Raises:
        ValueError: if the rewards are unknown.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        program: Program,
        rewards: str = "paper",
        max_turns: int | None = None,
        evaluator: Evaluator | None = None,
        graph: SynergyGraph | None = None,
        genetics: Genetics | None = None,
    ) -> None:
        if rewards not in REWARDS:
            raise ValueError(f"rewards: expected one of {', '.join(REWARDS)}, found {rewards!r}")
        self.program, self.rewards = program, rewards
        self.max_turns = max_turns or MAX_TURNS
        self.evaluator = evaluator or shared_evaluator()
        self.tools = Tools(program, self.evaluator, graph or read_graph(), genetics or Genetics())
        self.observation_space = Text(LONGEST_TEXT, charset=string.printable)
        self.action_space = Text(LONGEST_TEXT, min_length=0, charset=string.printable)
        self.episode = Episode(question(program))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. The seed is taken for Gymnasium's sake: no draw is made."""
        super().reset(seed=seed)
        self.episode = Episode(question(self.program))
        return self.observation(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn; after the end nothing changes any more."""
        if self.episode.ended:
            return self.observation(), 0.0, self.episode.terminated, self.episode.truncated, {}
        try:
            turn = parse_turn(action)
        except ActionError as problem:
            self._respond(Exchange(None, error(f"invalid turn: {problem}")))
        else:
            if turn.tool:
                number = len(self.episode.exchanges)
                self._respond(Exchange(turn, self.tools.call(turn.tool, turn.arguments or {}, number)))
            else:
                self._answer(Exchange(turn), turn.answer)
        episode, reward = self.episode, 0.0
        if episode.ended:
            reward = total_reward(self.program, episode.exchanges, episode.instructions, self.rewards)
        return self.observation(), reward, episode.terminated, episode.truncated, self._info()

    def observation(self) -> str:
        """The observation of the present state."""
        return self.episode.observation

    @property
    def score(self) -> float:
        """OverOz of the answer; 0 without one that could be measured, for -Oz is what is used then."""
        instructions = self.episode.instructions
        return 0.0 if instructions is None else self.program.over_oz(instructions)

    def clone(self) -> PassesEnv:
        """An independent copy in the same state; what was measured is shared."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def _respond(self, exchange: Exchange) -> None:
        exchanges = (*self.episode.exchanges, exchange)
        response = exchange.response or {}
        self.episode = replace(
            self.episode,
            observation=_printable(response_text(response)),
            exchanges=exchanges,
            error=response.get("error", ""),
            truncated=len(exchanges) >= self.max_turns,
        )

    def _answer(self, exchange: Exchange, answer: tuple[str, ...]) -> None:
        problem, instructions = "", None
        try:
            outcome = self.evaluator.evaluate(self.program.content, answer)
        except PassError as refused:
            problem = str(refused)
        else:
            problem, instructions = outcome.failure, outcome.instructions
        self.episode = replace(
            self.episode,
            observation=_printable(f"The answer could not be measured: {problem}" if problem else "The end."),
            exchanges=(*self.episode.exchanges, exchange),
            instructions=instructions,
            answer=answer,
            error=problem,
            terminated=True,
        )

    def _info(self) -> dict[str, Any]:
        program, episode = self.program, self.episode
        info: dict[str, Any] = {
            "instructions": program.instructions,
            "oz_instructions": program.oz_instructions,
            "error": episode.error or None,
        }
        if not episode.ended:
            return info
        used = program.oz_instructions if episode.instructions is None else episode.instructions
        return info | {
            "score": self.score,
            "over_orig": program.over_orig(used),
            "valid_path": all(checks(program.name, episode.exchanges)),
        }


def _printable(text: str) -> str:
    """The text with everything replaced that an observation may not hold."""
    return "".join(character if character in string.printable else "?" for character in text)
