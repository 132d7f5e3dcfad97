"""Component patching against full forwards with hooks, and what heads write against the attention output."""

import pandas as pd
import pytest
import torch
from transformer_lens import patching
from transformers import GraniteConfig, GraniteForCausalLM

from interp.components import head_outputs, patch_component
from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import patch, run_pair
from tests.interp.test_sweep import ANSWER, DECISION, VALUE, log_prob, make_pair
from tests.interp.tiny import SIZES, tiny_pair_folders

KINDS = ("llama", "mistral", "qwen2", "qwen3")
HEADS, WIDTH = SIZES["num_attention_heads"], SIZES["head_dim"]


@pytest.fixture(scope="module", params=KINDS)
def subject(request, tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp(request.param), request.param)[0])


def hook_for(layer, component, edit):
    """Register a hook that hands the component's (tokens, width) to `edit`, and puts in what it returns."""

    def before(module, args):
        return (edit(args[0][0])[None], *args[1:])

    def after(module, args, output):
        if isinstance(output, tuple):
            return (edit(output[0][0])[None], *output[1:])
        return edit(output[0])[None]

    if component == "heads":
        return layer.self_attn.o_proj.register_forward_pre_hook(before)
    return getattr(layer, "self_attn" if component == "attention" else "mlp").register_forward_hook(after)


def outputs(causal, ids, component):
    """(L, tokens, width) of a plain forward."""
    found = []
    handles = [hook_for(layer, component, lambda x: found.append(x) or x) for layer in causal.get_decoder().layers]
    with torch.no_grad():
        causal(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found)


def one_cell(causal, ids, tail, layer, component, positions, values, slice_=slice(None)):
    def edit(x):
        x = x.clone()
        for position, value in zip(positions, values, strict=True):
            x[position, slice_] = value[slice_]
        return x

    handle = hook_for(causal.get_decoder().layers[layer], component, edit)
    with torch.no_grad():
        logits = causal(input_ids=torch.tensor([[*ids, *tail]]), use_cache=False).logits[0, len(ids) - 1 :]
    handle.remove()
    return logits


@pytest.mark.parametrize("component", ["attention", "mlp", "heads"])
@pytest.mark.parametrize("positions", [(VALUE,), (DECISION,), (VALUE + 2, DECISION)])
@pytest.mark.parametrize("trained", [True, False])
def test_every_cell_equals_a_full_forward_with_a_hook(subject, component, positions, trained):
    pair, causal = make_pair(1), subject.causal_lm
    with subject.trained() if trained else subject.base():
        a, b = run_pair(subject, pair)
        donor = outputs(causal, [*a.ids, *a.tail], component)
        found = patch_component(subject, b, a, positions, component)
        slices = [slice(h * WIDTH, (h + 1) * WIDTH) for h in range(HEADS)] if component == "heads" else [slice(None)]
        cells = [
            one_cell(causal, b.ids, b.tail, layer, component, positions, donor[layer][list(positions)], part)
            for layer in range(subject.n_layers)
            for part in slices
        ]
    torch.testing.assert_close(found.logits, torch.stack([cell[0] for cell in cells]), rtol=0, atol=1e-4)
    expected = torch.tensor([log_prob(cell, ANSWER) for cell in cells])
    torch.testing.assert_close(found.answer_log_prob, expected, rtol=0, atol=1e-4)
    assert (found.logits - b.logits).abs().max() > 0.01  # a patch that changes nothing proves nothing


@pytest.mark.parametrize("trained", [True, False])
def test_heads_sum_to_the_attention_output(subject, trained):
    with subject.trained() if trained else subject.base():
        run, _ = run_pair(subject, make_pair())
        for layer in range(subject.n_layers):
            bias = subject.decoder.layers[layer].self_attn.o_proj.bias
            summed = head_outputs(subject, run, layer).sum(0) + (0 if bias is None else bias)
            torch.testing.assert_close(summed, run.components["attention"][layer], rtol=0, atol=1e-5)


def test_what_a_head_writes_holds_its_slice_of_the_adapter(subject):
    """Against W and s B A taken apart by hand."""
    run, _ = run_pair(subject, make_pair())
    module = subject.decoder.layers[1].self_attn.o_proj
    delta = module.scaling["default"] * module.lora_B["default"].weight @ module.lora_A["default"].weight
    weight = (module.base_layer.weight + delta)[:, 2 * WIDTH : 3 * WIDTH]
    expected = run.components["heads"][1][:, 2 * WIDTH : 3 * WIDTH] @ weight.T
    torch.testing.assert_close(head_outputs(subject, run, 1)[2], expected, rtol=0, atol=1e-5)
    assert delta.abs().max() > 0.1


@pytest.mark.parametrize("component", ["attention", "mlp", "heads"])
def test_a_run_patched_into_itself_changes_nothing(subject, component):
    run, _ = run_pair(subject, make_pair())
    found = patch_component(subject, run, run, [VALUE, DECISION], component)
    assert torch.equal(found.logits, run.logits.expand_as(found.logits))


def test_heads_agree_with_transformer_lens(subject):
    pair, bridge = make_pair(answer=(40,)), subject.bridge()
    with subject.base(), torch.no_grad():
        names = lambda name: name.endswith("hook_z")  # noqa: E731
        _, cache = bridge.run_with_cache(torch.tensor([pair.ids_a]), names_filter=names)
        expected = patching.generic_activation_patch(
            bridge,
            torch.tensor([pair.ids_b]),
            cache,
            lambda logits: logits[0, -1, 40] - logits[0, -1, 41],
            patching.layer_pos_head_vector_patch_setter,
            "z",
            index_df=pd.DataFrame(
                [(layer, DECISION, head) for layer in range(subject.n_layers) for head in range(HEADS)],
                columns=["layer", "pos", "head"],
            ),
        )
        a, b = run_pair(subject, pair)
        found = patch_component(subject, b, a, [DECISION], "heads").logits
    torch.testing.assert_close(found[:, 40] - found[:, 41], expected, rtol=0, atol=1e-4)


def test_runs_without_the_tail_decide_alike(subject):
    a, b = run_pair(subject, make_pair())
    whole = patch_component(subject, b, a, [DECISION], "heads")
    short = patch_component(subject, b.to_decision(), a.to_decision(), [DECISION], "heads")
    torch.testing.assert_close(short.logits, whole.logits, rtol=0, atol=1e-5)
    assert float(short.answer_log_prob[0]) == pytest.approx(float(short.logits[0].log_softmax(-1)[ANSWER[0]]), abs=1e-5)


def test_layers_that_scale_what_they_add_are_refused():
    small = {**SIZES, "vocab_size": 264, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GraniteForCausalLM(GraniteConfig(**small, residual_multiplier=0.5)).eval()
    a, b = run_pair(model, make_pair())
    with pytest.raises(UnsupportedArchitecture, match="GraniteForCausalLM"):
        patch_component(model, b, a, [DECISION], "mlp")


@pytest.mark.parametrize("component", ["residual", "mlp", "heads"])
def test_some_layers_are_those_of_all(subject, component):
    a, b = run_pair(subject, make_pair())

    def patched(layers):
        if component == "residual":
            return patch(subject, b, a, [VALUE], layers).logits
        return patch_component(subject, b, a, [VALUE], component, layers).logits

    size = HEADS if component == "heads" else 1
    whole = patched(None).unflatten(0, (-1, size))
    torch.testing.assert_close(patched([0, 3]).unflatten(0, (-1, size)), whole[[0, 3]], rtol=0, atol=1e-5)
    torch.testing.assert_close(patched([2]).unflatten(0, (-1, size)), whole[[2]], rtol=0, atol=1e-5)
