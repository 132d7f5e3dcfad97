"""Every way in which PEFT writes an adapter: measured as plain arithmetic on its file says, or refused in one line."""

import copy
import dataclasses
import json
import re

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from interp import cli, logit_lens, lora_svd
from interp.base_models import BaseModelError
from interp.flip import MODELS
from interp.lora_files import LoraFiles
from interp.lora_svd_summary import by_module
from interp.patching import Task, measure_pair
from interp.subject import Subject
from interp.tokens import encode_pair
from tests.interp.test_patching import make_pair
from tests.interp.tiny import ALL_PROJECTIONS, save_adapter, save_base

LAYERS = 2
FACTOR = re.compile(r"(?P<module>.+)\.lora_(embedding_)?A(\.weight)?")
TOKENS = (7, 71)  # 71 is the letter e, which the prompts hold

# What the adapter is told, and s by projection: alpha / r, or alpha / sqrt(r) when rank-stabilised. All others have 2.
WORKS = {
    "plain": ({}, {}),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2, "down_proj": 8}}, {"q_proj": 4.0, "down_proj": 1.0}),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 32, "up_proj": 2}}, {"q_proj": 8.0, "up_proj": 0.5}),
    "rank_pattern and alpha_pattern": (
        {"rank_pattern": {"q_proj": 2, "k_proj": 8}, "alpha_pattern": {"q_proj": 6, "v_proj": 4}},
        {"q_proj": 3.0, "k_proj": 1.0, "v_proj": 1.0},
    ),
    "rank-stabilised": ({"use_rslora": True}, dict.fromkeys(ALL_PROJECTIONS, 4.0)),
    "rank-stabilised with a rank_pattern": (
        {"use_rslora": True, "rank_pattern": {"q_proj": 16}},
        dict.fromkeys(ALL_PROJECTIONS, 4.0) | {"q_proj": 2.0},
    ),
    "layers_to_transform": ({"layers_to_transform": [1]}, {}),
    "all-linear": ({"targets": "all-linear"}, {}),
    "more rank than the matrix has": ({"rank": 40, "alpha": 80}, {}),
    "embedding and head": ({"targets": ["q_proj", "embed_tokens", "lm_head"]}, {}),
    "biases, where the model has none": ({"bias": "all"}, {}),
    "a saved head": ({"modules_to_save": ["lm_head"]}, {}),
    "a saved embedding": ({"modules_to_save": ["embed_tokens"]}, {}),
    "saved norms": ({"modules_to_save": ["input_layernorm"]}, {}),
    "a saved MLP": ({"targets": ["q_proj"], "modules_to_save": ["mlp"]}, {}),
    "saved attention": ({"targets": ["up_proj"], "modules_to_save": ["self_attn"]}, {}),
    "trained tokens": ({"trainable_token_indices": list(TOKENS)}, {}),
}
TIED = {
    "the head's LoRA": {"targets": ["q_proj", "lm_head"]},
    "the embedding's LoRA": {"targets": ["q_proj", "embed_tokens"]},
    "both": {"targets": ["embed_tokens", "lm_head"]},
    "a saved head": {"modules_to_save": ["lm_head"]},
    "a saved embedding": {"modules_to_save": ["embed_tokens"]},
}
OTHER_METHODS = {
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "LOHA": peft.LoHaConfig(target_modules=["q_proj"]),
    "LOKR": peft.LoKrConfig(target_modules=["q_proj"]),
    "VERA": peft.VeraConfig(target_modules=["q_proj"]),
    "OFT": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
    "BOFT": peft.BOFTConfig(target_modules=["q_proj"], boft_block_size=4),
    "ADALORA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=3),
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3),
    "LN_TUNING": peft.LNTuningConfig(),
}
OTHER_DELTAS = {
    "DoRA": ({"use_dora": True}, "use_dora: expected false, since the delta of DoRA is not s B A, found true"),
    "a bias on B": ({"lora_bias": True}, "lora_bias: expected none, since .*, found True"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights: expected true, false, .*, found 'pissa'"),
    "OLoRA": ({"init_lora_weights": "olora"}, "init_lora_weights: expected true, false, .*, found 'olora'"),
    "activated LoRA": ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens: expected none, .*, found \[5\]"),
    "expert tensors": (
        {"target_parameters": ["mlp.up_proj.weight"]},
        r"target_parameters: expected none, .*, found \['mlp",
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("tied"), num_hidden_layers=LAYERS, tie_word_embeddings=True)


def edit(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def untied(base):
    """The base model with a head of its own, so that what is added to it does not reach the embedding."""
    model = AutoModelForCausalLM.from_pretrained(base).eval().requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    return model


def plain_arithmetic(base, adapter, scales):
    """The base model with W + s B A written into it from the adapter's file, and name -> ||s B A||_F. No PEFT."""
    model, weights, norms = untied(base), load_file(adapter / "adapter_model.safetensors"), {}
    own = model.state_dict()
    for key, tensor in weights.items():
        name = key.removeprefix("base_model.model.")
        if found := FACTOR.fullmatch(name):
            scale = scales.get(found["module"].rsplit(".", 1)[-1], 2.0)
            delta = scale * weights[key.replace("_A", "_B")] @ tensor
            norms[found["module"]] = float(delta.double().norm())
            own[f"{found['module']}.weight"] += delta.mT if "embedding" in name else delta
        elif "trainable_tokens_delta" in name:  # whole rows, whatever it is called
            own["model.embed_tokens.weight"][list(TOKENS)] = tensor
        elif "lora_" not in name and ".base_layer." not in name:  # what lies under LoRA on an embedding is saved along
            own[name].copy_(tensor)
    return model, norms


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_measured(adapter, base, expected, norms):
    """Loading, patching, the lens and the SVD say what the two plain models and the plain norms say."""
    subject = Subject.load(adapter)
    pair = encode_pair(subject.tokenizer, make_pair(2))
    plain = {"base": logits_of(untied(base), pair.ids_a), "trained": logits_of(expected, pair.ids_a)}
    frame = measure_pair(subject, Task.of(pair, positions=("value", "decision")))
    frame = frame[(frame["direction"] == "baseline_a") & (frame["metric"] == "logit_difference")].set_index("model")
    for model, switched in zip(MODELS, (subject.base, subject.trained), strict=True):
        with switched():
            torch.testing.assert_close(logits_of(subject.model, pair.ids_a), plain[model], rtol=0, atol=1e-4)
            read, error = logit_lens.lens(subject, pair.ids_a, [pair.decision])
        torch.testing.assert_close(read[-1, 0], plain[model], rtol=0, atol=1e-4)
        assert error < 1e-4
        difference = float(plain[model][pair.answer[0]] - plain[model][pair.foil[0]])
        assert frame.loc[model, "value"] == pytest.approx(difference, abs=2e-4)
    found = by_module(lora_svd.measure(adapter)).set_index("module")["frobenius"]
    assert found.to_dict() == pytest.approx(norms, rel=1e-5)
    return plain


def refused(adapter, message, *, also_by_svd=True, base=None):
    """Each in one line, by an error that the commands print as one."""
    for load in (Subject.load, lora_svd.measure) if also_by_svd else (Subject.load,):
        with pytest.raises(cli.KNOWN_ERRORS, match=message) as caught:
            load(adapter, base)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "scales"), WORKS.values(), ids=WORKS)
def test_it_is_measured(tmp_path, base, options, scales):
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    plain = assert_measured(adapter, base, *plain_arithmetic(base, adapter, scales))
    assert (plain["trained"] - plain["base"]).abs().max() > 0.05


@pytest.mark.parametrize("options", TIED.values(), ids=TIED)
def test_head_and_embedding_that_are_one_matrix(tmp_path, tied, options):
    """What is trained of one is not in the other."""
    adapter = save_adapter(tmp_path / "adapter", tied, **options)
    assert_measured(adapter, tied, *plain_arithmetic(tied, adapter, {}))


def test_a_fresh_adapter(tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base, size=0)
    plain = assert_measured(adapter, base, *plain_arithmetic(base, adapter, {}))
    assert torch.equal(plain["trained"], plain["base"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_half_precision_files_of_both_formats(tmp_path, base, dtype, name):
    adapter = save_adapter(tmp_path / "adapter", base)
    file = adapter / "adapter_model.safetensors"
    halves = {key: tensor.to(dtype) for key, tensor in load_file(file).items()}
    save_file({key: tensor.float() for key, tensor in halves.items()}, file)
    expected = plain_arithmetic(base, adapter, {})
    file.unlink()
    (save_file if name == file.name else torch.save)(halves, adapter / name)
    assert_measured(adapter, base, *expected)


def test_several_adapters_in_one_folder(tmp_path, base):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for first in ("default", "first"):
        with torch.random.fork_rng(devices=[]):
            model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, adapter_name=first)
            model.add_adapter("second", dataclasses.replace(config, r=2))
        model.save_pretrained(str(tmp_path / first))
    refused(tmp_path / "first", r"adapter_config\.json: expected one adapter's folder, found those of first, second")
    assert {module.rank for module in LoraFiles.open(tmp_path / "default").modules} == {4}
    second = tmp_path / "first" / "second"
    assert {module.rank for module in LoraFiles.open(second).modules} == {2}
    assert Subject.load(second).name == "second"


@pytest.mark.parametrize(("options", "message"), OTHER_DELTAS.values(), ids=OTHER_DELTAS)
def test_a_delta_that_is_not_s_b_a(tmp_path, base, options, message):
    adapter = save_adapter(tmp_path / "adapter", base, targets=["q_proj"])
    edit(adapter, **options)
    refused(adapter, rf"adapter_config\.json: {message}")


@pytest.mark.parametrize("name", OTHER_METHODS)
def test_another_method(tmp_path, base, name):
    config = copy.deepcopy(OTHER_METHODS[name])
    config.base_model_name_or_path = str(base)
    config.save_pretrained(str(tmp_path))
    refused(tmp_path, rf"adapter_config\.json: peft_type: expected LORA, found '{name}'")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_stay_when_the_adapter_is_off(tmp_path, bias):
    base = save_base(tmp_path / "base", "qwen2", num_hidden_layers=LAYERS)
    adapter = save_adapter(tmp_path / "adapter", base, bias=bias)
    message = rf"adapter_model\.safetensors: .*bias: expected nothing but LoRA weights, found .* \(bias is '{bias}'\)"
    refused(adapter, message, also_by_svd=False)
    left_out = LoraFiles.open(adapter).left_out  # the SVD reads the factors, and names what is none
    assert left_out
    assert all(key.endswith("bias") for key, _ in left_out)


@pytest.mark.parametrize("name", [None, "", "/no/such/model"])
def test_a_base_that_cannot_be_had(tmp_path, base, name):
    adapter = save_adapter(tmp_path / "adapter", base)
    edit(adapter, base_model_name_or_path=name)
    message = r"adapter_config\.json: base_model_name_or_path: expected .*; --base overrides it"
    refused(adapter, message, also_by_svd=False)
    frame = lora_svd.measure(adapter)  # what needs no base weight is there, the rest says why it is not
    missing = frame[frame["value"].isna()]
    assert set(missing["metric"]) == set(lora_svd.AGAINST_BASE)
    assert missing["note"].str.contains(r"base_model_name_or_path: expected").all()
    assert Subject.load(adapter, base).is_trained


def test_a_base_of_another_width(tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base)
    wider = save_base(tmp_path / "wider", num_hidden_layers=LAYERS, hidden_size=64)
    refused(adapter, r"adapter: expected an adapter of .*wider, found .*size mismatch", also_by_svd=False, base=wider)
    notes = set(lora_svd.measure(adapter, wider)["note"]) - {""}
    assert notes == {"base weight not available: the base weight has another shape"}


def test_a_base_that_is_no_model(tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base)
    with pytest.raises(BaseModelError, match=r"--base: expected a model folder.*\(a folder without config\.json\)"):
        Subject.load(adapter, tmp_path)
