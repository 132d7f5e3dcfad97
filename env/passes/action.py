"""What the agent writes in a turn: a thought, and then one tool call or the answer.

<think>why</think>
<tool_call>{"name": "instrcount", "arguments": {"filename": "...", "optimization_flags": ["--sroa"]}}</tool_call>

<think>why</think>
<answer>["--sroa", "--gvn"]</answer>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WHOLE = re.compile(r"\s*<think>.*?</think>\s*<(tool_call|answer)>.*?</\1>\s*", re.DOTALL)
_PART = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>")


class ActionError(ValueError):
    """A text is no turn; the message says what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the agent.

    Attributes:
        tool: the tool that it calls, or "" if it answers.
        arguments: of the call.
        answer: the sequence that it recommends.
        well_formed: whether it is a thought and a call or answer, each once, and nothing else.
    """

    tool: str = ""
    arguments: Mapping[str, Any] | None = None
    answer: tuple[str, ...] = ()
    well_formed: bool = True


def parse_turn(text: Any) -> Turn:
    """The turn that a text is. Text around the call or answer is allowed, and makes the turn not well formed.

    Raises:
        ActionError: if there is not exactly one call or answer, or it is no JSON of the right kind.
    """
    if not isinstance(text, str):
        raise ActionError(f"expected a text, found {type(text).__name__}")
    parts = _PART.findall(text)
    if len(parts) != 1:
        raise ActionError(f"expected one <tool_call> or one <answer>, found {len(parts)}")
    kind, body = parts[0]
    well_formed = bool(_WHOLE.fullmatch(text)) and all(text.count(tag) <= 1 for tag in _TAGS)
    try:
        value = json.loads(body)
    except RecursionError:
        raise ActionError(f"expected JSON in <{kind}>, found text nested too deeply") from None
    except ValueError:
        raise ActionError(f"expected JSON in <{kind}>, found {body.strip()[:60]!r}") from None
    if kind == "answer":
        if not isinstance(value, list) or not all(isinstance(flag, str) for flag in value):
            raise ActionError(f"expected a list of passes in <answer>, found {body.strip()[:60]!r}")
        return Turn(answer=tuple(value), well_formed=well_formed)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ActionError(f"expected an object with name and arguments in <tool_call>, found {body.strip()[:60]!r}")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ActionError(f"arguments: expected an object, found {type(arguments).__name__}")
    return Turn(tool=value["name"], arguments=arguments, well_formed=well_formed)


def call_text(thought: str, tool: str, arguments: Mapping[str, Any]) -> str:
    """The text of a turn that calls a tool."""
    call = json.dumps({"name": tool, "arguments": dict(arguments)})
    return f"<think>\n{thought}\n</think>\n<tool_call>\n{call}\n</tool_call>"


def answer_text(thought: str, sequence: Sequence[str]) -> str:
    """The text of a turn that answers."""
    return f"<think>\n{thought}\n</think>\n<answer>\n{json.dumps(list(sequence))}\n</answer>"


def response_text(response: Mapping[str, Any]) -> str:
    """The text in which a tool's response comes back."""
    return f"<tool_response>\n{json.dumps(response, indent=2)}\n</tool_response>"
