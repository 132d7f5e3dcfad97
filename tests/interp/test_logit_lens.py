"""The logit lens on tiny random models, against plain implementations; its summary on planted curves."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from counterfactuals import CounterfactualPair, Decision, write_decisions, write_pairs
from interp import logit_lens
from interp.figures import save
from interp.flip import MODELS
from interp.logit_lens import COLUMNS, _settling, lens, main, measure, measure_text
from interp.logit_lens_report import CAPTIONS, figures
from interp.logit_lens_summary import permutation_p, read, spearman, summarise
from interp.logit_lens_texts import decision_text, pair_texts
from interp.stats import derive_rng
from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import run_pair
from interp.tokens import encode_pair
from tests.interp.test_tokens import LISTS, NUMBERS, build
from tests.interp.tiny import SIZES, save_adapter, tiny_pair_folders

LAYERS = 4
SLOT_CHOICES = {"fuse": ("true", "false"), "tile": ("32", "64", "128", "256"), "retain": ("[]", "[3]", "[7]", "[17]")}
FILES = {
    *(f"{name}.{kind}" for name in CAPTIONS for kind in ("pdf", "png")), "results.parquet", "summary.json", "run.json",
    "pairs.jsonl", "tokens.parquet", "decisions.jsonl", "texts.parquet", "results.partial",
}  # fmt: skip


def make_pair(number, *, values=("2", "0")):
    head = f'{{"node":{number},"uses":{{"{number}":'
    texts = [f"{head}{value}}}}}" for value in values]
    return CounterfactualPair(
        id=f"p{number}",
        environment="test",
        kind="future_uses",
        messages_a=({"role": "user", "content": texts[0]},),
        messages_b=({"role": "user", "content": texts[1]},),
        action_prefix='{"retain": ',
        answer=f"[{number}]}}",
        foil="[]}",
        spans={"value": (len(head), len(head) + len(values[0]))},
        group=f"g{number // 2}",
    )


def make_decision(number=0, *, retain="[7]", tile="128", choices=SLOT_CHOICES, group=None):
    action = f'{{"fuse": true, "tile": {tile}, "retain": {retain}}}'
    slots = {}
    for name, text in (("fuse", "true"), ("tile", tile), ("retain", retain)):
        start = action.index(f'"{name}": ') + len(f'"{name}": ')
        slots[name] = (start, start + len(text))
    return Decision(
        id=f"d{number}",
        environment="test",
        group=group or f"g{number // 2}",
        messages=({"role": "user", "content": f'{{"node":{number},"uses":{{"3":1,"7":{number}}}}}'},),
        action=action,
        slots=slots,
        choices={name: tuple(dict.fromkeys([*choices[name], action[slice(*slots[name])]])) for name in slots},
        spans={},
        labels={},
    )


def text_of(tokenizer, decision):
    text, left_out = decision_text(tokenizer, decision)
    assert left_out == []
    return text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair_folders(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture(scope="module")
def text(subject):
    return text_of(subject.tokenizer, make_decision())


@pytest.fixture(scope="module")
def frame(subject, text):
    return measure(subject, [text])


def curve(frame, slot, model, metric, choice=""):
    """(layers,) values, lowest layer first."""
    keys = {"slot": slot, "model": model, "metric": metric, "choice": choice}
    rows = frame[(frame[list(keys)] == pd.Series(keys)).all(axis=1)]
    return rows.sort_values("layer")["value"].to_numpy()


def plain_lens(causal, text, position):
    """(L + 1, vocab): the states that the model itself returns, the last of which it has normed already."""
    with torch.inference_mode():
        out = causal(input_ids=torch.tensor([text.ids]), use_cache=False, output_hidden_states=True)
        below = [causal.lm_head(causal.model.norm(state[0, position])) for state in out.hidden_states[:-1]]
        return torch.stack([*below, out.logits[0, position]]).double()


# Forks


@pytest.mark.parametrize("retain", ["[7]", "[]", "[3, 7]"])
def test_a_fork_is_where_whole_actions_part(subject, retain):
    decision = make_decision(retain=retain)
    text = text_of(subject.tokenizer, decision)
    for fork in text.forks:
        slot = fork.slot.split(":")[0]
        before, after = decision.around(slot)
        prompt = subject.tokenizer.apply_chat_template(
            [dict(m) for m in decision.messages], tokenize=False, add_generation_prompt=True
        )
        found = set()
        for choice in decision.choices[slot]:
            ids = subject.tokenizer(prompt + before + choice + after, add_special_tokens=False)["input_ids"]
            if tuple(ids[: fork.position + 1]) == text.ids[: fork.position + 1]:
                found.add(ids[fork.position + 1])
        assert found == set(fork.tokens)
        assert len(found) == len(fork.tokens) > 1
        assert fork.tokens[0] == text.ids[fork.position + 1]
    assert subject.tokenizer.decode(text.ids).endswith(decision.action)


def test_lists_part_from_the_empty_one_first_and_from_each_other_one_token_later(subject):
    ids = subject.tokenizer.convert_tokens_to_ids
    forks = {fork.slot: fork for fork in text_of(subject.tokenizer, make_decision()).forks}
    assert list(forks) == ["fuse", "tile", "retain", "retain:2"]
    assert forks["retain"].choices == ("[", "[]")
    assert forks["retain"].tokens == tuple(ids(["Ġ[", "Ġ[]"]))
    assert forks["retain:2"].position == forks["retain"].position + 1
    assert forks["retain:2"].choices == ("[7]", "[3]", "[17]")
    assert forks["retain:2"].tokens == tuple(ids(["7", "3", "1"]))
    assert forks["fuse"].choices == ("true", "false")
    assert forks["tile"].choices == ("128", "32", "64", "256")


def test_the_empty_list_leaves_nothing_to_choose_next(subject):
    forks = {fork.slot: fork for fork in text_of(subject.tokenizer, make_decision(retain="[]")).forks}
    assert forks["retain"].choices == ("[]", "[")
    assert "retain:2" not in forks


def test_numbers_of_one_token_are_told_apart_at_once():
    tokenizer = build("threes", [*LISTS, *NUMBERS, ("12", "8")])
    digits, threes = (text_of(t, make_decision(tile="12")) for t in (build(merges=LISTS), tokenizer))
    slots = [[fork.slot for fork in text.forks if fork.slot.startswith("tile")] for text in (digits, threes)]
    assert slots == [["tile", "tile:2"], ["tile"]]  # 12 and 128 share their first digit, and no token


def test_what_cannot_be_read_is_named(subject):
    text, left_out = decision_text(subject.tokenizer, make_decision(choices=SLOT_CHOICES | {"tile": ()}))
    assert left_out == [("d0 tile", "no other choice in the slot")]
    assert [fork.slot for fork in text.forks] == ["fuse", "retain", "retain:2"]
    altering = build(merges=LISTS)
    altering.chat_template = "{% for m in messages %}{{ m['content'] | replace('node', 'nod') }}{% endfor %}"
    text, left_out = decision_text(altering, make_decision())
    assert text is None
    assert ("d0 fuse false", "template alters the user message") in left_out


# The lens


def test_the_frame_is_tidy(frame):
    assert tuple(frame.columns) == COLUMNS
    assert not frame.duplicated(list(COLUMNS[:-1])).any()
    assert np.isfinite(frame["value"]).all()
    choices = 2 + 4 + 2 + 3
    per_layer = 2 * choices * 3 + 4 * (2 * 3 + 1)
    assert len(frame) == per_layer * (LAYERS + 1) + 2 * 4 * 3


@pytest.mark.parametrize("model", MODELS)
def test_every_layer_equals_a_plain_lens(subject, text, frame, model):
    for fork in text.forks:
        with getattr(subject, model)():
            logits = plain_lens(subject.causal_lm, text, fork.position)
        log_probs = logits.log_softmax(-1)
        for choice, token in zip(fork.choices, fork.tokens, strict=True):
            np.testing.assert_allclose(curve(frame, fork.slot, model, "logit", choice), logits[:, token], atol=1e-4)
            np.testing.assert_allclose(
                curve(frame, fork.slot, model, "p", choice), log_probs[:, token].exp(), rtol=1e-3
            )
            ranks = [1 + sorted(row.tolist(), reverse=True).index(row[token].item()) for row in logits]
            np.testing.assert_array_equal(curve(frame, fork.slot, model, "rank", choice), ranks)
        entropy = scipy.stats.entropy(log_probs.exp().numpy(), axis=-1)
        np.testing.assert_allclose(curve(frame, fork.slot, model, "entropy"), entropy, rtol=1e-4)
        kl = scipy.stats.entropy(log_probs[-1:].exp().numpy(), log_probs.exp().numpy(), axis=-1)
        np.testing.assert_allclose(curve(frame, fork.slot, model, "kl_final"), kl, rtol=1e-3, atol=1e-6)
        assert curve(frame, fork.slot, model, "lens_error") < 1e-4
        top = logits[:, fork.tokens].argmax(-1)
        np.testing.assert_array_equal(curve(frame, fork.slot, model, "chosen"), top == 0)


def test_divergence_is_from_base_to_trained(subject, text, frame):
    fork = text.forks[0]
    logits = {}
    for model in MODELS:
        with getattr(subject, model)():
            logits[model] = plain_lens(subject.causal_lm, text, fork.position)
    base, trained = (logits[model].softmax(-1).numpy() for model in MODELS)
    found = curve(frame, fork.slot, "trained", "kl_base")
    np.testing.assert_allclose(found, scipy.stats.entropy(trained, base, axis=-1), rtol=1e-3, atol=1e-6)
    assert found[0] == 0  # the embedding is not adapted
    assert found[-1] > 0.1
    assert len(curve(frame, fork.slot, "base", "kl_base")) == 0


def test_all_slots_in_one_pass_equal_one_at_a_time(subject, text):
    positions = [fork.position for fork in text.forks]
    together, _ = lens(subject, text.ids, positions)
    for index, position in enumerate(positions):
        alone, _ = lens(subject, text.ids[: position + 1], [position])
        torch.testing.assert_close(alone[:, 0], together[:, index], atol=1e-4, rtol=1e-4)


def test_a_fresh_adapter_diverges_nowhere(folders, text, tmp_path):
    fresh = measure_text(Subject.load(save_adapter(tmp_path / "fresh", folders[1], size=0.0)), text)
    assert (fresh.loc[fresh["metric"] == "kl_base", "value"] == 0).all()
    same = fresh[fresh["metric"] != "kl_base"]
    base, trained = (same[same["model"] == model]["value"].to_numpy() for model in MODELS)
    np.testing.assert_array_equal(base, trained)
    summary = summarise(fresh, profile=profile_of(np.zeros(LAYERS)))
    assert summary["kinds"]["decision"]["fuse"]["divergence"]["half_from_layer"]["estimate"] is None
    assert all(test["p"] is test["p_bh"] is test["rho"]["estimate"] is None for test in summary["alignment"]["tests"])
    assert "undefined" in summary["statement"]


def test_each_model_is_read_through_its_own_unembedding(folders, text, tmp_path):
    adapted = Subject.load(save_adapter(tmp_path / "head", folders[1], targets=["v_proj", "lm_head"]))
    found = measure_text(adapted, text)
    assert curve(found, "fuse", "trained", "kl_base")[0] > 0.01  # the same embedding, another unembedding
    fork = text.forks[0]
    for model in MODELS:
        with getattr(adapted, model)():
            logits = plain_lens(adapted.causal_lm, text, fork.position)
        np.testing.assert_allclose(curve(found, "fuse", model, "logit", "true"), logits[:, fork.tokens[0]], atol=1e-4)


def bare(config_class, model_class, **options):
    """A random model alone, as much of a subject as the lens asks for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        causal = model_class(config_class(**SIZES, vocab_size=64, pad_token_id=0, **options)).eval()
    return SimpleNamespace(causal_lm=causal, decoder=causal.model)


def test_logits_are_capped_where_the_model_caps_them():
    model = bare(Gemma2Config, Gemma2ForCausalLM, final_logit_softcapping=2.0)
    logits, error = lens(model, range(20), [5, 19])
    assert logits.shape == (LAYERS + 1, 2, 64)
    assert error < 1e-4
    assert 1.5 < logits.abs().max() <= 2.0


def test_a_model_that_does_more_to_its_last_stream_is_refused():
    with pytest.raises(UnsupportedArchitecture, match=r"GraniteForCausalLM.*not covered by the logit lens"):
        lens(bare(GraniteConfig, GraniteForCausalLM, logits_scaling=3.0), range(20), [19])


def test_a_failed_reading_leaves_no_trace(subject, text):
    before, _ = lens(subject, text.ids, [3])
    with pytest.raises(IndexError):
        lens(subject, text.ids, [len(text.ids)])
    assert not any(module._forward_pre_hooks for module in subject.causal_lm.modules())
    assert torch.equal(lens(subject, text.ids, [3])[0], before)


def test_the_subject_is_left_as_it_was(subject, text):
    with subject.base():
        measure_text(subject, text)
        assert not subject.is_trained
    assert subject.is_trained


def test_a_pair_is_read_in_a_and_in_b_where_patching_reads_it(subject):
    pair = encode_pair(subject.tokenizer, make_pair(2))
    found = measure(subject, pair_texts(subject.tokenizer, pair))
    assert set(found["slot"]) == {"answer in A", "answer in B"}
    for model in MODELS:
        with getattr(subject, model)():
            runs = run_pair(subject, pair)
        for side, run, reference in zip("AB", runs, (" [", " []"), strict=True):
            for choice, token in ((" [", pair.answer[0]), (" []", pair.foil[0])):
                logit = curve(found, f"answer in {side}", model, "logit", choice)[-1]
                assert logit == pytest.approx(float(run.logits[token]), abs=1e-4)
            assert set(found.loc[found["slot"] == f"answer in {side}", "reference"]) == {reference}


@pytest.mark.parametrize(
    ("top", "layer"), [([1, 1, 1], 0), ([0, 1, 1], 1), ([1, 0, 1], 2), ([0, 1, 0, 0, 1, 1], 4), ([2], 0)]
)
def test_the_settling_layer_is_the_first_of_the_last_run(top, layer):
    assert _settling(torch.tensor(top)).tolist() == [layer]


def test_measure_takes_a_progress_bar_and_refuses_no_texts(subject, text):
    seen = []
    measure(subject, [text], progress=lambda texts: seen.extend(texts) or texts)
    assert seen == [text]
    with pytest.raises(ValueError, match="at least one"):
        measure(subject, [])


# The summary


def profile_of(*sizes, parts=("attention", "mlp")):
    rows = [
        {"layer": layer, "part": part, "frobenius": size, "per_parameter": size / 2}
        for part, written in zip(parts, sizes, strict=False)
        for layer, size in enumerate(written)
    ]
    return pd.DataFrame(rows)


def planted_frame(steps, *, groups=12, per_group=2, settle=None, slots=("retain",), seed=0):
    """Texts whose divergence grows by `steps` (L,) times a factor of their own; the choice settles at `settle`."""
    rng = np.random.default_rng(seed)
    levels = np.concatenate([[0], np.cumsum(steps)])
    rows = []
    for number, slot, model in itertools.product(range(groups * per_group), slots, MODELS):
        of = {"id": f"d{number}", "group": f"g{number // per_group}", "kind": "decision", "slot": slot}
        of |= {"reference": "[", "model": model}
        late = (settle or {}).get(model, 3) + int(rng.integers(2))
        p = np.where(np.arange(len(levels)) < late, 0.1, 0.9)
        curves = {("p", "["): p, ("p", "[]"): 1 - p, ("rank", "["): np.where(p > 0.5, 1, 100), ("chosen", ""): p > 0.5}
        curves |= {("entropy", ""): 1 - p, ("kl_final", ""): 0.9 - p}
        if model == "trained":
            curves["kl_base", ""] = levels * rng.uniform(0.5, 1.5)
        for (metric, choice), values in curves.items():
            rows += [of | {"layer": i, "choice": choice, "metric": metric, "value": v} for i, v in enumerate(values)]
        for metric, value in (("settling", late), ("settling_vocabulary", late), ("lens_error", 1e-6)):
            rows.append(of | {"layer": -1, "choice": "", "metric": metric, "value": value})
    return pd.DataFrame(rows).astype({"value": float})[list(COLUMNS)]


def test_planted_settling_layers_and_rise_are_found():
    steps = np.array([0.0] * 10 + [1.0] * 4 + [0.0] * 6)
    (slot,) = read(planted_frame(steps, settle={"base": 5, "trained": 12}))
    for model, planted in (("base", 5), ("trained", 12)):
        found = slot.settles(model)
        assert planted < found.low < found.estimate < found.high < planted + 1
    assert slot.rise().estimate == pytest.approx(12)  # half of four equal steps from layer 10 on
    assert slot.interval("trained", "p").estimate == pytest.approx(0.9)
    assert slot.interval("trained", "p", 0).estimate == pytest.approx(0.1)
    assert 10 ** slot.interval("trained", "log10_rank", 0).estimate == pytest.approx(100)
    np.testing.assert_allclose(slot.curves["base", "p"] + slot.curves["base", "p_others"], 1)
    np.testing.assert_allclose(slot.choices["base", "[]"], slot.curves["base", "p_others"])


def test_a_divergence_that_follows_the_adapter_is_told_from_one_that_does_not():
    rng = np.random.default_rng(3)
    steps = rng.permutation(np.linspace(0.1, 2, 24))
    profile = profile_of(steps**2, rng.permutation(steps))  # any growing function has the same ranks
    tests = summarise(planted_frame(steps), profile=profile)["alignment"]["tests"]
    assert len(tests) == 8
    found = {(t["part"], t["curve"], t["size"]): t for t in tests}
    for size in ("frobenius", "per_parameter"):
        followed, other = found["attention", "step", size], found["mlp", "step", size]
        assert followed["rho"]["estimate"] == followed["rho"]["low"] == pytest.approx(1)
        assert followed["p"] <= followed["p_bh"] < 0.01
        assert abs(other["rho"]["estimate"]) < 0.5
        assert other["p"] > 0.05


def test_a_layer_without_an_adapter_has_no_delta():
    profile = profile_of(np.arange(1.0, 7))
    steps = [1.0, 2, 3, 4, 5, 6, 0, 0]
    tests = summarise(planted_frame(steps), profile=profile)["alignment"]["tests"]
    assert tests[0]["rho"]["estimate"] == pytest.approx(1)
    with pytest.raises(ValueError, match=r"profile.layer: expected layers from 0 to 2, found 3"):
        summarise(planted_frame([1.0, 2, 3]), profile=profile)


def test_rank_correlation_and_its_p_are_those_of_scipy():
    rng = np.random.default_rng(1)
    curves, reference = rng.integers(0, 6, (5, 12)).astype(float), rng.normal(size=12)
    expected = [scipy.stats.spearmanr(one, reference) for one in curves]
    np.testing.assert_allclose(spearman(curves, reference), [found.statistic for found in expected])
    assert np.isnan(spearman(np.ones(12), reference))
    for one, found in zip(curves, expected, strict=True):  # scipy's is an approximation for large n
        assert permutation_p(one, reference, derive_rng(0, "test")) == pytest.approx(found.pvalue, abs=0.03)


def test_the_permutation_test_holds_its_level():
    rng = np.random.default_rng(2)
    draws = [permutation_p(rng.normal(size=10), rng.normal(size=10), np.random.default_rng(i)) for i in range(200)]
    assert 0.01 <= np.mean(np.array(draws) <= 0.05) <= 0.1


def test_the_summary_is_json_and_says_what_it_found():
    frame = planted_frame([0.0] * 5 + [1.0] * 5, slots=("tile", "retain"))
    summary = summarise(frame, profile=profile_of(np.arange(10.0), np.ones(10)))
    again = json.loads(json.dumps(summary, allow_nan=False))
    assert again == json.loads(json.dumps(summarise(frame, profile=profile_of(np.arange(10.0), np.ones(10)))))
    assert again["last_row_error"] == 1e-6
    assert set(again["kinds"]["decision"]) == {"tile", "retain"}
    assert "decision, tile (24 texts of 12 graphs): P(reference) 0.90" in again["statement"]
    assert "undefined (mlp)" in again["statement"]
    assert "2303.08112" in again["caution"]
    by_layer = again["kinds"]["decision"]["retain"]["models"]["base"]["by_layer"]
    assert {len(values) for curve in by_layer.values() for values in curve.values()} == {11}


def test_few_graphs_make_no_claim():
    summary = summarise(planted_frame([1.0, 2], groups=3))
    assert "no claim" in summary["statement"]
    assert "no profile" in summary["statement"]
    assert summary["alignment"] is None
    assert summary["kinds"]["decision"]["retain"]["models"]["base"]["p"]["low"] is None


def test_figures_come_from_the_frame_alone(tmp_path):
    frame = planted_frame([0.5] * 8, slots=("fuse", "tile", "retain"))
    profile = profile_of(np.arange(8.0), np.ones(8))
    for given in (None, profile[:0], profile):
        drawn = figures(frame, given)
        assert drawn.keys() == CAPTIONS.keys()
    bars = drawn["divergence"].axes[1].patches
    np.testing.assert_allclose([bar.get_height() for bar in bars], [*range(8), *[1] * 8])
    assert all(i < bar.get_x() + bar.get_width() / 2 < i + 1 for i, bar in enumerate(bars[:8]))  # between two readings
    (image,) = drawn["heatmap"].axes[1].images
    np.testing.assert_allclose(image.get_array()[2], read(frame)[2].curves["trained", "kl_final"][0])
    for name, figure in drawn.items():
        save(figure, tmp_path / name)


# The command


@pytest.fixture
def argv(folders, tmp_path):
    pairs, decisions = tmp_path / "pairs.jsonl", tmp_path / "decisions.jsonl"
    write_pairs([*(make_pair(n) for n in range(3)), make_pair(9, values=("0", "10"))], pairs)
    write_decisions([make_decision(n, retain=retain) for n, retain in enumerate(("[7]", "[]", "[3, 7]"))], decisions)
    out = str(tmp_path / "reports")
    return ["--adapter", str(folders[0]), "--pairs", str(pairs), "--decisions", str(decisions), "--out", out]


def test_the_command_leaves_everything_that_a_reader_needs(argv, tmp_path, capsys):
    assert main(argv) == 0
    folder = tmp_path / "reports" / "adapter" / "logit_lens"
    assert {path.name for path in folder.iterdir()} == FILES
    frame = pd.read_parquet(folder / "results.parquet")
    assert frame["id"].unique().tolist() == ["p0", "p1", "p2", "d0", "d1", "d2"]
    figures(frame)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["last_row_error"] < 1e-4
    assert summary["decisions"] == {"used": 3, "given": 3}
    assert summary["left_out"] == [{"id": "p9", "reason": "length differs"}]
    assert list(summary["kinds"]) == ["future_uses", "decision"]
    assert {test["part"] for test in summary["alignment"]["tests"]}
    texts = pd.read_parquet(folder / "texts.parquet")
    assert len(texts) == 6 + 4 + 3 + 4
    assert all(len(row.ids) > row.position for row in texts.itertuples())
    printed, err = capsys.readouterr()
    assert "P(reference)" in printed
    assert "pairs: 1 (length differs: 1)" in printed
    assert "logit lens" in err


def test_an_interrupted_run_is_continued(argv, tmp_path, monkeypatch):
    measured, whole = [], logit_lens.measure_text
    monkeypatch.setattr(logit_lens, "figures", lambda *args, **options: {})

    def some(subject, text):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append((text.id, text.forks[0].slot))
        return whole(subject, text)

    with monkeypatch.context() as patched:
        patched.setattr(logit_lens, "measure_text", some)
        assert main([*argv, "--quiet"]) == 130
        measured.clear()
        assert main([*argv, "--quiet", "--resume", "--limit", "3"]) == 130
        assert measured == [("p1", "answer in B"), ("p2", "answer in A"), ("p2", "answer in B")]
    assert main([*argv, "--quiet", "--resume"]) == 0
    cut = pd.read_parquet(tmp_path / "reports/adapter/logit_lens/results.parquet")
    assert main([*argv, "--quiet"]) == 0
    pd.testing.assert_frame_equal(cut, pd.read_parquet(tmp_path / "reports/adapter/logit_lens/results.parquet"))


def test_bad_input_is_one_line(argv, tmp_path, capsys):
    (tmp_path / "decisions.jsonl").write_text("{\n", encoding="utf-8")
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "decisions.jsonl:1: expected one JSON object" in err
