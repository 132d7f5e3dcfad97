"""The SVD command on tiny random models: its deltas against the live layers, PEFT's scales, and the files it leaves."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from counterfactuals import CounterfactualPair, write_pairs
from interp import lora_svd, lora_svd_growth
from interp.base_models import BaseModelError
from interp.lora_activations import functional_size, loaded_scales
from interp.lora_files import LoraFiles
from interp.lora_svd import COLUMNS, figures, main, measure, plot, profile, summarise
from interp.lora_svd_summary import by_module
from interp.subject import Subject, SubjectError
from interp.tokens import encode_pair
from tests.interp.tiny import save_adapter, save_base, tiny_pair_folders

MODULES = 4 * 7
WEIGHT_FILES = {
    f"{stem}.{kind}" for stem in ("lora_svd", "spectra", "overlap", "functional_size") for kind in ("pdf", "png")
} | {"results.parquet", "summary.json", "run.json", "results.partial"}

# What decides the scale of a module in PEFT.
SCALES = {
    "plain": {},
    "rank-stabilised": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"q_proj": 2, "down_proj": 8}},
    "alpha pattern": {"alpha_pattern": {"q_proj": 32, r"layers\.1\.mlp\.up_proj": 3}},
    "both by layer": {
        "rank_pattern": {r"model\.layers\.2\.self_attn\.k_proj": 6, "v_proj": 3},
        "alpha_pattern": {r".*\.mlp\..*": 5, "k_proj": 9},
    },
    "both, stabilised": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
    "some layers": {"layers_to_transform": [1, 3]},
    "by regular expression": {"targets": r".*\.mlp\.(up|down)_proj"},
    "head and embedding": {"targets": ["q_proj", "lm_head", "embed_tokens"], "rank_pattern": {"lm_head": 2}},
}


def make_pair(number, group=None):
    head = f'{{"node":{number},"uses":{{"{number}":'
    messages = [({"role": "user", "content": f'{head}{value},"x":1}}}}'},) for value in "20"]
    return CounterfactualPair(
        f"p{number}", "test", "future_uses", *messages, '{"retain": ', f"[{number}]}}", "[]}",
        {"value": (len(head), len(head) + 1)}, group or f"g{number}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair_folders(tmp_path_factory.mktemp("tiny"), size=0.05)


@pytest.fixture(scope="module")
def frame(folders):
    return measure(folders[0])


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture
def base(folders):
    return folders[1]


@pytest.fixture
def pair_file(tmp_path):
    file = tmp_path / "pairs.jsonl"
    write_pairs([make_pair(n) for n in range(3)], file)
    return file


def read_tensors(file):
    """Copies: what `load_file` returns lies in the file, which the tests write over."""
    return {key: tensor.clone() for key, tensor in load_file(file).items()}


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def layers_of(subject):
    return {name: layer for name, layer in subject.causal_lm.named_modules() if isinstance(layer, LoraLayer)}


def test_the_frame_is_tidy(frame):
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(["module", "metric", "index"]).any()
    assert frame["module"].nunique() == MODULES
    assert (frame["metric"] == "sigma").sum() == MODULES * 4
    assert np.isfinite(frame["value"]).all()
    assert (frame["note"] == "").all()
    assert set(frame["layer"]) == {0, 1, 2, 3}
    assert set(frame.loc[frame["projection"] == "down_proj", "part"]) == {"mlp"}


@pytest.mark.parametrize("options", SCALES.values(), ids=SCALES)
def test_scales_and_deltas_are_those_of_the_loaded_layers(tmp_path, base, options):
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    subject, files = Subject.load(adapter), LoraFiles.open(adapter)
    assert {module.name: module.scale for module in files.modules} == loaded_scales(subject)
    found = by_module(measure(files.folder)).set_index("module")
    live = layers_of(subject)
    assert set(found.index) == set(live)
    for name, layer in live.items():
        delta = layer.get_delta_weight("default").double()
        assert found.loc[name, "frobenius"] == pytest.approx(float(delta.norm()), rel=1e-5)
        assert found.loc[name, "spectral"] == pytest.approx(float(torch.linalg.svdvals(delta)[0]), rel=1e-5)
        weight = layer.base_layer.weight.double()
        assert found.loc[name, "relative_frobenius"] == pytest.approx(float(delta.norm() / weight.norm()), rel=1e-5)


def test_the_factors_are_what_the_layer_adds(folders, subject):
    files, generator = LoraFiles.open(folders[0]), torch.Generator().manual_seed(0)
    live = layers_of(subject)
    for module in files.modules:
        b, a = files.factors([module])
        x = torch.randn(5, module.shape[1], generator=generator)
        with torch.no_grad(), subject.trained():
            on = live[module.name](x)
        with torch.no_grad(), subject.base():
            off = live[module.name](x)
        torch.testing.assert_close(
            (on - off).double(), module.scale * x.double() @ a[0].mT @ b[0].mT, atol=1e-4, rtol=0
        )


def test_singular_values_and_overlaps_equal_dense_float64_ones(folders, frame, subject):
    found = by_module(frame).set_index("module")
    for name, layer in layers_of(subject).items():
        delta = (
            layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
        weight = layer.base_layer.weight.double()
        u, sigma, vh = torch.linalg.svd(delta)
        rows = frame[(frame["module"] == name) & (frame["metric"] == "sigma")].sort_values("index")
        np.testing.assert_allclose(rows["value"], sigma[:4], rtol=1e-9)
        own_u, own_sigma, own_vh = torch.linalg.svd(weight)
        count = int(((sigma**2).cumsum(0) < 0.9 * (sigma**2).sum()).sum()) + 1
        row = found.loc[name]
        assert row["energy_rank_90"] == count
        assert row["relative_spectral"] == pytest.approx(float(sigma[0] / own_sigma[0]), rel=1e-4)
        for side, ours, theirs in (("left", u, own_u), ("right", vh.mT, own_vh.mT)):
            expected = float((ours[:, :count].mT @ theirs[:, :4]).square().sum()) / count
            assert row[f"overlap_{side}"] == pytest.approx(expected, rel=1e-3)
            assert row[f"overlap_{side}_random"] == pytest.approx(4 / len(ours))
        tuned = torch.linalg.svd(weight + delta).U[:, : min(10, *weight.shape)]
        short = own_u[:, : min(weight.shape)]
        assert row["intruders"] == int(((short.mT @ tuned).abs().amax(0) < 0.5).sum())
        assert row["intruders_undetermined"] == 0


def test_profile_adds_squares_up(frame):
    found, modules = profile(frame), by_module(frame)
    assert found[["layer", "part"]].values.tolist() == [[n, part] for n in range(4) for part in ("attention", "mlp")]
    for row in found.itertuples():
        inside = modules[(modules["layer"] == row.layer) & (modules["part"] == row.part)]
        total = (inside["frobenius"] ** 2).sum()
        assert row.frobenius == pytest.approx(np.sqrt(total))
        assert row.per_parameter == pytest.approx(np.sqrt(total / (inside["rows"] * inside["columns"]).sum()))


def test_a_larger_delta_in_one_layer_is_named(folders, tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base)
    file = adapter / "adapter_model.safetensors"
    weights = read_tensors(file)
    save_file({k: v * 9 if "layers.2.mlp.up" in k and "lora_B" in k else v for k, v in weights.items()}, file)
    summary = summarise(measure(adapter, adapter_only=True))
    assert summary["layers"]["largest"] == 2
    assert summary["parts"]["mlp"]["share"] > 0.9
    assert "largest in layer 2" in summary["statement"]


def test_a_fresh_adapter_has_size_zero_and_no_rank(tmp_path, base):
    found = measure(save_adapter(tmp_path / "fresh", base, size=0.0))
    wide = by_module(found)
    for metric in ("frobenius", "spectral", "relative_frobenius", "relative_spectral", "intruders"):
        assert (wide[metric] == 0).all(), metric
    for metric in ("stable_rank", "effective_rank", "energy_rank_90", "overlap_left", "overlap_right"):
        assert wide[metric].isna().all(), metric
    summary = summarise(found)
    assert summary["zero_modules"] == MODULES
    assert "zero in all 28 modules" in summary["statement"]
    assert summary["parts"]["mlp"]["stable_rank"] is None
    json.dumps(summary, allow_nan=False)
    assert set(figures(found)) == {"lora_svd", "spectra", "overlap", "functional_size"}


def test_without_the_base_what_needs_it_is_not_available(folders, frame, tmp_path):
    found = measure(folders[0], adapter_only=True)
    own = ~found["metric"].isin(lora_svd.AGAINST_BASE)
    pd.testing.assert_frame_equal(found[own], frame[own])
    assert found.loc[~own, "value"].isna().all()
    summary = summarise(found)
    assert summary["not_available"] == {"base weight not available: not asked for": MODULES}
    assert summary["intruders"]["count"] is None
    figures(found)

    moved = tmp_path / "moved"
    moved.mkdir()
    for file in folders[0].iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    edit(moved / "adapter_config.json", base_model_name_or_path=str(tmp_path / "gone"))
    (reason,) = summarise(measure(moved))["not_available"]
    assert "no such folder" in reason
    with pytest.raises(BaseModelError, match="gone"):
        measure(moved, tmp_path / "gone")
    pd.testing.assert_frame_equal(measure(moved, folders[1]).drop(columns="adapter"), frame.drop(columns="adapter"))


def test_base_weights_that_cannot_be_compared_are_named(folders, tmp_path, base):
    other = tmp_path / "other"
    other.mkdir()
    for file in base.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = read_tensors(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(768, 1, dtype=torch.uint8)
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(32, 48)
    del weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(48, 32)
    save_file(weights, other / "model.safetensors")
    found = summarise(measure(folders[0], other))["not_available"]
    assert found == {
        "base weight not available: the base weight is quantised (torch.uint8)": 1,
        "base weight not available: the base weight has another shape": 1,
        "base weight not available: the base model's file has no weight of this name": 1,
        "the delta or the base weight is zero": 1,
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"use_dora": True}, "use_dora: expected false"),
        ({"peft_type": "IA3"}, "peft_type: expected LORA, found 'IA3'"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: expected none"),
        ({"use_qalora": True}, "use_qalora: expected none"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected true"),
        ({"target_parameters": ["experts.w"]}, "target_parameters: expected none"),
        ({"r": 5}, r"q_proj: expected rank 5 as in adapter_config\.json, found 4 in B, 4 in A"),
    ],
)
def test_other_deltas_are_refused(tmp_path, base, changes, problem):
    adapter = save_adapter(tmp_path / "adapter", base, targets=["q_proj"])
    edit(adapter / "adapter_config.json", **changes)
    with pytest.raises(SubjectError, match=problem) as caught:
        measure(adapter)
    assert "\n" not in str(caught.value)


def test_a_broken_weights_file_is_named(tmp_path, base, capsys):
    adapter = save_adapter(tmp_path / "adapter", base)
    file = adapter / "adapter_model.safetensors"
    weights = read_tensors(file)
    key = next(key for key in weights if "lora_B" in key)
    save_file({k: v for k, v in weights.items() if k != key}, file)
    with pytest.raises(SubjectError, match="found nothing for lora_B"):
        measure(adapter)
    save_file(weights | {key: weights[key] * torch.nan}, file)
    with pytest.raises(SubjectError, match=r"lora_B.*expected finite numbers"):
        measure(adapter)
    file.write_bytes(b"nothing of the kind")
    capsys.readouterr()  # the bars of making the adapter
    assert main(["--adapter", str(adapter), "--adapter-only"]) == 2
    err = capsys.readouterr().err
    assert "expected a file of tensors" in err
    assert err.count("\n") == 1


def test_weights_as_a_pytorch_file_and_whole_weights_beside_them(tmp_path, base):
    adapter = save_adapter(tmp_path / "adapter", base, modules_to_save=["lm_head"])
    expected = measure(adapter)
    assert [reason for _, reason in LoraFiles.open(adapter).left_out] == ["a whole weight, no factor of a delta"]
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    pd.testing.assert_frame_equal(measure(adapter), expected)


def test_functional_size_equals_a_plain_computation(subject):
    pair = encode_pair(subject.tokenizer, make_pair(2))
    found = functional_size(subject, [pair])
    assert found["module"].nunique() == MODULES
    name = "model.layers.2.mlp.down_proj"
    layer, seen = layers_of(subject)[name], {}
    hook = layer.base_layer.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0][0]))
    for model in ("base", "trained"):
        with getattr(subject, model)(), torch.no_grad():
            subject.causal_lm(torch.tensor([pair.ids_a]))
        delta = (seen["x"] @ layer.get_delta_weight("default").mT).norm(dim=-1)
        own = (seen["x"] @ layer.base_layer.weight.mT).norm(dim=-1)
        rows = found[(found["module"] == name) & (found["model"] == model)].set_index(["position", "metric"])["value"]
        assert rows["prompt", "delta_output"] == pytest.approx(float(delta[1:].mean()), rel=1e-4)
        assert rows["prompt", "base_output"] == pytest.approx(float(own[1:].mean()), rel=1e-4)
        assert rows["decision", "delta_output"] == pytest.approx(float(delta[-1]), rel=1e-4)
        assert rows["decision", "base_output"] == pytest.approx(float(own[-1]), rel=1e-4)
    hook.remove()


def test_functional_size_leaves_out_the_bias_and_leaves_no_hook(tmp_path):
    subject = Subject.load(tiny_pair_folders(tmp_path, "qwen2", targets=["q_proj", "lm_head"])[0])
    pair = encode_pair(subject.tokenizer, make_pair(2))
    before = functional_size(subject, [pair])
    for layer in layers_of(subject).values():
        assert not layer.base_layer._forward_hooks
    layer = layers_of(subject)["model.layers.0.self_attn.q_proj"].base_layer
    layer.bias.data += 100.0
    first = before["module"] == "model.layers.0.self_attn.q_proj"
    after = functional_size(subject, [pair])
    np.testing.assert_allclose(after["value"][first], before["value"][first], rtol=1e-3)
    with pytest.raises(ValueError, match="at least one"):
        functional_size(subject, [])


def test_the_command_leaves_everything_that_a_reader_needs(folders, pair_file, tmp_path, capsys):
    out = tmp_path / "r"
    argv = ["--adapter", str(folders[0]), "--pairs", str(pair_file), "--out", str(out)]
    assert main(argv) == 0
    folder = out / "adapter" / "lora_svd"
    assert {path.name for path in folder.iterdir()} == WEIGHT_FILES | {"pairs.jsonl", "tokens.parquet"}
    saved = pd.read_parquet(folder / "results.parquet")
    plot(saved)
    summary = json.loads((folder / "summary.json").read_text())
    assert next(iter(summary)) == "statement"
    assert summarise(saved) | {"left_out": []} == summary
    assert summary["functional_size"]["pairs"] == 3
    run = json.loads((folder / "run.json").read_text())
    assert run["command"].startswith("python -m interp.lora_svd --adapter")
    assert run["pairs"]["used"] == 3
    printed, err = capsys.readouterr()
    assert "q_proj" in printed
    assert summary["statement"] in printed
    assert "SVD of adapter" in err

    assert main([*argv, "--no-activations", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert {path.name for path in folder.iterdir()} == WEIGHT_FILES  # the pairs of the run before are gone
    run_of_files = json.loads((folder / "run.json").read_text())
    assert run_of_files["pairs"] is None
    assert (run_of_files["adapter"], run_of_files["base"]) == (run["adapter"], run["base"])


def test_functional_size_is_resumed_pair_by_pair(folders, pair_file, tmp_path, monkeypatch):
    argv = ["--adapter", str(folders[0]), "--pairs", str(pair_file), "--out", str(tmp_path / "r"), "--quiet"]
    assert main(argv) == 0
    file = tmp_path / "r/adapter/lora_svd/results.parquet"
    expected = pd.read_parquet(file)

    def refuse(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(lora_svd, "measure_pair", refuse)
    assert main([*argv, "--resume"]) == 0
    pd.testing.assert_frame_equal(pd.read_parquet(file), expected)


def test_no_model_is_loaded_for_the_files(folders, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    argv = ["--adapter", str(folders[0]), "--out", str(tmp_path / "r"), "--quiet", "--no-activations"]
    assert main(argv) == 0


def test_a_series_of_checkpoints(folders, tmp_path, base, capsys):
    one = save_adapter(tmp_path / "ep050", base, seed=1)
    two = tmp_path / "ep100"
    two.mkdir()
    weights = load_file(one / "adapter_model.safetensors")
    (two / "adapter_config.json").write_bytes((one / "adapter_config.json").read_bytes())
    # Twice as large, the same inputs, other outputs in one module.
    turned = {key: value * 2 if "lora_B" in key else value for key, value in weights.items()}
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    q = torch.linalg.qr(torch.cat([weights[key], torch.randn(48, 4, generator=torch.Generator().manual_seed(0))], 1)).Q
    turned[key] = q[:, 4:] @ torch.linalg.qr(weights[key]).R * 2
    save_file(turned, two / "adapter_model.safetensors")
    fresh = save_adapter(tmp_path / "ep150", base, size=0.0, targets=["up_proj", "q_proj"])

    frame, left_out = lora_svd_growth.measure([one, two])
    assert left_out == []
    compared = frame[frame["other"] == "ep050"].set_index(["module", "side", "metric"])["value"]
    for module in frame["module"].unique():
        left = 0.0 if module == "model.layers.1.mlp.up_proj" else 1.0
        assert compared[module, "left", "overlap"] == pytest.approx(left, abs=1e-5)
        assert compared[module, "right", "overlap"] == pytest.approx(1, abs=1e-5)
        assert compared[module, "left", "angle_largest"] == pytest.approx(0 if left else 90, abs=0.1)
    sizes = frame[frame["metric"] == "frobenius"].pivot(index="module", columns="adapter", values="value")
    np.testing.assert_allclose(sizes["ep100"], 2 * sizes["ep050"], rtol=1e-5)

    argv = ["--adapter", str(one), str(two), str(fresh), "--adapter-only", "--out", str(tmp_path / "r")]
    assert main(argv) == 0
    folder = tmp_path / "r" / "ep050-ep150" / "lora_svd_growth"
    assert {"growth.pdf", "growth.png", "angles.pdf", "angles.png", "run.json"} <= {p.name for p in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["left_out"]) == MODULES - 8
    assert [entry["adapter"] for entry in summary["adapters"]] == ["ep050", "ep100", "ep150"]
    assert summary["neighbours"][0]["overlap"]["right"] == pytest.approx(1, abs=1e-5)
    assert summary["neighbours"][1]["overlap"]["right"] is None  # a zero delta has no subspace
    assert "undefined, since a delta is zero" in capsys.readouterr().out
    assert json.loads((folder / "run.json").read_text())["command"].startswith("python -m interp.lora_svd --adapter")
    assert main([*argv, "--series", "run 1", "--quiet"]) == 0
    assert (tmp_path / "r" / "run 1" / "lora_svd_growth" / "summary.json").exists()


def test_adapters_of_different_models_are_no_series(folders, tmp_path):
    wider = save_adapter(tmp_path / "wider", save_base(tmp_path / "base", hidden_size=64))
    with pytest.raises(ValueError, match=r"wider: model.*expected the shape \(.*\) as in .*adapter, found"):
        lora_svd_growth.measure([folders[0], wider])


def test_names_of_checkpoints_make_the_axis():
    places, ticks, label = lora_svd_growth._axis(["ep050", "ep100", "run-ep400"])
    assert (places, ticks, label) == ([50, 100, 400], ["50", "100", "400"], "episodes of training")
    assert lora_svd_growth._axis(["ep050", "final"])[:2] == ([1, 2], ["ep050", "final"])
    assert lora_svd_growth._axis(["a-ep1", "b-ep1"])[0] == [1, 2]


def test_help_and_module_entry():
    done = subprocess.run(
        [sys.executable, "-m", "interp.lora_svd", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    for option in ("--no-activations", "--adapter-only", "--series"):
        assert option in done.stdout
