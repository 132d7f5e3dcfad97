"""Moments of the pass-ordering dialogue at which one measured number decides: what is asked, called and responded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from counterfactuals.ir_edits import Edit, Promotion, constant_edits, promotions, slot_edits, textual
from counterfactuals.pair import PairError
from env.passes import LLVMError, Program, load_program, shared_evaluator
from env.passes.action import call_text, response_text
from env.passes.prompts import question
from env.passes.synergy import read_graph
from env.passes.tools import FIND_BEST, INSTRCOUNT

MEM2REG = "mem2reg"
KINDS = ("improvement_over_oz", "same_sign", "digit_edit", "single_feature", MEM2REG, "identical")
AT_THE_QUESTION = ("single_feature", MEM2REG)
TWO_MODULES = ("improvement_over_oz", "same_sign", *AT_THE_QUESTION)
EDITORS: dict[str, Callable[[str], Iterator[Edit | Promotion]]] = {
    "single_feature": constant_edits,
    MEM2REG: promotions,
}
LENGTHS = 10, 14  # passes of a sequence
WALKS, NEAREST = 40, 20  # sequences measured of a program, and how many of them, nearest to -Oz, are used
EDITS = 12  # tried of a program
# What the agent thinks: nothing that gives the decision away before the tag that is the decision.
FIRST = f"I measure a first sequence with {INSTRCOUNT}."
DECIDE = "Is improvement_over_oz above 0?"


class PairRefused(PairError):
    """The environment does not prove that two prompts differ in one number only."""


@dataclass(frozen=True)
class Moment:
    """A program, an edit of it, and the sequence that is measured.

    Attributes:
        program: its name, which both modules go by.
        edit: what makes the other module; None: there is no other module.
        sequence: of the call.
    """

    program: str
    edit: Edit | Promotion | None
    sequence: tuple[str, ...]

    def modules(self) -> tuple[Program, Program]:
        """The program and the edited one, which is the same without an edit.

        Raises:
            PairRefused: if the edited text is no program, or nothing is left of it under -Oz.
        """
        program = load_program(self.program)
        if self.edit is None:
            return program, program
        try:
            edited = Program.measured(self.program, self.edit.applied(self.program).encode(), shared_evaluator())
        except (LLVMError, ValueError) as error:
            raise PairRefused(f"expected an edit that leaves a program, found {error}") from None
        if not edited.oz_instructions:
            raise PairRefused("expected an edit that leaves something under -Oz, found that nothing is left")
        return program, edited

    def questions(self) -> tuple[str, str]:
        """The questions about the two modules."""
        program, edited = self.modules()
        return question(program), question(edited)

    def responses(self) -> tuple[str, str]:
        """What the tool responds to the call about the two modules.

        Raises:
            PairRefused: if the questions differ, or a module cannot be measured.
        """
        program, edited = self.modules()
        if question(program) != question(edited):
            raise PairRefused("expected an edit that the question does not show, found another question")
        before, after = (response(module, self.sequence) for module in (program, edited))
        return before, after


def gain_of(program: Program, sequence: Sequence[str]) -> float | None:
    """`improvement_over_oz` as the tool says it; None if the sequence fails."""
    outcome = shared_evaluator().evaluate(program.content, sequence)
    return None if outcome.instructions is None else round(program.over_oz(outcome.instructions), 6)


def response(program: Program, sequence: Sequence[str]) -> str:
    """The text of the tool's response to a call that measures a sequence.

    Raises:
        PairRefused: if the sequence fails.
    """
    if (gain := gain_of(program, sequence)) is None:
        raise PairRefused("expected a sequence that runs to its end, found one that does not")
    return response_text({"filename": program.name, "status": "success", "improvement_over_oz": gain})


def instrcount_text(name: str, sequence: Sequence[str]) -> str:
    """The agent's first turn: the call that measures a sequence."""
    return call_text(FIRST, INSTRCOUNT, {"filename": name, "optimization_flags": list(sequence)})


def search_text(name: str) -> str:
    """The agent's turn after a number that is not above 0."""
    return call_text(DECIDE, FIND_BEST, {"filename": name})


def moments(program: Program, kind: str, rng: Generator) -> Iterator[Moment]:
    """Moments of a program to try for pairs of a kind: edits drawn at random, and sequences near -Oz that suit them."""
    walks = read_graph().walks(WALKS, rng, *LENGTHS)
    outcomes = shared_evaluator().evaluate_all(program.content, walks)
    gains = {s: program.over_oz(o.instructions) for s, o in zip(walks, outcomes, strict=True) if o.instructions}
    near = sorted((s for s in gains if round(gains[s], 6)), key=lambda s: (abs(gains[s]), s))[:NEAREST]
    if not near:
        return
    if kind not in TWO_MODULES:
        yield Moment(program.name, None, near[rng.integers(len(near))])
        return
    edits = list(EDITORS.get(kind, slot_edits)(textual(program.name)))
    for place in rng.permutation(len(edits))[:EDITS]:
        edit = edits[place]
        sequence = near[rng.integers(len(near))]
        if kind in AT_THE_QUESTION:
            yield Moment(program.name, edit, sequence)
        else:
            yield from _suiting(Moment(program.name, edit, sequence), near, kind)


def _suiting(moment: Moment, sequences: Sequence[tuple[str, ...]], kind: str) -> Iterator[Moment]:
    """The edit with each sequence whose two numbers are of the signs that the kind asks for."""
    try:
        program, edited = moment.modules()
    except PairRefused:
        return
    if edited.features != program.features:
        return
    shared_evaluator().evaluate_all(edited.content, sequences)  # all at once: they share what they begin with
    for sequence in sequences:
        before, after = gain_of(program, sequence), gain_of(edited, sequence)
        if before and after and before != after and (before * after < 0) == (kind == "improvement_over_oz"):
            yield Moment(moment.program, moment.edit, sequence)
