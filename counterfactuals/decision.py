"""One ordinary state of an episode, its reference answer, and what an optimal agent thinks of it.

Pairs say what a fact does to a decision; decisions say what a model does in the states that it meets. Like a pair, a
decision is a plain, validated value that is stored as one JSON object a line.
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
    Span,
    checked_messages,
    checked_spans,
    expect,
    fields_of,
    read_records,
    write_records,
)


@dataclass(frozen=True)
class Decision:
    """A state and the reference answer to it.

    Attributes:
        id: unique within a file.
        environment: name of the environment that made it, for example ``scheduler``.
        group: the statistical unit (decisions of one graph share it), as for pairs.
        messages: chat messages, each ``{"role": …, "content": …}``; the last one is the user's.
        action: the whole reference answer.
        slots: slot name -> (start, end), the characters of `action` that fill it.
        choices: slot name -> the texts that could stand there, the reference's own among them.
        spans: name -> (start, end), characters of the last user message: ``key:<id>`` and ``value:<id>`` of the facts
            that a decision about <id> should rest on, and whole fields.
        labels: what an optimal agent, or the reference, thinks; anything JSON can hold.
        meta: anything JSON can hold.

    Raises:
        PairError: on construction, if a field does not hold what is said above.
    """

    id: str
    environment: str
    group: str
    messages: tuple[Message, ...]
    action: str
    slots: Mapping[str, Span]
    choices: Mapping[str, tuple[str, ...]]
    spans: Mapping[str, Span]
    labels: Mapping[str, Any]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "environment", "group", "action"):
            value = getattr(self, name)
            expect(isinstance(value, str) and value != "", name, "a string that is not empty", value)
        object.__setattr__(self, "messages", checked_messages("messages", self.messages))
        object.__setattr__(self, "slots", checked_spans("slots", self.slots, len(self.action), "the action"))
        object.__setattr__(self, "spans", checked_spans("spans", self.spans, len(self.user), "the user message"))
        object.__setattr__(self, "choices", self._checked_choices())
        for name in ("labels", "meta"):
            expect(isinstance(getattr(self, name), Mapping), name, "an object", getattr(self, name))
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @property
    def user(self) -> str:
        """The last user message, the text that the spans index."""
        return self.messages[-1]["content"]

    def slot_text(self, slot: str) -> str:
        """What the reference answer writes in a slot."""
        start, end = self.slots[slot]
        return self.action[start:end]

    def around(self, slot: str) -> tuple[str, str]:
        """The reference answer before and after a slot."""
        start, end = self.slots[slot]
        return self.action[:start], self.action[end:]

    def to_json(self) -> str:
        """One line of a decision file, without the newline."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["messages"] = [dict(message) for message in self.messages]
        for name in ("slots", "choices", "spans"):
            record[name] = {key: list(value) for key, value in record[name].items()}
        record |= {"labels": dict(self.labels), "meta": dict(self.meta)}
        return json.dumps(record, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Decision:
        """The decision that a line holds.

        Raises:
            PairError: if the line is not a JSON object with exactly the fields of a decision (`meta` may be missing).
        """
        return cls(**fields_of(line, cls))

    def _checked_choices(self) -> Mapping[str, tuple[str, ...]]:
        found = self.choices
        expect(isinstance(found, Mapping) and set(found) == set(self.slots), "choices", "one entry per slot", found)
        for slot, texts in found.items():
            listed = isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts)
            name = f"choices.{slot}"
            expect(listed and len(set(texts)) == len(texts), name, "a list of different texts", texts)
            expect(self.slot_text(slot) in texts, name, f"the action's own {self.slot_text(slot)!r} among them", texts)
        return MappingProxyType({slot: tuple(texts) for slot, texts in found.items()})


def write_decisions(decisions: Iterable[Decision], path: str | Path) -> None:
    """Write a decision file (JSONL) in one piece: the file appears whole or not at all."""
    write_records(decisions, path)


def read_decisions(path: str | Path) -> list[Decision]:
    """Read a decision file (JSONL; blank lines are passed over).

    Raises:
        PairError: naming the file and every broken line, or if the file holds no decision or an id twice.
        OSError: if the file cannot be read.
    """
    return read_records(path, Decision.from_json, "decision")
