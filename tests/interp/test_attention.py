"""One row of attention against eager attention, and blocked edges against full forwards with a mask."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import repeat_kv

from interp.attention import Cell, block, continue_with, generate, head_grams, query_row, run_prefix
from interp.subject import Subject, UnsupportedArchitecture
from tests.interp.tiny import KINDS, tiny_model, tiny_pair_folders

LENGTH = 24  # longer than the tiny models' window of 6 tokens
TOKENS = (40, 41, 7)


def ids_of(seed=0, length=LENGTH):
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=KINDS)
def subject(request, tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp(request.param), request.param)[0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp("llama"), "llama")[0])


def row_of(model, ids):
    return query_row(model, run_prefix(model, ids), head_grams(model))


def implementation(causal, name):
    causal.config._attn_implementation = name
    return causal


@torch.no_grad()
def eager(causal, ids):
    """(L, H, T) of the last position, and (vocab,) its logits, by the library's own eager attention."""
    before = causal.config._attn_implementation
    found = implementation(causal, "eager")(input_ids=torch.tensor([ids]), output_attentions=True, use_cache=False)
    implementation(causal, before)
    return torch.stack([layer[0, :, -1] for layer in found.attentions]), found.logits[0, -1]


@torch.no_grad()
def masked(causal, ids, cell):
    """(vocab,) logits of a full eager forward in which one head's last query may not look at a span."""

    def attend(module, query, key, value, attention_mask, scaling, **options):
        groups = query.shape[1] // key.shape[1]
        scores = query @ repeat_kv(key, groups).mT * scaling
        scores = scores + attention_mask
        if module.layer_idx == cell.layer:
            scores[:, cell.head, -1, cell.span[0] : cell.span[1]] = -torch.inf
        return (scores.softmax(-1) @ repeat_kv(value, groups)).transpose(1, 2), None

    AttentionInterface.register("eager_with_a_hole", attend)
    before = causal.config._attn_implementation
    # An unknown name gets no mask from the library: hand over the causal one, windows included.
    length = len(ids)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    masks = {}
    for kind in set(getattr(causal.config, "layer_types", None) or ["full_attention"]):
        window = causal.config.sliding_window if kind == "sliding_attention" else length
        masks[kind] = torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None]
    if not getattr(causal.config, "layer_types", None):
        window = getattr(causal.config, "sliding_window", None) or length
        masks["full_attention"] = torch.where((distance >= 0) & (distance < window), 0.0, -torch.inf)[None, None]
    kinds = getattr(causal.config, "layer_types", None) or ["full_attention"] * causal.config.num_hidden_layers
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, mask=masks[kind]: (args, {**kwargs, "attention_mask": mask}), with_kwargs=True
        )
        for layer, kind in zip(causal.get_decoder().layers, kinds, strict=True)
    ]
    try:
        logits = implementation(causal, "eager_with_a_hole")(input_ids=torch.tensor([ids]), use_cache=False).logits
    finally:
        implementation(causal, before)
        for handle in handles:
            handle.remove()
    return logits[0, -1]


@pytest.mark.parametrize("trained", [True, False])
def test_the_row_equals_eager_attention(subject, trained):
    ids = ids_of()
    with subject.trained() if trained else subject.base():
        row = row_of(subject, ids)
        weights, logits = eager(subject.causal_lm, ids)
    torch.testing.assert_close(row.attention, weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(row.logits, logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(row.attention.sum(-1), torch.ones(row.attention.shape[:2]), rtol=0, atol=1e-6)


def test_base_and_trained_differ(llama):
    ids = ids_of()
    with llama.base():
        base = row_of(llama, ids)
    assert float((row_of(llama, ids).attention - base.attention).abs().max()) > 0.01


def test_what_is_written_equals_the_projection_of_each_value(subject):
    ids = ids_of(1)
    row = row_of(subject, ids)
    decoder = subject.causal_lm.get_decoder()
    config = subject.config
    caught = []
    handles = [
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: caught.append(output[0]))
        for layer in decoder.layers
    ]
    with torch.no_grad():
        subject.causal_lm(input_ids=torch.tensor([ids]), use_cache=False)
        for handle in handles:
            handle.remove()
        for index, (layer, values) in enumerate(zip(decoder.layers, caught, strict=True)):
            values = values.reshape(len(ids), config.num_key_value_heads, config.head_dim)
            for head in range(config.num_attention_heads):
                alone = torch.zeros(len(ids), config.num_attention_heads, config.head_dim)
                alone[:, head] = values[:, head // (config.num_attention_heads // config.num_key_value_heads)]
                project = layer.self_attn.o_proj
                written = project(alone.flatten(1)) - project(torch.zeros(1, alone.flatten(1).shape[1]))
                torch.testing.assert_close(row.written[index, head], written.norm(dim=-1), rtol=1e-3, atol=1e-5)


def test_a_blocked_edge_equals_a_full_forward_with_a_mask(subject):
    ids, causal = ids_of(2), subject.causal_lm
    row = row_of(subject, ids)
    layers, heads = row.attention.shape[:2]
    spans = [(18, 21), (20, 23), (2, 4)]
    cells = [Cell(layer, head, span) for span in spans for layer in range(layers) for head in range(heads)]
    found = block(subject, row, cells, TOKENS)
    expected = torch.stack([masked(causal, ids, cell) for cell in cells])[:, list(TOKENS)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    moved = (found - row.logits[list(TOKENS)]).abs().max(dim=1).values
    assert int((moved > 1e-3).sum()) > len(cells) / 4


def test_many_passes_equal_one(llama, monkeypatch):
    row = row_of(llama, ids_of(3))
    cells = [Cell(layer, head, (5, 8)) for head in (2, 0) for layer in (3, 1, 0)]
    found = block(llama, row, cells, TOKENS)
    monkeypatch.setattr("interp.attention.MAX_ROWS", 2)
    monkeypatch.setattr("interp.attention.MAX_UNEMBEDDED", 1)
    torch.testing.assert_close(block(llama, row, cells, TOKENS), found, rtol=0, atol=1e-5)
    backwards = block(llama, row, cells[::-1], TOKENS)
    torch.testing.assert_close(backwards, found.flip(0), rtol=0, atol=1e-5)


def test_an_edge_that_is_not_looked_along_can_be_blocked_without_effect(tmp_path):
    subject = Subject.load(tiny_pair_folders(tmp_path, "mistral")[0])
    row = row_of(subject, ids_of(4))
    cells = [Cell(layer, 1, (3, 9)) for layer in range(4)]  # outside the window of 6
    found = block(subject, row, cells, TOKENS)
    torch.testing.assert_close(found, row.logits[list(TOKENS)].expand_as(found), rtol=0, atol=1e-5)


@pytest.mark.parametrize("span", [(3, 3), (-1, 2), (20, LENGTH)])
def test_a_span_must_be_before_the_last_position(llama, span):
    with pytest.raises(ValueError, match="expected spans within 0 to 23"):
        block(llama, row_of(llama, ids_of()), [Cell(0, 0, span)], TOKENS)


def test_a_donors_stream_continues_as_in_a_full_forward(subject):
    ids, causal = ids_of(5), subject.causal_lm
    row, donor = row_of(subject, ids), row_of(subject, ids_of(6, 30)).streams
    found = continue_with(subject, row, donor)
    decoder = causal.get_decoder()
    for index, module in enumerate([*decoder.layers, decoder.norm]):

        def put(module, args, kwargs, value=donor[index]):
            stream = (args[0] if args else kwargs["hidden_states"]).clone()
            stream[0, -1] = value
            return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

        handle = module.register_forward_pre_hook(put, with_kwargs=True)
        with torch.no_grad():
            expected = causal(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        handle.remove()
        torch.testing.assert_close(found[index], expected, rtol=0, atol=1e-4)
    own = continue_with(subject, row, row.streams)
    torch.testing.assert_close(own, row.logits.expand_as(own), rtol=0, atol=1e-4)


def test_generation_is_greedy_and_leaves_the_prefix_as_it_is(subject):
    ids, causal = ids_of(7), subject.causal_lm
    prefix = run_prefix(subject, ids)
    before = query_row(subject, prefix, head_grams(subject))
    expected = list(ids)
    with torch.no_grad():
        for _ in range(5):
            expected.append(int(causal(input_ids=torch.tensor([expected]), use_cache=False).logits[0, -1].argmax()))
    assert generate(subject, prefix, 5, ()) == expected[len(ids) :]
    third = expected[len(ids) + 2]
    assert generate(subject, prefix, 5, (third,)) == expected[len(ids) : expected.index(third, len(ids))]
    after = query_row(subject, prefix, head_grams(subject))
    assert torch.equal(before.attention, after.attention)


def test_what_is_not_covered_is_refused(llama):
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=210)).eval()
    with pytest.raises(UnsupportedArchitecture, match="not covered"):
        run_prefix(gpt2, ids_of())
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, vocab_size=210, attn_logit_softcapping=5.0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    with pytest.raises(UnsupportedArchitecture, match="not covered"):
        row_of(gemma, ids_of())
    with pytest.raises(ValueError, match="two tokens or more, found 1"):
        run_prefix(llama, [5])


def test_a_model_that_it_computes_otherwise_is_refused():
    model = tiny_model()
    grams = head_grams(model)
    prefix = run_prefix(model, ids_of())
    model.lm_head.register_forward_hook(lambda module, args, output: output * (1 + (output.dim() == 3)))
    with pytest.raises(UnsupportedArchitecture, match="found a difference of"):
        query_row(model, prefix, grams)


def test_nothing_is_left_behind_after_an_error(llama):
    ids = ids_of()
    row = row_of(llama, ids)
    before = llama.causal_lm.config._attn_implementation
    handle = llama.causal_lm.get_decoder().layers[2].mlp.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        block(llama, row, [Cell(0, 0, (1, 2))], TOKENS)
    handle.remove()
    assert llama.causal_lm.config._attn_implementation == before
    torch.testing.assert_close(row_of(llama, ids).logits, row.logits, rtol=0, atol=0)


def test_quantities_are_linear_in_the_length(llama):
    row = row_of(llama, ids_of(0, 60))
    sizes = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    assert all(value.numel() < 60 * 60 for value in sizes.values() if isinstance(value, torch.Tensor))
    assert isinstance(llama.causal_lm, nn.Module)
