"""Activation patching: at which layer the decision leaves the changed value and reaches the token that decides.

For every pair, model and layer, one run's residual stream is put into the other's at the value's tokens, or at the
decision position (interchange of real activations, never noise: arXiv 2309.16042). Three directions are measured
(`interp.flip`): denoising and noising, which are no mirror images (arXiv 2404.15255), and the trained model's
activations put into the base model on the same prompt (arXiv 2402.14811).

    python -m interp.patching --adapter ckpt/ep400
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from interp import cli
from interp.flip import METRIC, RECOVERY_EPS, SWEEPS, positions_of, summarise
from interp.patching_report import plot, table
from interp.run_record import PairPlan, RunFolder
from interp.stats import recovery
from interp.subject import Subject
from interp.sweep import Patched, Run, patch, run_pair
from interp.tokens import EncodedPair

__all__ = ["main", "measure", "measure_pair", "plot", "summarise"]

COLUMNS = ("pair", "group", "kind", "model", "direction", "position", "layer", "metric", "value")
DESCRIPTION = "At which layer the decision leaves the changed value and reaches the token that decides."
EXAMPLE = "python -m interp.patching --adapter ckpt/ep400 --count 64 --seed 0"


def measure(
    subject: Subject, pairs: Sequence[EncodedPair], *, progress: Callable[[Iterable], Iterable] = iter
) -> pd.DataFrame:
    """Patch every pair in every direction, position and layer.

    Args:
        pairs: see `interp.tokens.encode_pairs`.
        progress: wraps the pairs, to show how far it is; `tqdm` will do.

    Returns:
        One row per pair, model, direction, position, layer and metric, with the columns
        pair, group, kind: the pair's.
        model: `base` or `trained`, the model that runs.
        direction: `denoise`, `noise`, `cross`; or `baseline_a`, `baseline_b` for the model's own runs, with position
            `none` and layer -1.
        position: `value` or `decision` (with `cross`, only the latter).
        layer: the stream entering this layer was patched; the last one, L, is what the last layer returns.
        metric: `logit_difference` (logits), `p_answer` (all tokens of the answer, teacher-forced), `p_first_answer`,
            `p_first_foil`, `kl` (nats, from the model's own run on A to the patched one, at the decision), `recovery`
            (of the logit difference, see `interp.flip`; NaN where donor and recipient are closer than `RECOVERY_EPS`).
        value: the number.

    Raises:
        ValueError: if there are no pairs.
    """
    frames = [measure_pair(subject, pair) for pair in progress(pairs)]
    if not frames:
        raise ValueError("pairs: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


def measure_pair(subject: Subject, pair: EncodedPair) -> pd.DataFrame:
    """The rows of one pair, as described in `measure`."""
    switches: dict[str, Callable[[], AbstractContextManager]] = {"base": subject.base, "trained": subject.trained}
    runs: dict[tuple[str, str], Run] = {}
    for model, switched in switches.items():
        with switched():
            runs[model, "baseline_a"], runs[model, "baseline_b"] = run_pair(subject, pair)
    places = {"value": pair.value_positions, "decision": (pair.decision,)}
    metrics = {key: _metrics(run, runs[key[0], "baseline_a"], pair) for key, run in runs.items()}
    blocks = [_block(found, *key, "none", first_layer=-1) for key, found in metrics.items()]
    for (model, direction), (recipient, donor) in SWEEPS.items():
        for position in positions_of(direction):
            with switches[model]():
                patched = patch(subject, runs[recipient], runs[donor], places[position])
            found = _metrics(patched, runs[model, "baseline_a"], pair)
            start, end = metrics[recipient][METRIC], metrics[donor][METRIC]
            found["recovery"] = torch.from_numpy(recovery(found[METRIC], start, end, RECOVERY_EPS))
            blocks.append(_block(found, model, direction, position))
    frame = pd.concat(blocks, ignore_index=True)
    return frame.assign(pair=pair.id, group=pair.group, kind=pair.kind)[list(COLUMNS)]


def _metrics(found: Run | Patched, reference: Run, pair: EncodedPair) -> dict[str, Tensor]:
    """Metric -> (n,) in float64; n is 1 for a run and L + 1 for a patched one."""
    logits = torch.atleast_2d(found.logits).cpu().double()  # (n, vocab)
    log_probs = logits.log_softmax(-1)
    log_reference = reference.logits.cpu().double().log_softmax(-1)  # (vocab,)
    answer_log_prob = torch.atleast_1d(torch.as_tensor(found.answer_log_prob)).cpu().double()
    answer, foil = pair.answer[0], pair.foil[0]
    return {
        "logit_difference": logits[:, answer] - logits[:, foil],
        "p_answer": answer_log_prob.exp(),
        "p_first_answer": log_probs[:, answer].exp(),
        "p_first_foil": log_probs[:, foil].exp(),
        "kl": (log_reference.exp() * (log_reference - log_probs)).sum(-1),
    }


def _block(
    metrics: Mapping[str, Tensor], model: str, direction: str, position: str, first_layer: int = 0
) -> pd.DataFrame:
    wide = pd.DataFrame({metric: values.numpy() for metric, values in metrics.items()})
    wide["layer"] = wide.index + first_layer
    long = wide.melt(id_vars="layer", var_name="metric", value_name="value")
    return long.assign(model=model, direction=direction, position=position)


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw, for each adapter."""
    args = cli.common_parser("patching", DESCRIPTION, example=EXAMPLE).parse_args(argv)
    for adapter in cli.adapter_folders(args):
        _analyse(args, argv, adapter)
    return cli.DONE


def _analyse(args: argparse.Namespace, argv: Sequence[str], adapter: Path) -> None:
    pairs = cli.load_pairs(args, adapter)
    subject = cli.load_subject(args, adapter)
    plan = PairPlan.make(subject.tokenizer, pairs)
    run = RunFolder.open("patching", args, argv, subject)
    frame = run.collect(
        plan.encoded, lambda pair: measure_pair(subject, pair), cli.progress_bar(args, f"patching {subject.name}")
    )
    summary = summarise(frame, args.seed) | {"left_out": plan.left_out_records()}
    run.finish(plan, frame, summary, {"patching": plot(frame, seed=args.seed)})
    title = f"{subject.name} on {Path(subject.base_identity['name']).name}"
    cli.say(args, table(frame, seed=args.seed, title=title, left_out=plan.reasons(), folder=run.folder))


if __name__ == "__main__":
    raise SystemExit(main())
