"""Tiny random models of many architectures through every engine: equal to the model's own forward, or refused."""

import importlib.util
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer

from interp import cli, knockout, logit_lens, lora_svd
from interp.attention import Cell, block, head_grams, query_row, run_prefix
from interp.components import head_outputs
from interp.lora_files import LoraFiles
from interp.lora_svd_summary import by_module
from interp.patching import measure_pair
from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import patch, run_pair
from interp.tokens import encode_pair
from tests.interp import test_patching, test_tokens
from tests.interp.test_attention import eager, masked
from tests.interp.test_sweep import DECISION, VALUE, assert_close, by_full_forwards, forward, make_pair
from tests.interp.tiny import ALL_PROJECTIONS, KINDS, SIZES, save_adapter, save_base, tiny_tokenizer

LAYERS = 2
WINDOW = {"sliding_window": 20}  # shorter than the prompts, and two layers of it reach from the decision to the value
ALTERNATING = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = ALTERNATING | {"query_pre_attn_scalar": 8}
GRANITE = {"residual_multiplier": 0.3, "attention_multiplier": 0.2}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2}

OTHER_LAYERS = "found others: their components cannot be patched; --components residual leaves them out"
NO_DECODER = (
    "this architecture is not covered: expected a decoder with embed_tokens, layers, norm, rotary_emb, found no"
)
OTHER_LOGITS = "found a difference of"
ENGINES = ("residual", "components", "attention", "lens", "knockout")


@dataclass(frozen=True)
class Row:
    """One architecture.

    Attributes:
        config: name of the configuration's class in transformers; `extra` are its fields beside `SIZES`.
        targets: of the adapter.
        refused: engine -> what its refusal says; the others work. The SVD always does.
    """

    config: str
    extra: dict = field(default_factory=dict)
    targets: tuple = ALL_PROJECTIONS
    refused: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=lambda: SIZES)


RESIDUAL_ONLY = {"components": OTHER_LAYERS}
MATRIX = {
    "llama": Row("LlamaConfig"),
    "llama3": Row("LlamaConfig", KINDS["llama3"][2]),
    "mistral": Row("MistralConfig", WINDOW),
    "qwen2": Row("Qwen2Config", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": Row("Qwen3Config"),
    "llama with yarn": Row("LlamaConfig", {"rope_parameters": YARN}),
    "llama with biases": Row("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": Row("SmolLM3Config", {"no_rope_layers": [1, 0]}),  # the second layer has no positions
    "gemma": Row("GemmaConfig"),
    "olmo": Row("OlmoConfig"),
    "olmo2": Row("Olmo2Config", refused=RESIDUAL_ONLY),
    "olmo3": Row("Olmo3Config", ALTERNATING, refused=RESIDUAL_ONLY),
    "gemma2": Row(
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
        refused=dict.fromkeys(("residual", "components", "attention", "knockout"), "expected plain .*, found softcap"),
    ),
    "gemma2 without caps": Row(
        "Gemma2Config",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        refused=RESIDUAL_ONLY,
    ),
    "gemma3": Row("Gemma3TextConfig", GEMMA, refused=RESIDUAL_ONLY),
    "phi3": Row("Phi3Config", WINDOW, FUSED, RESIDUAL_ONLY),
    "mixtral": Row("MixtralConfig", EXPERTS | {"num_local_experts": 4}, ("q_proj", "o_proj")),
    "granite": Row("GraniteConfig", GRANITE | {"logits_scaling": 8.0}, refused=dict.fromkeys(ENGINES, OTHER_LOGITS)),
    "gpt2": Row(
        "GPT2Config",
        {"n_embd": 32, "n_head": 4, "n_layer": LAYERS, "n_positions": 512, "initializer_range": 0.3},
        ("c_attn", "c_proj", "c_fc"),
        dict.fromkeys(ENGINES, NO_DECODER),
        {},
    ),
}


def build(folder, row):
    """A subject on a tiny random model, and its adapter's folder."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": 264, "tie_word_embeddings": False}
    layers = {"num_hidden_layers": LAYERS} if row.sizes else {}
    config = getattr(transformers, row.config)(**row.sizes | row.extra | ids | layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:  # not all zeros, not all ones
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    transposed = {"fan_in_fan_out": True} if row.config == "GPT2Config" else {}
    return save_adapter(folder / "adapter", folder / "base", targets=row.targets, **transposed)


@pytest.fixture(scope="module", params=MATRIX)
def built(request, tmp_path_factory):
    row = MATRIX[request.param]
    adapter = build(tmp_path_factory.mktemp("tiny"), row)
    return row, adapter, Subject.load(adapter)


def works(built, engine, measured):
    """Whether the engine is to work; where it is not, that `measured` is refused as the row says, in one line."""
    row = built[0]
    if engine not in row.refused:
        return True
    with pytest.raises(UnsupportedArchitecture, match=row.refused[engine]) as caught:
        measured()
    assert isinstance(caught.value, cli.KNOWN_ERRORS)
    assert "\n" not in str(caught.value)
    return False


def chat_pair(subject, values=("2", "0")):
    return encode_pair(subject.tokenizer, test_patching.make_pair(2, values=values))


def assert_cells(causal, pair, position):
    """Every cell of a sweep is a full forward with a hook, and some cell is not the run that nothing was patched in."""
    a, b = run_pair(causal, pair)
    found = patch(causal, b, a, [position])
    streams = forward(causal, pair.ids_a, pair.answer[:-1])[1]
    assert_close(found, by_full_forwards(causal, pair.ids_b, streams, [position], pair.answer))
    assert (found.logits - b.logits).abs().max() > 0.01


def test_patched_streams_equal_full_forwards(built):
    subject, pair = built[2], make_pair()

    def cells():
        a, b = run_pair(subject, pair)
        patch(subject, b, a, [VALUE])

    if works(built, "residual", cells):
        for switched, position in ((subject.trained, VALUE), (subject.trained, DECISION), (subject.base, VALUE)):
            with switched():
                assert_cells(subject.causal_lm, pair, position)


def test_components_end_to_end(built):
    subject = built[2]
    pair = chat_pair(subject)
    if works(built, "components", lambda: measure_pair(subject, pair)):
        frame = measure_pair(subject, pair)
        assert {"residual", "attention", "mlp"} <= set(frame["component"])
        moved = frame[(frame["component"] == "attention") & (frame["metric"] == "recovery")]["value"]
        assert moved.abs().max() > 0


def test_what_heads_write_adds_up_to_the_attention_output(built):
    row, _, subject = built
    for switched in (subject.base, subject.trained):
        with switched(), torch.no_grad():
            if "residual" in row.refused or "components" in row.refused:
                continue
            run, _ = run_pair(subject, make_pair())
            for index, layer in enumerate(subject.decoder.layers):
                project = layer.self_attn.o_proj
                bias = project(torch.zeros(1, project.in_features))  # the base layer's, if any
                summed = head_outputs(subject, run, index).sum(0) + bias
                torch.testing.assert_close(summed, run.components["attention"][index], rtol=0, atol=1e-4)


def test_one_row_of_attention_equals_eager_attention(built):
    subject, ids = built[2], list(make_pair().ids_a)

    def row():
        return query_row(subject, run_prefix(subject, ids), head_grams(subject))

    if works(built, "attention", row):
        found = row()
        attention, logits = eager(subject.causal_lm, ids)
        torch.testing.assert_close(found.attention, attention, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.logits, logits, rtol=0, atol=1e-4)
        cell = Cell(LAYERS - 1, 2, (len(ids) - 4, len(ids) - 2))
        blocked = block(subject, found, [cell], [40, 41])
        torch.testing.assert_close(blocked[0], masked(subject.causal_lm, ids, cell)[[40, 41]], rtol=0, atol=1e-4)


def test_the_lens_ends_at_the_models_own_logits(built):
    subject, ids = built[2], list(make_pair().ids_a)
    if works(built, "lens", lambda: logit_lens.lens(subject, ids, [DECISION])):
        read, error = logit_lens.lens(subject, ids, [VALUE, DECISION])
        own = forward(subject.causal_lm, ids, ())[0][0]
        torch.testing.assert_close(read[-1, 1], own, rtol=0, atol=1e-4)
        assert error < 1e-4
        assert read.shape[:2] == (LAYERS + 1, 2)


def test_the_adapter_from_the_first_layer_on_is_the_trained_model(built):
    subject = built[2]
    pair = chat_pair(subject)
    if works(built, "knockout", lambda: knockout.measure_pair(subject, pair)):
        frame = knockout.measure_pair(subject, pair)
        effects = frame[frame["metric"] == "effect"].set_index(["model", "switch", "layer"])["value"].sort_index()
        trained, base = (effects.loc[model, "none", -1].item() for model in ("trained", "base"))
        assert effects.loc["base", "on_from", 0].item() == pytest.approx(trained, abs=1e-4)
        assert effects.loc["base", "on_up_to", LAYERS - 1].item() == pytest.approx(trained, abs=1e-4)
        assert abs(trained - base) > 1e-3


def test_deltas_are_those_that_peft_merges(built):
    _, adapter, subject = built
    found, files = by_module(lora_svd.measure(adapter)).set_index("module"), LoraFiles.open(adapter)
    live = {name: layer for name, layer in subject.causal_lm.named_modules() if isinstance(layer, LoraLayer)}
    assert set(found.index) == {module.name for module in files.modules} == set(live)
    for module in files.modules:
        layer = live[module.name]
        delta, weight = layer.get_delta_weight("default").double(), layer.base_layer.weight.double()
        (b,), (a,) = files.factors([module])
        of_file = module.scale * b @ a
        torch.testing.assert_close(of_file.mT if module.transposed else of_file, delta, rtol=0, atol=1e-6)
        row = found.loc[module.name]
        assert row["frobenius"] == pytest.approx(float(delta.norm()), rel=1e-5)
        assert row["relative_frobenius"] == pytest.approx(float(delta.norm() / weight.norm()), rel=1e-5)


def test_a_tokenizer_that_takes_digits_in_threes(tmp_path):
    """As Llama 3's: the count 123 is one token and so is 0, where a digit splitter gives three against one."""
    tokenizer = test_tokens.build("threes", test_tokens.LISTS + test_tokens.NUMBERS)
    base = save_base(tmp_path / "base", "llama3", num_hidden_layers=LAYERS, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(base)
    subject = Subject.load(save_adapter(tmp_path / "adapter", base))
    pair = chat_pair(subject, ("123", "0"))
    start, end = pair.spans["value"]
    assert end == start + 1
    assert_cells(subject.causal_lm, pair, start)
    assert {"residual", "attention", "mlp"} <= set(measure_pair(subject, pair)["component"])


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available(),
    reason="a 4-bit base needs the package bitsandbytes and a CUDA device",
)
def test_a_base_in_four_bits(tmp_path):
    base = save_base(tmp_path / "base", num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=128, head_dim=16)
    subject = Subject.load(save_adapter(tmp_path / "adapter", base), device="cuda", dtype="bfloat16", load_in_4bit=True)
    frame = measure_pair(subject, chat_pair(subject))
    assert frame[frame["metric"] == "logit_difference"]["value"].notna().all()
