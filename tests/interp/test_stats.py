"""Right answers in dumb cases, the coverage of the interval, and invariants."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from interp.stats import MIN_GROUPS, ClusterBootstrap, Interval, count_crossings, derive_rng, flip_layer, recovery

FLOATS = st.floats(-10, 10, allow_nan=False)
CURVES = hnp.arrays(np.float64, st.integers(2, 12), elements=st.integers(-640, 640).map(lambda n: n / 64))  # exact


def drawn(groups, resamples=500, seed=0):
    return ClusterBootstrap.draw(groups, derive_rng(seed, "test"), resamples)


def test_named_generators_repeat_and_do_not_depend_on_each_other():
    assert derive_rng(3, "patching").random() == derive_rng(3, "patching").random()
    firsts = {
        derive_rng(*name).random()
        for name in [(3, "a"), (4, "a"), (3, "b"), (3, "a", "b"), (3, "a,b"), (-3, "a"), (3,)]
    }
    assert len(firsts) == 7


def test_no_process_wide_random_source_is_touched():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    drawn(["a", "b"])
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


def test_constant_values_have_an_interval_of_no_width():
    boot = drawn([f"g{i}" for i in range(8)])
    interval = boot.interval(boot.means(np.full(8, 2.5)))
    assert (interval.estimate, interval.low, interval.high, interval.undefined) == (2.5, 2.5, 2.5, 0.0)


def test_the_first_row_is_the_plain_mean_over_observations():
    values = np.array([1.0, 2.0, 6.0, 7.0])
    assert drawn(["a", "a", "a", "b"]).means(values)[0] == 4.0


def test_a_resample_is_the_mean_of_the_groups_that_were_drawn():
    groups, values = ["a", "a", "b", "c"], np.array([[1.0, 5.0], [3.0, 7.0], [10.0, 0.0], [20.0, 1.0]])
    boot = drawn(groups)
    members = {"a": [0, 1], "b": [2], "c": [3]}
    for row, counts in zip(boot.means(values)[1:20], boot.weights[1:20], strict=True):
        rows = [i for name, count in zip(members, counts, strict=True) for i in members[name] * int(count)]
        np.testing.assert_allclose(row, values[rows].mean(axis=0))
    assert (boot.weights.sum(axis=1) == 3).all()


def test_pairs_of_one_graph_are_drawn_together():
    # Two graphs of 50 equal pairs carry the information of two numbers, not of a hundred.
    values = np.concatenate([np.zeros(50 * 4), np.ones(50 * 4)])
    clustered = drawn([f"g{i // 50}" for i in range(400)])
    single = drawn([f"p{i}" for i in range(400)])
    width = [np.ptp(np.quantile(boot.means(values)[1:], [0.025, 0.975])) for boot in (clustered, single)]
    assert width[0] > 4 * width[1]


def test_undefined_values_are_left_out_of_means():
    boot = drawn(["a", "b", "c"])
    means = boot.means([1.0, math.nan, 3.0])
    assert means[0] == 2.0
    only_b = (boot.weights[:, [0, 2]] == 0).all(axis=1)
    assert only_b.any()
    assert (np.isnan(means) == only_b).all()


def test_few_groups_give_no_interval():
    for count, has_one in ((1, False), (MIN_GROUPS - 1, False), (MIN_GROUPS, True)):
        boot = drawn([f"g{i}" for i in range(count)])
        interval = boot.interval(boot.means(np.arange(count) + 1.0))
        assert interval.estimate == (count + 1) / 2
        assert math.isfinite(interval.low) == has_one
        assert interval.excludes_zero == has_one
        low, high = boot.band(boot.means(np.ones((count, 3))))
        assert np.isfinite(low).all() == np.isfinite(high).all() == has_one


def test_an_interval_counts_the_resamples_without_a_value():
    boot = drawn([f"g{i}" for i in range(8)], resamples=4)
    interval = boot.interval([1.0, 1.0, math.nan, 3.0, math.nan])
    assert interval.undefined == 0.5
    assert 1.0 <= interval.low < interval.high <= 3.0
    nothing = boot.interval(np.full(5, math.nan))
    assert nothing.undefined == 1.0
    assert json.dumps(nothing.to_json(), allow_nan=False) == (
        '{"estimate": null, "low": null, "high": null, "undefined": 1.0}'
    )


@pytest.mark.parametrize(("low", "high", "excludes"), [(0.1, 2, True), (-2, -0.1, True), (-1, 1, False), (0, 1, False)])
def test_an_interval_that_touches_zero_does_not_exclude_it(low, high, excludes):
    assert Interval(0.0, low, high, 0.0).excludes_zero is excludes


def test_wrong_shapes_are_refused():
    boot = drawn(["a", "b"])
    with pytest.raises(ValueError, match="expected 2 rows"):
        boot.means([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="draws"):
        boot.interval([1.0, 2.0])
    with pytest.raises(ValueError, match="at least one observation"):
        drawn([])


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    trials = 300
    for trial in range(trials):
        sizes = rng.integers(1, 5, size=30)
        groups = np.repeat(np.arange(30), sizes)
        values = 0.7 + rng.normal(size=30)[groups] + 0.5 * rng.normal(size=len(groups))
        boot = drawn(groups.tolist(), resamples=400, seed=trial)
        interval = boot.interval(boot.means(values))
        covered += interval.low <= 0.7 <= interval.high
    assert 0.88 <= covered / trials <= 0.98


def test_an_effect_that_is_not_there_is_seldom_claimed_with_the_fewest_groups():
    rng = np.random.default_rng(2)
    claimed = 0
    for trial in range(300):
        boot = drawn(list(range(MIN_GROUPS)), resamples=200, seed=trial)
        claimed += boot.interval(boot.means(rng.normal(size=MIN_GROUPS))).excludes_zero
    assert claimed / 300 < 0.2  # percentile intervals of six values are too short, but not absurd


@settings(max_examples=50, deadline=None)
@given(values=hnp.arrays(np.float64, (9,), elements=FLOATS), shift=FLOATS, factor=st.floats(0.1, 10))
def test_intervals_move_and_stretch_with_the_values(values, shift, factor):
    boot = drawn([f"g{i % 7}" for i in range(9)], resamples=100)
    plain, moved = boot.interval(boot.means(values)), boot.interval(boot.means(values * factor + shift))
    for name in ("estimate", "low", "high"):
        assert getattr(moved, name) == pytest.approx(getattr(plain, name) * factor + shift, abs=1e-9)
    assert plain.low <= plain.high


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(9)))
def test_the_order_of_observations_within_groups_does_not_matter(order):
    values = np.arange(9.0) ** 2
    groups = ["a"] * 9
    np.testing.assert_allclose(drawn(groups, 50).means(values), drawn(groups, 50).means(values[list(order)]))


def test_recovery_is_0_at_the_recipient_and_1_at_the_donor():
    np.testing.assert_allclose(recovery([[-2.0, 3.0, 0.5]], [[-2.0]], [[3.0]], 0.1), [[0.0, 1.0, 0.5]])


@pytest.mark.filterwarnings("error")
def test_recovery_by_almost_nothing_is_undefined_not_huge():
    found = recovery([1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.05, 0.1], 0.1)
    np.testing.assert_array_equal(np.isnan(found), [True, True, False])
    assert found[2] == 10.0


@pytest.mark.parametrize(
    ("curve", "direction", "flip"),
    [
        ([0, 0, 1, 1], "rising", 1.5),
        ([0, 0.25, 0.75, 1], "rising", 1.5),
        ([0, 0.4, 0.9, 1], "rising", 1.2),
        ([0, 0.5, 1], "rising", 1.0),
        ([1, 0.5, 0], "falling", 1.0),
        ([1, 1, 0.2, 0], "falling", 1.625),
        ([0, 1], "rising", 0.5),
        ([0, 0.8, 0.2, 1], "rising", 2.375),  # crosses three times: the last counts
        ([1, 0.2, 0.8, 0], "falling", 2.375),
        ([0, 0.1, 0.2], "rising", None),  # never arrives
        ([1, 1, 0.9], "falling", None),  # never leaves
        ([0.9, 1, 1], "rising", None),  # was there from the start
        ([0, 1, 0], "rising", None),  # does not stay
        ([0, math.nan, 1], "rising", None),
        ([0.5, 0.5], "rising", None),
    ],
)
@pytest.mark.filterwarnings("error")
def test_flip_layer_of_simple_curves(curve, direction, flip):
    found = float(flip_layer(curve, direction))
    assert math.isnan(found) if flip is None else found == pytest.approx(flip)


def test_flip_layers_of_many_curves_are_those_of_each():
    curves = np.random.default_rng(0).normal(0.5, 1, size=(3, 40, 7))
    together = flip_layer(curves, "rising")
    assert together.shape == (3, 40)
    np.testing.assert_array_equal(together, [[flip_layer(curve, "rising") for curve in block] for block in curves])


@settings(max_examples=200, deadline=None)
@given(curve=CURVES)
def test_rising_and_falling_mirror_each_other(curve):
    np.testing.assert_array_equal(flip_layer(curve, "rising"), flip_layer(1 - curve, "falling", threshold=0.5))


@settings(max_examples=200, deadline=None)
@given(curve=CURVES)
def test_a_rising_curve_stays_up_after_its_flip(curve):
    flip = float(flip_layer(curve, "rising"))
    if math.isnan(flip):
        assert curve[-1] < 0.5 or (curve >= 0.5).all()
    else:
        layers = np.arange(len(curve))
        assert (curve[layers >= flip + 1e-9] >= 0.5).all()
        assert curve[math.ceil(flip) - 1] < 0.5
        assert np.interp(flip, layers, curve) == pytest.approx(0.5)


def test_crossings_are_counted():
    assert [count_crossings(c) for c in ([0, 0, 0], [0, 1, 1], [0, 1, 0, 1], [1, 0])] == [0, 1, 3, 1]


def test_two_thousand_resamples_of_a_curve_are_quick():
    import time

    values = np.random.default_rng(0).normal(size=(64, 31))
    start = time.perf_counter()
    boot = drawn([f"g{i // 2}" for i in range(64)], resamples=2000)
    flip_layer(boot.means(values), "rising")
    assert time.perf_counter() - start < 1.0
