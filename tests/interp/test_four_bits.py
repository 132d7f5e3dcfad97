"""Less memory, the same measurements: a base model in 4 bit, and sweeps in passes that a size bounds."""

import copy
import json

import pytest
import torch
from peft.tuners.lora import LoraLayer

from interp import base_models, cli, lora_svd, patching
from interp.attention import head_grams, query_row, run_prefix
from interp.base_models import BaseModelError, find_base, load_base
from interp.components import head_outputs, patch_component
from interp.lora_files import LoraFiles
from interp.lora_svd_summary import by_module
from interp.memory_limit import MemoryLimitError, limit_memory
from interp.patching import measure_pair
from interp.subject import Subject
from interp.sweep import patch, run_pair
from tests.interp.test_architecture_matrix import chat_pair
from tests.interp.test_attention import eager
from tests.interp.test_sweep import DECISION, VALUE, assert_close, by_full_forwards, forward, make_pair
from tests.interp.tiny import save_adapter, save_base, tiny_pair_folders, tiny_tokenizer

WIDE = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # a block is 64 weights
NARROW = {"num_hidden_layers": 2}  # rows of 32 and 48: blocks cross them


def dequantised(layer):
    """W (m, n) that a 4-bit layer stands for."""
    functional = pytest.importorskip("bitsandbytes").functional
    return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def in_full_precision(causal):
    """A copy of a causal model with plain linear layers that hold the dequantised weights. The adapter is left out."""
    plain = copy.deepcopy(causal)
    for name, layer in list(plain.named_modules()):
        if type(layer).__name__ == "Linear4bit":
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            linear.weight.data = dequantised(layer)
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, linear)
    return plain


@pytest.fixture(scope="module", params=["wide", "narrow", "packed folder"])
def built(request, tmp_path_factory):
    """Adapter folder, base folder and a subject in 4 bit: quantised when it is loaded, or before."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    base = save_base(folder / "base", **NARROW if request.param == "narrow" else WIDE)
    adapter = save_adapter(folder / "adapter", base)
    if request.param != "packed folder":
        return adapter, base, Subject.load(adapter, load_in_4bit=True)
    load_base(find_base(str(base)), dtype="bfloat16", load_in_4bit=True)[0].save_pretrained(folder / "packed")
    tiny_tokenizer().save_pretrained(folder / "packed")
    return adapter, folder / "packed", Subject.load(adapter, folder / "packed")


def test_the_base_is_the_quantised_model_bit_for_bit(built):
    _, base, subject = built
    options = {"load_in_4bit": base.name != "packed"}
    alone, _ = load_base(find_base(str(base)), **options)
    ids = make_pair().ids_a
    with subject.base():
        found = forward(subject.causal_lm, ids, ())[0]
    assert torch.equal(found, forward(alone, ids, ())[0])
    torch.testing.assert_close(found, forward(in_full_precision(alone), ids, ())[0], rtol=0, atol=1e-4)
    assert not torch.allclose(found, forward(subject.causal_lm, ids, ())[0], atol=0.1)  # the adapter does something


def test_weights_stay_as_they_were_loaded(built):
    """A forward and a state_dict, in any order, leave every weight and scale."""
    _, _, subject = built
    layers = [module for module in subject.causal_lm.modules() if type(module).__name__ == "Linear4bit"]
    layers = [layer for layer in layers if not isinstance(layer, LoraLayer)]
    before = [dequantised(layer) for layer in layers]
    ids = make_pair().ids_a
    first = forward(subject.causal_lm, ids, ())[0]
    subject.model.state_dict()
    assert torch.equal(forward(subject.causal_lm, ids, ())[0], first)
    assert all(torch.equal(dequantised(layer), weight) for layer, weight in zip(layers, before, strict=True))
    assert {weight.dtype for weight in before} <= {torch.float32, torch.bfloat16}
    assert len(layers) == 7 * subject.n_layers


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("positions", [(VALUE,), (VALUE + 1, DECISION)])
def test_every_cell_equals_a_full_forward(built, trained, positions):
    _, _, subject = built
    with subject.trained() if trained else subject.base():
        a, b = run_pair(subject, make_pair(1))
        _, streams = forward(subject.causal_lm, a.ids, a.tail)
        expected = by_full_forwards(subject.causal_lm, b.ids, streams, positions, b.answer)
        assert_close(patch(subject, b, a, positions), expected)


def test_heads_and_attention(built):
    """What heads write adds up to the attention output; the query's row is the library's eager attention."""
    _, _, subject = built
    _, b = run_pair(subject, make_pair(2))
    for layer in range(subject.n_layers):
        written = head_outputs(subject, b, layer).sum(0)
        torch.testing.assert_close(written, b.components["attention"][layer], rtol=0, atol=1e-4)
    row = query_row(subject, run_prefix(subject, list(b.ids)), head_grams(subject))
    attention, logits = eager(subject.causal_lm, list(b.ids))
    torch.testing.assert_close(row.attention, attention, rtol=0, atol=1e-5)
    torch.testing.assert_close(row.logits, logits, rtol=0, atol=1e-4)


def test_the_svd_is_of_the_file_and_relative_to_the_folder_s_weights(built):
    """Of the adapter's own factors, whatever the base is; against W of the folder, or not where that is packed."""
    adapter, base, subject = built
    found, files = by_module(lora_svd.measure(adapter, base)).set_index("module"), LoraFiles.open(adapter)
    live = {name: layer for name, layer in subject.causal_lm.named_modules() if isinstance(layer, LoraLayer)}
    assert set(found.index) == set(live)
    for module in files.modules:
        (b,), (a,) = files.factors([module])
        delta = module.scale * b @ a
        assert found.loc[module.name, "frobenius"] == pytest.approx(float(delta.norm()), rel=1e-9)
        torch.testing.assert_close(live[module.name].get_delta_weight("default").double(), delta, rtol=0, atol=1e-6)
    notes = set(lora_svd.measure(adapter, base)["note"]) - {""}
    packed = {"base weight not available: the base weight is quantised (torch.uint8)"}
    assert notes == (packed if base.name == "packed" else set())


def test_a_pair_from_one_end_to_the_other(built):
    _, _, subject = built
    frame = measure_pair(subject, chat_pair(subject))
    assert frame[frame["metric"] == "logit_difference"]["value"].notna().all()


# -- what is refused


def test_layers_on_several_devices(tmp_path):
    base = find_base(str(save_base(tmp_path / "base", **NARROW)))
    with pytest.raises(BaseModelError, match=r"^--device: expected one device for all layers .*, found 'auto'$"):
        load_base(base, device="auto")


@pytest.fixture
def base(tmp_path):
    return save_base(tmp_path / "base", **NARROW)


def test_without_the_package(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BaseModelError, match=r"^--load-in-4bit: expected the package bitsandbytes, .*, found none$"):
        load_base(find_base(str(base)), load_in_4bit=True)


def test_on_a_device_that_has_no_kernels_for_it(base, monkeypatch):
    monkeypatch.setattr(base_models, "_checked_device", lambda device: torch.device(device))
    with pytest.raises(BaseModelError, match=r"^--load-in-4bit: expected cpu or a CUDA device .*, found 'mps'$"):
        load_base(find_base(str(base)), device="mps", load_in_4bit=True)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "expected the package bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "expected none, or 4 bit of bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "expected none, or 4 bit of bitsandbytes"),
    ],
)
def test_a_folder_of_quantised_weights(base, monkeypatch, method, message):
    file = base / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": method}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BaseModelError, match=rf"config\.json: quantization_config: {message}"):
        load_base(find_base(str(base)))


# -- sweeps in a given memory

DEEP = {"num_hidden_layers": 8, "num_attention_heads": 8}  # 64 cells of heads: many rows in a pass


def allocated(work):
    """The most bytes that were allocated at once while `work` ran, beyond what was there before, and its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, result


def smallest(subject, pair):
    """The smallest size that a sweep of heads is done in, as the refusal of a smaller one names it."""
    a, b = run_pair(subject, pair)
    limit_memory(subject, weight_bytes(subject) + 10**5)
    with pytest.raises(MemoryLimitError, match=r"^--max-memory: expected .* MB or more for a sweep") as refused:
        patch_component(subject, b, a, [VALUE], "heads")
    return int(float(str(refused.value).split()[2]) * 1.001e6)


def weight_bytes(subject):
    return sum(tensor.nbytes for tensor in [*subject.causal_lm.parameters(), *subject.causal_lm.buffers()])


@pytest.fixture
def deep(tmp_path):
    base = save_base(tmp_path / "base", **DEEP)
    return Subject.load(save_adapter(tmp_path / "adapter", base))


def test_a_sweep_stays_below_its_size(deep):
    """Weights, the runs of both models and a sweep of each kind; and the numbers are those of one long pass."""
    pair = make_pair(length=100)

    def work():
        with deep.base():
            others = run_pair(deep, pair)
        a, b = run_pair(deep, pair)
        found = [patch(deep, b, a, [VALUE]), patch_component(deep, b, a, [VALUE], "heads")]
        return [*found, others]

    weights = weight_bytes(deep)
    allocated(work)  # what is made once and kept
    unlimited, expected = allocated(work)
    size = smallest(deep, pair)
    limit_memory(deep, size)
    limited, found = allocated(work)
    assert weights + limited < size < weights + unlimited
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert_close(ours, theirs, 1e-5)


def test_a_sweep_of_a_base_in_four_bits_stays_below_its_size(built):
    """Though every layer unpacks its weight while it works."""
    _, _, subject = built
    pair = make_pair(length=100)

    def work():
        with subject.base():
            others = run_pair(subject, pair)
        a, b = run_pair(subject, pair)
        return patch_component(subject, b, a, [VALUE], "heads"), others

    allocated(work)
    size = smallest(subject, pair)
    limit_memory(subject, size)
    assert weight_bytes(subject) + allocated(work)[0] < size
    limit_memory(subject, 10**12)  # as for the other tests


def test_a_larger_size_gives_longer_passes(deep, monkeypatch):
    lengths = []
    layer = deep.decoder.layers[-1].self_attn
    monkeypatch.setattr(layer, "forward", count_rows(layer.forward, lengths))
    pair = make_pair(length=100)
    size, longest = smallest(deep, pair), []
    for factor in (1, 2, 100):
        limit_memory(deep, factor * size)
        a, b = run_pair(deep, pair)
        lengths.clear()
        patch_component(deep, b, a, [VALUE], "heads")
        longest.append(max(lengths))
    assert longest[0] < longest[1] < longest[2] == 4096 // 92  # tokens from the value to the end of the answer


def count_rows(forward, lengths):
    def counted(hidden_states, *args, **options):
        lengths.append(len(hidden_states))
        return forward(hidden_states, *args, **options)

    return counted


def test_weights_that_do_not_fit(deep):
    with pytest.raises(MemoryLimitError, match=r"^--max-memory: expected more than the weights of LlamaForCausalLM"):
        limit_memory(deep, weight_bytes(deep))


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5GiB", 3 * 2**29), ("800 mb", 8 * 10**8), ("1000B", 1000)]
)
def test_sizes(text, size):
    parser = cli.common_parser("patching", "", example="")
    assert parser.parse_args(["--adapter", "a", "--max-memory", text]).max_memory == size


@pytest.mark.parametrize(
    "text", ["2", "GB", "-1GB", "0GB", "2 XB", "2GBs", "1e3MB", "\u0663GB", "0.1B", "9" * 400 + "GB", ""]
)
def test_texts_that_are_no_size(text, capsys):
    assert patching.main(["--adapter", "a", f"--max-memory={text}"]) == cli.BAD_INPUT
    assert "--max-memory: expected a size as 800MB, 2GB or 1.5GiB, found " in capsys.readouterr().err


def test_a_command_whose_model_does_not_fit(tmp_path, capsys):
    adapter, _ = tiny_pair_folders(tmp_path)
    capsys.readouterr()
    options = ["--adapter", str(adapter), "--out", str(tmp_path), "--count", "1", "--quiet"]
    assert patching.main([*options, "--max-memory", "100kB"]) == cli.BAD_INPUT
    assert capsys.readouterr().err.startswith("error: --max-memory: expected more than the weights of LlamaForCausalLM")
