"""The knock-out on tiny random models: equality with full forwards under switched modules, and planted answers."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from peft.tuners.lora import LoraLayer

from counterfactuals import CounterfactualPair, generate_pairs, scheduler_episodes, write_pairs
from interp import knockout_drive, lora_svd
from interp.knockout import COLUMNS, adapted_parts, load_profile, main, measure, measure_pair, play_trial, trials
from interp.knockout_report import figures
from interp.knockout_summary import importance, needed, read, simultaneous, summarise
from interp.subject import Subject, UnsupportedArchitecture
from interp.tokens import encode_pair
from tests.interp.tiny import KINDS, save_adapter, save_base, tiny_pair_folders

LAYERS = 4
ADAPTERS = {
    "all": {},
    "two projections": {"targets": ["q_proj", "down_proj"]},
    "some layers": {"layers_to_transform": [1, 3]},
    "head and embedding": {"targets": ["v_proj", "lm_head", "embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "trained tokens": {"trainable_token_indices": [7, 8, 50]},
}


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
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def subject(base, tmp_path_factory):
    return Subject.load(save_adapter(tmp_path_factory.mktemp("ep1"), base))


@pytest.fixture(scope="module")
def frame(subject):
    return measure(subject, [encode_pair(subject.tokenizer, make_pair(n)) for n in (2, 5)])


def modules_on(subject, model, switch, part, layer):
    """The names of the modules in which the adapter is on, from the words of `measure` alone."""

    def depth(name):
        if ".layers." in name:
            return int(name.split(".layers.")[1].split(".")[0])
        return -1 if "embed" in name else LAYERS

    def part_of(name):
        return "attention" if ".self_attn." in name else "mlp" if ".mlp." in name else "outside"

    def chosen(name):
        return part_of(name) == part and (part == "outside" or depth(name) == layer)

    rules = {
        ("base", "none"): lambda name: False,
        ("trained", "none"): lambda name: True,
        ("base", "on"): chosen,
        ("trained", "off"): lambda name: not chosen(name),
        ("base", "on_up_to"): lambda name: depth(name) <= layer,
        ("base", "on_from"): lambda name: depth(name) >= layer,
    }
    return [name for name in subject.adapted_modules if rules[model, switch](name)]


def assert_equal_to_full_forwards(subject, pair):
    found = measure_pair(subject, pair)
    for key, rows in found.groupby(["model", "switch", "part", "layer"]):
        values = rows.set_index("metric")["value"]
        with subject.only(modules_on(subject, *key)), torch.inference_mode():
            for side, ids in (("a", pair.ids_a), ("b", pair.ids_b)):
                logits = subject.causal_lm(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
                expected = float(logits[pair.answer[0]] - logits[pair.foil[0]])
                assert values[f"logit_difference_{side}"] == pytest.approx(expected, abs=2e-4), key
        assert values["effect"] == values["logit_difference_a"] - values["logit_difference_b"]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_configuration_equals_a_full_forward(tmp_path, kind):
    subject = Subject.load(tiny_pair_folders(tmp_path, kind)[0])
    found = assert_equal_to_full_forwards(subject, encode_pair(subject.tokenizer, make_pair(12)))
    assert len(found.groupby(["model", "switch", "part", "layer"])) == 2 + 4 * LAYERS + 2 * LAYERS
    assert found.loc[found["metric"] == "engine_error", "value"].max() < 1e-3


@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_whatever_is_adapted_is_switched(tmp_path, base, options):
    subject = Subject.load(save_adapter(tmp_path / "adapter", base, **options))
    found = assert_equal_to_full_forwards(subject, encode_pair(subject.tokenizer, make_pair(3)))
    measured = found[found["switch"] == "off"]
    assert set(zip(measured["layer"], measured["part"], strict=True)) == set(adapted_parts(subject))


def test_chunks_change_nothing(subject, frame, monkeypatch):
    monkeypatch.setattr(knockout_drive, "MAX_TOKENS", 1)  # one row at a time
    pair = encode_pair(subject.tokenizer, make_pair(2))
    found = measure_pair(subject, pair)
    expected = frame[frame["pair"] == pair.id].reset_index(drop=True)
    pd.testing.assert_frame_equal(found.drop(columns="value"), expected.drop(columns="value"))
    np.testing.assert_allclose(found["value"], expected["value"], atol=2e-4)


def test_an_identical_pair_moves_nothing(subject):
    found = measure_pair(subject, encode_pair(subject.tokenizer, make_pair(2, values=("2", "2"))))
    assert found.loc[found["metric"] == "effect", "value"].abs().max() < 1e-4


def test_the_frame_is_tidy_and_the_subject_as_it_was(subject, frame):
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(list(COLUMNS[:-1])).any()
    assert np.isfinite(frame["value"]).all()
    assert subject.is_trained
    assert subject.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="at least one"):
        measure(subject, [])


def test_a_fresh_adapter_needs_and_brings_nothing(tmp_path, base):
    subject = Subject.load(save_adapter(tmp_path / "fresh", base, size=0.0))
    pairs = [encode_pair(subject.tokenizer, make_pair(n, group=f"g{n}")) for n in range(1, 8)]
    found = measure(subject, pairs)
    spread = found[found["metric"] == "effect"].groupby("pair")["value"].agg(lambda values: values.max() - values.min())
    assert spread.max() < 1e-4
    summary = summarise(found, profile=load_profile(tmp_path / "fresh"))
    assert "No effect of the adapter to locate" in summary["statement"]
    assert not any(module["needed"] for module in summary["modules"])
    assert summary["cumulative"]["below"] == {"crossings": None, "share": None}
    assert all(test["p"] is None for test in summary["profile"]["tests"])
    json.dumps(summary, allow_nan=False)
    assert set(figures(found, profile=load_profile(tmp_path / "fresh"))) == {"knockout", "cumulative", "profile"}


def test_a_planted_part_is_named(tmp_path, base):
    """The adapter writes in attention of layer 2 only, so that is where everything is lost and gained."""
    subject = Subject.load(save_adapter(tmp_path / "planted", base, size=0.5))
    with torch.no_grad():
        for name, module in subject.causal_lm.named_modules():
            if isinstance(module, LoraLayer) and ".layers.2.self_attn." not in name:
                module.lora_B["default"].weight.zero_()
    pairs = [encode_pair(subject.tokenizer, make_pair(n, group=f"g{n}")) for n in range(1, 9)]
    knockouts = read(measure(subject, pairs))
    planted = knockouts.modules.index((2, "attention"))
    for change in (knockouts.lost(), knockouts.gained()):
        np.testing.assert_allclose(np.delete(change, planted, axis=1), 0, atol=2e-4)
        np.testing.assert_allclose(change[0, planted], knockouts.brought().estimate, atol=2e-4)
    np.testing.assert_allclose(knockouts.share("below")[0], [0, 0, 0, 1, 1], atol=1e-3)
    np.testing.assert_allclose(knockouts.share("above")[0], [1, 1, 1, 0, 0], atol=1e-3)
    assert knockouts.crossing("below", 0.5).estimate == pytest.approx(2.5, abs=1e-3)
    assert knockouts.crossing("above", 0.5).estimate == pytest.approx(2.5, abs=1e-3)


def test_an_architecture_that_is_not_driven_right_is_refused(base, tmp_path):
    subject = Subject.load(save_adapter(tmp_path / "scaled", base))
    whole = subject.causal_lm.forward

    def scaled(*args, **options):  # some models scale their logits after the unembedding
        output = whole(*args, **options)
        output.logits = output.logits * 0.5
        return output

    subject.causal_lm.forward = scaled
    with pytest.raises(UnsupportedArchitecture, match="driven layer by layer"):
        measure_pair(subject, encode_pair(subject.tokenizer, make_pair(2)))


def planted_frame(*, lost, brought=10.0, groups=8, noise=0.2, seed=0, layers=6):
    """A frame without a model: attention of layer l costs `lost[l]`, MLP nothing; layer 3 brings it all."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(groups):
        pair = (f"p{number}", f"g{number}", "future_uses")

        def add(model, switch, part, layer, effect, pair=pair):
            a = effect / 2 + noise * rng.normal()
            values = {"logit_difference_a": a, "logit_difference_b": a - effect, "effect": effect}
            rows.extend((*pair, model, switch, part, layer, metric, value) for metric, value in values.items())

        trained = brought + noise * rng.normal()
        add("base", "none", "all", -1, 0.0)
        add("trained", "none", "all", -1, trained)
        rows.append((*pair, "base", "none", "all", -1, "engine_error", 1e-5))
        for layer in range(layers):
            for part, cost in (("attention", lost[layer]), ("mlp", 0.0)):
                add("trained", "off", part, layer, trained - cost + noise * rng.normal())
                add("base", "on", part, layer, cost / 10 + noise * rng.normal())
            add("base", "on_up_to", "all", layer, trained * (layer >= 3))
            add("base", "on_from", "all", layer, trained * (layer <= 3))
    return pd.DataFrame(rows, columns=list(COLUMNS))


LOST = (0.0, 0.1, 0.2, 8.0, 3.0, 0.3)


def test_the_summary_finds_what_was_planted():
    frame = planted_frame(lost=LOST)
    summary = summarise(frame)
    assert {(m["layer"], m["part"]) for m in summary["modules"] if m["needed"]} >= {(3, "attention"), (4, "attention")}
    assert not any(m["needed"] for m in summary["modules"] if m["part"] == "mlp")
    assert "the dearest, attention of layer 3, costs" in summary["statement"]
    dearest = max(summary["modules"], key=lambda module: module["lost"]["effect"]["estimate"])
    assert dearest["lost"]["effect"]["estimate"] == pytest.approx(8, abs=0.4)
    assert dearest["gained"]["effect"]["estimate"] == pytest.approx(0.8, abs=0.4)
    assert summary["cumulative"]["below"]["crossings"]["0.5"]["estimate"] == pytest.approx(3.5)
    assert summary["cumulative"]["above"]["crossings"]["0.5"]["estimate"] == pytest.approx(3.5)
    assert summary["engine_error"] == 1e-5
    assert summary["score"] is None
    assert "No episodes were played" in summary["statement"]
    assert importance(frame).idxmax() == 3
    json.dumps(summary, allow_nan=False)


def test_few_graphs_make_no_claim():
    summary = summarise(planted_frame(lost=LOST, groups=5))
    assert "No claim from so few graphs" in summary["statement"]
    assert not any(module["needed"] for module in summary["modules"])
    assert all(module["lost"]["simultaneous"] is None for module in summary["modules"])
    figures(planted_frame(lost=LOST, groups=5))


def test_nothing_is_needed_where_nothing_is_lost():
    """All sixty intervals hold together: chance names a part in about one of twenty frames, not in nearly all."""
    named = [bool(needed(read(planted_frame(lost=[0.0] * 30, layers=30, seed=seed, groups=16)))) for seed in range(20)]
    assert sum(named) <= 5


def test_simultaneous_limits_are_wider_than_pointwise_ones_and_none_for_constants():
    rng = np.random.default_rng(0)
    draws = np.concatenate([np.zeros((1, 40)), rng.normal(size=(2000, 40))])
    draws[:, 7] = 0
    low, high = simultaneous(draws)
    assert low[7] == high[7] == 0
    assert (np.delete(high, 7) > 2.7).all()  # a single one would be 1.96
    inside = ((draws[1:] >= low) & (draws[1:] <= high)).all(axis=1).mean()
    assert inside == pytest.approx(0.95, abs=0.005)


def test_the_profile_is_compared_layer_by_layer():
    frame = planted_frame(lost=LOST, noise=0.01)
    sizes = {"attention": LOST, "mlp": [1.0] * 6}
    profile = pd.DataFrame(
        [(layer, part, size, -size) for part, found in sizes.items() for layer, size in enumerate(found)],
        columns=["layer", "part", "frobenius", "per_parameter"],
    ).sample(frac=1, random_state=0)
    summary = summarise(frame, profile=profile)
    tests = {(t["part"], t["size"], t["change"]): t for t in summary["profile"]["tests"]}
    assert tests["attention", "frobenius", "lost"]["rho"]["estimate"] == pytest.approx(1.0, abs=0.1)
    assert tests["attention", "per_parameter", "lost"]["rho"]["estimate"] == pytest.approx(-1.0, abs=0.1)
    assert tests["attention", "frobenius", "lost"]["p"] < 0.02
    assert tests["mlp", "frobenius", "lost"]["p"] is None
    assert "rank correlation of" in summary["statement"]
    assert "profile" in figures(frame, profile=profile)
    partial = summarise(frame, profile=profile[profile["layer"] != 3])
    assert partial["profile"]["tests"][0]["layers"] == 5


def test_the_profile_of_the_adapter_names_the_same_parts(tmp_path, base):
    folder = save_adapter(tmp_path / "two", base, targets=["q_proj", "down_proj"], layers_to_transform=[1, 3])
    profile = load_profile(folder)
    assert set(zip(profile["layer"], profile["part"], strict=True)) >= set(adapted_parts(Subject.load(folder)))
    pd.testing.assert_frame_equal(profile, lora_svd.profile(lora_svd.measure(folder)))


def test_trials_switch_what_they_say(subject, frame):
    episodes = scheduler_episodes(1, seed=0)
    made = {(trial.model, trial.part): set(trial.on) for trial in trials(subject, frame, episodes)}
    everything = set(subject.adapted_modules)
    assert made["base", "all"] == set()
    assert made["trained", "all"] == everything
    assert made["base", "attention only"] == {name for name in everything if ".self_attn." in name}
    assert made["base", "mlp only"] == {name for name in everything if ".mlp." in name}
    assert made["trained", "no layers 0–1"] == {name for name in everything if int(name.split(".")[2]) > 1}
    most, least = importance(frame).idxmax(), importance(frame).abs().idxmin()
    for title, layer in (("most", most), ("least", least)):
        on = made["trained", f"no layers {layer} ({title} needed)"]
        assert everything - on == {name for name in everything if f".layers.{layer}." in name}
    assert len(made) == 9


def test_playing_counts_what_the_model_writes(subject, frame):
    episodes = scheduler_episodes(2, seed=0)
    trial = trials(subject, frame, episodes)[1]
    played = play_trial(subject, trial, episodes)
    values = played.pivot(index="pair", columns="metric", values="value")
    assert (values["invalid"] == 3).all()  # a random model writes no action, and is stopped
    assert (values["valid_share"] == 0).all()
    assert (values["score"] < 0).all()
    summary = summarise(pd.concat([frame, played, play_trial(subject, trials(subject, frame, episodes)[0], episodes)]))
    assert [row["part"] for row in summary["score"]["configurations"]] == ["all", "all"]
    assert "2 graphs, too few for intervals" in summary["statement"]


@pytest.fixture
def pair_file(tmp_path):
    write_pairs(
        [*(make_pair(n, group=f"g{n}") for n in range(3)), make_pair(9, kind="other")], tmp_path / "pairs.jsonl"
    )
    return tmp_path / "pairs.jsonl"


def test_the_command_leaves_everything_and_is_resumed(tmp_path, pair_file, capsys):
    folders = tiny_pair_folders(tmp_path)
    argv = ["--adapter", str(folders[0]), "--pairs", str(pair_file), "--out", str(tmp_path / "r")]
    assert main(argv) == 0
    folder = tmp_path / "r" / "adapter" / "knockout"
    names = {"results.parquet", "summary.json", "run.json", "pairs.jsonl", "tokens.parquet", "results.partial"}
    figures_made = {f"{stem}.{kind}" for stem in ("knockout", "cumulative", "profile") for kind in ("pdf", "png")}
    assert {path.name for path in folder.iterdir()} == names | figures_made
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["left_out"] == [{"id": "p9", "reason": "kind other"}]
    assert summary["score"] is None  # pairs of an environment without episodes
    frame = pd.read_parquet(folder / "results.parquet")
    assert frame["pair"].unique().tolist() == ["p0", "p1", "p2"]
    figures(frame)
    printed, err = capsys.readouterr()
    assert "logit difference, A - B" in printed
    assert "knockout" in err
    assert main([*argv, "--resume", "--quiet"]) == 0
    pd.testing.assert_frame_equal(frame, pd.read_parquet(folder / "results.parquet"))


def test_the_command_plays_episodes_of_the_scheduler(tmp_path, capsys):
    folders = tiny_pair_folders(tmp_path)
    write_pairs(generate_pairs(2, seed=0), tmp_path / "pairs.jsonl")
    argv = ["--adapter", str(folders[0]), "--pairs", str(tmp_path / "pairs.jsonl"), "--out", str(tmp_path / "r")]
    assert main([*argv, "--limit", "1", "--episodes", "1", "--quiet"]) == 0
    folder = tmp_path / "r" / "adapter" / "knockout"
    assert (folder / "score.pdf").exists()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["score"]["configurations"]) == 9
    assert main([*argv, "--episodes", "-1"]) == 2
    assert "--episodes: expected a whole number, found '-1'" in capsys.readouterr().err
