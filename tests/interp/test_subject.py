"""Loading an adapter, switching it, and refusing what cannot be switched off."""

import json
import shutil
import socket

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from interp.base_models import BaseModelError
from interp.subject import Subject, SubjectError, UnsupportedArchitecture
from tests.interp.tiny import KINDS, save_adapter, save_base, tiny_pair_folders

IDS = torch.arange(5, 25)[None]

# What PEFT can be told to do to a model, all of which must come off again.
ADAPTERS = {
    "all projections": {},
    "two projections": {"targets": ["q_proj", "v_proj"]},
    "by pattern": {"targets": r".*\.mlp\.(up|down)_proj"},
    "head and embedding": {"targets": ["q_proj", "lm_head", "embed_tokens"]},
    "rank and alpha patterns": {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"q_proj": 32}},
    "rank-stabilised": {"use_rslora": True},
    "some layers": {"layers_to_transform": [1, 3]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embedding": {"modules_to_save": ["embed_tokens"]},
    "trained tokens": {"trainable_token_indices": [7, 8]},
}


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(tmp_path, base):
    return save_adapter(tmp_path / "ep400", base)


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_switched_off_it_is_the_base_and_switched_on_the_merged_model(tmp_path, base, options):
    subject = Subject.load(save_adapter(tmp_path / "adapter", base, **options))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    untouched = logits(plain)
    merged = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().eval()
    with subject.base():
        assert torch.equal(logits(subject.model), untouched)
        assert torch.equal(logits(subject.causal_lm), untouched)
    torch.testing.assert_close(logits(subject.model), logits(merged), rtol=0, atol=1e-4)
    assert (logits(subject.model) - untouched).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings_come_back(tmp_path, kind):
    base = save_base(tmp_path / "base", kind, tie_word_embeddings=True)
    subject = Subject.load(save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"]))
    with subject.base():
        assert torch.equal(logits(subject.model), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_contexts_nest_and_restore_after_an_exception(adapter):
    subject = Subject.load(adapter)
    trained = logits(subject.model)
    assert subject.is_trained
    with subject.base():
        base = logits(subject.model)
        with subject.trained() as same:
            assert same is subject
            assert torch.equal(logits(subject.model), trained)
            with pytest.raises(RuntimeError, match="planted"), subject.base():
                raise RuntimeError("planted")
            assert subject.is_trained
        assert not subject.is_trained
        assert torch.equal(logits(subject.model), base)
    assert torch.equal(logits(subject.model), trained)
    with pytest.raises(RuntimeError, match="planted"), subject.base():
        raise RuntimeError("planted")
    assert torch.equal(logits(subject.model), trained)


def test_it_is_frozen_and_in_eval_mode_however_it_is_switched(adapter):
    subject = Subject.load(adapter)  # dropout 0.1: in train mode two calls would differ
    for context in (subject.base, subject.trained, subject.base):
        with context():
            assert not subject.model.training
            assert not any(parameter.requires_grad for parameter in subject.model.parameters())
            assert torch.equal(logits(subject.model), logits(subject.model))
    assert not any(parameter.requires_grad for parameter in subject.model.parameters())


def test_rank_stabilised_scale(tmp_path, base):
    subject = Subject.load(save_adapter(tmp_path, base, rank=4, alpha=8, use_rslora=True))
    scales = {module.scaling["default"] for module in subject.model.modules() if isinstance(module, LoraLayer)}
    assert scales == {4.0}  # 8 / sqrt(4), not 8 / 4


def test_what_it_says_of_itself(adapter, base):
    subject = Subject.load(adapter)
    assert (subject.name, subject.n_layers, subject.config.num_attention_heads) == ("ep400", 4, 4)
    assert subject.base_identity["name"] == str(base)
    assert subject.decoder is subject.causal_lm.model
    assert subject.tokenizer.tokenize("[]") == ["[", "]"]
    assert Subject.load(adapter).adapter_sha256 == subject.adapter_sha256
    edit(adapter / "adapter_config.json", lora_alpha=9)
    assert Subject.load(adapter).adapter_sha256 != subject.adapter_sha256


def test_another_base_can_be_given(adapter, base, tmp_path):
    other = save_base(tmp_path / "other", seed=1)
    subject = Subject.load(adapter, other)
    with subject.base():
        assert torch.equal(logits(subject.model), logits(AutoModelForCausalLM.from_pretrained(other)))


def test_adapter_weights_as_pytorch_file(adapter):
    expected = logits(Subject.load(adapter).model)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert torch.equal(logits(Subject.load(adapter).model), expected)


def test_bfloat16(adapter):
    subject = Subject.load(adapter, dtype="bfloat16")
    assert subject.causal_lm.dtype == torch.bfloat16


def test_nothing_goes_to_the_network(adapter, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert Subject.load(adapter).bridge() is not None


def test_bridge_shares_the_weights_switches_along_and_leaves_the_model_alone(tmp_path):
    subject = Subject.load(tiny_pair_folders(tmp_path, "qwen2")[0])
    before = {name: type(module) for name, module in subject.model.named_modules()}
    trained = logits(subject.model)
    bridge = subject.bridge()
    assert subject.bridge() is bridge
    assert {name: type(module) for name, module in subject.model.named_modules()} == before
    assert subject.config._attn_implementation == "sdpa"
    ours = {parameter.data_ptr() for parameter in subject.model.parameters()}
    assert {parameter.data_ptr() for parameter in bridge.parameters()} <= ours
    with torch.no_grad():
        torch.testing.assert_close(bridge(IDS), trained, rtol=0, atol=1e-4)
        with subject.base():
            torch.testing.assert_close(bridge(IDS), logits(subject.model), rtol=0, atol=1e-4)
            assert (bridge(IDS) - trained).abs().max() > 0.1
        torch.testing.assert_close(bridge(IDS), trained, rtol=0, atol=1e-4)
    assert torch.equal(logits(subject.model), trained)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_are_refused(tmp_path, bias):
    base = save_base(tmp_path / "base", "qwen2")
    adapter = save_adapter(tmp_path / "adapter", base, bias=bias)
    with pytest.raises(SubjectError, match=rf"adapter_model\.safetensors: .*proj.*bias: .*\(bias is '{bias}'\)"):
        Subject.load(adapter)


def test_bias_of_a_model_without_biases_is_no_reason_to_refuse(tmp_path, base):
    assert Subject.load(save_adapter(tmp_path, base, bias="all")).is_trained


def test_replicated_layers_are_refused(tmp_path, base):
    adapter = save_adapter(tmp_path, base, layer_replication=[[0, 3], [1, 4]])
    with pytest.raises(SubjectError, match=r"adapter_config\.json: .*\(layer_replication is \[\[0, 3\], \[1, 4\]\]\)"):
        Subject.load(adapter)


def test_other_methods_are_refused(tmp_path, base):
    model = AutoModelForCausalLM.from_pretrained(base)
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(str(tmp_path / "ia3"))
    with pytest.raises(SubjectError, match=r"adapter_config\.json: peft_type: expected LORA, found 'IA3'"):
        Subject.load(tmp_path / "ia3")
    with pytest.raises(SubjectError, match=r"adapter_config\.json: use_dora: expected false"):
        Subject.load(save_adapter(tmp_path / "dora", base, use_dora=True))


def test_missing_files(adapter, tmp_path):
    with pytest.raises(BaseModelError, match=r"nowhere.adapter_config\.json: expected the configuration"):
        Subject.load(tmp_path / "nowhere")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(SubjectError, match=r"expected the adapter's weights \(adapter_model\.safetensors or"):
        Subject.load(adapter)


def test_a_broken_weights_file(adapter):
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(SubjectError, match=r"adapter_model\.safetensors: expected a file of tensors, found"):
        Subject.load(adapter)


def test_an_adapter_of_a_wider_model(tmp_path, adapter):
    wider = save_base(tmp_path / "wider", hidden_size=64)
    with pytest.raises(SubjectError, match=r"expected an adapter of .*wider, found .*size mismatch"):
        Subject.load(adapter, wider)


def test_an_adapter_of_a_deeper_or_a_shallower_model(tmp_path, adapter):
    for layers, message in ((3, r"a weight without a place: .*layers\.3"), (5, r"nothing for .*layers\.4")):
        other = save_base(tmp_path / f"{layers} layers", num_hidden_layers=layers)
        with pytest.raises(SubjectError, match=rf"adapter_model\.safetensors: .*{message}"):
            Subject.load(adapter, other)


def test_a_missing_tensor(adapter):
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if "lora_B" in key)
    save_file({name: tensor for name, tensor in weights.items() if name != key}, file)
    with pytest.raises(SubjectError, match=r"found nothing for .*lora_B"):
        Subject.load(adapter)


def test_logits_that_are_not_finite(adapter, base, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BaseModelError, match="expected finite logits"):
        Subject.load(adapter, broken)


def test_decoder_of_an_architecture_without_rotary_positions(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.interp.tiny import tiny_tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=264)).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    subject = Subject.load(save_adapter(tmp_path / "adapter", tmp_path / "base", targets=["c_attn"]))
    assert subject.n_layers == 2
    with pytest.raises(UnsupportedArchitecture, match="GPT2LMHeadModel: this architecture is not covered"):
        subject.decoder  # noqa: B018
