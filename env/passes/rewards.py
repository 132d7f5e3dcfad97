"""What an episode is worth: the paper's rewards, and those of the published code.

Both are 0.5 * format + 0.5 * 30 * improvement. They differ in both parts:

| | format | improvement |
|---|---|---|
| paper | 1.5 for a transcript on a valid path, otherwise 0 | OverOrig, against the unoptimised program |
| published | 1.5 for a transcript on a valid path, otherwise points that add up to 1.49 at most | OverOz |

The numbers 0.5, 30, 1.5 and 1.49 are the published code's. Its list of points is not repeated: here a transcript that
is not perfect gets 1.49 times the share of the checks below that it passes. Defects of the published code that are not
repeated either: its format scorer is handed prompt and response together, and so gives a perfect transcript 0.47; its
training samples do not show the file name that their answers must contain; their answers are lists as Python prints
them, which is not the JSON that its scorer reads. The published 8.46 % is called OverOz in one place and OverOrig in
another.

An episode without a measurable answer has improvement 0 in the reward, under both: with -Oz in its place, as in the
paper's evaluation, the paper's reward would pay for saying nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from env.passes.action import Turn
from env.passes.catalogue import OZ
from env.passes.programs import Program
from env.passes.tools import FIND_BEST, INSTRCOUNT

FORMAT_WEIGHT, ANSWER_WEIGHT, SCALE = 0.5, 0.5, 30.0
PERFECT, AT_MOST = 1.5, 1.49
REWARDS = ("paper", "published")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn and what came back: None for a turn that cannot be read, and for no response after an answer."""

    turn: Turn | None
    response: dict[str, Any] | None = None


def checks(filename: str, exchanges: Sequence[Exchange]) -> tuple[bool, ...]:
    """What a transcript on a valid path has, in the order of the path; what was not reached is False.

    Path A: `instrcount` of a sequence, which beats -Oz, and that sequence as the answer. Path B: `instrcount` of a
    sequence, which does not, `find_best_pass_sequence`, and its sequence as the answer, or -Oz if it does not beat it.
    """
    padded = [*exchanges, *[Exchange(None)] * 3][: max(3, len(exchanges))]
    first, second, third = padded[:3]
    improvement = (first.response or {}).get("improvement_over_oz")
    passed = [*_called(first, INSTRCOUNT, filename), improvement is not None]
    if improvement is not None and improvement > 0:
        tried = (first.turn.arguments or {}).get("optimization_flags") if first.turn else None
        return (*passed, *_answered(second, tried), len(exchanges) == 2)
    found = second.response or {}
    percentage = found.get("improvement_percentage")
    best = None if percentage is None else found["best_pass_sequence"] if percentage > 0 else [OZ]
    passed += [*_called(second, FIND_BEST, filename), percentage is not None]
    return (*passed, *_answered(third, best), len(exchanges) == 3)


def _called(exchange: Exchange, tool: str, filename: str) -> tuple[bool, bool, bool]:
    turn = exchange.turn
    if turn is None:
        return False, False, False
    return turn.well_formed, turn.tool == tool, (turn.arguments or {}).get("filename") == filename


def _answered(exchange: Exchange, sequence: Sequence[str] | None) -> tuple[bool, bool]:
    turn = exchange.turn
    if turn is None or turn.tool:
        return False, False
    return turn.well_formed, sequence is not None and turn.answer == tuple(sequence)


def format_reward(filename: str, exchanges: Sequence[Exchange], rewards: str = "paper") -> float:
    """The reward for keeping to the protocol: 0 to 1.5.

    Raises:
        ValueError: if the rewards are unknown.
    """
    passed = checks(filename, exchanges)
    if all(passed):
        return PERFECT
    return AT_MOST * sum(passed) / len(passed) if _known(rewards) == "published" else 0.0


def answer_reward(program: Program, instructions: int | None, rewards: str = "paper") -> float:
    """The reward for the answer: 30 times OverOrig or OverOz; 0 if there is no answer or it could not be measured.

    Raises:
        ValueError: if the rewards are unknown.
    """
    improvement = program.over_orig if _known(rewards) == "paper" else program.over_oz
    return 0.0 if instructions is None else SCALE * improvement(instructions)


def total_reward(
    program: Program, exchanges: Sequence[Exchange], instructions: int | None, rewards: str = "paper"
) -> float:
    """0.5 * format + 0.5 * answer.

    Raises:
        ValueError: if the rewards are unknown.
    """
    form = format_reward(program.name, exchanges, rewards)
    return FORMAT_WEIGHT * form + ANSWER_WEIGHT * answer_reward(program, instructions, rewards)


def _known(rewards: str) -> str:
    if rewards not in REWARDS:
        raise ValueError(f"rewards: expected one of {', '.join(REWARDS)}, found {rewards!r}")
    return rewards
