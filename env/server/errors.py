"""How the service says no."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ServiceError(ValueError):
    """A request that is refused; the message is one line that says what was expected and what was found.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status


def first_line(errors: Sequence[Any]) -> str:
    """The first of pydantic's errors as one line, without the value, which can be of any size."""
    error = errors[0]
    where = ".".join(str(part) for part in error["loc"] if part != "body") or "body"
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {error['msg']}{more}"
