"""The LoRA matrices of a live model: reading them, and other ones in their place for a while.

A module's delta is dW = s B A (arXiv 2106.09685), B (m, r), A (r, n), with s from the loaded layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from interp.stats import derive_rng


@dataclass(frozen=True)
class Factors:
    """One module's `b` (m, r) and `a` (r, n), the live tensors, and `scale`."""

    name: str
    b: Tensor
    a: Tensor
    scale: float


def lora_factors(causal: nn.Module) -> list[Factors]:
    """The factors of all adapted modules, in the order of the model; names are those inside the causal model."""
    return [
        found for name, layer in causal.named_modules() if isinstance(layer, LoraLayer) for found in _of(name, layer)
    ]


@contextmanager
def replaced_b(causal: nn.Module, make: Callable[[Factors], Tensor]) -> Iterator[None]:
    """Another B in every adapted module inside this context; the adapter's own is back on leaving, whatever happens."""
    factors = lora_factors(causal)
    kept = [factor.b.detach().clone() for factor in factors]
    try:
        with torch.no_grad():
            for factor in factors:
                factor.b.copy_(make(factor))
        yield
    finally:
        with torch.no_grad():
            for factor, own in zip(factors, kept, strict=True):
                factor.b.copy_(own)


def zero_b(factor: Factors) -> Tensor:
    """A B of zeros: the adapter as it is before training."""
    return torch.zeros_like(factor.b)


def random_b(seed: int, *names: str) -> Callable[[Factors], Tensor]:
    """Maker of a normal random B for which ||B A||_F is the trained one's: the same size, another direction.

    The norm of the product is matched, not that of B, since trained B and A are aligned and random ones are not.
    """

    def make(factor: Factors) -> Tensor:
        drawn = derive_rng(seed, *names, factor.name).standard_normal(tuple(factor.b.shape))
        b = torch.from_numpy(drawn)
        size = product_norm(b, factor.a)
        return (b * (product_norm(factor.b, factor.a) / size if size > 0 else 0.0)).to(factor.b)

    return make


def product_norm(b: Tensor, a: Tensor) -> float:
    """||B A||_F = sqrt(<B^T B, A A^T>), without the m x n product."""
    b, a = b.cpu().double(), a.cpu().double()
    return float(((b.mT @ b) * (a @ a.mT)).sum().clamp(min=0).sqrt())


def written_directions(causal: Any) -> list[Tensor]:
    """Per stream l = 0 … L, an orthonormal (d_model, k) basis of what the adapter mostly writes to it below layer l.

    The leading left singular vectors of the deltas of all `o_proj` and `down_proj` below l, side by side; k is the rank
    that one layer's two have together, so that the basis stays small where many layers have written. k is 0 where
    nothing has been written.
    """
    decoder = causal.get_decoder()
    width = causal.get_input_embeddings().weight.shape[1]
    device = causal.get_input_embeddings().weight.device
    written = torch.zeros(width, 0, dtype=torch.float32, device=device)
    bases, rank = [written], 0
    for layer in decoder.layers:
        own = [_left_factor(f) for f in lora_factors(layer) if f.name.rsplit(".", 1)[-1] in ("o_proj", "down_proj")]
        written = torch.cat([written, *own], dim=1)
        rank = max(rank, sum(part.shape[1] for part in own))
        bases.append(_leading_left(written, rank))
    return bases


def _leading_left(tall: Tensor, count: int) -> Tensor:
    """(d, k) the first left singular vectors, up to `count`, without those of singular value 0.

    By the smaller of the two Gram matrices, in float64: half the singular values' digits are plenty for their order.
    """
    x = tall.double()
    if x.shape[1] == 0:
        return tall
    values, vectors = torch.linalg.eigh(x.mT @ x if x.shape[1] < x.shape[0] else x @ x.mT)  # ascending
    kept = min(count, int((values > values[-1] * 1e-12).sum()) if values[-1] > 0 else 0)
    leading = vectors[:, len(values) - kept :].flip(-1)
    basis = x @ leading if x.shape[1] < x.shape[0] else leading
    return torch.linalg.qr(basis).Q.to(tall)


def _left_factor(factor: Factors) -> Tensor:
    """(m, r) with the left singular vectors and values of s B A."""
    upper = torch.linalg.qr(factor.a.float().mT).R
    return factor.scale * factor.b.float() @ upper.mT


def _of(name: str, layer: Any) -> Iterator[Factors]:
    for adapter in layer.active_adapters:
        scale = float(layer.scaling[adapter]) if adapter in layer.scaling else 1.0
        if adapter in layer.lora_B:
            yield Factors(name, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, scale)
        elif adapter in layer.lora_embedding_B:
            yield Factors(name, layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter], scale)
