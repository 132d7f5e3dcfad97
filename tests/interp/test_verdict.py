"""The rules of the verdict on planted summaries: every case, its borders, and what intervals may never do."""

import copy
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interp import patching_summary
from interp.stats import MIN_GROUPS
from interp.verdict import BAND, SAME_LAYERS, decide
from interp.verdict_audit import ENOUGH_FAILURES, WORTH, judge_audit
from tests.interp.synthetic import planted_frame

CASES = ("unused", "prior", "relocated", "created", "undecided")


def interval(low, high, undefined=0.0):
    return {"estimate": (low + high) / 2, "low": low, "high": high, "undefined": undefined}


def around(middle, half=0.2):
    return interval(middle - half, middle + half)


def sweep(effect, flips):
    found = {position: {"ratio_of_means": flip, "crossings": 1} for position, flip in (flips or {}).items()} or None
    return {"effect": effect, "end_error": 1e-5, "changed_cells": 9, "cells": 10, "flips": found}


def summary(trained, base, *, change=None, moved=None, flips=(20.0, 22.0), groups=12, **more):
    """A patching summary. `moved`: trained - base in layers at the value and at the decision."""
    places = {name: around(flip) for name, flip in zip(("value", "decision"), flips, strict=True)}
    both = dict(zip(("value", "decision"), moved, strict=True)) if moved else None
    models = {
        model: {"sweeps": {way: sweep(effect, places) for way in ("denoise", "noise")}}
        for model, effect in (("base", base), ("trained", trained))
    }
    difference = {"effect": change or around(5), "flips": {"denoise": both} if both else None}
    kind = {"pairs": groups, "groups": groups, "models": models, "trained_minus_base": difference}
    return {"kinds": {"future_uses": kind}, **more}


def case(*args, **kwargs):
    return decide({"patching": summary(*args, **kwargs)}, None).case


NOT_MOVED = (around(0.1), around(-0.3))


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("unused", summary(around(0), around(0))),
        ("unused", summary(around(0), around(4))),  # the adapter undid it
        ("created", summary(around(12), around(0))),
        ("created", summary(around(-12), around(0))),
        ("prior", summary(around(4), around(4), change=around(0), moved=NOT_MOVED)),
        ("relocated", summary(around(4), around(4), change=around(0), moved=(around(0), around(-6)))),
        ("undecided", summary(interval(0.1, 3), around(0))),  # not nothing, but perhaps next to it
        ("undecided", summary(interval(-1, 1), around(0))),
        ("undecided", summary(around(12), interval(-0.2, 0.6))),
        ("undecided", summary(around(4), around(4), change=around(0), moved=(interval(-3, 3), around(0)))),
        ("undecided", summary(around(4), around(4), change=interval(-0.2, 2), moved=NOT_MOVED)),
        ("undecided", summary(around(9), around(4), change=around(5), moved=NOT_MOVED)),  # stronger in its old place
        ("undecided", summary(around(4), around(4), change=around(0))),  # nothing located
    ],
)
def test_each_case_follows_from_its_intervals(expected, found):
    verdict = decide({"patching": found}, None)
    assert verdict.case == expected
    assert verdict.sentence.startswith(expected.capitalize())
    assert bool(verdict.missing) == (expected == "undecided")
    json.dumps(verdict.to_json(), allow_nan=False)


def test_the_borders_belong_to_no_claim_of_absence():
    step = 1e-9
    assert case(interval(-0.1, BAND - step), around(0)) == "unused"
    assert case(interval(-0.1, BAND), around(0)) == "undecided"
    assert case(interval(BAND, 3), around(0)) == "created"
    assert case(interval(BAND - step, 3), around(0)) == "undecided"
    for edge, expected in ((SAME_LAYERS - step, "prior"), (SAME_LAYERS, "undecided")):
        moved = (interval(0, edge), around(0))
        assert case(around(4), around(4), change=around(0), moved=moved) == expected
    moved = (interval(SAME_LAYERS, 4), around(0))
    assert case(around(4), around(4), change=around(0), moved=moved) == "relocated"


def test_too_few_graphs_a_wrong_engine_or_lost_resamples_decide_nothing():
    assert case(around(12), around(0), groups=MIN_GROUPS - 1) == "undecided"
    assert case(around(12), around(0), controls={"self": {"largest_change": 0.0}}) == "created"
    wrong = {"everything": {"trained": {"largest_difference_from_a": 2 * BAND}}}
    verdict = decide({"patching": summary(around(12), around(0), controls=wrong)}, None)
    assert verdict.case == "undecided"
    assert "engine" in verdict.missing[0]
    lost = (interval(5, 6, undefined=0.3), around(0))
    assert case(around(4), around(4), change=around(0), moved=lost) == "undecided"


def test_without_patching_nothing_is_decided_and_it_is_said():
    verdict = decide({}, None)
    assert (verdict.case, verdict.missing) == ("undecided", ("the patching analysis",))
    assert {finding.analysis for finding in verdict.corroboration} == {
        "patching", "retention_heads", "logit_lens", "knockout", "lora_svd",
    }  # fmt: skip
    assert all(finding.agrees is None for finding in verdict.corroboration)
    assert verdict.axis.push == "evidence"


finite = st.floats(-8, 8, allow_nan=False)
intervals = st.builds(lambda a, b: interval(min(a, b), max(a, b)), finite, finite)
layers = st.builds(lambda a, b: interval(min(a, b), max(a, b)), st.floats(-4, 4), st.floats(-4, 4))
widths = st.floats(0, 20)


def widened(record, by):
    return {**record, "low": record["low"] - by, "high": record["high"] + by}


@settings(max_examples=300, deadline=None)
@given(intervals, intervals, intervals, layers, layers, st.tuples(*[widths] * 5))
def test_wider_intervals_make_no_other_claim(trained, base, change, value, decision, by):
    narrow = case(trained, base, change=change, moved=(value, decision))
    trained, base, change, value, decision = (
        widened(record, more) for record, more in zip((trained, base, change, value, decision), by, strict=True)
    )
    assert case(trained, base, change=change, moved=(value, decision)) in {narrow, "undecided"}


@settings(max_examples=100, deadline=None)
@given(intervals, intervals, intervals, layers, layers)
def test_no_interval_no_claim(trained, base, change, value, decision):
    found = summary(trained, base, change=change, moved=(value, decision))
    unknown = copy.deepcopy(found)
    for model in unknown["kinds"]["future_uses"]["models"].values():
        model["sweeps"]["denoise"]["effect"] |= {"low": None, "high": None}
    assert decide({"patching": unknown}, None).case == "undecided"


def test_planted_curves_are_called_what_they_are():
    flips = {"value": 14.0, "decision": 18.0}
    for expected, effects in (
        ("created", {"base": 0.0, "trained": 6.0}),
        ("unused", {"base": 0.0, "trained": 0.0}),
        ("prior", {"base": 6.0, "trained": 6.0}),
    ):
        frame = planted_frame(effects=effects, flips=flips, groups=24, noise=0.1)
        verdict = decide({"patching": patching_summary.summarise(frame)}, None)
        assert verdict.case == expected, verdict.sentence


# --- the audit, and what to push on

PAYS, PAYS_NOT = around(15, 3), around(0.6, 0.3)
WELL, BADLY = around(5, 1), around(-5, 1)


def audit(retention, heuristic=WELL, constant=BADLY):
    return {
        "retention": retention, "heuristic": heuristic, "best_constant": constant, "optimum": around(20, 1),
        "optimum_without_retention": around(6, 1),
    }  # fmt: skip


def push(trained, audited, **others):
    return decide({"patching": summary(trained, around(0)), **others}, audited).axis.push


def heads(pays, retained, **counts):
    failures = {"pays": pays, "retained": retained, "counts": {"unresolved": 0, **counts}}
    return {"models": {"trained": {"failures": failures, "readers": [], "claim": "made"}}}


def test_it_does_not_is_never_taken_for_it_would_not_pay():
    assert judge_audit(audit(PAYS)).pays is True
    assert judge_audit(audit(PAYS_NOT)).pays is False
    assert judge_audit(audit(interval(WORTH - 1, WORTH + 1))).pays is None
    missing = judge_audit(None)
    assert (missing.available, missing.pays) == (False, None)
    assert missing.sentence.startswith("Not available")
    assert push(around(0), audit(PAYS_NOT)) == "reward or hardware"
    assert push(around(0), audit(interval(WORTH - 1, WORTH + 1))) == "evidence"
    assert push(around(0), None) == "evidence"


def test_where_it_would_pay_the_observation_decides_between_lookahead_and_capacity():
    assert push(around(0), audit(PAYS, heuristic=around(8), constant=around(-5))) == "capacity"
    assert push(around(0), audit(PAYS, heuristic=around(-8), constant=around(5))) == "lookahead"
    assert push(around(0), audit(PAYS, heuristic=around(5, 3), constant=around(5, 3))) == "evidence"


def test_a_used_fact_needs_no_push_unless_it_fails_where_it_pays():
    used = around(12)
    assert push(used, audit(PAYS)) == "nothing"
    assert push(used, audit(PAYS_NOT)) == "nothing"
    assert push(around(-12), audit(PAYS)) == "training"
    assert push(used, audit(PAYS), retention_heads=heads(40, 30, downstream=10)) == "nothing"
    assert push(used, audit(PAYS), retention_heads=heads(40, 4, downstream=30, retrieval=6)) == "capacity"
    blind = audit(PAYS, heuristic=around(-8), constant=around(5))
    assert push(used, blind, retention_heads=heads(40, 4, unresolved=36)) == "lookahead"
    few = ENOUGH_FAILURES - 1
    assert push(used, audit(PAYS), retention_heads=heads(few, 0, downstream=few)) == "nothing"


def test_an_adapter_that_changes_nothing_needs_training():
    zero = {"modules": 4, "zero_modules": 4, "profile": []}
    assert push(around(0), audit(PAYS), lora_svd=zero) == "training"


# --- agreement


def agreement(analysis, found, **kwargs):
    whole = {"patching": summary(around(12), around(0), **kwargs), analysis: found}
    return next(f for f in decide(whole, None).corroboration if f.analysis == analysis)


def reader(layer, head=1, effect=2.0):
    return {"layer": layer, "head": head, "effect": around(effect)}


@pytest.mark.parametrize(
    ("readers", "agrees"),
    [([reader(21)], True), ([reader(19)], True), ([reader(3)], False), ([], False),
     ([reader(21), reader(3, effect=0.5)], True), ([reader(21, effect=0.5), reader(3)], False)],
)  # fmt: skip
def test_readers_agree_where_the_decision_flips(readers, agrees):
    found = {"models": {"trained": {"readers": readers, "claim": "made", "failures": {}}}}
    assert agreement("retention_heads", found).agrees is agrees


def test_what_was_not_claimed_agrees_with_nothing():
    found = {"models": {"trained": {"readers": [], "claim": "no claim: few graphs", "failures": {}}}}
    assert agreement("retention_heads", found).agrees is None
    assert "few graphs" in agreement("retention_heads", found).numbers


def test_the_size_of_the_delta_agrees_if_it_is_larger_where_the_fact_is_read():
    def profile(at):
        return [{"layer": layer, "part": "mlp", "frobenius": 3.0 if layer == at else 1.0} for layer in range(30)]

    assert agreement("lora_svd", {"profile": profile(21)}).agrees is True
    assert agreement("lora_svd", {"profile": profile(2)}).agrees is False


def test_the_lens_and_the_knockout_agree_by_their_layers():
    def lens(low, high):
        return {"kinds": {"future_uses": {"answer in A": {"divergence": {"half_from_layer": interval(low, high)}}}}}

    assert agreement("logit_lens", lens(22, 24)).agrees is True
    assert agreement("logit_lens", lens(3, 5)).agrees is False
    assert agreement("logit_lens", lens(3, 28)).agrees is None

    def knockout(layer, part="attention"):
        return {"groups": 8, "modules": [{"layer": layer, "part": part, "needed": True}]}

    assert agreement("knockout", knockout(21)).agrees is True
    assert agreement("knockout", knockout(21, "mlp")).agrees is False
    assert agreement("knockout", knockout(2)).agrees is False
    assert agreement("knockout", {"groups": 8, "modules": []}).agrees is None


def test_controls_are_quoted_with_their_own_interval():
    found = {"patching": summary(around(12), around(0), controls={"random_b": {"effect": around(0.1)}})}
    claims = {f.claim: f for f in decide(found, None).corroboration if f.analysis == "patching"}
    (random_b,) = (f for claim, f in claims.items() if "random B" in claim)
    (other_key,) = (f for claim, f in claims.items() if "another key" in claim)
    assert random_b.agrees is True
    assert (other_key.agrees, other_key.numbers) == (None, "not measured")


def test_json_holds_no_infinity():
    verdict = decide({"patching": summary(interval(-math.inf, math.inf), around(0))}, audit(PAYS))
    assert verdict.case == "undecided"
    assert "interval for the trained model's effect" in verdict.missing[0]
