"""The analyses name what is planted, and nothing where nothing is."""

import pytest

from interp.planted.models import KINDS
from interp.planted.scores import scores
from interp.planted.trial import try_planting


@pytest.fixture(scope="module")
def outcomes():
    return {kind: try_planting(kind, 0) for kind in KINDS if kind != "rank"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "rank"])
def test_heads_layers_and_verdict_are_as_planted(outcomes, kind):
    outcome = outcomes[kind]
    named = {model: set(heads) for model, heads in outcome.named.items()}
    assert named == {model: set(heads) for model, heads in outcome.planted.items()}
    assert outcome.case == outcome.case_planted
    for _, _, layer, low, high in outcome.flips:
        assert low <= layer <= high
    assert all(share == 1.0 for share in outcome.ranking["effect"])
    assert bool(outcome.flips) == (kind != "absent")


@pytest.mark.slow
def test_no_bound_is_missed(outcomes):
    found = {score.name: score for score in scores(list(outcomes.values()))}
    assert not [name for name, score in found.items() if score.missed]
    assert found["heads: precision"].count == found["heads: recall"].count == 8
    assert found["layer: flip at the value in place"].count == 7
    assert found["no mechanism: a head is named"].hits == 0


@pytest.mark.parametrize("number", range(6))
def test_rank_and_module_of_a_delta_are_found(number):
    outcome = try_planting("rank", number)
    assert (outcome.rank, outcome.module) == (outcome.rank_planted, outcome.module_planted)
