"""The patching command on tiny random models: oracles that need no expected numbers, and the files it leaves."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from counterfactuals import CounterfactualPair, write_pairs
from interp import patching
from interp.flip import MODELS, RECOVERY_EPS, SWEEPS, positions_of
from interp.patching import COLUMNS, Task, main, measure, measure_pair
from interp.patching_report import plot
from interp.run_record import _content_key
from interp.subject import Subject
from interp.tokens import encode_pair, encode_pairs
from tests.interp.tiny import save_adapter, tiny_pair_folders

LAYERS = 4
FILES = {
    "results.parquet", "summary.json", "pairs.jsonl", "tokens.parquet", "run.json", "results.partial",
    *(f"{name}.{kind}" for name in ("patching", "components", "controls", "attribution") for kind in ("pdf", "png")),
}  # fmt: skip


def make_pair(number, *, values=("2", "0"), kind="future_uses", group=None):
    head = f'{{"node":{number},"uses":{{"{number}":'
    texts = [f'{head}{value},"x":1}}}}' for value in values]
    return CounterfactualPair(
        id=f"p{number}",
        environment="test",
        kind=kind,
        messages_a=({"role": "user", "content": texts[0]},),
        messages_b=({"role": "user", "content": texts[1]},),
        action_prefix='{"retain": ',
        answer=f"[{number}]}}",
        foil="[]}",
        spans={"value": (len(head), len(head) + len(values[0]))},
        group=group or f"g{number // 2}",
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture(scope="module")
def pair(subject):
    return encode_pair(subject.tokenizer, make_pair(2))


@pytest.fixture(scope="module")
def frame(subject, pair):
    return measure(subject, [pair])


@pytest.fixture
def pair_file(tmp_path):
    file = tmp_path / "pairs.jsonl"
    write_pairs([*(make_pair(n) for n in range(4)), make_pair(9, values=("0", "10"))], file)
    return file


def cells(frame, model, direction, position, metric="logit_difference"):
    """(layers,) values of one curve, lowest layer first."""
    keys = {"model": model, "direction": direction, "position": position, "metric": metric}
    rows = frame[(frame[list(keys)] == pd.Series(keys)).all(axis=1) & frame["component"].isin(["residual", "none"])]
    return rows.sort_values("layer")["value"].to_numpy()


def baseline(frame, model, side, metric="logit_difference"):
    (value,) = cells(frame, model, f"baseline_{side}", "none", metric)
    return value


def test_the_frame_is_tidy(frame):
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(list(COLUMNS[:-1])).any()
    sweeps = 2 * len(SWEEPS) - 1
    assert len(frame) == 2 * 2 * 5 + sweeps * (LAYERS + 1) * 6 + 2 * 2 * LAYERS * 6 + 1  # components, and a fact
    assert np.isfinite(frame["value"]).all()
    assert set(frame.loc[frame["position"] == "none", "layer"]) == {-1}
    assert set(frame.loc[frame["position"] != "none", "layer"]) == set(range(LAYERS + 1))


@pytest.mark.parametrize("model", MODELS)
def test_an_identical_pair_moves_nothing_exactly(subject, model):
    frame = measure(subject, [encode_pair(subject.tokenizer, make_pair(2, values=("2", "2")))])
    assert baseline(frame, model, "a") == baseline(frame, model, "b")
    for direction, position in itertools.product(("denoise", "noise"), ("value", "decision")):
        assert (cells(frame, model, direction, position) == baseline(frame, model, "a")).all()
        assert np.isnan(cells(frame, model, direction, position, "recovery")).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("side", ["a", "b"])
def test_baselines_equal_a_plain_forward(subject, pair, frame, model, side):
    ids = getattr(pair, f"ids_{side}") + pair.answer
    with getattr(subject, model)(), torch.inference_mode():
        logits = subject.causal_lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    log_probs = logits.log_softmax(-1)
    at = pair.decision
    assert baseline(frame, model, side) == pytest.approx(
        float(logits[at, pair.answer[0]] - logits[at, pair.foil[0]]), abs=1e-4
    )
    steps = [log_probs[at + i, token] for i, token in enumerate(pair.answer)]
    assert baseline(frame, model, side, "p_answer") == pytest.approx(float(torch.stack(steps).sum().exp()), rel=1e-3)
    assert baseline(frame, model, side, "p_first_foil") == pytest.approx(
        float(log_probs[at, pair.foil[0]].exp()), rel=1e-3
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("direction", "donor", "recipient"), [("denoise", "a", "b"), ("noise", "b", "a")])
def test_the_ends_of_every_curve_are_known(frame, model, direction, donor, recipient):
    assert abs(baseline(frame, model, donor) - baseline(frame, model, recipient)) > 0.1
    for metric in ("logit_difference", "p_answer", "p_first_answer", "kl"):
        end, start = baseline(frame, model, donor, metric), baseline(frame, model, recipient, metric)
        value = cells(frame, model, direction, "value", metric)
        decision = cells(frame, model, direction, "decision", metric)
        assert value[0] == pytest.approx(end, abs=1e-4)  # the only token that differs
        assert value[-1] == pytest.approx(start, abs=1e-4)  # no layer left to read it
        assert decision[0] == pytest.approx(start, abs=1e-4)  # the same token in A and B
        if metric != "p_answer":  # whose later tokens read the recipient's earlier positions
            assert decision[-1] == pytest.approx(end, abs=1e-4)


def test_kl_is_measured_from_a(subject, pair, frame):
    for model in MODELS:
        with getattr(subject, model)(), torch.inference_mode():
            logits = [
                subject.causal_lm(input_ids=torch.tensor([ids])).logits[0, -1] for ids in (pair.ids_a, pair.ids_b)
            ]
        a, b = (x.double().log_softmax(-1) for x in logits)
        forward, backward = float((a.exp() * (a - b)).sum()), float((b.exp() * (b - a)).sum())
        assert baseline(frame, model, "b", "kl") == pytest.approx(forward, rel=1e-3)
        assert baseline(frame, model, "b", "kl") != pytest.approx(backward, rel=1e-2)
        assert baseline(frame, model, "a", "kl") == 0.0
        assert cells(frame, model, "denoise", "value", "kl")[0] == pytest.approx(0.0, abs=1e-6)


def test_recovery_is_that_of_the_logit_difference(frame):
    for (model, direction), (recipient, donor) in SWEEPS.items():
        start, end = (baseline(frame, name, side[-1]) for name, side in (recipient, donor))
        for position in positions_of(direction):
            expected = (cells(frame, model, direction, position) - start) / (end - start)
            np.testing.assert_allclose(cells(frame, model, direction, position, "recovery"), expected)


def test_a_pair_that_the_model_does_not_tell_apart_has_no_recovery(subject):
    found = measure_pair(subject, encode_pair(subject.tokenizer, make_pair(8)))
    assert abs(baseline(found, "trained", "a") - baseline(found, "trained", "b")) < RECOVERY_EPS
    assert np.isnan(cells(found, "trained", "denoise", "decision", "recovery")).all()
    assert np.isfinite(found.loc[found["metric"] != "recovery", "value"]).all()


def test_exchanging_a_and_b_exchanges_the_directions(subject, pair, frame):
    turned = measure_pair(subject, dataclasses.replace(pair, ids_a=pair.ids_b, ids_b=pair.ids_a))
    for model in MODELS:
        for position in ("value", "decision"):
            np.testing.assert_allclose(
                cells(turned, model, "denoise", position), cells(frame, model, "noise", position), atol=1e-4
            )


def test_the_trained_stream_decides_in_the_base_model_as_it_does_in_its_own(frame):
    # All projections are adapted but not the unembedding: after the last layer the streams are exchangeable.
    crossed = cells(frame, "base", "cross", "decision")
    assert crossed[-1] == pytest.approx(baseline(frame, "trained", "a"), abs=1e-4)
    assert crossed[0] == pytest.approx(baseline(frame, "base", "a"), abs=1e-4)


def test_a_fresh_adapter_makes_no_difference_anywhere(folders, pair, tmp_path):
    fresh = measure_pair(Subject.load(save_adapter(tmp_path / "fresh", folders[1], size=0.0)), pair)
    own = fresh[fresh["direction"] != "cross"]
    base, trained = (own[own["model"] == model]["value"].to_numpy() for model in MODELS)
    np.testing.assert_array_equal(base, trained)
    crossed = fresh[fresh["direction"] == "cross"]
    assert crossed.loc[crossed["metric"] == "recovery", "value"].isna().all()
    np.testing.assert_allclose(cells(fresh, "base", "cross", "decision"), baseline(fresh, "base", "a"), atol=1e-4)


def test_an_answer_of_one_token_has_the_probability_of_that_token(subject):
    single = dataclasses.replace(make_pair(7), action_prefix='{"fuse": ', answer="7", foil="8")
    found = measure_pair(subject, encode_pair(subject.tokenizer, single))
    for position in ("value", "decision"):
        np.testing.assert_allclose(
            cells(found, "trained", "denoise", position, "p_answer"),
            cells(found, "trained", "denoise", position, "p_first_answer"),
            rtol=1e-5,
        )


def test_the_subject_is_left_as_it_was(subject, pair):
    with subject.base():
        measure_pair(subject, pair)
        assert not subject.is_trained
    assert subject.is_trained


def test_measure_takes_a_progress_bar_and_refuses_no_pairs(subject, pair):
    seen = []
    measure(subject, [pair], progress=lambda pairs: seen.extend(pairs) or pairs)
    assert seen == [pair]
    with pytest.raises(ValueError, match="at least one"):
        measure(subject, [])


def test_the_command_leaves_everything_that_a_reader_needs(folders, pair_file, tmp_path, capsys):
    out = tmp_path / "reports"
    argv = ["--adapter", str(folders[0]), "--pairs", str(pair_file), "--out", str(out), "--seed", "5"]
    assert main(argv) == 0
    folder = out / "adapter" / "patching"
    assert {path.name for path in folder.iterdir()} == FILES

    frame = pd.read_parquet(folder / "results.parquet")
    assert frame["pair"].unique().tolist() == ["p0", "p1", "p2", "p3"]
    plot(frame)  # the figure comes from the file alone

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["left_out"] == [{"id": "p9", "reason": "length differs"}]
    assert summary["kinds"]["future_uses"]["pairs"] == 4
    for model in MODELS:
        assert all(
            sweep["end_error"] < 1e-4 for sweep in summary["kinds"]["future_uses"]["models"][model]["sweeps"].values()
        )

    run = json.loads((folder / "run.json").read_text())
    assert run["command"].startswith("python -m interp.patching --adapter")
    subject = Subject.load(folders[0])
    assert run["adapter"] == {"name": "adapter", "sha256": subject.adapter_sha256}
    assert run["base"] == subject.base_identity
    assert (run["seed"], run["device"], run["dtype"], run["load_in_4bit"]) == (5, "cpu", "float32", False)
    assert run["pairs"]["used"] == 4
    assert run["pairs"]["groups"] == 2
    assert run["pairs"]["left_out"] == summary["left_out"]
    assert len(run["pairs"]["used_sha256"]) == len(run["pairs"]["source_sha256"]) == 64
    assert run["wall_seconds"] > 0
    assert run["peak_memory_bytes"] > 10**7
    assert {"torch", "transformers", "peft"} <= run["versions"].keys()
    assert set(run["git"]) in ({"revision", "modified"}, {"revision", "why"})

    tokens = pd.read_parquet(folder / "tokens.parquet").set_index("id")
    encoded = encode_pair(subject.tokenizer, make_pair(2))
    assert tuple(tokens.loc["p2", "ids_a"]) == encoded.ids_a
    assert tuple(tokens.loc["p2", "foil"]) == encoded.foil
    assert [json.loads(line)["id"] for line in (folder / "pairs.jsonl").open()] == ["p0", "p1", "p2", "p3"]

    printed, err = capsys.readouterr()
    assert "left out: 1 (length differs: 1)" in printed
    assert "logit difference, A - B" in printed
    assert str(folder) in printed
    assert "patching" in err  # the progress bar


def test_quiet_is_quiet(folders, pair_file, tmp_path, capsys):
    argv = [
        "--adapter",
        str(folders[0]),
        "--pairs",
        str(pair_file),
        "--limit",
        "1",
        "--out",
        str(tmp_path / "r"),
        "--quiet",
        "--control-pairs",
        "0",
    ]
    assert main(argv) == 0
    assert capsys.readouterr() == ("", "")


def test_every_adapter_has_a_folder(folders, pair_file, tmp_path):
    other = save_adapter(tmp_path / "other", folders[1], seed=3)
    out = tmp_path / "r"
    argv = ["--adapter", str(folders[0]), str(other), "--pairs", str(pair_file), "--limit", "1", "--out", str(out)]
    assert main([*argv, "--quiet", "--control-pairs", "0"]) == 0
    one, two = (pd.read_parquet(out / name / "patching" / "results.parquet") for name in ("adapter", "other"))
    same = one["value"] == two["value"]
    assert same[(one["model"] == "base") & (one["direction"] != "cross")].all()
    own = (one["model"] == "trained") & (one["position"] == "none")
    assert not same[own & (one["metric"] == "logit_difference")].any()
    series = out / "adapter-other" / "patching_growth"
    assert {path.name for path in series.iterdir()} == {
        "results.parquet", "summary.json", "run.json", "patching_growth.pdf", "patching_growth.png",
    }  # fmt: skip
    grown = pd.read_parquet(series / "results.parquet")
    assert grown["adapter"].unique().tolist() == ["adapter", "other"]
    effect = grown[(grown["adapter"] == "other") & (grown["model"] == "trained") & (grown["quantity"] == "effect")]
    assert effect["estimate"].item() == pytest.approx(baseline(two, "trained", "a") - baseline(two, "trained", "b"))
    assert main([*argv, "--quiet", "--control-pairs", "0", "--resume", "--series", "both"]) == 0
    assert (out / "both" / "patching_growth" / "run.json").exists()


def interrupt_after(monkeypatch, count):
    """Let `count` pairs be measured, then press Ctrl-C; returns the ids measured."""
    measured = []
    whole = patching.measure_pair

    def measure_some(subject, pair):
        if len(measured) == count:
            raise KeyboardInterrupt
        measured.append(pair.id)
        return whole(subject, pair)

    monkeypatch.setattr(patching, "measure_pair", measure_some)
    return measured


def test_an_interrupted_run_is_continued(folders, pair_file, tmp_path, monkeypatch, capsys):
    def argv(out, *more):
        plain = ["--pairs", str(pair_file), "--out", str(tmp_path / out), "--quiet", "--control-pairs", "0"]
        return ["--adapter", str(folders[0]), *plain, *more]

    assert main(argv("whole")) == 0
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        assert main(argv("cut")) == 130
    assert "--resume" in capsys.readouterr().err
    folder = tmp_path / "cut" / "adapter" / "patching"
    assert not (folder / "run.json").exists()
    with monkeypatch.context() as patched:
        measured = interrupt_after(patched, 4)
        assert main(argv("cut", "--resume")) == 0
        assert measured == ["p2", "p3"]
    whole, cut = (pd.read_parquet(tmp_path / out / "adapter/patching/results.parquet") for out in ("whole", "cut"))
    pd.testing.assert_frame_equal(whole, cut)
    with monkeypatch.context() as patched:
        measured = interrupt_after(patched, 4)
        assert main(argv("cut")) == 0
        assert measured == ["p0", "p1", "p2", "p3"]  # without --resume a run starts over


def test_a_resumed_run_takes_no_pair_that_has_changed(folders, tmp_path, monkeypatch):
    file, out = tmp_path / "pairs.jsonl", tmp_path / "r"
    plain = ["--pairs", str(file), "--out", str(out), "--quiet", "--control-pairs", "0"]
    argv = ["--adapter", str(folders[0]), *plain]
    write_pairs([make_pair(1), make_pair(2)], file)
    assert main(argv) == 0
    write_pairs([make_pair(1), make_pair(2, values=("3", "0"))], file)
    measured = interrupt_after(monkeypatch, 2)
    assert main([*argv, "--resume"]) == 0
    assert measured == ["p2"]


def test_a_resumed_run_never_mixes_settings(folders, pair_file, tmp_path, capsys):
    argv = ["--pairs", str(pair_file), "--limit", "1", "--out", str(tmp_path / "r"), "--quiet", "--adapter"]
    assert main([*argv, str(folders[0])]) == 0
    assert main([*argv, str(folders[0]), "--resume", "--dtype", "bfloat16"]) == 2
    err = capsys.readouterr().err
    assert "setting.json: dtype: expected bfloat16 as in this run, found float32" in err
    other = save_adapter(tmp_path / "other" / "adapter", folders[1], seed=3)  # another adapter in a folder of this name
    assert main([*argv, str(other), "--resume"]) == 2
    assert "adapter: expected" in capsys.readouterr().err
    assert main([*argv, str(other)]) == 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--pairs", "missing.jsonl"], "missing.jsonl"),
        (["--pairs", "useless.jsonl"], "expected at least one that can be used, found 1 (length differs: 1)"),
        (["--pairs", "broken.jsonl"], "broken.jsonl:1: expected one JSON object"),
        (["--base", "no/such/folder/here"], "no/such/folder/here"),
        (["--device", "toaster"], "--device"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folders, tmp_path, monkeypatch, capsys, more, problem):
    monkeypatch.chdir(tmp_path)
    write_pairs([make_pair(9, values=("0", "10"))], "useless.jsonl")
    (tmp_path / "broken.jsonl").write_text("{\n", encoding="utf-8")
    (tmp_path / "fine.jsonl").write_text(make_pair(1).to_json() + "\n", encoding="utf-8")
    argv = ["--adapter", str(folders[0]), *([] if "--pairs" in more else ["--pairs", "fine.jsonl"]), *more]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert problem in err
    assert not (tmp_path / "reports").exists()


def test_a_folder_without_an_adapter_is_named(tmp_path, pair_file, capsys):
    assert main(["--adapter", str(tmp_path), "--pairs", str(pair_file)]) == 2
    assert "adapter_config.json" in capsys.readouterr().err


def test_it_runs_as_a_command(folders, pair_file, tmp_path):
    command = [sys.executable, "-m", "interp.patching", "--adapter", str(folders[0]), "--pairs", str(pair_file)]
    done = subprocess.run(
        [*command, "--limit", "1", "--out", str(tmp_path / "r"), "--quiet", "--control-pairs", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "r" / "adapter" / "patching" / "run.json").exists()


def test_pairs_of_another_kind_are_kept_apart(subject):
    pairs = [make_pair(1), make_pair(2, kind="other_key")]
    encoded, _ = encode_pairs(subject.tokenizer, pairs)
    summary = patching.summarise(measure(subject, encoded))
    assert {kind: found["pairs"] for kind, found in summary["kinds"].items()} == {"future_uses": 1, "other_key": 1}


def test_a_kept_result_is_of_what_was_asked_for(pair):
    plain = Task.of(pair)
    others = [Task.of(pair, thorough=True), Task.of(pair, components=("residual",)), Task.of(pair, seed=1)]
    assert len({_content_key(task) for task in [plain, *others]}) == 4
    assert _content_key(Task.of(pair)) == _content_key(plain)


def test_controls_are_for_the_first_pairs_of_the_main_kind(subject):
    encoded, _ = encode_pairs(
        subject.tokenizer, [make_pair(0), make_pair(1, kind="other_key"), make_pair(2), make_pair(4)]
    )
    tasks = patching._tasks(encoded, ["heads"], ["between"], 2, 0)
    assert [task.thorough for task in tasks] == [True, False, True, False]
    assert tasks[0].components == ("residual", "heads")
    assert tasks[0].positions == ("value", "between", "decision")
    assert tasks[0].donor_a in {p.ids_a for p in encoded if p.group != "g0"}


def test_a_thorough_pair_has_every_part(subject, pair):
    frame = measure(subject, [pair], control_pairs=1)
    plain = measure(subject, [pair])
    keys = list(COLUMNS[:-1])
    assert not frame.duplicated(keys).any()
    both = plain.merge(frame, on=keys, suffixes=("_plain", "_thorough"))
    assert len(both) == len(plain)
    np.testing.assert_array_equal(both["value_plain"], both["value_thorough"])
    exact = frame[(frame["direction"] == "denoise") & (frame["metric"] == "logit_difference")]
    measured = set(exact[["component", "position"]].itertuples(index=False, name=None))
    assert measured == {
        ("residual", "value"), ("residual", "between"), ("residual", "decision"), ("attention", "value"),
        ("attention", "decision"), ("mlp", "value"), ("mlp", "decision"), ("heads", "decision"),
    }  # fmt: skip
    assert {"self", "everything", "other_position", "lora_span"} <= set(frame["direction"])
    assert {"zero_b", "random_b"} <= set(frame["model"])
