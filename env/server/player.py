"""A trained adapter as a player. Loads it when it is first asked; needs `interp`, so only programs import this."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

from env.fusionops import prompts as fusionops_prompts
from env.scheduler import prompts as scheduler_prompts
from env.server.errors import ServiceError
from env.server.service import Answer

_MESSAGES = {"scheduler": scheduler_prompts.messages, "fusionops": fusionops_prompts.messages}


class PlayerError(ValueError):
    """A player cannot be had; the message is one line that says what was expected and what was found."""


def adapter_player(folder: Path) -> Answer:
    """The adapter in a folder as a player: name of the environment, observation -> the action's text.

    The words around the observation are those that the adapter was trained with, as `workbench.json` records them, or
    else the environment's own. An adapter that records its environment plays in no other.

    Raises:
        PlayerError: if there is no adapter in the folder, or its record cannot be read.
    """
    if not (folder / "adapter_config.json").is_file():
        raise PlayerError(f"--adapter: expected a folder with an adapter_config.json, found none in {str(folder)!r}")
    record = _record(folder / "workbench.json")
    trained_in, system = record.get("environment"), record.get("system")
    if trained_in is not None and trained_in not in _MESSAGES:
        raise PlayerError(
            f"{folder / 'workbench.json'}: environment: expected one of {', '.join(_MESSAGES)}, found {trained_in!r}"
        )
    if system is not None and not isinstance(system, str):
        raise PlayerError(f"{folder / 'workbench.json'}: system: expected a text, found {type(system).__name__}")
    model = _LazyModel(folder)

    def answer(environment: str, observation: str) -> str:
        if trained_in not in (None, environment):
            raise ServiceError(409, f"adapter: expected the environment {trained_in}, found {environment}")
        messages = _MESSAGES[environment]
        return model.answer(messages(observation) if system is None else messages(observation, system))

    return answer


class _LazyModel:
    """Loads on the first call, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._answer: Any = None

    def answer(self, prompt: tuple[dict[str, str], dict[str, str]]) -> str:
        with self._lock:
            if self._answer is None:
                self._answer = _load(self._folder)
            text: str = self._answer([prompt])[0]
            return text


def _load(folder: Path) -> Any:
    from interp.answers import answer
    from interp.base_models import BaseModelError
    from interp.subject import Subject, SubjectError

    try:
        subject = Subject.load(folder)
    except (BaseModelError, SubjectError, OSError) as error:
        raise ServiceError(409, f"adapter: {error}") from error
    return partial(answer, subject.model, subject.tokenizer)


def _record(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlayerError(f"{file}: expected JSON, found something else ({error})") from None
    if not isinstance(record, dict):
        raise PlayerError(f"{file}: expected a JSON object, found {type(record).__name__}")
    return record
