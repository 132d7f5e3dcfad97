"""The language of the planted models: words that are tokens, and pairs of prompts that differ in one value.

A prompt lists, in random order, an entry per slot, a key and its value: `a 3a ; c 0c ; b 7b ; retain`. The value of one
slot differs between A (above 0) and B (0). Values name their slot, so that a head can find one by what it is, and no
second head has to carry the key to it.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from counterfactuals import CounterfactualPair

SLOTS = "abcd"
DIGITS = "0123456789"
FILLERS = tuple(f"{letter}x" for letter in "mnopqrstuvwx")
ASK, ANSWER, FOIL = "retain", "yes", "no"
SPECIAL = ("<start>", "<end>", "<unknown>")
TURN = ("<user>", "<model>")
WORDS = (*SPECIAL, *TURN, ";", ASK, ANSWER, FOIL, *SLOTS, *FILLERS, *(d + s for s in SLOTS for d in DIGITS))
CHAT_TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<model> {% endif %}"
)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are `WORDS`, numbered in their order."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    start, end, unknown = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=end, unk_token=unknown
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_pairs(count: int, rng: np.random.Generator, slot: str) -> list[CounterfactualPair]:
    """Pairs, each a group of its own, that differ in the value of a slot: 1 to 9 in A, 0 in B."""
    return [_pair(number, rng, slot) for number in range(count)]


def _pair(number: int, rng: np.random.Generator, slot: str) -> CounterfactualPair:
    order = [SLOTS[i] for i in rng.permutation(len(SLOTS))]
    other = str(rng.choice([name for name in SLOTS if name != slot]))
    values = {name: str(rng.integers(10)) for name in SLOTS} | {slot: str(rng.integers(1, 10))}
    words: list[str] = []
    spans: dict[str, tuple[int, int]] = {}
    for name in order:
        words += [str(filler) for filler in rng.choice(FILLERS, size=rng.integers(1, 3))]
        for what, word in (("key", name), ("value", values[name] + name)):
            begin = sum(len(w) + 1 for w in words)
            span = {slot: what, other: f"other_{what}"}.get(name)
            if span is not None:
                spans[span] = (begin, begin + len(word))
            words.append(word)
        words.append(";")
    text, begin = " ".join(words), spans["value"][0]
    return CounterfactualPair(
        id=f"planted-{number}",
        environment="planted",
        kind="value",
        messages_a=({"role": "user", "content": text},),
        messages_b=({"role": "user", "content": text[:begin] + "0" + text[begin + 1 :]},),
        action_prefix=f"{ASK} ",
        answer=ANSWER,
        foil=FOIL,
        spans=spans,
        group=f"graph-{number}",
    )
