"""What pairs and decisions have in common as records: checked fields, and files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

Message = Mapping[str, str]
Span = tuple[int, int]


class PairError(ValueError):
    """A record, or a line of a file, breaks the contract; the message names the field, the expected, the found."""


class Record(Protocol):
    """A value that is stored as a line."""

    @property
    def id(self) -> str:
        """Its name, unique in a file."""

    def to_json(self) -> str:
        """One line of a file."""


R = TypeVar("R", bound=Record)


def expect(condition: bool, name: str, expected: str, found: Any) -> None:
    """Raise a `PairError` about a field unless the condition holds."""
    if not condition:
        raise PairError(f"{name}: expected {expected}, found {shown(found)}")


def shown(value: Any, limit: int = 80) -> str:
    """A value for a message, cut to one short piece."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def checked_messages(name: str, messages: Any) -> tuple[Message, ...]:
    """Chat messages, the last one the user's."""
    expect(isinstance(messages, (list, tuple)) and len(messages) > 0, name, "a list of chat messages", messages)
    checked = []
    for message in messages:
        keys_ok = isinstance(message, Mapping) and set(message) == {"role", "content"}
        expect(
            keys_ok and all(isinstance(v, str) for v in message.values()), name, "messages of role and content", message
        )
        checked.append(MappingProxyType(dict(message)))
    expect(checked[-1]["role"] == "user", name, "a last message with role user", checked[-1]["role"])
    return tuple(checked)


def checked_spans(
    field: str, spans: Any, length: int, text: str, *, required: Sequence[str] = ()
) -> Mapping[str, Span]:
    """Name -> (start, end), characters of a text of that length; `text` says which one in messages."""
    wanted = f"an object with the key {', '.join(required)}" if required else "an object"
    expect(isinstance(spans, Mapping) and all(name in spans for name in required), field, wanted, spans)
    checked = {}
    for name, span in spans.items():
        is_pair = isinstance(span, (list, tuple)) and len(span) == 2 and all(type(edge) is int for edge in span)
        expect(is_pair, f"{field}.{name}", "[start, end]", span)
        start, end = span
        expect(0 <= start < end <= length, f"{field}.{name}", f"0 <= start < end <= {length}, {text}", span)
        checked[name] = (start, end)
    return MappingProxyType(checked)


def fields_of(line: str, cls: type) -> dict[str, Any]:
    """The fields of a dataclass that a line holds.

    Raises:
        PairError: if the line is not a JSON object with exactly these fields (`meta` may be missing).
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise PairError(f"expected one JSON object, found text that is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise PairError(f"expected one JSON object, found {shown(record)}")
    known = {f.name for f in fields(cls)}
    if missing := sorted(known - {"meta"} - record.keys()):
        raise PairError(f"expected the field(s) {', '.join(missing)}, found only {', '.join(sorted(record))}")
    if unknown := sorted(record.keys() - known):
        raise PairError(f"expected only the fields {', '.join(sorted(known))}, found also {', '.join(unknown)}")
    return record


def write_records(records: Iterable[Record], path: str | Path) -> None:
    """Write a JSONL file in one piece: the file appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")
    partial.replace(path)


def read_records(path: str | Path, from_json: Callable[[str], R], what: str) -> list[R]:
    """Read a JSONL file (blank lines are passed over).

    Raises:
        PairError: naming the file and every broken line, or if the file holds nothing or an id twice.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    records: list[R] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    for number, line in _numbered_lines(path):
        try:
            record = from_json(line)
        except PairError as error:
            problems.append(f"{path}:{number}: {error}")
            continue
        if record.id in seen:
            problems.append(
                f"{path}:{number}: id: expected an id used once, found {record.id!r} of line {seen[record.id]} again"
            )
        seen.setdefault(record.id, number)
        records.append(record)
    if problems:
        raise PairError("\n".join(problems))
    if not records:
        raise PairError(f"{path}: expected at least one {what}, found none")
    return records


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PairError(f"{path}: expected UTF-8 text, found a byte that is not ({error})") from None
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
