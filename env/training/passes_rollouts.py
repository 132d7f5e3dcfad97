"""Whole dialogues that a policy samples, as token ids and with the environment's reward.

The dialogues about one program are written in step, so that what they have in common is read once. Every draw is named
by the run's seed, the step and the dialogue: what one dialogue draws changes nothing for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from env.passes import PassesEnv
from env.passes.prompts import messages
from env.training.store import TrainingError
from interp.rows import Rows

MAX_NEW_TOKENS = 320  # of a turn


@dataclass
class Dialogue:
    """One dialogue while it is written.

    Attributes:
        env: where it is played.
        rng: what it draws from.
        prompt: token ids of the question, up to the first turn.
        ids: token ids of all that follows: the agent's turns and the responses.
        mask: of each of them, 1 if the agent wrote it.
        reward: of the whole, when it has ended.
        valid_path: whether it kept to the protocol to the letter.
    """

    env: PassesEnv
    rng: Generator
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    valid_path: bool = False


class Chat:
    """How a tokenizer's chat template writes a question and what comes between two turns.

    Raises:
        TrainingError: if the template does not write a longer chat as the continuation of a shorter one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id
        self._asked = list(messages("?"))
        self._before = self._render(self._asked) + str(tokenizer.eos_token)
        self.between("")

    def prompt(self, question: str) -> list[int]:
        """Token ids of the question, up to where the first turn begins."""
        return self._ids(self._render(list(messages(question))))

    def between(self, response: str) -> list[int]:
        """Token ids from the end of a turn, which is not among them, to the beginning of the next one."""
        said = [{"role": "assistant", "content": ""}, {"role": "user", "content": response}]
        text = self._render([*self._asked, *said])
        if not text.startswith(self._before):
            raise TrainingError("chat template: expected one that continues a chat, found one that rewrites it")
        return self._ids(text.removeprefix(self._before))

    def _render(self, chat: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def play(
    model: Any,
    chat: Chat,
    envs: Sequence[PassesEnv],
    rngs: Sequence[Generator],
    temperature: float = 1.0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[Dialogue]:
    """Play an episode of each environment with a causal language model as it is switched now.

    Args:
        envs: best of one program; they are reset.
        rngs: one for each.
        max_new_tokens: a turn that has not ended by then is cut, and ended.
    """
    played = [Dialogue(env, rng, chat.prompt(env.reset()[0])) for env, rng in zip(envs, rngs, strict=True)]
    while running := [one for one in played if not one.env.episode.ended]:
        prompts = [one.prompt + one.ids for one in running]
        turns = _sample(model, prompts, [one.rng for one in running], chat.end, temperature, max_new_tokens)
        for one, turn in zip(running, turns, strict=True):
            _step(one, turn, chat)
    return played


def _step(one: Dialogue, turn: list[int], chat: Chat) -> None:
    text = chat.tokenizer.decode(turn, skip_special_tokens=True)
    observation, reward, *_, info = one.env.step(str(text))
    one.reward += reward
    one.valid_path = info.get("valid_path", False)
    given = [] if turn[-1] == chat.end else [chat.end]
    if not one.env.episode.ended:
        given += chat.between(observation)
    one.ids += [*turn, *given]
    one.mask += [1] * len(turn) + [0] * len(given)


@torch.inference_mode()
def _sample(
    model: Any, prompts: list[list[int]], rngs: Sequence[Generator], end: int, temperature: float, most: int
) -> list[list[int]]:
    """One turn of each row, with the token that ends it unless it was cut."""
    rows = Rows(model, prompts)
    written: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    pieces = [prompt[rows.shared :] for prompt in prompts]
    while running:
        logits = rows.logits(rows.feed(pieces))[:, 0]
        for i, token in zip(running, _draw(logits, [rngs[i] for i in running], temperature), strict=True):
            written[i].append(token)
        going = [row for row, i in enumerate(running) if written[i][-1] != end and len(written[i]) < most]
        if going and len(going) < len(running):
            rows.keep(torch.tensor(going, device=rows.device))
        running = [running[row] for row in going]
        pieces = [[written[i][-1]] for i in running]
    return written


def _draw(logits: Tensor, rngs: Sequence[Generator], temperature: float) -> list[int]:
    """A token of each row of logits (rows, vocab)."""
    chances = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1).cpu().numpy()
    return [
        int(np.searchsorted(row, rng.random() * row[-1], side="right")) for row, rng in zip(chances, rngs, strict=True)
    ]
