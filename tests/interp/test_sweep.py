"""The patching engine against full forwards, against TransformerLens, and against itself."""

import copy
import dataclasses

import pandas as pd
import pytest
import torch
from peft import PeftModel
from transformer_lens import patching
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
)

from interp import sweep
from interp.base_models import BUILT_IN, find_base
from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import Patched, SweepError, patch, run_pair
from interp.tokens import EncodedPair
from tests.interp.tiny import KINDS, SIZES, save_adapter, save_base, tiny_model, tiny_pair_folders

LENGTH, VALUE = 24, 10  # longer than the tiny models' window of 6 tokens on both sides of the value
DECISION = LENGTH - 1
ANSWER = (40, 50, 60)


def make_pair(seed=0, *, length=LENGTH, value=VALUE, answer=ANSWER, vocabulary=200) -> EncodedPair:
    """Prompts of random tokens that differ in the one at `value`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
    other = [*ids[:value], (ids[value] + 7) % vocabulary, *ids[value + 1 :]]
    return EncodedPair(
        f"pair {seed}", "graph", "future_uses", tuple(ids), tuple(other), answer, (41,), {"value": (value, value + 1)}
    )


def swapped(pair: EncodedPair) -> EncodedPair:
    return dataclasses.replace(pair, ids_a=pair.ids_b, ids_b=pair.ids_a)


@pytest.fixture(scope="module", params=KINDS)
def subject(request, tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp(request.param), request.param)[0])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Subject.load(tiny_pair_folders(tmp_path_factory.mktemp("llama"), "llama")[0])


def forward(causal, ids, tail, edit=None):
    """Logits from the decision position on, and the stream entering each layer and the final norm.

    `edit` is (layer, positions, values): what is put into that layer's input.
    """
    streams, modules = [], [*causal.get_decoder().layers, causal.get_decoder().norm]

    def hook(index):
        def run(module, args, kwargs):
            stream = args[0] if args else kwargs["hidden_states"]
            if edit is not None and edit[0] == index:
                stream = stream.clone()
                stream[0, list(edit[1])] = edit[2]
            streams.append(stream[0])
            return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

        return run

    handles = [module.register_forward_pre_hook(hook(i), with_kwargs=True) for i, module in enumerate(modules)]
    with torch.no_grad():
        logits = causal(input_ids=torch.tensor([[*ids, *tail]]), use_cache=False).logits[0, len(ids) - 1 :]
    for handle in handles:
        handle.remove()
    return logits, streams


def log_prob(logits, answer) -> float:
    return float(logits.log_softmax(-1)[torch.arange(len(answer)), list(answer)].sum())


def by_full_forwards(causal, ids, donor_streams, positions, answer) -> Patched:
    """Every cell by a forward of its own, with nothing of the engine in it."""
    cells = []
    for layer, stream in enumerate(donor_streams):
        cells.append(forward(causal, ids, answer[:-1], (layer, positions, stream[list(positions)]))[0])
    return Patched(torch.stack([c[0] for c in cells]), torch.tensor([log_prob(c, answer) for c in cells]))


def assert_close(found: Patched, expected: Patched, tolerance=1e-4):
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.answer_log_prob, expected.answer_log_prob, rtol=0, atol=tolerance)


def test_runs_equal_the_models_own_forward(subject):
    pair = make_pair()
    for run, ids in zip(run_pair(subject, pair), (pair.ids_a, pair.ids_b), strict=True):
        logits, streams = forward(subject.causal_lm, ids, pair.answer[:-1])
        torch.testing.assert_close(run.logits, logits[0], rtol=0, atol=1e-4)
        assert run.answer_log_prob == pytest.approx(log_prob(logits, pair.answer), abs=1e-4)
        assert run.ids == ids
        recorded = torch.cat([run.residual, run.tail_residual], dim=1)
        torch.testing.assert_close(recorded, torch.stack(streams)[:, VALUE:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("positions", [(VALUE,), (DECISION,), (VALUE + 1, VALUE + 5, DECISION)])
@pytest.mark.parametrize("trained", [True, False])
def test_every_cell_equals_a_full_forward(subject, positions, trained):
    pair = make_pair(1)
    with subject.trained() if trained else subject.base():
        a, b = run_pair(subject, pair)
        for recipient, donor in ((b, a), (a, b)):
            _, streams = forward(subject.causal_lm, donor.ids, donor.tail)
            expected = by_full_forwards(subject.causal_lm, recipient.ids, streams, positions, ANSWER)
            found = patch(subject, recipient, donor, positions)
            assert_close(found, expected)
            assert (found.logits - recipient.logits).abs().max() > 0.1  # a patch that changes nothing proves nothing


@pytest.mark.parametrize("overrides", [{"num_key_value_heads": 1}, {"num_key_value_heads": 4}])
def test_other_groupings_of_query_heads(tmp_path, overrides):
    base = save_base(tmp_path / "base", **overrides)
    subject, pair = Subject.load(save_adapter(tmp_path / "adapter", base)), make_pair(2)
    a, b = run_pair(subject, pair)
    expected = by_full_forwards(
        subject.causal_lm, b.ids, forward(subject.causal_lm, a.ids, a.tail)[1], (VALUE,), ANSWER
    )
    assert_close(patch(subject, b, a, [VALUE]), expected)


@pytest.mark.parametrize("shape", [{"answer": (40,)}, {"value": 0}, {"value": DECISION}, {"length": 2, "value": 1}])
def test_short_answers_and_extreme_positions(llama, shape):
    pair = make_pair(3, **shape)
    a, b = run_pair(llama, pair)
    value = pair.first_difference
    _, streams = forward(llama.causal_lm, a.ids, a.tail)
    assert_close(patch(llama, b, a, [value]), by_full_forwards(llama.causal_lm, b.ids, streams, (value,), pair.answer))


def test_a_run_patched_into_itself_changes_nothing(subject):
    for run in run_pair(subject, make_pair()):
        for positions in ([VALUE], [DECISION], range(VALUE, LENGTH)):
            found = patch(subject, run, run, positions)
            assert torch.equal(found.logits, run.logits.expand_as(found.logits))
            assert found.answer_log_prob.tolist() == [run.answer_log_prob] * (subject.n_layers + 1)


def test_rows_driven_through_the_layers_unpatched_equal_the_run(subject):
    run, _ = run_pair(subject, make_pair())
    with torch.inference_mode():
        for first in (VALUE, DECISION):
            rows = {layer: run.stream(layer, first) for layer in range(subject.n_layers + 1)}
            logits = sweep._grow(subject.causal_lm, subject.decoder, run, first, rows)
            torch.testing.assert_close(logits[:, 0], run.logits.expand(len(rows), -1), rtol=0, atol=1e-4)


def test_all_positions_give_the_donors_decision(subject):
    a, b = run_pair(subject, make_pair())
    found = patch(subject, b, a, range(VALUE, LENGTH))
    torch.testing.assert_close(found.logits, a.logits.expand_as(found.logits), rtol=0, atol=1e-4)


def test_the_only_differing_token_at_layer_0_gives_the_donors_run(subject):
    a, b = run_pair(subject, make_pair())
    for donor in (a, copy.deepcopy(a)):  # the copy is no run of the same call, so that the cell is computed
        found = patch(subject, b, donor, [VALUE])
        torch.testing.assert_close(found.logits[0], a.logits, rtol=0, atol=1e-4)
        assert float(found.answer_log_prob[0]) == pytest.approx(a.answer_log_prob, abs=1e-4)


def test_another_adapter_as_donor(tmp_path, llama):
    """The embeddings are the same, and yet the cell of layer 0 is the recipient's model's word, not the donor's."""
    base = llama.base_identity["name"]
    other, pair = Subject.load(save_adapter(tmp_path, base, seed=5)), make_pair()
    donor, (a, b) = run_pair(other, pair)[0], run_pair(llama, pair)
    _, streams = forward(other.causal_lm, donor.ids, donor.tail)
    found = patch(llama, b, donor, [VALUE])
    assert_close(found, by_full_forwards(llama.causal_lm, b.ids, streams, (VALUE,), ANSWER))
    torch.testing.assert_close(found.logits[0], a.logits, rtol=0, atol=1e-4)
    assert (found.logits[0] - donor.logits).abs().max() > 0.1


def test_the_last_position_after_the_last_layer_gives_the_donors_logits(subject):
    a, b = run_pair(subject, make_pair())
    torch.testing.assert_close(patch(subject, b, a, [DECISION]).logits[-1], a.logits, rtol=0, atol=1e-4)


def test_an_earlier_position_after_the_last_layer_is_too_late(subject):
    a, b = run_pair(subject, make_pair())
    torch.testing.assert_close(patch(subject, b, a, [VALUE]).logits[-1], b.logits, rtol=0, atol=1e-4)


def test_everything_before_the_value_is_shared_exactly(subject):
    a, b = run_pair(subject, make_pair())
    for ours, others in ((a.keys, b.keys), (a.values, b.values)):
        for layer, (one, other) in enumerate(zip(ours, others, strict=True)):
            assert torch.equal(one[:, :, :VALUE], other[:, :, :VALUE])
            assert layer == 0 or not torch.equal(one[:, :, VALUE:], other[:, :, VALUE:])


def test_patching_leaves_both_runs_as_they_were(llama):
    runs = run_pair(llama, make_pair())
    before = copy.deepcopy(runs)
    patch(llama, runs[1], runs[0], [VALUE, DECISION])
    for run, kept in zip(runs, before, strict=True):
        for name in ("residual", "tail_residual", "logits"):
            assert torch.equal(getattr(run, name), getattr(kept, name))
        assert all(map(torch.equal, (*run.keys, *run.values), (*kept.keys, *kept.values)))


def test_swapping_the_prompts_swaps_denoising_and_noising(subject):
    a, b = run_pair(subject, make_pair())
    other_a, other_b = run_pair(subject, swapped(make_pair()))
    for positions in ([VALUE], [DECISION]):
        assert_close(patch(subject, b, a, positions), patch(subject, other_a, other_b, positions), 1e-5)
        assert_close(patch(subject, a, b, positions), patch(subject, other_b, other_a, positions), 1e-5)


def test_the_other_models_stream_as_donor(subject):
    pair = make_pair(4)
    donor, _ = run_pair(subject, pair)
    _, streams = forward(subject.causal_lm, pair.ids_a, pair.answer[:-1])
    with subject.base():
        recipient, _ = run_pair(subject, pair)
        expected = by_full_forwards(subject.causal_lm, recipient.ids, streams, (DECISION,), ANSWER)
        assert_close(patch(subject, recipient, donor, [DECISION]), expected)


def test_another_pairs_stream_as_donor(llama):
    donor, _ = run_pair(llama, make_pair(6, value=VALUE + 3))
    _, recipient = run_pair(llama, make_pair(5))
    _, streams = forward(llama.causal_lm, donor.ids, donor.tail)
    expected = by_full_forwards(llama.causal_lm, recipient.ids, streams, (VALUE + 4,), ANSWER)
    assert_close(patch(llama, recipient, donor, [VALUE + 4]), expected)
    with pytest.raises(SweepError, match=f"from {VALUE + 3} to {DECISION}"):
        patch(llama, recipient, donor, [VALUE])


@pytest.mark.parametrize("position", [VALUE, DECISION])
@pytest.mark.parametrize("trained", [True, False])
def test_transformer_lens_agrees(subject, position, trained):
    pair, bridge = make_pair(answer=(40,)), subject.bridge()
    with subject.trained() if trained else subject.base(), torch.no_grad():
        _, cache = bridge.run_with_cache(
            torch.tensor([pair.ids_a]), names_filter=lambda name: name.endswith("hook_resid_pre")
        )
        expected = patching.generic_activation_patch(
            bridge,
            torch.tensor([pair.ids_b]),
            cache,
            lambda logits: logits[0, -1, 40] - logits[0, -1, 41],
            patching.layer_pos_patch_setter,
            "resid_pre",
            index_df=pd.DataFrame({"layer": range(subject.n_layers), "pos": position}),
        )
        a, b = run_pair(subject, pair)
        found = patch(subject, b, a, [position]).logits
    torch.testing.assert_close((found[:, 40] - found[:, 41])[:-1], expected, rtol=0, atol=1e-4)


def test_a_fresh_adapter_is_the_base_model(tmp_path):
    subject, pair = Subject.load(tiny_pair_folders(tmp_path, "qwen3", size=0)[0]), make_pair()
    found = {}
    for name, context in (("trained", subject.trained()), ("base", subject.base())):
        with context:
            a, b = run_pair(subject, pair)
            found[name] = patch(subject, b, a, [VALUE])
    assert torch.equal(found["trained"].logits, found["base"].logits)


def test_merged_weights_equal_the_live_adapter(tmp_path):
    adapter, base = tiny_pair_folders(tmp_path, "qwen2")
    subject, pair = Subject.load(adapter), make_pair()
    merged = PeftModel.from_pretrained(Subject.load(adapter).causal_lm.__class__.from_pretrained(base), adapter)
    plain = merged.merge_and_unload().eval()
    live, folded = ([*run_pair(model, pair)] for model in (subject, plain))
    assert folded[0].trained is None
    assert_close(patch(subject, live[1], live[0], [VALUE]), patch(plain, folded[1], folded[0], [VALUE]))


def test_pairs_do_not_meet(llama):
    first, second = make_pair(7), make_pair(8)
    alone = [run_pair(llama, pair) for pair in (first, second)]
    wanted = [patch(llama, b, a, [VALUE]) for a, b in alone]
    together = [run_pair(llama, second), run_pair(llama, first)]
    for (a, b), expected in zip(together, reversed(wanted), strict=True):
        assert torch.equal(patch(llama, b, a, [VALUE]).logits, expected.logits)


def test_passes_of_few_rows_give_the_same(llama, monkeypatch):
    a, b = run_pair(llama, make_pair())
    whole = patch(llama, b, a, [VALUE])
    for tokens in (1, 40):
        monkeypatch.setattr(sweep, "MAX_TOKENS", tokens)
        assert_close(patch(llama, b, a, [VALUE]), whole, 1e-5)


def test_a_failing_layer_leaves_no_trace(llama):
    pair = make_pair()
    a, b = run_pair(llama, pair)
    wanted = patch(llama, b, a, [VALUE])
    hooks = [len(module._forward_pre_hooks) for module in llama.model.modules()]

    def fail(*_):
        raise RuntimeError("planted")

    handle = llama.decoder.layers[2].register_forward_hook(fail)
    for call in (lambda: run_pair(llama, pair), lambda: patch(llama, b, a, [VALUE])):
        with pytest.raises(RuntimeError, match="planted"):
            call()
    handle.remove()
    assert [len(module._forward_pre_hooks) for module in llama.model.modules()] == hooks
    assert llama.config._attn_implementation == "sdpa"
    assert torch.equal(run_pair(llama, pair)[1].logits, b.logits)
    assert torch.equal(patch(llama, b, a, [VALUE]).logits, wanted.logits)


@pytest.mark.parametrize("positions", [[], [VALUE - 1], [LENGTH], [-1]])
def test_positions_out_of_range(llama, positions):
    a, b = run_pair(llama, make_pair())
    with pytest.raises(SweepError, match=f"positions: expected some from {VALUE} to {DECISION}"):
        patch(llama, b, a, positions)


def test_donor_of_another_length(llama):
    _, recipient = run_pair(llama, make_pair())
    donor, _ = run_pair(llama, make_pair(length=LENGTH + 1))
    with pytest.raises(SweepError, match=f"expected {LENGTH} tokens, as the recipient has, found {LENGTH + 1}"):
        patch(llama, recipient, donor, [DECISION])


def test_recipient_of_the_other_model(llama):
    a, b = run_pair(llama, make_pair())
    with (
        llama.base(),
        pytest.raises(SweepError, match=r"now \(trained: False\), found one with trained: True"),
    ):
        patch(llama, b, a, [VALUE])


def other_architecture(name):
    """A tiny random model of a kind that the engine does not cover."""
    small = {**SIZES, "vocab_size": 264, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=264)).eval()
        if name == "granite":
            return GraniteForCausalLM(GraniteConfig(**small, logits_scaling=8.0)).eval()
        return Gemma2ForCausalLM(Gemma2Config(**small, attn_implementation="eager")).eval()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "GPT2LMHeadModel: this architecture is not covered.*found no embed_tokens"),
        ("granite", "GraniteForCausalLM: .* found a difference of"),
        ("gemma2", "Gemma2Attention: this architecture is not covered.*found softcap"),
    ],
)
def test_architectures_that_are_not_covered_are_refused(name, message):
    model = other_architecture(name)

    def sweep_once():
        a, b = run_pair(model, make_pair())
        patch(model, b, a, [VALUE])

    with pytest.raises(UnsupportedArchitecture, match=message):
        sweep_once()


def test_layers_of_another_type_are_refused():
    model = tiny_model("qwen2")
    model.config.layer_types = ["full_attention", "chunked_attention"] * 2
    with pytest.raises(UnsupportedArchitecture, match=r"Qwen2ForCausalLM: .* found chunked_attention"):
        run_pair(model, make_pair())


def test_an_engine_that_is_wrong_refuses(monkeypatch):
    model, pair = tiny_model("mistral"), make_pair()
    a, b = run_pair(model, pair)
    monkeypatch.setattr(sweep.SharedPrefix, "mask", lambda self, length, window, groups: None)
    with pytest.raises(UnsupportedArchitecture, match=r"MistralForCausalLM: .* found a difference of"):
        patch(model, b, a, [VALUE])


@pytest.mark.slow
def test_smollm2_equals_full_forwards(tmp_path):
    subject = Subject.load(save_adapter(tmp_path, find_base(BUILT_IN).path, rank=16, alpha=32, size=0.02))
    pair = make_pair(length=120, value=80, vocabulary=49000)
    a, b = run_pair(subject, pair)
    for recipient, donor in ((b, a), (a, b)):
        _, streams = forward(subject.causal_lm, donor.ids, donor.tail)
        for position in (80, 119):
            found = patch(subject, recipient, donor, [position])
            for layer in (0, 1, 14, 29, 30):
                edit = (layer, [position], streams[layer][[position]])
                logits, _ = forward(subject.causal_lm, recipient.ids, recipient.tail, edit)
                torch.testing.assert_close(found.logits[layer], logits[0], rtol=0, atol=2e-4)
                assert float(found.answer_log_prob[layer]) == pytest.approx(log_prob(logits, ANSWER), abs=2e-4)
