"""Flip layers from planted curves: what is claimed, what is not, and what is only counted."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from interp.flip import MODELS, POSITIONS, locate, show, summarise
from interp.patching_report import table
from interp.stats import MIN_GROUPS, Interval
from tests.interp.synthetic import planted_frame

FLIPS = {"value": 11.3, "decision": 15.2}
BOTH = {"base": 4.0, "trained": 12.0}


@pytest.fixture(scope="module")
def created():
    """A base model without an effect and a trained model with one."""
    return planted_frame(effects={"base": 0.0, "trained": 12.0}, flips=FLIPS)


def numbers_in(record):
    if isinstance(record, dict):
        return [number for value in record.values() for number in numbers_in(value)]
    return [record] if isinstance(record, (int, float)) else []


def exchange(frame, pairs):
    return frame.replace({old: new for a, b in pairs for old, new in ((a, b), (b, a))})


def test_planted_flips_are_found_exactly_without_noise():
    frame = planted_frame(effects=BOTH, flips={"value": 10.0, "decision": 15.0}, noise=0.0)
    located = locate(frame)
    for model in MODELS:
        for position, planted in (("value", 10.0), ("decision", 15.0)):
            flip = located.flip(model, "denoise", position)
            assert flip.low == flip.estimate == flip.high == pytest.approx(planted, abs=0.01)
        assert located.transit(model, "denoise").estimate == pytest.approx(5.0, abs=0.02)


def test_planted_flips_lie_in_their_intervals(created):
    summary = summarise(created)["kinds"]["future_uses"]
    for position, planted in FLIPS.items():
        flip = summary["models"]["trained"]["sweeps"]["denoise"]["flips"][position]
        assert flip["ratio_of_means"]["low"] < planted < flip["ratio_of_means"]["high"]
        assert flip["mean_of_ratios"]["low"] < planted < flip["mean_of_ratios"]["high"]
        assert flip["crossings"] == 1


def test_a_model_without_an_effect_is_given_no_flip_layer(created):
    summary = summarise(created)["kinds"]["future_uses"]
    base = summary["models"]["base"]
    assert base["sweeps"]["denoise"]["effect_present"] is False
    assert base["sweeps"]["denoise"]["flips"] is None
    assert base["statement"].startswith("no effect to locate: A - B = ")
    assert summary["trained_minus_base"]["flips"] is None
    assert summary["trained_minus_base"]["effect"]["low"] > 10
    assert summary["models"]["trained"]["sweeps"]["denoise"]["effect_present"] is True


def test_a_handful_of_graphs_makes_no_claim():
    frame = planted_frame(effects=BOTH, flips=FLIPS, groups=MIN_GROUPS - 1)
    summary = summarise(frame)["kinds"]["future_uses"]
    for model in MODELS:
        assert summary["models"][model]["statement"].startswith(f"no claim from {MIN_GROUPS - 1} graphs")
        assert summary["models"][model]["sweeps"]["denoise"]["flips"] is None


def test_patching_that_changes_nothing_says_so():
    frame = planted_frame(effects=BOTH, flips=FLIPS)
    own = frame[(frame["direction"] == "baseline_b") & (frame["metric"] == "logit_difference")]
    own = own.set_index(["model", "pair"])["value"]
    inert = (frame["direction"] == "denoise") & (frame["metric"] == "logit_difference") & (frame["model"] == "trained")
    frame.loc[inert, "value"] = own.loc[list(zip(frame[inert]["model"], frame[inert]["pair"], strict=True))].to_numpy()
    trained = summarise(frame)["kinds"]["future_uses"]["models"]["trained"]
    assert trained["sweeps"]["denoise"]["changed_cells"] == 0
    assert trained["sweeps"]["denoise"]["flips"] is None
    assert trained["statement"].startswith("patching changed none of 1488 cells")
    assert trained["sweeps"]["noise"]["changed_cells"] > 0


def test_pairs_without_a_gap_are_counted_and_spoil_nothing():
    frame = planted_frame(effects=BOTH, flips=FLIPS)
    flat = frame["pair"].isin(["future_uses-0", "future_uses-1", "future_uses-2"])
    frame.loc[flat & (frame["metric"] == "logit_difference"), "value"] = 0.5
    summary = summarise(frame)
    sweep = summary["kinds"]["future_uses"]["models"]["trained"]["sweeps"]["denoise"]
    assert sweep["undefined_pairs"] == 3
    assert np.isfinite(numbers_in(summary)).all()
    for position, planted in FLIPS.items():
        for curve in ("ratio_of_means", "mean_of_ratios"):
            assert sweep["flips"][position][curve]["estimate"] == pytest.approx(planted, abs=1.5)


def test_a_small_denominator_moves_the_mean_of_ratios_and_not_the_ratio_of_means():
    frame = planted_frame(effects=BOTH, flips=FLIPS)
    rows = (frame["pair"] == "future_uses-0") & (frame["model"] == "trained") & (frame["metric"] == "logit_difference")
    frame.loc[rows & (frame["direction"] == "baseline_a"), "value"] = 0.11
    frame.loc[rows & (frame["direction"] == "baseline_b"), "value"] = 0.0
    located = locate(frame)
    sweep = located.sweeps["trained", "denoise"]
    assert np.abs(sweep.mean_ratios["decision"][0]).max() > 2
    assert np.abs(sweep.curves["decision"][0]).max() < 1.1


def test_the_base_models_own_rows_do_not_touch_the_trained_ones(created):
    other = created.copy()
    other.loc[other["model"] == "base", "value"] *= 3
    plain, changed = (summarise(f)["kinds"]["future_uses"]["models"]["trained"] for f in (created, other))
    assert plain == changed


def test_exchanging_a_and_b_exchanges_the_directions():
    frame = planted_frame(effects=BOTH, flips=FLIPS)
    turned = exchange(frame, [("baseline_a", "baseline_b"), ("denoise", "noise")])
    one, other = locate(frame), locate(turned)
    for model in MODELS:
        for position in POSITIONS:
            assert one.flip(model, "denoise", position) == other.flip(model, "noise", position)
    assert one.sweeps["trained", "denoise"].effect.estimate == -other.sweeps["trained", "denoise"].effect.estimate


def test_differences_are_paired():
    frame = planted_frame(effects=BOTH, flips=FLIPS, noise=0.3)
    located = locate(frame)
    difference = located.flip_difference("denoise", "decision")
    single = located.flip("trained", "denoise", "decision")
    assert difference.estimate == pytest.approx(single.estimate - located.flip("base", "denoise", "decision").estimate)
    assert difference.high - difference.low < (single.high - single.low) / 2  # both models share each pair's shift


def test_kinds_of_pairs_are_never_averaged_together():
    main = planted_frame(effects={"base": 0.0, "trained": 12.0}, flips=FLIPS)
    control = planted_frame(effects={"base": 0.0, "trained": 0.0}, flips=FLIPS, kind="other_key", seed=1)
    both = pd.concat([main, control], ignore_index=True)
    assert locate(both).kind == "future_uses"
    found = summarise(both)["kinds"]
    assert list(found) == ["future_uses", "other_key"]
    assert found["future_uses"] == summarise(main)["kinds"]["future_uses"]
    assert found["other_key"]["models"]["trained"]["sweeps"]["denoise"]["flips"] is None
    with pytest.raises(ValueError, match="expected one of future_uses, other_key, found 'dose'"):
        locate(both, "dose")


def test_the_seed_moves_intervals_and_not_estimates(created):
    one, two = (locate(created, seed=seed).sweeps["trained", "denoise"].effect for seed in (0, 1))
    assert one.estimate == two.estimate
    assert one.low != two.low
    assert summarise(created, 3) == summarise(created, 3)


def test_a_curve_that_misses_a_known_end_is_told(created):
    assert locate(created).sweeps["trained", "noise"].end_error == pytest.approx(0, abs=1e-9)
    bent = created.copy()
    place = {"pair": "future_uses-3", "model": "trained", "direction": "noise", "position": "value", "layer": 0}
    row = (bent[[*place, "metric"]] == pd.Series({**place, "metric": "logit_difference"})).all(axis=1)
    assert row.sum() == 1
    bent.loc[row, "value"] += 0.25
    sweeps = summarise(bent)["kinds"]["future_uses"]["models"]["trained"]["sweeps"]
    assert sweeps["noise"]["end_error"] == pytest.approx(0.25)
    assert sweeps["denoise"]["end_error"] == pytest.approx(0, abs=1e-9)


def test_the_trained_stream_in_the_base_model_has_a_flip_layer_of_its_own(created):
    crossed = summarise(created)["kinds"]["future_uses"]["trained_into_base"]
    assert list(crossed["flips"]) == ["decision"]
    flip = crossed["flips"]["decision"]["ratio_of_means"]
    assert flip["low"] < FLIPS["decision"] < flip["high"]
    assert crossed["transit_layers"] is None
    assert crossed["effect"]["estimate"] == pytest.approx(6, abs=0.5)  # half of 12, above the base model's 0


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(1.234, 1.0, 2.0, 0.0), "1.23 [1.00, 2.00]"),
        (Interval(-0.001, -0.004, 0.1, 0.0), "0.00 [0.00, 0.10]"),
        (Interval(3.0, math.nan, math.nan, 0.0), "3.00"),
        (Interval(math.nan, math.nan, math.nan, 1.0), "none"),
    ],
)
def test_intervals_are_shown_without_a_negative_zero(interval, text):
    assert show(interval) == text


def test_a_summary_is_strict_json(created):
    assert json.loads(json.dumps(summarise(created), allow_nan=False)) == summarise(created)


def test_the_table_shows_both_models_and_what_was_left_out(created):
    text = table(created, title="ep400", left_out="2 (length differs: 2)", folder="reports/ep400/patching")
    lines = text.splitlines()
    assert lines[0] == "ep400, future_uses: 24 pairs of 12 graphs"
    row = next(line for line in lines if "A into B, at the decision" in line)
    flip = locate(created).flip("trained", "denoise", "decision")
    assert row.split("decision")[1].split(maxsplit=1) == [
        "-",
        f"{flip.estimate:.2f} [{flip.low:.2f}, {flip.high:.2f}]   -",
    ]
    assert "no effect to locate" in text
    assert "left out: 2 (length differs: 2)" in text
    assert lines[-1] == "written to reports/ep400/patching"
