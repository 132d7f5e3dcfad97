"""The contract between an environment and the analyses: two prompts that differ in one fact.

A pair is what `interp` knows of an environment. It is a plain, validated value that is stored as one JSON object a
line, so that pairs made by any environment, or by hand, can be analysed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

Message = Mapping[str, str]


class PairError(ValueError):
    """A pair, or a line of a pair file, breaks the contract; the message names the field, the expected, the found."""


@dataclass(frozen=True)
class CounterfactualPair:
    """Prompts A and B with the same characters everywhere except inside the span `value` of the last user message.

    Attributes:
        id: unique within a file.
        environment: name of the environment that made the pair, for example ``scheduler``.
        kind: what the pair is for: ``future_uses`` (the main kind) or the name of a control.
        messages_a, messages_b: chat messages, each ``{"role": …, "content": …}``; the last one is the user's.
        action_prefix: the assistant's text up to the decision.
        answer: the rest of the action that the fact in A calls for.
        foil: the rest of the action that the fact in B calls for.
        spans: name -> (start, end), characters of the last user message, the same in A and B; ``value`` is the fact.
        group: the statistical unit (pairs made from one graph share it).
        meta: anything JSON can hold.

    Raises:
        PairError: on construction, if a field does not hold what is said above.
    """

    id: str
    environment: str
    kind: str
    messages_a: tuple[Message, ...]
    messages_b: tuple[Message, ...]
    action_prefix: str
    answer: str
    foil: str
    spans: Mapping[str, tuple[int, int]]
    group: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "environment", "kind", "action_prefix", "answer", "foil", "group"):
            _expect(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        for name in ("id", "answer", "foil", "group"):
            _expect(getattr(self, name) != "", name, "a string that is not empty", "")
        _expect(self.answer != self.foil, "foil", "a text other than the answer", self.foil)
        for name in ("messages_a", "messages_b"):
            object.__setattr__(self, name, _checked_messages(name, getattr(self, name)))
        text_a, text_b = self.user_a, self.user_b
        object.__setattr__(self, "spans", _checked_spans(self.spans, len(text_a)))
        _expect(isinstance(self.meta, Mapping), "meta", "an object", self.meta)
        object.__setattr__(self, "meta", MappingProxyType(dict(self.meta)))
        if self.messages_a[:-1] != self.messages_b[:-1]:
            raise PairError("messages_b: expected the same messages as in messages_a before the last one, found others")
        start, end = self.spans["value"]
        suffix = text_a[end:]
        tail = len(text_b) - len(suffix)
        if text_a[:start] != text_b[:start] or text_b[max(tail, start) :] != suffix:
            raise PairError(
                f"spans.value: expected A and B to be equal outside characters {start} to {end} of the user message, "
                f"found a difference at character {_first_difference(text_a, text_b)}"
            )

    @property
    def user_a(self) -> str:
        """A's last user message, the text that the spans index."""
        return self.messages_a[-1]["content"]

    @property
    def user_b(self) -> str:
        """B's last user message."""
        return self.messages_b[-1]["content"]

    @property
    def value_a(self) -> str:
        """The characters of the changed value in A."""
        start, end = self.spans["value"]
        return self.user_a[start:end]

    @property
    def value_b(self) -> str:
        """The characters of the changed value in B, which may be longer or shorter than A's."""
        start, end = self.spans["value"]
        return self.user_b[start : len(self.user_b) - (len(self.user_a) - end)]

    def to_json(self) -> str:
        """One line of a pair file, without the newline."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["spans"] = {name: list(span) for name, span in self.spans.items()}
        record["messages_a"] = [dict(m) for m in self.messages_a]
        record["messages_b"] = [dict(m) for m in self.messages_b]
        record["meta"] = dict(self.meta)
        return json.dumps(record, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> CounterfactualPair:
        """The pair that a line holds.

        Raises:
            PairError: if the line is not a JSON object with exactly the fields of a pair (`meta` may be missing).
        """
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PairError(f"expected one JSON object, found text that is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise PairError(f"expected one JSON object, found {_shown(record)}")
        known = {f.name for f in fields(cls)}
        if missing := sorted(known - {"meta"} - record.keys()):
            raise PairError(f"expected the field(s) {', '.join(missing)}, found only {', '.join(sorted(record))}")
        if unknown := sorted(record.keys() - known):
            raise PairError(f"expected only the fields {', '.join(sorted(known))}, found also {', '.join(unknown)}")
        return cls(**record)


def write_pairs(pairs: Iterable[CounterfactualPair], path: str | Path) -> None:
    """Write a pair file (JSONL) in one piece: the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(pair.to_json() + "\n" for pair in pairs), encoding="utf-8")
    partial.replace(path)


def read_pairs(path: str | Path) -> list[CounterfactualPair]:
    """Read a pair file (JSONL; blank lines are passed over).

    Raises:
        PairError: naming the file and every broken line, or if the file holds no pair or an id twice.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    pairs: list[CounterfactualPair] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in _numbered_lines(path):
        try:
            pair = CounterfactualPair.from_json(line)
        except PairError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        if pair.id in seen:
            problems.append(
                f"{path}:{number}: id: expected an id used once, found {pair.id!r} of line {seen[pair.id]} again"
            )
        seen.setdefault(pair.id, number)
        pairs.append(pair)
    if problems:
        raise PairError("\n".join(problems))
    if not pairs:
        raise PairError(f"{path}: expected at least one pair, found none")
    return pairs


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PairError(f"{path}: expected UTF-8 text, found a byte that is not ({error})") from None
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _checked_messages(name: str, messages: Any) -> tuple[Message, ...]:
    _expect(isinstance(messages, (list, tuple)) and len(messages) > 0, name, "a list of chat messages", messages)
    checked = []
    for message in messages:
        keys_ok = isinstance(message, Mapping) and set(message) == {"role", "content"}
        _expect(
            keys_ok and all(isinstance(v, str) for v in message.values()), name, "messages of role and content", message
        )
        checked.append(MappingProxyType(dict(message)))
    _expect(checked[-1]["role"] == "user", name, "a last message with role user", checked[-1]["role"])
    return tuple(checked)


def _checked_spans(spans: Any, length: int) -> Mapping[str, tuple[int, int]]:
    _expect(isinstance(spans, Mapping) and "value" in spans, "spans", "an object with the key value", spans)
    checked = {}
    for name, span in spans.items():
        is_pair = isinstance(span, (list, tuple)) and len(span) == 2 and all(type(edge) is int for edge in span)
        _expect(is_pair, f"spans.{name}", "[start, end]", span)
        start, end = span
        _expect(0 <= start < end <= length, f"spans.{name}", f"0 <= start < end <= {length}, the user message", span)
        checked[name] = (start, end)
    return MappingProxyType(checked)


def _first_difference(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _expect(condition: bool, name: str, expected: str, found: Any) -> None:
    if not condition:
        raise PairError(f"{name}: expected {expected}, found {_shown(found)}")


def _shown(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
