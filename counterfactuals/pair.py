"""The contract between an environment and the analyses: two prompts that differ in one fact.

A pair is what `interp` knows of an environment. It is a plain, validated value that is stored as one JSON object a
line, so that pairs made by any environment, or by hand, can be analysed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from counterfactuals.records import (
    Message,
    PairError,
    checked_messages,
    checked_spans,
    expect,
    fields_of,
    read_records,
    write_records,
)


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
            expect(isinstance(getattr(self, name), str), name, "a string", getattr(self, name))
        for name in ("id", "answer", "foil", "group"):
            expect(getattr(self, name) != "", name, "a string that is not empty", "")
        expect(self.answer != self.foil, "foil", "a text other than the answer", self.foil)
        for name in ("messages_a", "messages_b"):
            object.__setattr__(self, name, checked_messages(name, getattr(self, name)))
        text_a, text_b = self.user_a, self.user_b
        object.__setattr__(
            self, "spans", checked_spans("spans", self.spans, len(text_a), "the user message", required=("value",))
        )
        expect(isinstance(self.meta, Mapping), "meta", "an object", self.meta)
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
        return cls(**fields_of(line, cls))


def write_pairs(pairs: Iterable[CounterfactualPair], path: str | Path) -> None:
    """Write a pair file (JSONL) in one piece: the file appears whole or not at all."""
    write_records(pairs, path)


def read_pairs(path: str | Path) -> list[CounterfactualPair]:
    """Read a pair file (JSONL; blank lines are passed over).

    Raises:
        PairError: naming the file and every broken line, or if the file holds no pair or an id twice.
        OSError: if the file cannot be read.
    """
    return read_records(path, CounterfactualPair.from_json, "pair")


def _first_difference(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
