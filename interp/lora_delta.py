"""The SVD of a LoRA delta dW = s B A from its factors, and what it is compared with. Knows no file and no model.

B is (m, r) and A is (r, n). With thin QR factors B = Q_B R_B and A^T = Q_A R_A the delta is Q_B (s R_B R_A^T) Q_A^T, so
its SVD is that of an r x r matrix, turned by Q_B and Q_A. Nothing here makes the m x n delta, and merged minus base is
never formed: in half precision that difference is mostly rounding. Everything is float64, batched over leading
dimensions; the SVDs of a base weight W are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

Floats = NDArray[np.float64]

ROWS = 1024  # of a block of the tall QR: a block of rank 32 in float64 stays in a core's cache
DENSE_SIDE = 2048  # up to this shorter side, W is decomposed whole: seconds; beyond it, its leading triplets only
KRYLOV_SIDE = 64  # below this shorter side a dense SVD of W + dW is the faster one
TOLERANCE = 1e-5  # of the eigenvalues in a Krylov SVD, relative
INTRUDER_COUNT, INTRUDER_MATCH = 10, 0.5


@dataclass(frozen=True)
class SVD:
    """Singular triplets, largest first: `left` (..., m, k), `sigma` (..., k), `right` (..., n, k).

    `complete` says whether they are all that the matrix has, k = min(m, n), or the leading ones.
    """

    left: Tensor
    sigma: Tensor
    right: Tensor
    complete: bool = True

    def directions(self, count: int) -> SVD:
        """The first `count` triplets."""
        return SVD(self.left[..., :count], self.sigma[..., :count], self.right[..., :count], complete=False)


def delta_spectrum(b: Tensor, a: Tensor, scale: float | Tensor) -> Tensor:
    """Singular values of s B A, largest first.

    Args:
        b: (..., m, r).
        a: (..., r, n).
        scale: s, a number or (...,).

    Returns:
        (..., min(m, n, r)) float64; zeros where B is zero.
    """
    core = _triangle(b.double()) @ _triangle(a.double().mT).mT
    return torch.linalg.svdvals(core) * torch.as_tensor(scale, dtype=torch.float64).abs()[..., None]


def delta_svd(b: Tensor, a: Tensor, scale: float | Tensor) -> SVD:
    """The SVD of s B A, with arguments as for `delta_spectrum`. Where a sigma is 0 its vectors are arbitrary."""
    signed = torch.as_tensor(scale, dtype=torch.float64)
    left, upper_b = torch.linalg.qr(b.double())
    right, upper_a = torch.linalg.qr(a.double().mT)
    u, sigma, vh = torch.linalg.svd(upper_b @ upper_a.mT, full_matrices=False)
    sign = torch.where(signed < 0, -1.0, 1.0).to(torch.float64)
    return SVD(left @ u * sign[..., None, None], sigma * signed.abs()[..., None], right @ vh.mT, complete=False)


def spectrum_metrics(sigma: Tensor, shape: tuple[int, int]) -> dict[str, Floats]:
    """Size and rank of a matrix (m, n) from its singular values (..., k).

    Returns:
        Metric -> (...,). `frobenius` ||dW||_F; `spectral` sigma_1; `per_parameter` ||dW||_F / sqrt(m n), the root mean
        square entry; and, NaN where the matrix is zero, `stable_rank` ||dW||_F^2 / sigma_1^2, `effective_rank`
        exp(-sum p log p) with p = sigma / sum sigma, `energy_rank_90` and `energy_rank_99`, the fewest directions with
        that share of the sum of squares.
    """
    values = sigma.numpy().astype(np.float64)
    squares = values**2
    energy, largest = squares.sum(-1), values.max(-1)
    zero = largest == 0
    some = np.where(zero, 1.0, energy)
    p = values / np.where(zero, 1.0, values.sum(-1))[..., None]
    entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
    cumulative = squares.cumsum(-1) / some[..., None]
    found = {
        "stable_rank": energy / np.where(zero, 1.0, largest**2),
        "effective_rank": np.exp(entropy),
        # a hair below the share, since sums of rounded squares may end at 0.98999…
        "energy_rank_90": 1.0 + (cumulative < 0.9 - 1e-12).sum(-1),
        "energy_rank_99": 1.0 + (cumulative < 0.99 - 1e-12).sum(-1),
    }
    frobenius = np.sqrt(energy)
    sizes = {"frobenius": frobenius, "spectral": largest, "per_parameter": frobenius / np.sqrt(shape[0] * shape[1])}
    return sizes | {name: np.where(zero, np.nan, value) for name, value in found.items()}


def overlap(first: Tensor, second: Tensor) -> float:
    """||P^T Q||_F^2 / min(i, j) for orthonormal P (d, i) and Q (d, j), from 0 to 1 (arXiv 2106.09685, section 7.2).

    The mean squared cosine of the principal angles: 1 where the smaller subspace lies in the larger one.
    """
    return float((first.double().mT @ second.double()).square().sum()) / min(first.shape[-1], second.shape[-1])


def random_overlap(i: int, j: int, dimension: int) -> float:
    """The expected `overlap` of a random i-dimensional subspace with any j-dimensional one: max(i, j) / dimension.

    Each of the i random unit vectors has the expected squared length j / d inside the other, which makes i j / d over
    min(i, j). No approximation.
    """
    return max(i, j) / dimension


def leading_svd(weight: Tensor, count: int, rng: np.random.Generator) -> SVD:
    """The SVD of a base weight (m, n): all of it up to a shorter side of `DENSE_SIDE`, else the first `count` triplets.

    Args:
        rng: of the start vector of the Krylov method that a large weight needs.
    """
    if min(weight.shape) <= DENSE_SIDE:
        u, sigma, vh = torch.linalg.svd(weight.float(), full_matrices=False)
        return SVD(u, sigma, vh.mT)
    return _krylov(_operator(weight.float().numpy()), count, rng)


def leading_svd_of_sum(weight: Tensor, b: Tensor, a: Tensor, scale: float, count: int, rng: np.random.Generator) -> SVD:
    """The first `count` triplets of W + s B A, for W (m, n), B (m, r) and A (r, n).

    By a Krylov method that needs products with W, B and A only; a matrix with a shorter side below `KRYLOV_SIDE` is
    added up and decomposed instead.
    """
    count = min(count, *weight.shape)
    if min(weight.shape) < max(KRYLOV_SIDE, 2 * count):
        u, sigma, vh = torch.linalg.svd(weight.double() + scale * (b.double() @ a.double()), full_matrices=False)
        return SVD(u, sigma, vh.mT).directions(count)
    factors = ((b * scale).float().numpy(), a.float().numpy())
    return _krylov(_operator(weight.float().numpy(), *factors), count, rng)


@dataclass(frozen=True)
class Intruders:
    """How many leading singular vectors of W + dW match none of W's: `count` do not; of `undetermined` it is open."""

    count: int
    undetermined: int


def intruders(tuned: SVD, base: SVD, match: float = INTRUDER_MATCH) -> Intruders:
    """Intruder dimensions (arXiv 2410.21228): left singular vectors of W + dW without a close one among W's.

    A vector is an intruder if its absolute cosine with every left singular vector of W is below `match`. Where only
    leading ones of W are known, the cosine with any of the rest is at most sqrt(1 - sum of the squared known cosines):
    a vector is counted if that is below `match` too, and is undetermined if not.

    Args:
        tuned: the leading triplets of W + dW, those that are asked about.
        base: all triplets of W, or the leading ones.
    """
    cosines = (base.left.double().mT @ tuned.left.double()).abs()  # (base directions, tuned directions)
    rest = (1 - cosines.square().sum(0)).clamp(min=0).sqrt()
    unmatched = cosines.amax(0) < match
    open_question = unmatched & (rest >= match) if not base.complete else torch.zeros_like(unmatched)
    return Intruders(int((unmatched & ~open_question).sum()), int(open_question.sum()))


def _triangle(tall: Tensor) -> Tensor:
    """R (..., min(rows, r), r) with R^T R = X^T X for X (..., rows, r), by QR of blocks of rows, then of their R.

    One QR of 14,336 rows leaves the cache at every step and takes four times as long. Zeros fill the last block.
    """
    *batch, rows, rank = tall.shape
    if rows > 2 * ROWS and rank <= ROWS // 4:  # or else the triangles are hardly shorter than the blocks
        blocks = -(-rows // ROWS)
        missing = blocks * ROWS - rows
        filled = torch.nn.functional.pad(tall, (0, 0, 0, missing)) if missing else tall
        upper = torch.linalg.qr(filled.reshape(*batch, blocks, ROWS, rank), mode="r").R
        return _triangle(upper.reshape(*batch, blocks * rank, rank))
    return torch.linalg.qr(tall, mode="r").R


def _operator(weight: NDArray, b: NDArray | None = None, a: NDArray | None = None) -> LinearOperator:
    """x -> W x, or W x + B (A x)."""
    if b is None or a is None:
        return LinearOperator(weight.shape, lambda x: weight @ x, lambda y: weight.T @ y, dtype=weight.dtype)
    return LinearOperator(
        weight.shape, lambda x: weight @ x + b @ (a @ x), lambda y: weight.T @ y + a.T @ (b.T @ y), dtype=weight.dtype
    )


def _krylov(operator: LinearOperator, count: int, rng: np.random.Generator) -> SVD:
    start = rng.standard_normal(min(operator.shape)).astype(operator.dtype)
    u, sigma, vh = svds(operator, k=count, v0=start, tol=TOLERANCE)
    order = np.argsort(-sigma)
    left, values, right = (torch.from_numpy(np.ascontiguousarray(x)) for x in (u[:, order], sigma[order], vh[order].T))
    return SVD(left, values, right, complete=False)
