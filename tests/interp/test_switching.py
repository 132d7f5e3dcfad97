"""The adapter switched on in some modules only."""

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

from interp.subject import Subject
from tests.interp.test_subject import ADAPTERS, IDS, logits
from tests.interp.tiny import save_adapter, save_base, tiny_pair_folders

ONE = "model.layers.2.self_attn.v_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def subject(base, tmp_path_factory):
    return Subject.load(save_adapter(tmp_path_factory.mktemp("adapter"), base))


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_all_is_the_trained_model_and_none_the_base_exactly(tmp_path, base, options):
    subject = Subject.load(save_adapter(tmp_path / "adapter", base, **options))
    trained = logits(subject.model)
    with subject.base():
        untouched = logits(subject.model)
    assert not torch.equal(trained, untouched)
    everything = subject.adapted_modules
    for switched, expected in [
        (subject.only(everything), trained),
        (subject.only(lambda name: True), trained),
        (subject.only([]), untouched),
        (subject.without([]), trained),
        (subject.without(everything), untouched),
    ]:
        with switched as same:
            assert same is subject
            assert torch.equal(logits(subject.model), expected)
    assert torch.equal(logits(subject.model), trained)


def test_one_module_on_is_the_base_with_that_delta_merged_by_hand(base, subject):
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    layer = next(m for name, m in subject.causal_lm.named_modules() if name == ONE)
    assert isinstance(layer, LoraLayer)
    delta = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    with torch.no_grad():
        plain.get_submodule(ONE).weight += delta
    with subject.only([ONE]):
        torch.testing.assert_close(logits(subject.model), logits(plain), rtol=0, atol=1e-4)
    with subject.base():
        assert (logits(subject.model) - logits(plain)).abs().max() > 0.01


def test_without_is_the_complement_of_only(subject):
    def in_layer_1(name):
        return ".layers.1." in name

    with subject.without(in_layer_1):
        found = logits(subject.model)
        assert not any(parameter.requires_grad for parameter in subject.model.parameters())
    with subject.only([name for name in subject.adapted_modules if not in_layer_1(name)]):
        assert torch.equal(logits(subject.model), found)
    assert not torch.equal(logits(subject.model), found)


def test_contexts_nest_and_restore_after_an_exception(subject):
    trained = logits(subject.model)
    with subject.base():
        base = logits(subject.model)
    with subject.only([ONE]):
        one = logits(subject.model)
        assert subject.is_trained
        with subject.base():
            assert torch.equal(logits(subject.model), base)
            assert not subject.is_trained
            with subject.trained():
                assert torch.equal(logits(subject.model), trained)
        assert torch.equal(logits(subject.model), one)
        with pytest.raises(RuntimeError, match="planted"), subject.without([ONE]):
            raise RuntimeError("planted")
        assert torch.equal(logits(subject.model), one)
    with pytest.raises(RuntimeError, match="planted"), subject.only([ONE]):
        raise RuntimeError("planted")
    assert torch.equal(logits(subject.model), trained)


def test_an_unknown_module_is_named(subject):
    with pytest.raises(ValueError, match=r"found model\.layers\.9\.mlp"), subject.only(["model.layers.9.mlp", ONE]):
        pass


def test_the_bridge_switches_along(tmp_path):
    subject = Subject.load(tiny_pair_folders(tmp_path)[0])
    with subject.base():
        bridge = subject.bridge()  # made while the adapter is off
    with torch.no_grad():
        torch.testing.assert_close(bridge(IDS), logits(subject.model), rtol=0, atol=1e-4)
        with subject.only([ONE]):
            torch.testing.assert_close(bridge(IDS), logits(subject.model), rtol=0, atol=1e-4)
