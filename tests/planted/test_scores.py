"""Rates from outcomes made by hand, and simulations whose truth is known."""

import json
import math
from dataclasses import replace

import pytest
from scipy.stats import binomtest

from interp.planted.scores import Score, scores, table
from interp.planted.simulated import covered, falsely_named
from interp.planted.trial import Outcome

FOUND = Outcome(
    kind="reader",
    number=0,
    planted={"base": (), "trained": ((2, 1),)},
    named={"base": (), "trained": ((2, 1),)},
    ranking={"effect": (1.0,), "attention": (0.5,)},
    flips=(("trained", "value", 2.5, 2, 3), ("trained", "decision", 2.4, 2, 3)),
    case="created",
    case_planted="created",
)
MISSED = replace(
    FOUND,
    number=1,
    named={"base": ((0, 0),), "trained": ()},
    ranking={"effect": (0.4,), "attention": (0.5,)},
    flips=(("trained", "value", 1.9, 2, 3), ("trained", "decision", math.nan, 2, 3)),
    case="unused",
)
ABSENT = replace(FOUND, kind="absent", planted={"base": (), "trained": ()}, ranking={}, flips=(), case_planted="unused")


def by_name(*outcomes):
    return {score.name: score for score in scores(outcomes)}


def test_a_count_has_clopper_and_pearsons_interval():
    score = Score.of_hits("none of ten", 0, 10)
    assert (score.estimate, score.low) == (0.0, 0.0)
    assert score.high == pytest.approx(1 - 0.025**0.1)
    assert math.isnan(Score.of_hits("nothing", 0, 0).estimate)
    found = Score.of_hits("some of fifty", 13, 50)
    exact = binomtest(13, 50).proportion_ci(0.95, "exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    fewer, more = Score.of_hits("a mean", 12.5, 50), Score.of_hits("a mean", 13.5, 50)
    assert fewer.low < found.low < more.low < fewer.high < found.high < more.high


@pytest.mark.parametrize(
    ("hits", "nominal", "missed"), [(96, False, False), (94, False, True), (94, True, False), (85, True, True)]
)
def test_a_nominal_rate_may_miss_its_bound_by_chance(hits, nominal, missed):
    assert Score.of_hits("rate", hits, 100, at_least=0.95, nominal=nominal).missed is missed


@pytest.mark.parametrize(("hits", "missed"), [(5, False), (6, True)])
def test_a_rate_may_have_an_upper_bound(hits, missed):
    assert Score.of_hits("rate", hits, 100, at_most=0.05).missed is missed


def test_heads_layers_and_verdicts_are_counted():
    found = by_name(FOUND, MISSED)
    assert (found["heads: precision"].hits, found["heads: precision"].count) == (1, 2)
    assert (found["heads: recall"].hits, found["heads: recall"].count) == (1, 2)
    assert found["heads: AUROC by effect"].estimate == pytest.approx(0.7)
    assert found["heads: AUROC by attention"].estimate == 0.5
    for position in ("value", "decision"):
        assert found[f"layer: flip at the {position} in place"].hits == 1
    assert found["verdict: reader"].hits == 1
    assert found["verdict: reader"].missed


def test_a_wrong_head_lowers_precision_and_recall():
    right = by_name(FOUND)
    wrong = by_name(replace(FOUND, named={"base": (), "trained": ((2, 2),)}))
    surplus = by_name(replace(FOUND, named={"base": (), "trained": ((2, 1), (2, 2))}))
    rates = [(found["heads: precision"].estimate, found["heads: recall"].estimate) for found in (right, wrong, surplus)]
    assert rates == [(1, 1), (0, 0), (0.5, 1)]


def test_a_head_or_a_use_claimed_in_a_base_that_has_none_is_counted():
    found = by_name(FOUND, replace(FOUND, named={"base": ((2, 1),), "trained": ()}, case="prior"))
    assert found["none in the base: a head is named in it"].hits == 1
    assert found["none in the base: a use in it is claimed"].hits == 1
    assert found["none in the base: a use in it is claimed"].count == 2


def test_a_claim_without_a_mechanism_is_false_whatever_it_claims():
    found = by_name(ABSENT, replace(ABSENT, named={"base": (), "trained": ()}, case="undecided"))
    assert found["no mechanism: a head is named"].hits == 1
    assert found["no mechanism: a use is claimed"].hits == 1
    assert found["verdict: absent"].hits == 0
    assert found["heads: precision"].estimate == 0
    assert "heads: recall" not in found


def test_a_decoy_that_is_named_is_counted_once():
    decoy = replace(FOUND, kind="decoy", decoys=((0, 3),))
    assert by_name(decoy)["heads: decoy named"].hits == 0
    assert by_name(replace(decoy, named={"base": (), "trained": ((2, 1), (0, 3))}))["heads: decoy named"].hits == 1


def test_the_table_says_what_is_missed_and_json_holds_no_nan():
    found = scores([FOUND, MISSED])
    lines = table(found).splitlines()
    assert len(lines) == 1 + len(found)
    assert sum(line.endswith("MISSED") for line in lines) == sum(score.missed for score in found) > 0
    json.dumps([score.to_json() for score in found], allow_nan=False)


def test_intervals_over_enough_groups_cover_the_truth():
    score = Score.of_hits("coverage", covered(32, "normal", 300), 300, at_least=0.93, at_most=0.97, nominal=True)
    assert not score.missed
    assert covered(6, "skewed", 100) < 95  # so few, so skewed: known to be too narrow


def test_noise_is_seldom_named():
    assert falsely_named(12, 4) == 0
