"""Greedy answers on tiny random models: a batch equals its rows alone, and both equal the library's own generation."""

import pytest
import torch

from interp.answers import answer
from interp.tokens import TokenizerError
from tests.interp.tiny import KINDS, tiny_model, tiny_tokenizer

PROMPTS = [
    ({"role": "user", "content": '{"node":5}'},),
    ({"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": '{"node":11,"uses":{"3":0}}'}),
    ({"role": "user", "content": "a"},),
]
LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return tiny_model(request.param, seed=1)


def generated(model, tokenizer, prompt):
    """What the library writes, one prompt at a time, as text."""
    ids = tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_batch_equals_its_rows_alone_and_the_library(model, tokenizer):
    together = answer(model, tokenizer, PROMPTS, max_new_tokens=LENGTH)
    alone = [answer(model, tokenizer, [prompt], max_new_tokens=LENGTH)[0] for prompt in PROMPTS]
    assert together == alone
    assert together == [generated(model, tokenizer, prompt) for prompt in PROMPTS]
    assert len(set(together)) > 1


class Scripted(torch.nn.Module):
    """Says, to a prompt that ends in a user message of n characters, n times `x` and then the end of the turn."""

    def __init__(self, tokenizer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer, self.generation_config = tokenizer, type("Settings", (), {"eos_token_id": None})()
        self.rows_seen: list[int] = []
        self.left: list[int] = []

    def forward(self, input_ids, attention_mask, position_ids, cache, **_):
        assert (position_ids[:, -1] == attention_mask.sum(1) - 1).all()
        self.rows_seen.append(len(input_ids))
        if input_ids.shape[1] > 1:
            kept = (row[mask.bool()] for row, mask in zip(input_ids, attention_mask, strict=True))
            self.left = [self.tokenizer.decode(row).count("?") for row in kept]
        x = self.tokenizer.convert_tokens_to_ids("x")
        logits = torch.zeros(len(input_ids), 1, len(self.tokenizer))
        for row, left in enumerate(self.left):
            logits[row, 0, x if left else self.tokenizer.eos_token_id] = 1
        self.left = [left - 1 for left in self.left if left]
        return type("Output", (), {"last_hidden_state": logits})()

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return torch.nn.Identity()


def test_rows_leave_when_they_end_and_answers_keep_their_order(tokenizer):
    model = Scripted(tokenizer)
    prompts = [({"role": "user", "content": "?" * n},) for n in (2, 0, 4, 1)]
    assert answer(model, tokenizer, prompts) == ["xx", "", "xxxx", "x"]
    assert model.rows_seen == [4, 3, 2, 1, 1]


def test_a_long_answer_is_cut(tokenizer):
    prompts = [({"role": "user", "content": "?" * n},) for n in (9, 1)]
    assert answer(Scripted(tokenizer), tokenizer, prompts, max_new_tokens=3) == ["xxx", "x"]


def test_no_prompts_no_answers(model, tokenizer):
    assert answer(model, tokenizer, []) == []


def test_a_tokenizer_without_a_template_is_refused(model):
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(TokenizerError, match="chat_template"):
        answer(model, bare, PROMPTS)
