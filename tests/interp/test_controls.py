"""Controls on tiny models: what must be exact is, and other adapters leave no trace."""

import itertools

import numpy as np
import pytest
import torch

from interp.controls import ADAPTERS, control_rows, find_donor, other_positions
from interp.lora_weights import lora_factors, product_norm, random_b, replaced_b, written_directions, zero_b
from interp.pair_runs import PairRuns
from interp.subject import Subject
from interp.tokens import encode_pair
from tests.interp.test_patching import make_pair
from tests.interp.tiny import save_adapter, tiny_pair_folders

MODELS = ("base", "trained")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_pair_folders(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture(scope="module")
def subject(folders):
    return Subject.load(folders[0])


@pytest.fixture(scope="module")
def found(subject):
    return PairRuns.make(subject, encode_pair(subject.tokenizer, make_pair(2)))


@pytest.fixture(scope="module")
def rows(subject, found):
    donor = encode_pair(subject.tokenizer, make_pair(5))
    blocks = control_rows(found, donor, written_directions(subject.causal_lm), 0)
    return [row for block in blocks for row in block.to_dict("records") if row["metric"] == "logit_difference"]


def values(rows, model, direction, position=None):
    return np.array(
        [
            row["value"]
            for row in rows
            if row["model"] == model and row["direction"] == direction and position in (None, row["position"])
        ]
    )


def own(found, model, side):
    return float(found.metrics[model, f"baseline_{side}"]["logit_difference"])


@pytest.mark.parametrize("model", MODELS)
def test_a_run_patched_into_itself_is_exactly_itself(found, rows, model):
    for position in ("value", "decision"):
        assert (values(rows, model, "self", position) == own(found, model, "b")).all()


@pytest.mark.parametrize("model", MODELS)
def test_everything_patched_is_a(found, rows, model):
    assert values(rows, model, "everything") == pytest.approx(own(found, model, "a"), abs=1e-4)
    assert abs(own(found, model, "a") - own(found, model, "b")) > 0.1


def test_the_adapter_without_b_is_the_base_model(found, rows):
    for side in "ab":
        assert values(rows, "zero_b", f"baseline_{side}") == own(found, "base", side)
        assert abs(values(rows, "random_b", f"baseline_{side}") - own(found, "base", side)) > 0.01


@pytest.mark.parametrize("model", MODELS)
def test_another_pairs_decision_comes_with_its_last_stream(subject, rows, model):
    other = PairRuns.make(subject, encode_pair(subject.tokenizer, make_pair(5)))
    for side in "ab":
        found = values(rows, model, f"other_donor_{side}")
        logits = other.runs[model, f"baseline_{side}"].logits
        pair = encode_pair(subject.tokenizer, make_pair(2))
        expected = float(logits[pair.answer[0]] - logits[pair.foil[0]])
        assert found[-1] == pytest.approx(expected, abs=1e-4)


def test_inside_and_outside_add_up_to_the_whole(subject, found):
    width = subject.config.hidden_size
    whole, nothing = [[basis] * 5 for basis in (torch.eye(width), torch.eye(width)[:, :0])]
    a, b = found.runs["trained", "baseline_a"], found.runs["trained", "baseline_b"]
    plain = found.patched("trained", "denoise", "decision", b, a, (found.pair.decision,), light=True)
    expected = plain[plain["metric"] == "logit_difference"]["value"].to_numpy()
    inside = [row for block in control_rows(found, None, whole, 0) for row in block.to_dict("records")]
    inside = [row for row in inside if row["metric"] == "logit_difference"]
    np.testing.assert_allclose(values(inside, "trained", "lora_span"), expected, atol=1e-3)
    np.testing.assert_allclose(values(inside, "trained", "lora_complement"), own(found, "trained", "b"), atol=1e-3)
    without = [row for block in control_rows(found, None, nothing, 0) for row in block.to_dict("records")]
    assert not {"lora_span", "other_donor_a"} & {row["direction"] for row in without}


def test_written_directions_hold_what_the_adapter_writes_below(folders, tmp_path):
    adapter = save_adapter(tmp_path / "one", folders[1], layers_to_transform=[1], rank=3)
    causal = Subject.load(adapter).causal_lm
    bases = written_directions(causal)
    assert [basis.shape[1] for basis in bases] == [0, 0, 6, 6, 6]
    torch.testing.assert_close(bases[2].mT @ bases[2], torch.eye(6), rtol=0, atol=1e-5)
    for factor in lora_factors(causal):
        if factor.name.endswith(("o_proj", "down_proj")):
            torch.testing.assert_close(bases[2] @ (bases[2].mT @ factor.b), factor.b, rtol=0, atol=1e-5)


def test_a_random_b_is_as_large_and_named_by_its_seed(subject):
    factors = lora_factors(subject.causal_lm)
    one, two = random_b(0, "x"), random_b(0, "y")
    for factor in factors[:4]:
        made = one(factor)
        assert product_norm(made, factor.a) == pytest.approx(float((factor.b @ factor.a).norm()), rel=1e-4)
        assert torch.equal(made, one(factor))
        assert not torch.equal(made, two(factor))
    assert not torch.equal(one(factors[0])[:8, :2], one(factors[7])[:8, :2])


@pytest.mark.parametrize("make", [zero_b, random_b(0, "x")])
def test_the_adapters_own_b_is_back_even_after_an_error(subject, make):
    before = [factor.b.clone() for factor in lora_factors(subject.causal_lm)]
    changed = []

    def fail_inside():
        with replaced_b(subject.causal_lm, make):
            changed.append(not torch.equal(lora_factors(subject.causal_lm)[0].b, before[0]))
            raise RuntimeError("planted")

    def fail_midway():
        made = itertools.count()

        def fail_at_the_fourth(factor):
            if next(made) == 3:
                raise RuntimeError("planted")
            return make(factor)

        with replaced_b(subject.causal_lm, fail_at_the_fourth):
            changed.append("never reached")

    for fail in (fail_inside, fail_midway):
        with pytest.raises(RuntimeError, match="planted"):
            fail()
    assert changed == [True]
    assert all(map(torch.equal, before, [factor.b for factor in lora_factors(subject.causal_lm)]))


def test_other_positions_are_numbers_after_the_value(subject):
    pair = encode_pair(subject.tokenizer, make_pair(2))
    digits = {i for i, token in enumerate(pair.ids_a) if subject.tokenizer.decode([token]).isdigit()}
    chosen = other_positions(pair, lambda token: subject.tokenizer.decode([token]).isdigit(), 0)
    assert len(chosen) == 1
    assert set(chosen) <= digits - set(pair.value_positions)
    assert min(chosen) > max(pair.value_positions)
    assert other_positions(pair, lambda _: False, 0) == ()


def test_a_donor_is_another_graphs_pair_of_equal_length(subject):
    pair, same_graph, other, longer = (encode_pair(subject.tokenizer, make_pair(n)) for n in (2, 3, 5, 12))
    assert find_donor(pair, [pair, same_graph, other, longer], 0) is other
    assert find_donor(pair, [pair, same_graph, longer], 0) is None


def test_other_adapters_are_named_models(rows):
    assert {row["model"] for row in rows} == {*MODELS, *ADAPTERS}
