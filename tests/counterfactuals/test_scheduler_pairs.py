"""Every pair is proved by the environment, and shows what its kind promises."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from counterfactuals import CounterfactualPair, generate_pairs
from counterfactuals.scheduler import DOSES, KINDS, Difference, PairRefused, play, prove, random_graph
from env.scheduler.observation import LOOKAHEAD
from env.scheduler.policies import heuristic

PAIRS = {kind: generate_pairs(40, 3, kind=kind) for kind in KINDS}
ALL = [pair for pairs in PAIRS.values() for pair in pairs]


def observations(pair):
    return json.loads(pair.user_a), json.loads(pair.user_b)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_proved_by_replay(kind):
    for pair in PAIRS[kind]:
        again = CounterfactualPair.from_json(pair.to_json())
        assert again == pair
        prove(again)  # raises unless the environment gives the same pair


def test_a_pair_that_was_tampered_with_is_refused():
    pair = PAIRS["future_uses"][0]
    start, end = pair.spans["lookahead"]
    message = {"role": "user", "content": pair.user_a[:start] + "[]" + pair.user_a[end:]}
    other = {"role": "user", "content": pair.user_b[:start] + "[]" + pair.user_b[end:]}
    forged = replace(
        pair,
        messages_a=(pair.messages_a[0], message),
        messages_b=(pair.messages_b[0], other),
        spans={"value": pair.spans["value"]},
    )
    with pytest.raises(PairRefused, match="found another text"):
        prove(forged)
    with pytest.raises(PairRefused, match="cannot be made again"):
        prove(replace(pair, meta={}))


@pytest.mark.parametrize("kind", ["future_uses", "dose", "other_key"])
def test_one_count_is_the_only_difference(kind):
    for pair in PAIRS[kind]:
        a, b = observations(pair)
        node = str(pair.meta["node"])
        assert a["future_uses"].pop(node) == pair.meta["count"] == int(pair.value_a)
        assert b["future_uses"].pop(node) == 0 == int(pair.value_b)
        assert a == b
        assert len(pair.user_a) == len(pair.user_b)


def test_the_main_kind_calls_for_k_in_a_and_for_nothing_in_b():
    for pair in PAIRS["future_uses"] + PAIRS["dose"]:
        a, b = observations(pair)
        k = pair.meta["k"]
        assert k == a["current_node"] or k in a["fast_mem"]
        assert heuristic(a).to_text() == pair.action_prefix + pair.answer == pair.action_prefix + f"[{k}]}}"
        assert heuristic(b).to_text() == pair.action_prefix + pair.foil == pair.action_prefix + "[]}"


def test_the_main_kind_covers_both_roles_and_all_counts():
    pairs = generate_pairs(200, 0)
    roles = Counter(observations(pair)[0]["current_node"] == pair.meta["k"] for pair in pairs)
    assert min(roles.values()) > 60
    assert {pair.meta["count"] for pair in pairs} == set(range(1, 10))
    assert len({pair.meta["k"] for pair in pairs}) >= 10


def test_far_readers_are_beyond_the_lookahead():
    for pair in ALL:
        a, _ = observations(pair)
        shown = {int(i) for i in a["future_uses"]}
        assert not shown.intersection(pair.meta["readers"])
        assert all(pair.meta["node"] not in following["inputs"] for following in a["lookahead"])


def test_doses_share_graph_and_key():
    groups = {}
    for pair in PAIRS["dose"]:
        groups.setdefault((pair.group, pair.meta["node"]), []).append(pair.meta["count"])
    assert all(tuple(doses) == DOSES for doses in groups.values())
    assert len(groups) == 40 // len(DOSES)


def test_another_key_is_held_nowhere_and_leaves_what_is_called_for_alone():
    for pair in PAIRS["other_key"]:
        a, b = observations(pair)
        assert pair.meta["node"] not in {*a["fast_mem"], *a["current_group"]["node_ids"], a["current_node"]}
        assert heuristic(a) == heuristic(b)
        assert pair.meta["k"] == a["current_node"] != pair.meta["node"]
    assert {len(pair.meta["called_for"]) for pair in PAIRS["other_key"]} == {0, 1}


def test_an_identical_pair_is_identical():
    assert all(pair.messages_a == pair.messages_b for pair in PAIRS["identical"])


def test_spans_name_what_they_say():
    for pair in ALL:
        shown = {name: pair.user_a[start:end] for name, (start, end) in pair.spans.items()}
        a, b = observations(pair)
        assert shown["key"] == str(pair.meta["node"])
        assert shown["value"] == str(pair.meta["count"])
        for field in ("current_node", "current_group", "fast_mem", "future_uses", "lookahead"):
            assert json.loads(shown[field]) == a[field]
        assert a["future_uses"][shown["other_key"]] == b["future_uses"][shown["other_key"]] == int(shown["other_value"])
        assert shown["other_key"] != shown["key"]


def test_a_seed_names_its_pairs_and_a_larger_count_begins_with_the_same():
    again = generate_pairs(12, 3)
    assert [pair.to_json() for pair in again] == [pair.to_json() for pair in PAIRS["future_uses"][:12]]
    assert again[0].to_json() != generate_pairs(1, 4)[0].to_json()


def test_differences_elsewhere_are_refused():
    rng = np.random.default_rng(0)
    graph = random_graph(rng)
    actions = play(graph, 4, rng)
    near = graph.order[5]
    shown = graph.order[: 5 + LOOKAHEAD]
    node = next(i for i in shown if i not in graph.inputs[near] and i != near)
    with pytest.raises(PairRefused, match=r"differ in future_uses only, found .*lookahead"):
        Difference(graph, (near,), node, actions).observations()


def test_the_published_rules_cannot_show_a_zero():
    with pytest.raises(ValueError, match="leave dead tensors out"):
        generate_pairs(1, 0, rules="upstream")
