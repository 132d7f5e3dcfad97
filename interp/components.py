"""Patching what one component adds to the residual stream: an attention output, an MLP output, a head's output.

With the names of `interp.recording`, recipient x, donor y, and positions Q, for q in Q

    attention   mid_l[q] <- h_l^x[q] + attention_l^y[q]                              then this layer's MLP reads it
    mlp         h_{l+1}[q] <- mid_l^x[q] + mlp_l^y[q]
    heads       mid_l[q] <- h_l^x[q] + W_O [z_1^x; …; z_h^y; …; z_H^x] + bias        one cell per head

Layer l's attention is done when its component is patched, and all that follows in the layer is done token by token.
So the stream that leaves layer l is the recipient's but at Q, where it takes one MLP of |Q| tokens to know it. The cell
is a row of the growing batch (`interp.sweep`) that joins at layer l + 1: the cost of a residual stream's.

Only layers of the form above are covered: the recorded components must add up to the recorded stream, or are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from interp.subject import Subject, UnsupportedArchitecture
from interp.sweep import Patched, Run, checked, drive

COMPONENTS = ("residual", "attention", "mlp", "heads")


@torch.inference_mode()
def patch_component(
    model: Subject | nn.Module,
    recipient: Run,
    donor: Run,
    positions: Sequence[int],
    component: str,
    layers: Sequence[int] | None = None,
) -> Patched:
    """The recipient's run with the donor's output of a component put in at some positions, for every layer.

    Args:
        component: `attention`, `mlp` or `heads`; the other arguments are those of `interp.sweep.patch`.
        layers: ascending; None is 0 to L - 1.

    Returns:
        A row per layer, lowest first; for heads n_heads rows, next to each other.

    Raises:
        SweepError: as `interp.sweep.patch`.
        UnsupportedArchitecture: likewise, and for layers whose components do not add up to the stream.
    """
    causal, decoder, chosen = checked(model, recipient, donor, positions)
    _check_parts(causal, recipient)
    here, there = (torch.tensor(chosen, device=run.residual.device) - run.start for run in (recipient, donor))
    asked = list(range(len(decoder.layers)) if layers is None else layers)
    own = recipient.components[component][asked][:, here]  # (layers, |Q|, width)
    others = donor.components[component][asked][:, there]
    n_heads = own.shape[-1] // decoder.layers[0].self_attn.head_dim if component == "heads" else 1
    differs = (own != others).unflatten(-1, (n_heads, -1)).any(-1).any(1).flatten()  # (layers * n_heads,)
    found = Patched(
        logits=recipient.logits.repeat(len(differs), 1),
        answer_log_prob=recipient.logits.new_full((len(differs),), recipient.answer_log_prob),
    )
    cells: list[tuple[int, Tensor]] = []
    left: Sequence[Tensor]  # what leaves the layer at Q, (|Q|, d_model) per cell
    for row, index in enumerate(asked):
        layer, stream = decoder.layers[index], recipient.residual[index, here]
        heads = differs.view(-1, n_heads)[row].nonzero().flatten()
        if component == "mlp":
            left = [stream + recipient.components["attention"][index, here] + others[row]] * len(heads)
        elif component == "attention":
            left = list(_through_mlp(layer, (stream + others[row])[None])) * len(heads)
        else:
            left = _with_heads(layer, stream, own[row], others[row], heads, n_heads)
        cells += [(index + 1, values) for values in left]
    driven = drive(causal, decoder, recipient, chosen, cells)
    found.logits[differs], found.answer_log_prob[differs] = driven.logits, driven.answer_log_prob
    return found


@torch.inference_mode()
def head_outputs(model: Subject | nn.Module, run: Run, layer: int) -> Tensor:
    """(n_heads, T - start, d_model) what each head of a layer writes, with the adapter if it is on.

    Summed over heads, and with the bias of `o_proj` where there is one, it is the attention output.
    """
    attention = _layers(model)[layer].self_attn
    z = run.components["heads"][layer].unflatten(-1, (-1, attention.head_dim))  # (tokens, heads, d_head)
    single = torch.einsum("thd,hg->gthd", z, torch.eye(z.shape[1], dtype=z.dtype, device=z.device)).flatten(-2)
    return attention.o_proj(single) - attention.o_proj(torch.zeros_like(single[:1]))


def _with_heads(
    layer: Any, stream: Tensor, own: Tensor, others: Tensor, heads: Tensor, n_heads: int
) -> Sequence[Tensor]:
    """What leaves the layer, (|Q|, d_model) per head, with that head's z (|Q|, n_heads * d_head) exchanged."""
    takes = torch.zeros(len(heads), n_heads, dtype=torch.bool, device=own.device)
    takes[torch.arange(len(heads), device=own.device), heads] = True
    takes = takes.repeat_interleave(own.shape[-1] // n_heads, dim=1)[:, None]  # (heads, 1, n_heads * d_head)
    mixed = torch.where(takes, others, own)
    return list(_through_mlp(layer, stream + layer.self_attn.o_proj(mixed)))


def _through_mlp(layer: Any, middle: Tensor) -> Tensor:
    """(rows, tokens, d_model), which is the shape that a mixture of experts insists on."""
    return middle + layer.mlp(layer.post_attention_layernorm(middle))


def _check_parts(causal: Any, run: Run) -> None:
    name = type(causal).__name__
    if not run.components:
        raise UnsupportedArchitecture(
            f"{name}: expected layers of self_attn with o_proj, mlp and two norms, found others: their components "
            f"cannot be patched; --components residual leaves them out"
        )
    stream = run.residual.float()
    summed = stream[:-1] + run.components["attention"].float() + run.components["mlp"].float()
    difference, scale = (summed - stream[1:]).abs().max(), stream.abs().max()
    if not difference <= max(1e-5, 4 * torch.finfo(run.residual.dtype).eps) * scale:
        raise UnsupportedArchitecture(
            f"{name}: expected layers that add attention and MLP to the stream, found a difference of "
            f"{float(difference):.2g}; --components residual leaves components out"
        )


def _layers(model: Any) -> Any:
    causal = model.causal_lm if isinstance(model, Subject) else model
    return causal.get_decoder().layers
