"""Greedy answers on tiny random models: a batch equals its rows alone, and both equal the library's own generation."""

import pytest
import torch
from transformers import LlamaConfig

from interp.answers import answer
from interp.rows import shared_length
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


def test_guesses_change_nothing(model, tokenizer):
    plain = answer(model, tokenizer, PROMPTS, max_new_tokens=LENGTH)
    wrong = [text[:2] + "{" + text[3:] for text in plain]
    assert answer(model, tokenizer, PROMPTS, max_new_tokens=LENGTH, guesses=["", *wrong, *plain]) == plain


class Scripted(torch.nn.Module):
    """Says, to a prompt with n question marks, n times `x` and then the end of the turn. Its cache keeps token ids."""

    def __init__(self, tokenizer):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer, self.generation_config = tokenizer, type("Settings", (), {"eos_token_id": None})()
        self.config = LlamaConfig()
        self.calls: list[tuple[int, int]] = []

    def forward(self, input_ids, cache, attention_mask=None, position_ids=None, **_):
        keys, _ = cache.update(input_ids[:, None, :, None], input_ids[:, None, :, None], 0)
        if attention_mask is None:
            return None  # what all prompts share
        self.calls.append(tuple(input_ids.shape))
        assert (position_ids[:, -1] == attention_mask.sum(1) - 1).all()
        x = self.tokenizer.convert_tokens_to_ids("x")
        logits = torch.zeros(*input_ids.shape, len(self.tokenizer))
        for row, (ids, mask) in enumerate(zip(keys[:, 0, :, 0], attention_mask.bool(), strict=True)):
            for at in range(-input_ids.shape[1], 0):
                upto = len(ids) + at + 1
                text = self.tokenizer.decode(ids[:upto][mask[:upto]])
                logits[row, at, x if text.count("?") > text.count("x") else self.tokenizer.eos_token_id] = 1
        return type("Output", (), {"last_hidden_state": logits})()

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return torch.nn.Identity()


def scripted(*counts):
    return [({"role": "user", "content": "?" * n},) for n in counts]


def test_rows_leave_when_they_end_and_answers_keep_their_order(tokenizer):
    model = Scripted(tokenizer)
    assert answer(model, tokenizer, scripted(2, 0, 4, 1)) == ["xx", "", "xxxx", "x"]
    assert [rows for rows, _ in model.calls] == [4, 3, 2, 1, 1]


def test_a_right_guess_saves_passes_and_a_wrong_one_is_taken_back(tokenizer):
    model = Scripted(tokenizer)
    assert answer(model, tokenizer, scripted(2, 0, 4, 1), guesses=["xx", "xxxx"]) == ["xx", "", "xxxx", "x"]
    assert [rows for rows, _ in model.calls] == [4, 1]
    assert answer(model, tokenizer, scripted(3, 5), guesses=["x?x"]) == ["xxx", "xxxxx"]


def test_a_long_answer_is_cut(tokenizer):
    for guesses in ([], ["xxxxxxx"], ["xx"], ["xxx"]):
        assert answer(Scripted(tokenizer), tokenizer, scripted(9, 1), max_new_tokens=3, guesses=guesses) == ["xxx", "x"]


def test_no_prompts_no_answers(model, tokenizer):
    assert answer(model, tokenizer, []) == []


def test_what_all_prompts_share_leaves_a_token_to_each():
    assert shared_length([[1, 2, 3], [1, 2, 4]]) == 2
    assert shared_length([[1, 2, 3]]) == 2
    assert shared_length([[1, 2], [1, 2, 3]]) == 1


def test_a_tokenizer_without_a_template_is_refused(model):
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(TokenizerError, match="chat_template"):
        answer(model, bare, PROMPTS)
