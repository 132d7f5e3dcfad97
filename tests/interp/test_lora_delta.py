"""The SVD from factors against dense float64 ones, planted ranks, subspaces and intruders; no file and no model."""

import numpy as np
import pytest
import torch

from interp import lora_delta
from interp.lora_delta import (
    SVD,
    delta_spectrum,
    delta_svd,
    intruders,
    leading_svd,
    leading_svd_of_sum,
    overlap,
    random_overlap,
    spectrum_metrics,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return torch.from_numpy(rng(seed).standard_normal(shape))


def basis(dimension, count, seed=0):
    return torch.linalg.qr(normal(dimension, count, seed=seed)).Q


def planted(sigma, m=20, n=12, seed=0):
    """Factors B (m, r), A (r, n) of a delta with these singular values, mixed so that neither is orthogonal."""
    sigma = torch.as_tensor(sigma, dtype=torch.float64)
    mix = normal(len(sigma), len(sigma), seed=seed + 7)
    b = basis(m, len(sigma), seed) * sigma @ mix
    return b, torch.linalg.inv(mix) @ basis(n, len(sigma), seed + 1).mT


SHAPES = [(20, 12, 4), (12, 20, 4), (6, 9, 8), (9, 6, 8), (5, 5, 5), (7, 3, 1), (1, 4, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [2.0, -0.5])
def test_the_factors_give_the_dense_svd(shape, scale):
    m, n, rank = shape
    b, a = normal(3, m, rank, seed=1), normal(3, rank, n, seed=2)  # more rank than the matrix has, too
    dense = scale * b @ a
    expected = torch.linalg.svdvals(dense)[:, : min(m, n, rank)]
    torch.testing.assert_close(delta_spectrum(b, a, scale), expected, rtol=1e-10, atol=1e-12)
    found = delta_svd(b, a, scale)
    torch.testing.assert_close(found.sigma, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.left * found.sigma[:, None] @ found.right.mT, dense, rtol=0, atol=1e-12)
    for vectors in (found.left, found.right):
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(min(m, n, rank)).double().expand(3, -1, -1))


def test_each_module_has_its_own_scale():
    b, a = normal(3, 8, 2), normal(3, 2, 6, seed=1)
    scales = torch.tensor([1.0, 4.0, -2.0])
    found = delta_spectrum(b, a, scales)
    for i in range(3):
        torch.testing.assert_close(found[i], delta_spectrum(b[i], a[i], float(scales[i])))
    torch.testing.assert_close(delta_svd(b, a, scales).sigma, found)


@pytest.mark.parametrize("rows", [2048, 2049, 4096, 5000])
def test_a_tall_factor_is_taken_in_blocks(rows):
    b, a = normal(2, rows, 3), normal(2, 3, 5, seed=1)
    torch.testing.assert_close(delta_spectrum(b, a, 1.0), torch.linalg.svdvals(b @ a)[:, :3], rtol=1e-10, atol=0)


def test_half_precision_factors_are_not_multiplied_in_half_precision():
    b, a = normal(40, 4).to(torch.bfloat16), normal(4, 30, seed=1).to(torch.bfloat16)
    expected = torch.linalg.svdvals(b.double() @ a.double())[:4]
    torch.testing.assert_close(delta_spectrum(b, a, 2.0), 2 * expected, rtol=1e-10, atol=0)


def test_rotating_outputs_inputs_or_the_inside_changes_no_singular_value():
    b, a = normal(9, 3), normal(3, 7, seed=1)
    inside, outside, inputs = basis(3, 3, 2), basis(9, 9, 3), basis(7, 7, 4)
    expected = delta_spectrum(b, a, 1.5)
    for turned in ((outside @ b, a), (b, a @ inputs), (b @ inside, inside.mT @ a)):
        torch.testing.assert_close(delta_spectrum(*turned, 1.5), expected)


def test_metrics_of_a_delta_with_known_singular_values():
    b, a = planted([3.0, 4.0, 0.0, 0.0])
    found = spectrum_metrics(delta_spectrum(b, a, 2.0), (20, 12))
    p = np.array([4, 3]) / 7
    expected = {
        "frobenius": 10.0,
        "spectral": 8.0,
        "per_parameter": 10 / np.sqrt(240),
        "stable_rank": 25 / 16,
        "effective_rank": np.exp(-(p * np.log(p)).sum()),
        "energy_rank_90": 2,
        "energy_rank_99": 2,
    }
    assert found.keys() == expected.keys()
    for metric, value in expected.items():
        assert found[metric] == pytest.approx(value, rel=1e-6), metric


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_equal_singular_values_have_every_rank_equal_to_their_number(rank):
    found = spectrum_metrics(delta_spectrum(*planted([2.0] * rank + [0.0] * (5 - rank)), 1.0), (20, 12))
    assert found["stable_rank"] == pytest.approx(rank)
    assert found["effective_rank"] == pytest.approx(rank)
    assert found["energy_rank_99"] == rank


def test_energy_ranks_count_squares():
    found = spectrum_metrics(torch.tensor([[3.0, 1.0, 0.1], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), (4, 4))
    assert found["energy_rank_90"].tolist() == [2, 3, 1]  # 9 / 10.01 is below 0.9
    assert found["energy_rank_99"].tolist() == [2, 3, 1]


def test_a_zero_delta_has_size_zero_and_no_rank():
    found = spectrum_metrics(delta_spectrum(torch.zeros(2, 8, 3), normal(2, 3, 5), 2.0), (8, 5))
    for metric in ("frobenius", "spectral", "per_parameter"):
        assert (found[metric] == 0).all()
    for metric in ("stable_rank", "effective_rank", "energy_rank_90", "energy_rank_99"):
        assert np.isnan(found[metric]).all()


def test_overlap_in_dumb_cases():
    whole = basis(10, 6)
    p, q = whole[:, :2], whole[:, 2:6]
    turned = p @ basis(2, 2, 3)
    assert overlap(p, turned) == pytest.approx(1)
    assert overlap(p, whole) == pytest.approx(1)  # inside the larger one
    assert overlap(p, q) == pytest.approx(0, abs=1e-12)
    half = torch.stack([whole[:, 0], whole[:, 5]], dim=1)
    assert overlap(p, half) == overlap(half, p) == pytest.approx(0.5)


@pytest.mark.parametrize(("i", "j", "dimension"), [(1, 1, 10), (3, 5, 20), (5, 3, 20), (8, 8, 16)])
def test_the_expected_overlap_of_random_subspaces_is_the_closed_form(i, j, dimension):
    fixed = basis(dimension, j, seed=99)
    found = np.array([overlap(basis(dimension, i, seed), fixed) for seed in range(600)])
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - random_overlap(i, j, dimension)) < 4 * error
    assert 4 * error < 0.3 * random_overlap(i, j, dimension)  # or else the test could not fail


def test_krylov_and_dense_agree(monkeypatch):
    weight = normal(90, 120).float() * torch.logspace(0, -2, 120)
    dense = leading_svd(weight, 5, rng())
    assert dense.complete
    monkeypatch.setattr(lora_delta, "DENSE_SIDE", 10)
    found = leading_svd(weight, 5, rng())
    assert not found.complete
    torch.testing.assert_close(found.sigma, dense.sigma[:5], rtol=1e-4, atol=0)
    for side in ("left", "right"):
        assert overlap(getattr(found, side), getattr(dense.directions(5), side)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("shape", [(90, 120), (120, 90), (20, 12)])  # the last one is added up
def test_leading_triplets_of_the_sum(shape):
    weight, b, a = normal(*shape).float(), normal(shape[0], 3, seed=1), normal(3, shape[1], seed=2)
    expected = torch.linalg.svd(weight.double() - 0.7 * b @ a, full_matrices=False)
    found = leading_svd_of_sum(weight, b, a, -0.7, 4, rng())
    torch.testing.assert_close(found.sigma.double(), expected.S[:4], rtol=1e-4, atol=0)
    cosines = (found.left.double() * expected.U[:, :4]).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones(4).double(), rtol=0, atol=1e-3)


def spectrum_matrix(m=80, n=70, seed=0):
    """W with singular values 70, 69, …, 1."""
    return (basis(m, n, seed) * torch.arange(n, 0, -1) @ basis(n, n, seed + 1).mT).float()


def test_a_planted_intruder_is_found_and_a_delta_along_w_is_none():
    weight = spectrum_matrix()
    own = leading_svd(weight, 10, rng())
    new_left, new_right = basis(80, 1, 5), basis(70, 1, 6)  # spread over all of W's directions
    along = own.left[:, :1].double(), own.right[:, :1].double()
    for (left, right), expected in (((new_left, new_right), 1), (along, 0)):
        tuned = leading_svd_of_sum(weight, left * 300, right.mT, 1.0, 10, rng())
        found = intruders(tuned, own)
        assert (found.count, found.undetermined) == (expected, 0)
    assert intruders(leading_svd_of_sum(weight, new_left * 0, new_right.mT, 1.0, 10, rng()), own).count == 0


def test_what_only_leading_vectors_cannot_decide_is_said():
    vectors = torch.eye(6).double()
    known = SVD(vectors[:, :2], torch.tensor([2.0, 1.0]), vectors[:, :2], complete=False)
    tuned = torch.stack([
        vectors[:, 0],  # matched
        vectors[:, 5],  # may be one of the others
        (vectors[:, 0] * 0.49 + vectors[:, 1] * 0.49 + vectors[:, 2] * 0.72) / 1.0,
        torch.tensor([0.6, 0.6, 0.3, 0.3, 0.3, 0.1]).double(),  # matched by 0.6
    ], dim=1)  # fmt: skip
    found = intruders(SVD(tuned, torch.ones(4), tuned), known)
    assert (found.count, found.undetermined) == (0, 2)
    # Enough known cosines below the bound leave no room for a match among the rest.
    wide = SVD(torch.eye(8).double()[:, :6], torch.ones(6), torch.eye(8).double()[:, :6], complete=False)
    spread = torch.tensor([[0.4] * 6 + [0.1, 0.1]]).double().mT
    found = intruders(SVD(spread / spread.norm(), torch.ones(1), spread), wide)
    assert (found.count, found.undetermined) == (1, 0)
