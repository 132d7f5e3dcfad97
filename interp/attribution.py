"""Attribution patching: all patches of a run at once, to first order (arXiv 2310.10348).

With m the logit difference, x the recipient's run and y the donor's, and c any recorded activation at position q,

    m(patched) - m(x)  ~  (c^y[q] - c^x[q]) . dm/dc[q]   at x,

so that one forward and one backward give every layer, component and head. It is a screen and never a result: saturated
softmaxes and components that make up for one another give false negatives (arXiv 2403.00745). Its agreement with exact
patching is reported wherever both were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from interp.components import COMPONENTS
from interp.flip import MODELS
from interp.pair_runs import PairRuns, numbering, switched
from interp.recording import recording
from interp.shared_prefix import SharedPrefix, attending, rotary_of_layers
from interp.subject import Subject
from interp.sweep import Run


def gradients(model: Subject | nn.Module, run: Run, answer: int, foil: int) -> dict[str, Tensor]:
    """Gradient of logit(answer) - logit(foil) at the decision, from the run's first recorded position on.

    Returns:
        Component -> (L, T - start, width); `residual` has L + 1 layers, `heads` all heads side by side. Components
        other than the residual stream are missing where layers are not `interp.recording.is_pre_norm`.
    """
    causal: Any = model.causal_lm if isinstance(model, Subject) else model
    decoder, start = causal.get_decoder(), run.start
    # Recorded under inference mode, tensors cannot be part of a graph: copies can.
    keys, values = (tuple(t[:, :, :start].clone() for t in kept) for kept in (run.keys, run.values))
    prefix = SharedPrefix(keys, values)
    with torch.enable_grad(), attending(decoder), recording(decoder) as recorded:
        batch = run.residual[0].clone()[None].requires_grad_()
        positions = torch.arange(start, len(run.ids), device=batch.device)[None]
        rotary = rotary_of_layers(decoder, batch, positions)
        for layer, embedded in zip(decoder.layers, rotary, strict=True):
            batch = layer(
                batch, attention_mask=prefix, position_ids=positions, position_embeddings=embedded, use_cache=False
            )
        logits = causal.get_output_embeddings()(decoder.norm(batch)[:, -1])[0].float()
        wanted = {name: recorded.of(name) for name in COMPONENTS if recorded.of(name)}
        flat = torch.autograd.grad(logits[answer] - logits[foil], [t for tensors in wanted.values() for t in tensors])
    left = iter(flat)
    return {name: torch.stack([next(left)[0] for _ in tensors]) for name, tensors in wanted.items()}


def attribute(found: Mapping[str, Tensor], recipient: Run, donor: Run, positions: Sequence[int]) -> dict[str, Tensor]:
    """Component -> (L, …) first-order change of the logit difference, from `gradients` of the recipient.

    `heads` is (L, n_heads * d_head), to be summed over each head's slice.
    """
    here, there = (torch.tensor(positions, device=run.residual.device) - run.start for run in (recipient, donor))
    scores = {}
    for name, gradient in found.items():
        ours, others = ((run.residual if name == "residual" else run.components[name]) for run in (recipient, donor))
        products = (others[:, there] - ours[:, here]).float() * gradient[:, here].float()
        scores[name] = products.sum(1) if name == "heads" else products.sum((1, 2))
    return scores


def attribution_rows(
    found: PairRuns, components: Iterable[str], wanted: Mapping[str, Sequence[int]]
) -> list[pd.DataFrame]:
    """Rows of metric `attribution`, in logits, denoising, for both models, at the named positions."""
    subject, pair, blocks = found.subject, found.pair, []
    for model in MODELS:
        recipient, donor = found.runs[model, "baseline_b"], found.runs[model, "baseline_a"]
        with switched(subject, model):
            slopes = gradients(subject, recipient, pair.answer[0], pair.foil[0])
        for position, positions in wanted.items():
            later = [p for p in positions if p >= recipient.start]
            scores = attribute({name: slopes[name] for name in components}, recipient, donor, later) if later else {}
            for name, score in scores.items():
                if name == "heads":
                    score = score.unflatten(-1, (-1, subject.decoder.layers[0].self_attn.head_dim)).sum(-1).flatten()
                layers, heads = numbering(len(score), name, range(subject.n_layers + (name == "residual")))
                blocks.append(
                    found.rows(
                        {"attribution": score.cpu().double()}, model, "denoise",
                        position=position, component=name, layer=layers, head=heads,
                    )
                )  # fmt: skip
    return blocks
