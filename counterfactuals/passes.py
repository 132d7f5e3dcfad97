"""Pairs of the pass-ordering dialogue in which the sign of one measured number decides what the agent does next.

The agent has asked for a sequence to be measured. If the response says `improvement_over_oz` above 0 it answers with
the sequence, otherwise it calls `find_best_pass_sequence`. Two real modules are played with the same texts: a program,
and the same program in which one load or store goes to another stack slot of its type. No feature and no count in the
question shows that, so both questions are the same text, and so is the call; but the sequence beats -Oz on one module
and not on the other. The responses are compared and refused unless the number is their only difference. Both prompts
are what the environment shows, to the character. The two numbers have equally many digits. Answer and foil are the tag
that opens a call or the answer: what follows it is no longer decided, and would cost many times the rest.

    python -m counterfactuals.passes --count 64 --out pairs.jsonl

Kinds:
    improvement_over_oz: the main kind, as above. At random, half of the pairs have the edited program as A.
    same_sign: the same with two numbers of one sign; the decision should not move.
    digit_edit: the program's own response, and in B its number with the other sign: an edit of the text that no module
        stands behind (`meta["on_manifold"]` is false).
    single_feature: the question itself, before any call. A constant 0 or 1 of the program is 7 in the other module, and
        that changes one feature and nothing else. Both call for `instrcount`; the foil answers -Oz at once, so the
        decision should not move.
    mem2reg: the question before and after the pass `mem2reg` of one variable, from which the others are hidden, so that
        all numbers keep as many digits. Many features and the count change together, as they do in real modules; again
        both call for `instrcount`.
    identical: A is B; nothing may move at all.

Agents are trained on the programs of the split `train`; pairs are made from the others.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from tqdm import tqdm

from counterfactuals.ir_edits import Edit, Promotion
from counterfactuals.pair import CounterfactualPair, PairError, read_pairs, write_pairs
from counterfactuals.passes_moments import (
    AT_THE_QUESTION,
    DECIDE,
    FIRST,
    KINDS,
    MEM2REG,
    TWO_MODULES,
    Moment,
    PairRefused,
    instrcount_text,
    moments,
    search_text,
)
from env.passes import LLVMError, Program, ProgramError, load_program, load_programs
from env.passes.action import answer_text
from env.passes.catalogue import OZ
from env.passes.prompts import SYSTEM_PROMPT, messages, question
from env.passes.tools import FIND_BEST, INSTRCOUNT

SPLITS = ("validation", "test")
LARGEST = 400  # instructions of a program
ATTEMPTS = 400


def generate_pairs(
    count: int, seed: int, *, kind: str = "improvement_over_oz", system: str = SYSTEM_PROMPT, quiet: bool = True
) -> list[CounterfactualPair]:
    """Pairs of one kind, each from a program drawn at random; several can be of one program, which is the group.

    Args:
        count: how many pairs.
        seed: names the pairs for ever; a larger count with the same seed begins with the same pairs.
        kind: one of `KINDS`.
        system: the system prompt that the agent was trained with.
        quiet: no progress bar.

    Raises:
        PairError: if an argument is not as said.
        LLVMError: if LLVM cannot be run.
    """
    if kind not in KINDS:
        raise PairError(f"kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    pairs = []
    for draw in tqdm(range(count), kind, disable=quiet):
        rng = np.random.default_rng([seed, KINDS.index(kind), draw])
        a_is_edited = bool(rng.random() < 0.5) and kind in TWO_MODULES
        pairs.append(_search(f"passes-{kind}-{seed}-{draw}", kind, a_is_edited, system, rng))
    return pairs


def prove(pair: CounterfactualPair) -> None:
    """Measure again what a pair was made of and compare.

    Raises:
        PairRefused: if the environment does not give this pair again.
    """
    if pair.kind not in KINDS:
        raise PairRefused(f"pair {pair.id}: kind: expected one of {', '.join(KINDS)}, found {pair.kind!r}")
    try:
        edit = pair.meta["edit"]
        made_by = Promotion if pair.kind == MEM2REG else Edit
        moment = Moment(pair.meta["program"], edit and made_by(**edit), tuple(pair.meta["sequence"]))
        again = _pair(pair.id, pair.kind, moment, pair.meta["a_is_edited"], pair.messages_a[0]["content"])
    except (KeyError, TypeError, ValueError, IndexError) as error:  # of them: PairError, PassError, ProgramError
        raise PairRefused(f"pair {pair.id}: cannot be made again: {error}") from None
    if again.to_json() != pair.to_json():
        raise PairRefused(f"pair {pair.id}: expected what its program and sequence give, found another text")


@cache
def _programs() -> tuple[Program, ...]:
    return tuple(p for split in SPLITS for p in load_programs(split) if p.instructions <= LARGEST)


def _search(name: str, kind: str, a_is_edited: bool, system: str, rng: Generator) -> CounterfactualPair:
    for _ in range(ATTEMPTS):
        program = _programs()[rng.integers(len(_programs()))]
        for moment in moments(program, kind, rng):
            try:
                return _pair(name, kind, moment, a_is_edited, system)
            except PairRefused:
                continue
    raise PairRefused(f"{kind}: expected a pair, found none in {ATTEMPTS} programs")


def _pair(name: str, kind: str, moment: Moment, a_is_edited: bool, system: str) -> CounterfactualPair:
    """The pair that a moment proves."""
    if (moment.edit is not None) != (kind in TWO_MODULES):
        raise PairRefused(f"expected {'an' if kind in TWO_MODULES else 'no'} edit in a pair of kind {kind}")
    program, call = moment.program, instrcount_text(moment.program, moment.sequence)
    texts = moment.questions() if kind in AT_THE_QUESTION else moment.responses()
    text_a, text_b = texts[::-1] if a_is_edited else texts
    before = list(messages(question(load_program(program)), system))
    if kind in AT_THE_QUESTION:
        before = before[:1]
        spans, about = _question_spans(kind, text_a, text_b)
        decisions = [call, answer_text(FIRST, [OZ])]
    else:
        before.append({"role": "assistant", "content": call})
        text_b = _negated(text_a) if kind == "digit_edit" else text_b
        spans, about = _response_spans(text_a), _signs(kind, text_a, text_b)
        decisions = [answer_text(DECIDE, moment.sequence), search_text(program)]
        decisions = decisions if about["numbers"]["a"] > 0 else decisions[::-1]
    prefix, answer, foil = _parted(*decisions)
    made_of = {
        "program": program,
        "edit": moment.edit and vars(moment.edit),
        "sequence": list(moment.sequence),
        "a_is_edited": a_is_edited,
        "on_manifold": kind != "digit_edit",
    }
    return CounterfactualPair(
        id=name,
        environment="passes",
        kind=kind,
        messages_a=(*before, {"role": "user", "content": text_a}),
        messages_b=(*before, {"role": "user", "content": text_b}),
        action_prefix=prefix,
        answer=answer,
        foil=foil,
        spans=spans,
        group=program,
        meta=made_of | about,
    )


def _negated(text: str) -> str:
    """A response with the other sign."""
    start, end = _number(text)
    value = text[start:end].strip()
    return f"{text[:start]} {value.removeprefix('-') if value.startswith('-') else '-' + value}{text[end:]}"


def _response_spans(text: str) -> dict[str, tuple[int, int]]:
    """Where the number, its key and the other keys of a response stand."""
    spans = {key: _span(text, f'"{key}"') for key in ("filename", "status")}
    return {"value": _number(text), **spans, "key": _span(text, '"improvement_over_oz"')}


def _signs(kind: str, text_a: str, text_b: str) -> dict[str, Any]:
    """The two numbers, and what they call for.

    Raises:
        PairRefused: unless they are all that differs, have equally many digits, and the signs that the kind asks for.
    """
    (start, end), (start_b, end_b) = _number(text_a), _number(text_b)
    if text_a[:start] + text_b[start_b:end_b] + text_a[end:] != text_b:
        raise PairRefused("expected responses that differ in improvement_over_oz only, found more")
    a, b = text_a[start:end], text_b[start_b:end_b]
    if len(a.lstrip(" -")) != len(b.lstrip(" -")):
        raise PairRefused(f"expected numbers of equally many digits, found{a} and{b}")
    numbers = float(a), float(b)
    flips = numbers[0] * numbers[1] < 0
    if 0 in numbers or flips != (kind in ("improvement_over_oz", "digit_edit")) or (a == b) != (kind == "identical"):
        raise PairRefused(f"{kind}: expected other numbers, found{a} and{b}")
    called_for = ["answer" if number > 0 else FIND_BEST for number in numbers]
    return {"numbers": dict(zip("ab", numbers, strict=True)), "called_for": dict(zip("ab", called_for, strict=True))}


def _question_spans(kind: str, text_a: str, text_b: str) -> tuple[dict[str, tuple[int, int]], dict[str, Any]]:
    """From where to where the numbers of two questions differ, and a feature before that; their names and values.

    Raises:
        PairRefused: unless numbers are all that differs, each with equally many digits, and of a single feature one.
    """
    numbers_a, numbers_b = (list(_QUESTION_NUMBER.finditer(text)) for text in (text_a, text_b))
    if [(n[1], n.span()) for n in numbers_a] != [(n[1], n.span()) for n in numbers_b]:
        raise PairRefused("expected questions whose numbers have equally many digits, found others")
    differing = [(a, b) for a, b in zip(numbers_a, numbers_b, strict=True) if a[2] != b[2]]
    if not differing or (len(differing) == 1) != (kind == "single_feature"):
        names = ", ".join(a[1] for a, _ in differing)
        raise PairRefused(f"{kind}: expected other numbers that differ, found {names or 'none'}")
    (first, _), (last, _) = differing[0], differing[-1]
    spans = {"key": first.span(1), "value": (first.start(2), last.end(2))}
    if other := next((n for n in numbers_a if n.end() < spans["key"][0] or n.start() > spans["value"][1]), None):
        spans |= {"other_key": other.span(1), "other_value": other.span(2)}
    values = {"a": {a[1]: int(a[2]) for a, _ in differing}, "b": {b[1]: int(b[2]) for _, b in differing}}
    return spans, {"values": values, "called_for": {"a": INSTRCOUNT, "b": INSTRCOUNT}}


# The space before it is part of the number: tokenizers join it with a minus sign.
_NUMBER = re.compile(r'"improvement_over_oz":( -?[\d.e-]+)')
# Its features, and the count that follows them.
_QUESTION_NUMBER = re.compile(r'^(?:  ")?(\w[\w ]*)"?: (\d+),?$', re.MULTILINE)


def _number(text: str) -> tuple[int, int]:
    found = _NUMBER.search(text)
    assert found
    return found.span(1)


def _span(text: str, part: str) -> tuple[int, int]:
    start = text.index(part)
    return start, start + len(part)


def _parted(answer: str, foil: str) -> tuple[str, str, str]:
    """What two turns begin with, up to the end of their thought, and the tag that follows in each."""
    prefix, end, answer = answer.partition("</think>\n")
    answer, foil = (rest.partition(">")[0] + ">" for rest in (answer, foil.removeprefix(prefix + end)))
    return prefix + end, answer, foil


def main(argv: Sequence[str] | None = None) -> int:
    """Write a pair file, or prove one; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m counterfactuals.passes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=64, help="pairs of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names the pairs (%(default)s)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated (default: improvement_over_oz)")
    parser.add_argument("--system", type=Path, help="file with the system prompt (default: the project's own)")
    parser.add_argument("--out", type=Path, help="pair file to write")
    parser.add_argument("--prove", type=Path, metavar="FILE", help="measure the pairs of a file again, and compare")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no summary")
    options = parser.parse_args(argv)
    if (options.out is None) == (options.prove is None):
        parser.error("expected --out FILE or --prove FILE")
    if options.count < 1:
        parser.error(f"--count: expected 1 or more, found {options.count}")
    try:
        said = _prove_file(options) if options.prove else _write_file(options)
    except (PairError, LLVMError, ProgramError, OSError, UnicodeDecodeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if not options.quiet:
        sys.stdout.write(said + "\n")
    return 0


def _write_file(options: argparse.Namespace) -> str:
    system = options.system.read_text(encoding="utf-8") if options.system else SYSTEM_PROMPT
    kinds = options.kind or [KINDS[0]]
    made = (generate_pairs(options.count, options.seed, kind=k, system=system, quiet=options.quiet) for k in kinds)
    pairs = [pair for of_kind in made for pair in of_kind]
    write_pairs(pairs, options.out)
    return f"{options.out}: {options.count} of each of {', '.join(kinds)}; {len({p.group for p in pairs})} programs"


def _prove_file(options: argparse.Namespace) -> str:
    pairs = read_pairs(options.prove)
    for pair in tqdm(pairs, "pairs measured", disable=options.quiet):
        prove(pair)
    return f"{options.prove}: {len(pairs)} pairs, all as the environment gives them"


if __name__ == "__main__":
    sys.exit(main())
