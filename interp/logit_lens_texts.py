"""What the logit lens reads: texts as the model is fed them, and the forks at which a slot of the action is decided.

A choice is never tokenized in part. Every choice is put into the whole action and tokenized against the whole reference
action (`interp.tokens`); it forks off at the first token at which the two differ. Choices may share tokens: where `[]`
is one token, `[3]` and `[7]` part from it together, and from each other one token later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import pandas as pd
from transformers import PreTrainedTokenizerBase

from counterfactuals import CounterfactualPair, Decision
from interp.tokens import AlignmentError, EncodedPair, encode_pair

DECISION = "decision"
MAX_FORKS = 2  # per slot: what it begins with, and which of those that begin alike; further ones are about digits


class Fork(NamedTuple):
    """Where the choices of a slot part on the way of the action that is fed.

    Attributes:
        slot: the slot's name; its second fork is `name:2`.
        position: of the last token before the fork, whose next token decides.
        choices: what each token begins, that of the fed action, the reference, first.
        tokens: the tokens.
    """

    slot: str
    position: int
    choices: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class LensText:
    """A text as the model is fed it, and the forks to look at. The fields `id`, `group` and `kind` are its source's."""

    id: str
    group: str
    kind: str
    ids: tuple[int, ...]
    forks: tuple[Fork, ...]


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[EncodedPair], decisions: Sequence[Decision]
) -> tuple[list[LensText], list[tuple[str, str]]]:
    """The pairs' texts, which lead the report, then the decisions'; and what was left out of the decisions."""
    texts = [text for pair in pairs for text in pair_texts(tokenizer, pair)]
    left_out: list[tuple[str, str]] = []
    for decision in decisions:
        text, problems = decision_text(tokenizer, decision)
        texts += [text] if text else []
        left_out += problems
    return texts, left_out


def pair_texts(tokenizer: PreTrainedTokenizerBase, pair: EncodedPair) -> tuple[LensText, LensText]:
    """A and B of a pair, slots `answer in A` and `answer in B`; the reference is what each calls for."""
    answer, foil = ((tokenizer.decode([tokens[0]]), tokens[0]) for tokens in (pair.answer, pair.foil))

    def text(side: str, ids: tuple[int, ...], *choices: tuple[str, int]) -> LensText:
        names, tokens = zip(*choices, strict=True)
        return LensText(pair.id, pair.group, pair.kind, ids, (Fork(f"answer in {side}", pair.decision, names, tokens),))

    return text("A", pair.ids_a, answer, foil), text("B", pair.ids_b, foil, answer)


def decision_text(
    tokenizer: PreTrainedTokenizerBase, decision: Decision
) -> tuple[LensText | None, list[tuple[str, str]]]:
    """A decision's messages and whole action, and the forks of its slots.

    Returns:
        The text, None if it has no fork; and (what, reason) of each slot or choice left out.
    """
    left_out: list[tuple[str, str]] = []
    ids: tuple[int, ...] = ()
    forks: list[Fork] = []
    for slot in decision.slots:
        reference = decision.slot_text(slot)
        at: dict[int, list[tuple[str, int]]] = defaultdict(list)  # position -> the choices that fork off there
        for choice in decision.choices[slot]:
            if choice == reference:
                continue
            try:
                encoded = encode_pair(tokenizer, _against(decision, slot, choice))
            except AlignmentError as error:
                left_out.append((f"{decision.id} {slot} {choice}", error.reason))
                continue
            ids = encoded.ids_a + encoded.answer
            at[encoded.decision].append((choice, encoded.foil[0]))
        if not at:
            left_out.append((f"{decision.id} {slot}", "no other choice in the slot"))
        forks += _forks(slot, reference, ids, at)
    text = LensText(decision.id, decision.group, DECISION, ids, tuple(forks)) if forks else None
    return text, left_out


def text_table(texts: Sequence[LensText]) -> pd.DataFrame:
    """One row per fork: the token ids fed, the position read, the choices and their tokens."""
    return pd.DataFrame(
        {"id": text.id, "group": text.group, "kind": text.kind, "ids": list(text.ids)}
        | {name: list(value) if isinstance(value, tuple) else value for name, value in fork._asdict().items()}
        for text in texts
        for fork in text.forks
    )


def _against(decision: Decision, slot: str, choice: str) -> CounterfactualPair:
    """The reference action and the same one with another choice in a slot, as answer and foil of one prompt."""
    before, after = decision.around(slot)
    return CounterfactualPair(
        id=f"{decision.id} {slot}",
        environment=decision.environment,
        kind=DECISION,
        messages_a=decision.messages,
        messages_b=decision.messages,
        action_prefix=before,
        answer=decision.slot_text(slot) + after,
        foil=choice + after,
        spans={"value": (0, 1)},  # of two equal prompts; no span is used
        group=decision.group,
    )


def _forks(slot: str, reference: str, ids: Sequence[int], at: Mapping[int, list[tuple[str, int]]]) -> Iterator[Fork]:
    """The first forks along the reference. A token is named by what the choices that it begins have in common."""
    for number, position in enumerate(sorted(at)[:MAX_FORKS]):
        begins = {ids[position + 1]: [reference]}
        begins[ids[position + 1]] += [choice for later in at if later > position for choice, _ in at[later]]
        for choice, token in at[position]:
            begins.setdefault(token, []).append(choice)
        names = tuple(map(_common_beginning, begins.values()))
        yield Fork(slot if number == 0 else f"{slot}:{number + 1}", position, names, tuple(begins))


def _common_beginning(texts: Sequence[str]) -> str:
    return "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))
