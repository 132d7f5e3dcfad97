"""A planted reader is named and a planted sink is not; failures are sorted as planted. No model is run."""

import json

import numpy as np
import pandas as pd
import pytest

from interp.retention_failures import examples, keys_with, sort_failures
from interp.retention_heads_report import figures, table
from interp.retention_heads_summary import halves, holm, sign_flip_p, summarise

LAYERS, HEADS = 6, 3
READER, SINK, SHAM = (4, 1), (2, 0), (3, 2)  # SHAM matters when blocked, but looks at all entries alike


def by_head(metric, table, **place):
    return [
        {**place, "layer": layer, "head": head, "metric": metric, "value": value, "answer": ""}
        for (layer, head), value in np.ndenumerate(table)
    ]


def single(metric, value, answer="", layer=-1, **place):
    return [{**place, "layer": layer, "head": -1, "metric": metric, "value": float(value), "answer": answer}]


def planted(groups=32, *, effect=1.5, decisions=60, seed=0):
    """Pairs and decisions in which the trained model has one reader; attention in the base model is noise."""
    rng = np.random.default_rng(seed)
    rows = []

    def noise(size=0.02):
        return np.abs(rng.normal(0, size, (LAYERS, HEADS)))

    def attention(trained, read=0.6):
        found = {name: noise() for name in ("attention", "attention_other", "attention_random")}
        for name in found:
            found[name][SINK] += 0.5  # looks at everything alike
            if trained:
                found[name][SHAM] += 0.3
        if trained:
            found["attention"][READER] += read
        found["attention_value"], found["attention_key"] = found["attention"] * 0.9, found["attention"] * 0.1
        return found | {f"written{name[9:]}": 3 * found[name] for name in list(found) if name.count("_") == 0 or "other"
                        in name or "random" in name}  # fmt: skip

    for number in range(groups):
        for model in ("base", "trained"):
            place = {"id": f"p{number}", "group": f"g{number}", "kind": "future_uses", "model": model, "key": "k"}
            found = attention(model == "trained")
            for name in ("effect", "effect_value", "effect_other", "effect_random"):
                found[name] = rng.normal(0, 0.05, (LAYERS, HEADS))
            if model == "trained":
                found["effect"][READER] += effect
                found["effect_other"][SHAM] += 1.0
                found["effect"][SHAM] += 1.0
            for metric, values in found.items():
                rows += by_head(metric, values, **place)
            rows += single("difference", 5.0, **place)
    for number in range(decisions):
        for model in ("base", "trained"):
            place = {"id": f"d{number}", "group": f"h{number // 2}", "kind": "decision", "model": model}
            fails = number % 5 == 0 and model == "trained"
            reads_little = number % 10 == 0
            restorable = number % 20 != 5
            written = "[]" if fails or model == "base" else "[3]"
            rows += single("list_length", len(written) - 2, written, key="", **place)
            rows += single("unknown_ids", 0, written, key="", **place)
            rows += single("unfinished", 0, written, key="", **place)
            if model == "base":
                continue
            rows += single("retains", not fails, written, key="3", **place)
            rows += single("pays", True, written, key="3", **place)
            for metric, values in attention(True, 0.05 if fails and reads_little else 0.9 if fails else 0.6).items():
                rows += by_head(metric, values, key="3", **place)
            if fails:
                for layer in range(LAYERS + 1):
                    value = 1.0 if restorable and layer == READER[0] + 1 else -1.0
                    rows += single("restored_difference", value, written, layer, key="3", **place)
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def frame():
    return planted()


@pytest.fixture(scope="module")
def summary(frame):
    return summarise(frame, 0)


def heads_of(records):
    return [(record["layer"], record["head"]) for record in records]


def test_the_planted_reader_is_named_and_nothing_else(summary):
    trained, base = summary["models"]["trained"], summary["models"]["base"]
    assert heads_of(trained["readers"]) == [READER]
    assert heads_of(base["readers"]) == []
    reader = trained["readers"][0]
    assert reader["effect"]["low"] < 1.5 < reader["effect"]["high"]
    assert reader["p_holm"] < 0.01
    assert reader["other_model"]["attention"]["estimate"] < 0.1
    assert "1 of 18 heads read the entry" in summary["statement"]
    assert "base: no head reads the entry: of 18, none was a candidate" in summary["statement"]
    json.dumps(summary, allow_nan=False)


def test_a_sink_passes_the_plain_definition_only(summary):
    plain = heads_of(summary["models"]["trained"]["plain_definition"]["heads"])
    assert set(plain) == {READER, SINK, SHAM}
    assert summary["overlap"]["trained"] == {
        "plain_and_reader": ["L4H1"],
        "plain_only": ["L2H0", "L3H2"],
        "reader_only": [],
    }
    found = summary["models"]["trained"]["plain_definition"]
    assert (found["decisions_that_retain"], found["enough"]) == (48, False)
    assert summary["models"]["base"]["plain_definition"]["decisions_that_retain"] == 0


def test_without_an_effect_there_is_no_reader():
    trained = summarise(planted(effect=0.0, decisions=0), 0)["models"]["trained"]
    assert trained["readers"] == []
    assert "no head reads the entry" in trained["statement"]


def test_few_graphs_make_no_claim():
    summary = summarise(planted(groups=8, decisions=0), 0)
    assert summary["models"]["trained"]["readers"] == []
    assert "no claim: expected at least 12 graphs, found 8" in summary["statement"]


def test_failures_are_sorted_as_planted(frame, summary):
    found = summary["models"]["trained"]["failures"]
    assert (found["pays"], found["failures"]) == (60, 12)
    assert found["counts"] == {"retrieval": 6, "downstream": 3, "unresolved": 3}
    assert found["shares"]["retrieval"]["estimate"] == pytest.approx(0.5)
    assert found["shares"]["retrieval"]["low"] < 0.5 < found["shares"]["retrieval"]["high"]
    shown = examples(frame, summary)
    assert {example["class"] for example in shown} == {"retrieval", "downstream", "unresolved"}
    assert all(
        (example["attention"]["L4H1"] < found["threshold"]) == (example["class"] == "retrieval") for example in shown
    )
    assert all(example["writes"] == "[]" for example in shown)


def test_failures_without_readers_are_not_sorted(frame):
    rows = frame[(frame["kind"] == "decision") & (frame["model"] == "trained")]
    found = sort_failures(rows, [], 0)
    assert found["counts"] == {"retrieval": 0, "downstream": 0, "unresolved": 12}
    assert "no confirmed readers" in found["statement"]
    assert len(keys_with(rows, pays=1, retains=1)) == 48
    assert keys_with(rows, pays=0).empty


def test_the_halves_share_no_graph_and_do_not_depend_on_the_order():
    names = [f"g{i}" for i in range(13)]
    first, second = halves(names, 0)
    assert (len(first), len(second)) == (6, 7)
    assert first.isdisjoint(second)
    assert halves(names[::-1] * 2, 0) == (first, second)
    assert halves(names, 1) != (first, second)


def test_sign_flips_are_exact_for_few_graphs():
    groups = ["a", "b", "c", "c"]
    values = np.array([[1.0, 1.0], [2.0, -5.0], [3.0, 1.0], [5.0, 1.0]])
    found = sign_flip_p(values, groups, np.random.default_rng(0))
    # The first column has 1, 2 and 4: only the pattern as it is reaches their mean. The second has 1, -5 and 1: its sum
    # of -3 is reached by all eight patterns but the two that leave -5 and turn one of the others or both.
    sums = [a + b + c for a in (1, -1) for b in (5, -5) for c in (1, -1)]
    assert found == pytest.approx([1 / 8, sum(s >= -3 for s in sums) / 8])


def test_holm_by_hand():
    assert holm(np.array([0.01, 0.04, 0.03])) == pytest.approx([0.03, 0.06, 0.06])
    assert holm(np.array([0.5])) == pytest.approx([0.5])
    assert holm(np.array([])).size == 0


def test_figures_need_numbers_only(frame, summary):
    drawn = figures(frame, summary)
    assert set(drawn) == {"retention_heads", "spans"}
    assert drawn["retention_heads"].get_figwidth() == pytest.approx(3.4)
    assert "L4H1" in table(summary, title="t", left_out="none", folder="f")
