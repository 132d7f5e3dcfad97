"""What is planted is there, nowhere else, and the same each time."""

import itertools
import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from interp import retention_heads
from interp.planted import models
from interp.planted.models import HEAD_DIM, HEADS, KINDS, KV_HEADS, LAYERS, RANK, plant
from interp.planted.pairs import SLOTS, WORDS, make_pairs, word_tokenizer
from interp.subject import Subject
from interp.tokens import encode_pair


def test_pairs_differ_in_the_value_of_the_slot_alone():
    tokenizer = word_tokenizer()
    for pair in make_pairs(20, np.random.default_rng(0), "c"):
        encoded = encode_pair(tokenizer, pair)
        differing = [i for i, (a, b) in enumerate(zip(encoded.ids_a, encoded.ids_b, strict=True)) if a != b]
        assert differing == [encoded.spans["value"][0]]
        assert WORDS[encoded.ids_a[differing[0]]] in [f"{digit}c" for digit in "123456789"]
        assert WORDS[encoded.ids_b[differing[0]]] == "0c"
        assert WORDS[encoded.ids_a[-1]] == "retain"
        assert [WORDS[found[0]] for found in (encoded.answer, encoded.foil)] == ["yes", "no"]
        assert tokenizer.unk_token_id not in encoded.ids_a
        assert {"key", "other_key", "other_value"} <= encoded.spans.keys()


def weights(planting, layer, projection):
    """(base weight, delta) of an attention projection."""
    base = load_file(planting.adapter.parent / "base" / "model.safetensors")
    adapter = load_file(planting.adapter / "adapter_model.safetensors")
    name = f"model.layers.{layer}.self_attn.{projection}_proj"
    b, a = (adapter[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "BA")
    return base[f"{name}.weight"], b @ a


def written(matrix, head):
    return matrix[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]


@pytest.mark.parametrize("number", range(4))
def test_a_reader_is_in_the_adapter_and_writes_nothing_in_the_base(tmp_path, number):
    planting = plant("reader", tmp_path, number)
    ((layer, head),) = planting.readers["trained"]
    assert planting.readers["base"] == ()
    base, delta = weights(planting, layer, "o")
    assert written(base, head).abs().max() == 0
    sizes = [float(written(delta, other).norm()) for other in range(HEADS)]
    assert sizes[head] > 3 * max(size for other, size in enumerate(sizes) if other != head)


@pytest.mark.parametrize("number", range(4))
def test_a_decoy_looks_as_a_reader_does_and_writes_nothing(tmp_path, number):
    planting = plant("decoy", tmp_path, number)
    ((layer, head),), ((at, reader),) = planting.decoys, planting.readers["trained"]
    assert (layer, head) != (at, reader)
    base, delta = weights(planting, layer, "o")
    assert written(base, head).abs().max() == written(delta, head).abs().max() == 0
    subject = Subject.load(planting.adapter)
    pairs = [encode_pair(subject.tokenizer, pair) for pair in make_pairs(6, np.random.default_rng(0), planting.slot)]
    rows = retention_heads.measure(subject, pairs)
    seen = rows[(rows["model"] == "trained") & (rows["metric"] == "attention")].groupby(["layer", "head"])["value"]
    assert seen.mean()[layer, head] > 0.5
    assert seen.mean()[layer, head] == pytest.approx(seen.mean()[at, reader], rel=0.25)


@pytest.mark.parametrize("number", range(4))
def test_a_relocated_reader_is_cancelled_where_it_was(tmp_path, number):
    planting = plant("relocated", tmp_path, number)
    ((before, head),), ((after, other),) = planting.readers["base"], planting.readers["trained"]
    assert abs(before - after) >= 2
    base, delta = weights(planting, before, "o")
    assert written(base, head).norm() > 0.4
    assert written(base + delta, head).norm() < 0.15
    base, delta = weights(planting, after, "o")
    assert written(base + delta, other).norm() > 0.4


def moved(planting, silent=()):
    """Model -> logits by which the value moves the decision, mean of 4 pairs, some heads' outputs being 0.

    A plain pass of each prompt through the libraries' model: none of the workbench's own code.
    """
    base = LlamaForCausalLM.from_pretrained(planting.adapter.parent / "base")
    model = PeftModel.from_pretrained(base, planting.adapter).eval()
    for layer, head in silent:

        def silence(module, inputs, head=head):
            outputs = inputs[0].clone()
            outputs[..., head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0.0
            return (outputs,)

        base.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(silence)
    pairs = [encode_pair(word_tokenizer(), pair) for pair in make_pairs(4, np.random.default_rng(0), planting.slot)]

    def mean():
        gaps = []
        for pair in pairs:
            a, b = model(input_ids=torch.tensor([pair.ids_a, pair.ids_b])).logits[:, -1]
            gaps.append(float((a - b)[pair.answer[0]] - (a - b)[pair.foil[0]]))
        return np.mean(gaps)

    with torch.no_grad():
        trained = mean()
        with model.disable_adapter():
            return {"base": mean(), "trained": trained}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rank"])
def test_in_a_plain_pass_the_value_moves_the_decision_by_the_readers_alone(tmp_path, kind):
    planting = plant(kind, tmp_path, 0)
    readers = {head for heads in planting.readers.values() for head in heads}
    others = set(itertools.product(range(LAYERS), range(HEADS))) - readers
    whole, without, alone = moved(planting), moved(planting, readers), moved(planting, others)
    for model, planted in planting.readers.items():
        assert abs(without[model]) < 0.4
        assert whole[model] > 1.5 if planted else abs(whole[model]) < 0.4
        assert alone[model] > 1.5 if planted else abs(alone[model]) < 0.1
    if planting.decoys:
        assert moved(planting, planting.decoys) == whole


@pytest.mark.parametrize("number", range(6))
def test_a_known_rank_is_in_one_module_and_noise_in_the_others(tmp_path, number):
    planting = plant("rank", tmp_path, number)
    adapter = load_file(planting.adapter / "adapter_model.safetensors")
    sigma = {
        key.removeprefix("base_model.model.").removesuffix(".lora_B.weight"): torch.linalg.svdvals(
            b @ adapter[key.replace("lora_B", "lora_A")]
        )
        for key, b in adapter.items()
        if "lora_B" in key
    }
    planted = sigma.pop(planting.module)
    assert int((planted > 1e-4).sum()) == planting.rank
    assert all(int((noise > 1e-4).sum()) == RANK for noise in sigma.values())
    assert max(noise.max() for noise in sigma.values()) < planted[planting.rank - 1]


def by_hand(planting, ids):
    """Logits of the last token of a model whose only weights are one reader's, without rotations: they are tiny."""
    tensors = load_file(planting.adapter.parent / "base" / "model.safetensors")
    ((layer, head),) = planting.readers["trained"]
    group = head // (HEADS // KV_HEADS)
    q, k, v, o = (weights(planting, layer, projection)[1] for projection in "qkvo")
    stream = tensors["model.embed_tokens.weight"][list(ids)]

    def normed(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rows(matrix, number):
        return matrix[number * HEAD_DIM : (number + 1) * HEAD_DIM]

    scores = normed(stream) @ rows(k, group).T @ rows(q, head) @ normed(stream[-1]) / HEAD_DIM**0.5
    value = scores.softmax(0) @ normed(stream) @ rows(v, group).T
    return tensors["lm_head.weight"] @ normed(stream[-1] + written(o, head) @ value)


@pytest.mark.parametrize("number", range(3))
def test_the_logits_differ_by_what_is_planted(tmp_path, number, monkeypatch):
    monkeypatch.setattr(models, "BACKGROUND", (0.0, 0.0))
    monkeypatch.setattr(models, "ADAPTER_NOISE", (0.0, 0.0))
    planting = plant("reader", tmp_path, number)
    subject = Subject.load(planting.adapter)
    for pair in make_pairs(3, np.random.default_rng(number), planting.slot):
        encoded = encode_pair(subject.tokenizer, pair)
        expected = [by_hand(planting, ids) for ids in (encoded.ids_a, encoded.ids_b)]
        batch = torch.tensor([encoded.ids_a, encoded.ids_b])
        for found, logits in zip(subject.model(input_ids=batch).logits[:, -1], expected, strict=True):
            torch.testing.assert_close(found, logits, atol=1e-3, rtol=0)
        moved = expected[0] - expected[1]
        assert moved[encoded.answer[0]] - moved[encoded.foil[0]] > 1
        with subject.base():
            a, b = subject.model(input_ids=batch).logits[:, -1]
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_number_gives_one_planting_and_no_draw_is_process_wide(tmp_path):
    state = torch.get_rng_state()
    first, again, other = (
        plant(*what)
        for what in (("prior", tmp_path / "1", 3), ("prior", tmp_path / "2", 3), ("prior", tmp_path / "3", 4))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert (first.readers, first.slot) == (again.readers, again.slot)
    for folder, file in (("base", "model.safetensors"), ("adapter", "adapter_model.safetensors")):
        one, same, different = (
            load_file(planting.adapter.parent / folder / file) for planting in (first, again, other)
        )
        assert all(torch.equal(one[key], same[key]) for key in one)
        assert not all(torch.equal(one[key], different[key]) for key in one)


def test_plantings_lie_in_many_places(tmp_path):
    plantings = [plant("reader", tmp_path / str(number), number) for number in range(12)]
    assert len({planting.readers["trained"] for planting in plantings}) >= 5
    assert {planting.slot for planting in plantings} <= set(SLOTS)
    config = json.loads((plantings[0].adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "0" / "base")
    assert {planting.case for planting in plantings} == {"created"}
    assert "rank" in KINDS
