"""The logit lens: at which layer each token of the answer takes shape, base beside trained.

The residual stream h_l that enters layer l (h_L: what the last layer returns) is read as if it were the last one,

    lens_l = unembed(norm(h_l)),

through the final norm and the unembedding of the model that made it, LoRA on them included; so the last row is the
model's own logits, which is checked on every text. Read at the positions whose next token decides a slot of the action;
the whole action is fed once, teacher-forced, so all slots come from one pass.

Caveat. The final norm and the unembedding fit the last layer's stream; early ones live in another basis, and what the
lens shows of them is unreliable (arXiv 2303.08112). Rank and KL to the final distribution stand beside the probability.

    python -m interp.logit_lens --adapter ckpt/ep400
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from counterfactuals import Decision, write_decisions
from interp import cli, lora_svd
from interp.flip import MODELS
from interp.logit_lens_report import CAPTIONS, figures, table
from interp.logit_lens_summary import summarise
from interp.logit_lens_texts import DECISION, Fork, LensText, decision_text, encode_texts, pair_texts, text_table
from interp.run_record import PairPlan, RunFolder
from interp.subject import Subject, UnsupportedArchitecture

__all__ = ["decision_text", "figures", "lens", "main", "measure", "measure_text", "pair_texts", "summarise"]

COLUMNS = ("id", "group", "kind", "slot", "reference", "model", "layer", "choice", "metric", "value")
DESCRIPTION = "At which layer each token of the answer takes shape, read through the model's own unembedding."
EXAMPLE = "python -m interp.logit_lens --adapter ckpt/ep400 --count 64 --seed 0"


def measure(
    subject: Subject, texts: Sequence[LensText], *, progress: Callable[[Iterable], Iterable] = iter
) -> pd.DataFrame:
    """Read base and trained model through the lens, at every fork and layer.

    Args:
        texts: see `pair_texts` and `decision_text`.
        progress: wraps the texts, to show how far it is; `tqdm` will do.

    Returns:
        One row per text, slot, model, layer, choice and metric, with the columns
        id, group, kind: the text's; kind is the pair's, or `decision`.
        slot: the fork's.
        reference: the choice that the environment calls for.
        model: `base` or `trained`.
        layer: of the stream read: the one entering this layer; the last one, L, is what the last layer returns. -1 for
            metrics that are about all layers.
        choice: for the metrics `logit`, `p` (among all tokens) and `rank` (among all tokens, 1 is the top); else empty.
        metric: those, and `chosen` (1 if the top choice is the reference, else 0), `entropy` (nats), `kl_final` (nats,
            KL(final || layer)), `kl_base` (nats, KL(trained || base) at the same layer; rows of the trained model);
            with layer -1 `settling` (first layer from which the final top choice stays on top of the choices),
            `settling_vocabulary` (the same for the top token among all), `lens_error` (largest difference in logits
            between the last row and the model's own).
        value: the number.

    Raises:
        ValueError: if there are no texts.
        UnsupportedArchitecture: if the last row is not the model's own logits.
    """
    frames = [measure_text(subject, text) for text in progress(texts)]
    if not frames:
        raise ValueError("texts: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


def measure_text(subject: Subject, text: LensText) -> pd.DataFrame:
    """The rows of one text, as described in `measure`."""
    positions = [fork.position for fork in text.forks]
    logits, errors = {}, {}
    for model, switched in zip(MODELS, (subject.base, subject.trained), strict=True):
        with switched():
            logits[model], errors[model] = lens(subject, text.ids, positions)
    blocks: list[pd.DataFrame] = []
    for index, fork in enumerate(text.forks):
        read = {model: logits[model][:, index].double() for model in MODELS}  # (L + 1, vocab)
        log_base = read["base"].log_softmax(-1)
        for model, found in read.items():
            blocks += _blocks(fork, model, found, log_base if model == "trained" else None, errors[model])
    frame = pd.concat(blocks, ignore_index=True)
    return frame.assign(id=text.id, group=text.group, kind=text.kind)[list(COLUMNS)]


@torch.inference_mode()
def lens(subject: Subject, ids: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, float]:
    """Logits of every layer's stream at some positions, from one forward pass, for the model as it is now switched.

    Returns:
        (L + 1, len(positions), vocab) logits, float32 on the CPU, and the largest difference between the last row and
        the model's own logits.

    Raises:
        UnsupportedArchitecture: if that difference is not rounding: the model does more to its last stream than to
            normalise, unembed and cap it.
    """
    causal = subject.causal_lm
    kept = torch.tensor(positions, device=causal.device)
    with _recording(subject.decoder, kept) as streams:
        fed = torch.tensor([list(ids)], device=causal.device)
        expected = causal(input_ids=fed, use_cache=False, logits_to_keep=kept).logits[0].float()
    logits = _unembed(causal, subject.decoder.norm(torch.stack(streams)))
    error = float((logits[-1] - expected).abs().max())
    tolerance = max(1e-3, 64 * torch.finfo(causal.dtype).eps) * float(expected.std())
    if not error <= tolerance:
        raise UnsupportedArchitecture(
            f"{type(causal).__name__}: expected the last layer's stream, normed and unembedded, to give the model's "
            f"own logits within {tolerance:.2g}, found a difference of {error:.2g}: it is not covered by the logit lens"
        )
    return logits.cpu(), error


def _unembed(causal: Any, normed: Tensor) -> Tensor:
    logits = causal.get_output_embeddings()(normed).float()
    cap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@contextmanager
def _recording(decoder: Any, positions: Tensor) -> Iterator[list[Tensor]]:
    """Collect (n, d_model) at some positions of what enters each layer and the final norm; no hook stays on leaving."""
    streams: list[Tensor] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append((args[0] if args else kwargs["hidden_states"])[0, positions])

    handles: list[Any] = []
    try:
        for module in (*decoder.layers, decoder.norm):
            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
        yield streams
    finally:
        for handle in handles:
            handle.remove()


def _blocks(fork: Fork, model: str, logits: Tensor, log_base: Tensor | None, error: float) -> Iterator[pd.DataFrame]:
    """The rows of one fork and model, from logits (L + 1, vocab) in float64."""
    log_probs = logits.log_softmax(-1)
    at_choices = logits[:, fork.tokens]  # (L + 1, choices)
    top, top_choice = logits.argmax(-1), at_choices.argmax(-1)
    of_layer = {
        "chosen": (top_choice == 0).double(),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "kl_final": _kl(log_probs[-1], log_probs),
    }
    if log_base is not None:
        of_layer["kl_base"] = _kl(log_probs, log_base)
    of_all = {
        "settling": _settling(top_choice),
        "settling_vocabulary": _settling(top),
        "lens_error": torch.tensor([error]),
    }
    found = [("", of_layer, 0), ("", of_all, -1)]
    for index, (choice, token) in enumerate(zip(fork.choices, fork.tokens, strict=True)):
        of_choice = {
            "logit": at_choices[:, index],
            "p": log_probs[:, token].exp(),
            "rank": 1 + (logits > at_choices[:, index, None]).sum(-1),
        }
        found.append((choice, of_choice, 0))
    for choice, metrics, first_layer in found:
        wide = pd.DataFrame({metric: values.double().numpy() for metric, values in metrics.items()})
        wide["layer"] = wide.index + first_layer
        long = wide.melt(id_vars="layer", var_name="metric", value_name="value")
        yield long.assign(slot=fork.slot, reference=fork.choices[0], model=model, choice=choice)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats over the last dimension; rounding below 0 is 0."""
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def _settling(top: Tensor) -> Tensor:
    """(1,) first layer from which the last entry of `top` (L + 1,) stays."""
    others = (top != top[-1]).nonzero().flatten()
    return torch.tensor([int(others[-1]) + 1 if len(others) else 0])


def analyse(
    args: argparse.Namespace,
    argv: Sequence[str],
    subject: Subject,
    plan: PairPlan,
    decisions: Sequence[Decision],
    profile: pd.DataFrame | None,
) -> dict[str, Any]:
    """Measure what is not there yet, write the folder, print the table.

    Args:
        plan: its pairs are read in A and in B.
        decisions: ordinary states, whose slots are read; may be empty.
        profile: of `interp.lora_svd.profile`, to align the divergence with.

    Returns:
        The summary.
    """
    texts, left_out = encode_texts(subject.tokenizer, plan.encoded, decisions)
    run = RunFolder.open("logit_lens", args, argv, subject)

    def one(text: Any) -> pd.DataFrame:
        return measure_text(subject, text)

    units: Sequence[Any] = [*texts]
    frame = run.collect(units, one, cli.progress_bar(args, f"logit lens {subject.name}", "text"))
    summary = summarise(frame, args.seed, profile) | {
        "captions": CAPTIONS,
        "decisions": {"used": len({text.id for text in texts if text.kind == DECISION}), "given": len(decisions)},
        "left_out": [*plan.left_out_records(), *({"id": what, "reason": why} for what, why in left_out)],
    }
    write_decisions(decisions, run.folder / "decisions.jsonl")
    text_table(texts).to_parquet(run.folder / "texts.parquet", index=False)
    run.finish(plan, frame, summary, figures(frame, profile, seed=args.seed))
    counts = Counter(why for _, why in left_out)
    reasons = "; ".join([f"pairs: {plan.reasons()}", *(f"decisions: {why}: {n}" for why, n in counts.items())])
    title = f"{subject.name} on {Path(subject.base_identity['name']).name}"
    cli.say(args, table(frame, summary, title=title, left_out=reasons, folder=run.folder, seed=args.seed))
    return summary


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw, for each adapter."""
    args = cli.common_parser("logit_lens", DESCRIPTION, example=EXAMPLE).parse_args(argv)
    for adapter in cli.adapter_folders(args):
        pairs, decisions = cli.load_pairs(args, adapter), cli.load_decisions(args, adapter)
        subject = cli.load_subject(args, adapter)
        plan = PairPlan.make(subject.tokenizer, pairs)
        profile = lora_svd.profile(lora_svd.measure(adapter, adapter_only=True))
        analyse(args, argv, subject, plan, decisions, profile)
    return cli.DONE


if __name__ == "__main__":
    raise SystemExit(main())
