"""What the imitation learner is shown: observations and the heuristic's answers."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerBase

from counterfactuals import CounterfactualPair, generate_pairs
from counterfactuals.scheduler import play, random_graph, replay
from env.scheduler.policies import heuristic
from env.scheduler.prompts import messages

BATCH_UNIT = 4  # the two sides of a pair, and as many states
IGNORED = -100  # the label of tokens that are not learnt, PyTorch's default


@dataclass(frozen=True)
class Sample:
    """One prompt and the action text to learn.

    Attributes:
        messages: chat messages.
        given: the beginning of the assistant's text, which is not learnt here.
        learnt: the rest of it.
        graph: fingerprint of the graph that it comes from.
    """

    messages: tuple[dict[str, str], ...]
    given: str
    learnt: str
    graph: str


def batches(count: int, size: int, seed: int) -> list[list[Sample]]:
    """Batches of samples: in the first half both sides of counterfactual pairs, in the second states of episodes.

    Both sides of a pair stand in one batch: what differs between their gradients is the count alone, and yes and no are
    balanced. Of a pair only the retain list is learnt, of an ordinary state the whole action.

    Args:
        count: batches.
        size: samples a batch, a multiple of `BATCH_UNIT`.
        seed: names the batches for ever; a larger count begins with the same batches.
    """
    per_batch = size // BATCH_UNIT
    pairs = generate_pairs(count * per_batch, seed)
    made = []
    for number in range(count):
        mine = pairs[number * per_batch : (number + 1) * per_batch]
        sides = [side for pair in mine for side in _sides(pair)]
        rng = np.random.default_rng([seed, number])
        made.append(sides + [episode_state(rng) for _ in range(size - len(sides))])
    return made


def _sides(pair: CounterfactualPair) -> tuple[Sample, Sample]:
    a, b = tuple(map(dict, pair.messages_a)), tuple(map(dict, pair.messages_b))
    return (
        Sample(a, pair.action_prefix, pair.answer, pair.group),
        Sample(b, pair.action_prefix, pair.foil, pair.group),
    )


def episode_state(rng: Generator) -> Sample:
    """A random moment of a random episode, and what the heuristic answers to it."""
    graph = random_graph(rng)
    observation = replay(graph, play(graph, int(rng.integers(len(graph))), rng))
    action = heuristic(json.loads(observation))
    return Sample(messages(observation), "", action.to_text(), graph.fingerprint[:16])


def encode(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """`input_ids` and `labels` (T,) of a sample, tokenized whole; learnt are the tokens that hold a character of what
    is
    to be learnt, and the end of the turn."""
    prompt = tokenizer.apply_chat_template(list(sample.messages), tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str)
    given = prompt + sample.given
    text = given + sample.learnt + str(tokenizer.eos_token)
    rendered = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = rendered["input_ids"], rendered["offset_mapping"]
    labels = [i if end > len(given) else IGNORED for i, (_, end) in zip(ids, offsets, strict=True)]
    return {"input_ids": ids, "labels": labels}
