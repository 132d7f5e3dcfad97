"""Some two hundred malformed inputs, each by the smallest change to a good one: one line that names it, status 2."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from counterfactuals import write_decisions, write_pairs
from interp import cli, knockout, logit_lens, lora_svd, patching, retention_heads
from interp.__main__ import main as everything
from tests.interp.test_main import make_decision
from tests.interp.test_patching import make_pair
from tests.interp.tiny import save_adapter, save_base

COMMANDS = {
    "interp": everything,
    "patching": patching.main,
    "lora_svd": lora_svd.main,
    "retention_heads": retention_heads.main,
    "logit_lens": logit_lens.main,
    "knockout": knockout.main,
}
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
NOT_JSON = {
    "empty": b"", "open": b"{", "not utf-8": b"\xff\xfe{}", "deep": b"[" * 100_000, "trailing": b"{} {}",
    "a number of 5,000 digits": b'{"r": ' + b"1" * 5000 + b"}",
}  # fmt: skip
NO_OBJECT = {"a list": b"[]", "null": b"null", "a number": b"3", "a string": b'"x"'}

# The fields of adapter_config.json, and values that they cannot have.
CONFIG = {
    "r": [0, -1, 1.5, "8", None, [4], {}, True, 10**12],
    "lora_alpha": ["16", None, [1], {}, True, float("nan"), float("inf"), 10**400],
    "lora_dropout": ["0", None, 1.5, -0.1],
    "rank_pattern": [[], "q_proj", None, {"q_proj": 0}, {"q_proj": "4"}, {"(": 4}],
    "alpha_pattern": [[], None, {"q_proj": None}, {"q_proj": "8"}, {"(": 8}],
    "target_modules": [5, [5], {}, [None], "", "(q_proj", ["no_such_module"]],
    "exclude_modules": [5, [None]],
    "modules_to_save": ["lm_head", 5, [1]],
    "layers_to_transform": ["1", [-1], 1.5, [0, None]],
    "layers_pattern": [5, [5]],
    "trainable_token_indices": ["x", [1.5], {"embed_tokens": 3}, [10**9]],
    "bias": ["some", None, True],
    "fan_in_fan_out": ["no", None],
    "use_rslora": ["yes", 1],
    "revision": [5],
    "task_type": ["SEQ_CLS", 7],
    "peft_type": [None, "", 5, "LORA2", []],
    "base_model_name_or_path": [None, "", 5, "/no/such/folder", ["a"]],
    "use_dora": [True],
    "lora_bias": [True],
    "use_qalora": [True],
    "target_parameters": [["mlp.up_proj.weight"]],
    "init_lora_weights": ["pissa", "no such start"],
    "layer_replication": [[[0, 1], [0, 1]]],
}
PAIR_FIELDS = {
    "id": [5, "", None],
    "environment": [None],
    "kind": [3],
    "messages_a": [[], "x", [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "system", "content": "x"}]],
    "messages_b": [None, [5], [{"role": "user", "content": "another text"}]],
    "action_prefix": [["x"]],
    "answer": ["", 5, "[]}"],
    "foil": ["", {}],
    "spans": [{}, [], {"key": [0, 1]}, {"value": [0]}, {"value": [3, 1]}, {"value": [0, 10**6]}, {"value": [0.0, 1.0]}],
    "group": ["", 1],
    "meta": [[], "x"],
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A base model, an adapter, pairs and decisions that are good."""
    folder = tmp_path_factory.mktemp("good")
    save_adapter(folder / "adapter", save_base(folder / "base", num_hidden_layers=2))
    write_pairs([make_pair(2)], folder / "pairs.jsonl")
    write_decisions([make_decision(4)], folder / "decisions.jsonl")
    return folder


@pytest.fixture
def place(good, tmp_path):
    """A copy of the adapter, the pairs and the decisions, to be spoilt."""
    shutil.copytree(good / "adapter", tmp_path / "adapter")
    for name in ("pairs.jsonl", "decisions.jsonl"):
        shutil.copy(good / name, tmp_path)
    return tmp_path


@pytest.fixture
def told(place, capsys):
    """Run a command on what is in `place`: what it says on stderr, which is one line that names something."""

    def run(named, *options, command="patching", pairs=True):
        given = ["--pairs", str(place / "pairs.jsonl")] if pairs else []
        adapter = [] if "--adapter" in options else ["--adapter", str(place / "adapter")]
        states = ["--decisions", str(place / "decisions.jsonl")]
        states = [] if "--decisions" in options or not pairs else states
        out = [] if "--out" in options else ["--out", str(place / "reports")]
        capsys.readouterr()
        status = COMMANDS[command]([*adapter, *given, *states, *out, "--quiet", *map(str, options)])
        printed, error = capsys.readouterr()
        assert (status, printed) == (cli.BAD_INPUT, ""), error
        assert error.startswith("error: "), error
        assert error.count("\n") == 1, error
        assert re.search(named, error), error
        assert "(and " not in error, error  # nothing that matters is in a second line
        assert not list(place.glob("reports/**/results.parquet"))

    return run


def edit_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def named_values(table):
    return [pytest.param(name, value, id=f"{name} {value!r}"[:50]) for name in table for value in table[name]]


# -- adapter_config.json


@pytest.mark.parametrize(("name", "value"), named_values(CONFIG))
def test_a_field_of_the_configuration(place, told, name, value):
    edit_json(place / "adapter/adapter_config.json", **{name: value})
    told(rf"adapter.*{name}|adapter.*no_such_module|adapter: expected an adapter of")


@pytest.mark.parametrize("text", [*NOT_JSON.values(), *NO_OBJECT.values(), b"{}"], ids=[*NOT_JSON, *NO_OBJECT, "{}"])
def test_the_text_of_the_configuration(place, told, text):
    (place / "adapter/adapter_config.json").write_bytes(text)
    for command in ("patching", "lora_svd"):
        told(r"adapter_config\.json: ", command=command)


# -- the adapter's weights


def reshaped(key, change):
    def spoil(weights):
        weights[f"{Q_PROJ}.{key}.weight"] = change(weights[f"{Q_PROJ}.{key}.weight"]).contiguous()

    return spoil


def without(weights):
    del weights[f"{Q_PROJ}.lora_B.weight"]


def renamed(weights):
    weights[f"{Q_PROJ}.lora_C.weight"] = weights.pop(f"{Q_PROJ}.lora_B.weight")


def surplus(weights):
    weights["base_model.model.model.layers.7.mlp.up_proj.lora_B.weight"] = torch.zeros(48, 4)
    weights["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = torch.zeros(4, 32)


SPOILT = {
    "nothing in it": lambda weights: weights.clear(),
    "no B": without,
    "another name": renamed,
    "a layer too many": surplus,
    "A of more rank": reshaped("lora_A", lambda a: torch.cat([a, a])),
    "A of another width": reshaped("lora_A", lambda a: a[:, 1:]),
    "B of another width": reshaped("lora_B", lambda b: b[1:]),
    "B transposed": reshaped("lora_B", lambda b: b.mT),
    "B of one dimension": reshaped("lora_B", lambda b: b.flatten()),
    "B of three dimensions": reshaped("lora_B", lambda b: b[None]),
    "B of no rows": reshaped("lora_B", lambda b: b[:0]),
    "B of NaN": reshaped("lora_B", lambda b: b * torch.nan),
    "B of infinity": reshaped("lora_B", lambda b: b + torch.inf),
    "B of whole numbers": reshaped("lora_B", lambda b: b.to(torch.int8)),
    "A of truth values": reshaped("lora_A", lambda a: a > 0),
}
BYTES = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "seven bytes": lambda data: data[:7],
    "length only": lambda data: data[:8],
    "half a header": lambda data: data[:100],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"x",
    "an enormous header": lambda data: b"\xff" * 8 + data[8:],
    "no JSON in the header": lambda data: data[:8] + b"x" + data[9:],
    "a text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    "a web page": lambda data: b"<!DOCTYPE html><html><body>404</body></html>",
    "zeros": lambda data: b"\0" * len(data),
}
PICKLES = {
    "a list": [torch.zeros(2)],
    "numbers": {f"{Q_PROJ}.lora_B.weight": 3},
    "names that are none": {3: torch.ones(2)},
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_the_tensors_of_an_adapter(place, told, spoil):
    file = place / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    spoil(weights)
    save_file(weights, file)
    told(r"adapter_model\.safetensors: |adapter: expected an adapter of .* size mismatch")


OF_BOTH = [
    pytest.param(file, BYTES[spoil], id=f"{file} {spoil}")
    for file in ("adapter_model.safetensors", "adapter_model.bin")
    for spoil in BYTES
    if file.endswith("safetensors") or spoil not in ("one byte long", "no JSON in the header")  # PyTorch takes these
]


@pytest.mark.parametrize(("name", "spoil"), OF_BOTH)
def test_the_bytes_of_an_adapter(place, told, name, spoil):
    file = place / "adapter/adapter_model.safetensors"
    if name != file.name:
        torch.save(load_file(file), place / "adapter" / name)
        file.unlink()
        file = place / "adapter" / name
    file.write_bytes(spoil(file.read_bytes()))
    told(rf"{re.escape(name)}: expected a file of tensors, found .")
    told(rf"{re.escape(name)}: expected a file of tensors, found .", "--adapter-only", command="lora_svd", pairs=False)


@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_pickle_of_something_else(place, told, content):
    (place / "adapter/adapter_model.safetensors").unlink()
    torch.save(content, place / "adapter/adapter_model.bin")
    told(r"adapter_model\.bin: .*expected .*, found .")
    told(r"adapter_model\.bin: .*expected .*, found .", "--adapter-only", command="lora_svd", pairs=False)


def test_a_pickle_that_would_run_a_program_does_not(place, told):
    class Program:
        def __reduce__(self):
            return (open, (str(place / "was run"), "w"))

    (place / "adapter/adapter_model.safetensors").unlink()
    torch.save({"x": Program()}, place / "adapter/adapter_model.bin")
    told(r"adapter_model\.bin: expected a file of tensors, found ")
    assert not (place / "was run").exists()


def test_weights_that_are_a_folder_or_missing(place, told):
    file = place / "adapter/adapter_model.safetensors"
    file.unlink()
    told(r"adapter: expected the adapter's weights .*, found neither")
    file.mkdir()
    told(r"adapter: expected the adapter's weights .*, found neither")


# -- pairs


@pytest.mark.parametrize(("name", "value"), named_values(PAIR_FIELDS))
def test_a_field_of_a_pair(place, told, name, value):
    edit_json(place / "pairs.jsonl", **{name: value})
    told(rf"pairs\.jsonl:1: .*({name}|spans\.value|foil)")


@pytest.mark.parametrize("name", [name for name in PAIR_FIELDS if name != "meta"])
def test_a_field_that_a_pair_lacks(place, told, name):
    record = json.loads((place / "pairs.jsonl").read_text())
    del record[name]
    (place / "pairs.jsonl").write_text(json.dumps(record))
    told(rf"pairs\.jsonl:1: expected the field\(s\) {name}")


PAIR_TEXTS = {name: text for name, text in NOT_JSON.items() if name != "empty"}


@pytest.mark.parametrize("text", [*PAIR_TEXTS.values(), *NO_OBJECT.values()], ids=[*PAIR_TEXTS, *NO_OBJECT])
def test_the_text_of_a_pair(place, told, text):
    (place / "pairs.jsonl").write_bytes(text)
    told(r"pairs\.jsonl:(1:)? expected ")


@pytest.mark.parametrize("command", COMMANDS)
def test_pair_files_without_a_pair_that_can_be_used(place, told, command):
    file = place / "pairs.jsonl"
    text = file.read_text()
    file.write_text("\n \n")
    told(r"pairs\.jsonl: expected at least one pair, found none", command=command)
    file.write_text(text + text)
    told(r"pairs\.jsonl:2: id: expected an id used once", command=command)
    write_pairs([make_pair(2, values=("10", "0"))], file)  # two tokens against one
    told(r"pairs: expected .*, found ", command=command)
    file.unlink()
    told(r"pairs\.jsonl", command=command)
    file.mkdir()
    told(r"pairs\.jsonl", command=command)


def test_half_a_character_in_a_pair(place, told):
    file = place / "pairs.jsonl"
    record = json.loads(file.read_text())
    for side in "ab":
        record[f"messages_{side}"][-1]["content"] += "\ud800"
    file.write_text(json.dumps(record))
    told(r"pairs: expected .*, found ")


# -- the base model and its tokenizer


def cut(name, keep=50):
    return lambda base: (base / name).write_bytes((base / name).read_bytes()[:keep])


def write(name, text):
    return lambda base: (base / name).write_text(text)


def edited(name, **changes):
    return lambda base: edit_json(base / name, **changes)


def removed(*names):
    return lambda base: [(base / name).unlink() for name in names]


def a_tensor_less(base):
    weights = load_file(base / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})


BASES = {
    "configuration empty": write("config.json", ""),
    "configuration cut": cut("config.json"),
    "configuration a list": write("config.json", "[]"),
    "configuration null": write("config.json", "null"),
    "configuration without a type": write("config.json", "{}"),
    "an unknown type": edited("config.json", model_type="no_such_model"),
    "a type that is no name": edited("config.json", model_type=5),
    "layers as a string": edited("config.json", num_hidden_layers="two"),
    "a layer more than there are": edited("config.json", num_hidden_layers=3),
    "a negative number of layers": edited("config.json", num_hidden_layers=-1),
    "no heads": edited("config.json", num_attention_heads=0),
    "another width": edited("config.json", hidden_size=40),
    "another vocabulary": edited("config.json", vocab_size=300),
    "an unknown activation": edited("config.json", hidden_act="no_such"),
    "no weights": removed("model.safetensors"),
    "weights cut": cut("model.safetensors", 1000),
    "weights empty": write("model.safetensors", ""),
    "a tensor less": a_tensor_less,
    "a tokenizer cut": cut("tokenizer.json"),
    "a tokenizer empty": write("tokenizer.json", ""),
    "a tokenizer of nothing": write("tokenizer.json", "{}"),
    "a tokenizer that is a list": write("tokenizer.json", "[]"),
    "no tokenizer": removed("tokenizer.json", "tokenizer_config.json"),
    "the tokenizer's settings cut": cut("tokenizer_config.json", 20),
    "the tokenizer's settings a list": write("tokenizer_config.json", "[]"),
    "no template": removed("chat_template.jinja"),
    "a template that is none": write("chat_template.jinja", "{% for message in messages %}"),
    "a template of an unknown filter": write("chat_template.jinja", "{{ messages | no_such_filter }}"),
    "a template that fails": write("chat_template.jinja", "{{ messages[7].content.no_such() }}"),
    "a template that divides by zero": write("chat_template.jinja", "{{ 1 // 0 }}"),
    "a template that refuses": write("chat_template.jinja", "{{ raise_exception('no user, please') }}"),
    "a template without the message": write("chat_template.jinja", "nothing"),
}


@pytest.mark.parametrize("spoil", BASES.values(), ids=BASES)
def test_a_base_model(good, place, told, spoil):
    base = place / "another"
    shutil.copytree(good / "base", base)
    spoil(base)
    told(r"another|template|pairs: expected", "--base", base)


# -- options

OPTIONS = {
    "unknown": (["--colour"], "--colour"),
    "no adapter named": (["--adapter"], "--adapter"),
    "an adapter that is not there": (["--adapter", "no/such"], "--adapter: expected a folder .*no/such"),
    "count of nothing": (["--count", "0"], "--count: expected a whole number above 0|--count.*'0'"),
    "limit of nothing": (["--limit", "-1"], "--limit"),
    "limit in words": (["--limit", "two"], "--limit.*'two'"),
    "threads": (["--threads", "0"], "--threads"),
    "seed": (["--seed", "x"], "--seed"),
    "a negative seed": (["--seed", "-1"], "--seed"),
    "type": (["--dtype", "int8"], "--dtype"),
    "an unknown device": (["--device", "gpu"], "--device: expected .*'gpu'"),
    "a device too many": (["--device", "cpu:3"], "--device: expected .*'cpu:3'"),
    "no device": (["--device", ""], "--device: expected "),
    "no size": (["--max-memory", "2"], "--max-memory: expected a size as 800MB, 2GB or 1.5GiB, found '2'"),
    "a base that is not there": (["--base", "/no/such"], "--base: expected .*'/no/such'"),
    "an empty base": (["--base", ""], "--base: expected "),
}
PATCHING_OPTIONS = {
    "components": (["--components", "neurons"], "--components.*neurons"),
    "positions": (["--positions", "elsewhere"], "--positions.*elsewhere"),
    "no controls": (["--control-pairs", "-1"], "--control-pairs"),
    "pairs and a count": (["--count", "3"], "--count: expected not to be given together with --pairs"),
    "decisions": (["--decisions"], "--decisions"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("options", "named"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_every_command(told, command, options, named):
    told(named, *options, command=command)


@pytest.mark.parametrize(("options", "named"), PATCHING_OPTIONS.values(), ids=PATCHING_OPTIONS)
def test_options_of_patching(told, options, named):
    told(named, *options)


@pytest.mark.parametrize("command", COMMANDS)
def test_files_in_the_place_of_folders(place, told, command):
    (place / "file").write_text("x")
    told("--adapter: expected a folder", "--adapter", place / "file", command=command)
    told("--base: expected .*a file", "--base", place / "file", command=command)
    told("file", "--out", place / "file", command=command)


@pytest.mark.parametrize("command", ["logit_lens", "retention_heads"])
def test_decisions(place, told, command):
    (place / "decisions.jsonl").write_text('{"id": 5}\n')
    told(r"decisions\.jsonl:1: ", "--decisions", place / "decisions.jsonl", command=command)
    told("none.jsonl", "--decisions", place / "none.jsonl", command=command)
