"""Prompts to token ids, and named character spans to token positions.

A prompt forced to end inside a token has already decided: in many vocabularies ``[]`` after ``"retain":`` is the single
token `` []`` while ``[7]`` begins with `` [``, so a prompt cut at ``[`` rules the first out. So no action is tokenized
in part. The two whole texts, prompt + action with the answer and prompt + action with the foil, are tokenized; the
decision is the first token at which they differ, and everything before it is the prompt that the model is fed.

The chat template is the authority on special tokens: the rendered text is tokenized with ``add_special_tokens=False``,
as `apply_chat_template(tokenize=True)` does. A beginning-of-sequence token that the template writes is there once, and
one that it does not write is not added, since the model does not see it in chat use either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from counterfactuals import CounterfactualPair

Span = tuple[int, int]
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can hold one half alone, and no tokenizer takes it


class AlignmentError(ValueError):
    """A pair cannot be analysed with a tokenizer. `reason` is short and fit for counting; the message says more."""

    def __init__(self, pair: str, reason: str, detail: str):
        super().__init__(f"pair {pair}: {reason}: {detail}")
        self.reason = reason


class TokenizerError(ValueError):
    """A tokenizer that no pair can be encoded with."""


@dataclass(frozen=True)
class EncodedPair:
    """A pair as the model is fed it. A and B have T tokens each and differ only at tokens of the span `value`.

    Attributes:
        id, group, kind: the pair's.
        ids_a, ids_b: (T,) prompt and action up to and including the decision position.
        answer: the tokens of the action with the answer, from the first one at which answer and foil differ.
        foil: the same for the foil; ``answer[0]`` and ``foil[0]`` are what the logit difference compares.
        spans: name -> [start, end) token positions that cover the named characters, the same in A and B.
    """

    id: str
    group: str
    kind: str
    ids_a: tuple[int, ...]
    ids_b: tuple[int, ...]
    answer: tuple[int, ...]
    foil: tuple[int, ...]
    spans: Mapping[str, Span]

    @property
    def decision(self) -> int:
        """T - 1, the position whose next token is the decision."""
        return len(self.ids_a) - 1

    @property
    def first_difference(self) -> int:
        """The first position at which A and B differ; in an identical pair, where the value stands."""
        found = _first_difference(self.ids_a, self.ids_b)
        return found if found < len(self.ids_a) else self.spans["value"][0]

    @property
    def value_positions(self) -> tuple[int, ...]:
        """The value's positions from the first difference on; those before it hold the same in A and B."""
        return tuple(range(self.first_difference, self.spans["value"][1]))


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Iterable[CounterfactualPair]
) -> tuple[list[EncodedPair], list[tuple[str, str]]]:
    """Encode what can be encoded.

    Returns:
        The encoded pairs, and (id, reason) of each pair left out, both in the order given.

    Raises:
        TokenizerError: if the tokenizer has no chat template, or gives no character offsets.
    """
    encoded: list[EncodedPair] = []
    left_out: list[tuple[str, str]] = []
    for pair in pairs:
        try:
            encoded.append(encode_pair(tokenizer, pair))
        except AlignmentError as error:
            left_out.append((pair.id, error.reason))
    return encoded, left_out


def encode_pair(tokenizer: PreTrainedTokenizerBase, pair: CounterfactualPair) -> EncodedPair:
    """Tokenize a pair, find its decision and the tokens of its spans.

    A span is covered by every token that holds one of its characters, so a token shared with the neighbouring text
    counts. That is allowed for the value too, as long as A and B have equal length and differ nowhere else.

    An identical pair, a control in which nothing may move, is encoded like any other.

    Raises:
        AlignmentError: if A and B do not align token by token, if the chat template alters the user message, or if
            the actions have no token of their own to compare.
        TokenizerError: if the tokenizer has no chat template, or gives no character offsets.
    """
    before, after = _template_around_user_message(tokenizer, pair)
    a, b = (_decide(tokenizer, pair, before + content + after) for content in (pair.user_a, pair.user_b))
    if len(a.ids) != len(b.ids):
        raise AlignmentError(pair.id, "length differs", f"{len(a.ids)} tokens in A, {len(b.ids)} in B")
    if a.ids == b.ids and pair.user_a != pair.user_b:
        raise AlignmentError(pair.id, "no difference", "A and B have other characters but the same tokens")
    spans_a = {name: a.cover(len(before) + start, len(before) + end) for name, (start, end) in pair.spans.items()}
    spans_b = {name: b.cover(*(len(before) + edge for edge in _span_in_b(pair, name))) for name in pair.spans}
    for name, span in spans_a.items():
        if span != spans_b[name]:
            detail = f"{name} is at tokens {list(span)} in A, {list(spans_b[name])} in B"
            raise AlignmentError(pair.id, "span differs", detail)
    start, end = spans_a["value"]
    if a.ids[:start] != b.ids[:start] or a.ids[end:] != b.ids[end:]:
        detail = f"the value is at tokens {start} to {end}, and A and B differ before or after it"
        raise AlignmentError(pair.id, "tokens differ outside the value", detail)
    return EncodedPair(
        pair.id, pair.group, pair.kind, a.ids, b.ids, a.answer, a.foil, MappingProxyType(dict(sorted(spans_a.items())))
    )


def _template_around_user_message(tokenizer: PreTrainedTokenizerBase, pair: CounterfactualPair) -> tuple[str, str]:
    """The rendered text before and after the last user message.

    Found by rendering a placeholder in its place: searching for the message itself would find it in a system prompt
    or an earlier turn that quotes it.
    """
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "chat_template: expected a tokenizer that has one, found none; use a chat model's tokenizer"
        )
    messages = [dict(message) for message in pair.messages_a]
    placeholder = "user-message"
    while any(placeholder in message["content"] for message in messages):
        placeholder += "-0"
    parts = _render(tokenizer, pair.id, [*messages[:-1], {"role": "user", "content": placeholder}]).split(placeholder)
    if len(parts) != 2:
        detail = f"expected to find it once in the rendered prompt, found it {len(parts) - 1} times"
        raise AlignmentError(pair.id, "template drops or repeats the user message", detail)
    before, after = parts
    for content in (pair.user_a, pair.user_b):
        if (
            _render(tokenizer, pair.id, [*messages[:-1], {"role": "user", "content": content}])
            != before + content + after
        ):
            detail = "the rendered prompt does not hold its characters as they are (is there white space at an end?)"
            raise AlignmentError(pair.id, "template alters the user message", detail)
    return before, after


def _render(tokenizer: PreTrainedTokenizerBase, pair: str, messages: list[dict[str, str]]) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it may divide by zero
        raise AlignmentError(pair, "template refuses the messages", str(error)) from None
    assert isinstance(text, str)
    return text


@dataclass(frozen=True)
class _Decision:
    """One prompt up to its decision: ids (T,), the characters [start, end) of each, and the two ways to go on."""

    pair: str
    ids: tuple[int, ...]
    edges: tuple[Span, ...]
    answer: tuple[int, ...]
    foil: tuple[int, ...]

    def cover(self, start: int, end: int) -> Span:
        """[first, last) of the tokens that hold a character of [start, end)."""
        held = [i for i, (left, right) in enumerate(self.edges) if left < end and right > start]
        if not held:
            detail = f"characters {start} to {end} of the rendered prompt are in no token"
            raise AlignmentError(self.pair, "span without tokens", detail)
        return held[0], held[-1] + 1


def _decide(tokenizer: PreTrainedTokenizerBase, pair: CounterfactualPair, prompt: str) -> _Decision:
    """Tokenize both whole actions after one prompt.

    What the model is fed in generation, the prompt tokenized by itself, must be how both begin; so the decision is
    always a token of the assistant's text.
    """
    if SURROGATE.search(prompt + pair.action_prefix + pair.answer + pair.foil):
        raise AlignmentError(pair.id, "half a character", "a surrogate stands without its other half")
    prompt_ids, _ = _tokenize(tokenizer, prompt)
    ids, edges = _tokenize(tokenizer, prompt + pair.action_prefix + pair.answer)
    foil_ids, _ = _tokenize(tokenizer, prompt + pair.action_prefix + pair.foil)
    if not ids[: len(prompt_ids)] == foil_ids[: len(prompt_ids)] == prompt_ids:
        detail = "the end of the prompt and the beginning of the action make one token, which generation never feeds"
        raise AlignmentError(pair.id, "prompt and action share a token", detail)
    decision = _first_difference(ids, foil_ids)
    if decision == min(len(ids), len(foil_ids)):
        detail = "one ends before they differ, so there is no token to compare"
        raise AlignmentError(pair.id, "answer and foil begin alike", detail)
    return _Decision(pair.id, ids[:decision], edges[:decision], ids[decision:], foil_ids[decision:])


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[tuple[int, ...], tuple[Span, ...]]:
    """Token ids, and the characters [start, end) of each.

    Some tokenizers leave white space out of the offsets; it is given to the token after it here, so that every
    character belongs to a token.
    """
    if not tokenizer.is_fast:
        raise TokenizerError(f"{type(tokenizer).__name__}: expected a tokenizer with offsets (a fast one), found none")
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    edges: list[Span] = []
    for start, end in encoding["offset_mapping"]:
        edges.append((min(start, edges[-1][1] if edges else 0), end))
    return tuple(encoding["input_ids"]), tuple(edges)


def _span_in_b(pair: CounterfactualPair, name: str) -> Span:
    """A span's characters in B: what lies after the value moves by the difference of the two values' lengths."""
    value_end = pair.spans["value"][1]
    shift = len(pair.user_b) - len(pair.user_a)
    start, end = (edge + shift if edge >= value_end else edge for edge in pair.spans[name])
    return start, end


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The first index at which the two differ, or the length of the shorter one if it begins the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
