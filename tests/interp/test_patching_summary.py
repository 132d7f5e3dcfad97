"""What the summary says of planted components, doses, controls and sequences of adapters."""

import json

import numpy as np
import pandas as pd
import pytest

from interp.patching_curves import curves, find
from interp.patching_growth import episode, growth, table
from interp.patching_growth import summarise as summarise_growth
from interp.patching_report import figures
from interp.patching_summary import by_place, doses, other_key_pairs, summarise
from tests.interp.synthetic import planted_frame

FLIPS = {"value": 11.3, "decision": 15.2}
LAYERS, HEADS, READER = 30, 4, (17, 2)
GRAPHS = 8


def row(pair, group, kind, model, direction, value, **place):
    nowhere = {"position": "none", "component": "none", "head": -1, "layer": -1, "metric": "logit_difference"}
    own = {"pair": pair, "group": group, "kind": kind, "model": model, "direction": direction, "value": value}
    return own | nowhere | place


@pytest.fixture(scope="module")
def frame():
    """A created effect, and one head that carries half of it; attribution sees that head and shrinks it."""
    plain = planted_frame(effects={"base": 0.0, "trained": 12.0}, flips=FLIPS, groups=GRAPHS)
    plain = plain.assign(component="residual", head=-1)
    plain.loc[plain["position"] == "none", "component"] = "none"
    rng, rows = np.random.default_rng(0), []
    own = plain[(plain["position"] == "none") & (plain["metric"] == "logit_difference")]
    for (pair, group, kind, model), some in own.groupby(["pair", "group", "kind", "model"]):
        start = float(some.loc[some["direction"] == "baseline_b", "value"].iloc[0])
        for layer, head in np.ndindex(LAYERS, HEADS):
            reads = 6.0 * ((layer, head) == READER and model == "trained")
            place = {"position": "decision", "component": "heads", "layer": layer, "head": head}
            shift = reads + 0.1 * rng.normal()
            rows.append(row(pair, group, kind, model, "denoise", start + shift, **place))
            rows.append(row(pair, group, kind, model, "denoise", shift / 3, **place | {"metric": "attribution"}))
    for number, (pair, some) in enumerate(plain.groupby("pair", sort=False)):
        facts = {"place": number / 16, "role_current": float(number % 2)}
        rows += [
            row(pair, some["group"].iloc[0], "future_uses", "none", "facts", value, metric=metric)
            for metric, value in facts.items()
        ]
    return pd.concat([plain, pd.DataFrame(rows)], ignore_index=True)


def dose_frame(answer):
    """Pairs of kind `dose` whose trained logit difference is `answer(count)` in A and -6 in B."""
    rows = []
    for graph in range(GRAPHS):
        for count in (1, 2, 3, 5, 9):
            pair = f"dose-{graph}-{count}", f"dose-g{graph}", "dose"
            rows.append(row(*pair, "none", "facts", float(count), metric="count"))
            for model in ("base", "trained"):
                a, b = (answer(count), -6.0) if model == "trained" else (1.0, 1.0)
                noise = 0.01 * graph
                rows.append(row(*pair, model, "baseline_a", a + noise))
                rows.append(row(*pair, model, "baseline_b", b + noise))
    return pd.DataFrame(rows)


def test_the_planted_head_is_named_and_no_other_is_beyond_chance(frame):
    found = summarise(frame)["components"]["heads"]
    trained = found["trained"]["decision"]
    assert (trained["top"][0]["layer"], trained["top"][0]["head"]) == READER
    assert trained["top"][0]["shift"]["low"] < 6 < trained["top"][0]["shift"]["high"] + 0.1
    assert trained["top"][0]["recovery"]["estimate"] == pytest.approx(0.5, abs=0.05)
    assert [cell["p_adjusted"] <= 0.05 for cell in trained["top"]] == [True, False, False, False, False]
    assert trained["cells_beyond_chance"] == 1
    assert trained["cells"] == LAYERS * HEADS
    base = found["base"]["decision"]
    assert base["cells_beyond_chance"] == 0
    assert base["top"][0]["recovery"] is None  # there is no effect to recover


def test_attribution_that_is_a_third_of_the_patch_agrees_in_order(frame):
    found = summarise(frame)["attribution"]["agreement"]["trained, heads, decision"]
    assert found["pearson"]["estimate"] == pytest.approx(1.0)
    assert found["spearman"]["estimate"] == pytest.approx(1.0)
    assert found["top_found"] == 1.0
    assert found["largest_exact"] == pytest.approx(3 * found["largest_attribution"], rel=1e-4)


def test_attribution_of_the_wrong_cells_is_told(frame):
    other = frame.copy()
    rows = other["metric"] == "attribution"
    other.loc[rows, "value"] = other.loc[rows, "value"].to_numpy()[::-1]
    found = summarise(other)["attribution"]["agreement"]["trained, heads, decision"]
    assert abs(found["pearson"]["estimate"]) < 0.5
    assert found["top_found"] < 0.6


@pytest.mark.parametrize(("answer", "graded"), [(lambda count: 5.0, False), (lambda count: float(count), True)])
def test_doses_tell_a_graded_reading_from_zero_against_any(answer, graded):
    found = doses(dose_frame(answer), 0)["models"]["trained"]
    assert list(found["by_count"]) == ["0", "1", "2", "3", "5", "9"]
    assert found["by_count"]["0"]["estimate"] == pytest.approx(-6, abs=0.1)
    assert found["by_count"]["9"]["estimate"] == pytest.approx(answer(9), abs=0.1)
    assert found["one_minus_zero"]["estimate"] == pytest.approx(answer(1) + 6)
    assert (found["largest_minus_one"]["low"] > 0.5) is graded


def test_another_keys_count_has_an_effect_of_its_own(frame):
    assert other_key_pairs(frame, 0) is None
    moved = dose_frame(lambda count: -6.0).assign(kind="other_key")
    found = other_key_pairs(moved, 0)
    assert found["effect"]["trained"]["estimate"] == pytest.approx(0)
    assert found["groups"] == GRAPHS


def test_places_and_roles_part_the_pairs(frame):
    found = by_place(frame, "future_uses", 0)
    thirds = ("first third", "middle third", "last third")
    assert sum(found[name]["pairs"] for name in thirds) == 2 * GRAPHS
    roles = [found[name] for name in ("key: current node", "key: another node")]
    for role in roles:
        assert role["pairs"] == GRAPHS
        assert role["trained"]["effect"]["estimate"] == pytest.approx(12, abs=0.5)
        assert role["trained"]["flips"]["value"]["estimate"] == pytest.approx(FLIPS["value"], abs=1)
        assert role["base"]["flips"] is None


def test_curves_keep_positions_and_directions_apart(frame):
    found = curves(frame, "future_uses", 0)
    assert {(c.component, c.position) for c in found} == {
        ("residual", "value"), ("residual", "decision"), ("heads", "decision"),
    }  # fmt: skip
    (value,) = find(found, model="trained", position="value")
    np.testing.assert_allclose(value.shift[:, 0], value.effect)


def test_the_summary_is_strict_json_and_begins_with_its_statement(frame):
    summary = summarise(pd.concat([frame, dose_frame(float)], ignore_index=True))
    assert next(iter(summary)) == "statement"
    assert summary["statement"].startswith("trained: the fact leaves its tokens at layer")
    assert "base: no effect to locate" in summary["statement"]
    assert list(summary["kinds"]) == ["future_uses"]  # doses have baselines only
    assert summary["controls"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_figures_are_drawn_for_what_was_measured(frame):
    assert set(figures(frame)) == {"patching", "components", "attribution"}
    assert set(figures(planted_frame(effects={"base": 0.0, "trained": 12.0}, flips=FLIPS))) == {"patching"}


def test_a_sequence_of_adapters_tells_when_the_effect_begins():
    sizes = {"ep050": 0.0, "ep100": 4.0, "ep400": 12.0}
    frames = {name: planted_frame(effects={"base": 0.0, "trained": size}, flips=FLIPS) for name, size in sizes.items()}
    grown = growth(frames)
    effects = grown[(grown["model"] == "trained") & (grown["quantity"] == "effect")]
    assert effects["episode"].tolist() == [50, 100, 400]
    np.testing.assert_allclose(effects["estimate"], list(sizes.values()), atol=0.5)
    flips = grown[(grown["model"] == "trained") & (grown["quantity"] == "flip_decision")]["estimate"]
    assert np.isnan(flips.iloc[0])
    assert flips.iloc[2] == pytest.approx(FLIPS["decision"], abs=1)
    summary = summarise_growth(grown)
    assert summary["statement"].endswith("apart from 0 from ep100 on")
    json.dumps(summary, allow_nan=False)
    assert "ep400" in table(grown, "folder")


@pytest.mark.parametrize(("name", "number"), [("ep050", 50), ("run2-ep400", 400), ("imitation", None)])
def test_the_episode_is_the_number_at_the_end(name, number):
    assert episode(name) == number or (number is None and np.isnan(episode(name)))
