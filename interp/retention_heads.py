"""Retention readers: the heads that carry the number of uses of tensor k to the token that decides about retaining it.

A large attention weight is weak evidence (sinks: arXiv 2504.02732). Beside the plain definition, attention of at least
0.1 to k's entry of future_uses where the model retains k, every head is measured in three ways: its attention against
that to other entries and to spans as long; attention times the norm of what it writes (arXiv 2004.10102); and what the
logit difference loses when the head's edge from the decision to the entry is blocked (arXiv 2304.14767). A reader
passes all, chosen on half of the graphs and confirmed on the others (`interp.retention_heads_summary`).

Pairs give the causal measure (in prompt A, whose count calls for the answer), decisions the model's own behaviour in
ordinary states: what it retains greedily, and where it fails to retain what the planner says pays.

    python -m interp.retention_heads --adapter ckpt/ep400
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from counterfactuals import Decision, write_decisions
from interp import cli
from interp.retention_failures import examples
from interp.retention_heads_report import figures, table
from interp.retention_heads_summary import summarise
from interp.retention_measure import Measuring, decision_pair, measure_any
from interp.run_record import PairPlan, RunFolder
from interp.subject import Subject
from interp.tokens import AlignmentError, EncodedPair, encode_pair

__all__ = ["analyse", "decision_pair", "figures", "main", "measure", "summarise"]

DESCRIPTION = "Which heads carry the number of uses of a tensor to the token that decides whether it is retained."
EXAMPLE = "python -m interp.retention_heads --adapter ckpt/ep400 --seed 0"


def measure(
    subject: Subject,
    pairs: Sequence[EncodedPair],
    decisions: Sequence[Decision] = (),
    *,
    progress: Callable[[Iterable], Iterable] = iter,
) -> pd.DataFrame:
    """Measure all heads on pairs and decisions.

    Returns:
        One row per pair or decision, model, key, layer, head and metric, with the columns
        id, group, kind: the pair's; the kind of a decision is `decision`.
        model: `base` or `trained`.
        key: whose entry of future_uses is looked at: `k` of a pair, an id in a decision; empty for a decision as a
            whole.
        layer, head: -1 where a metric has none.
        metric, of attention from the decision position, for pairs and decisions:
            `attention`: to the entry, a share of 1, summed over its tokens; `attention_key`, `attention_value`: to its
            two parts; `attention_other`: mean over the other entries; `attention_random`: mean over all spans as long.
            `written`, `written_other`, `written_random`: the same times the norm of what is written, in units of the
            residual stream.
        metric, for pairs, in logits, answer minus foil in prompt A:
            `difference`: as it is. `effect`: what it loses when the head's edge to the entry is blocked;
            `effect_value`, `effect_other`, `effect_random`: its edge to the value, to the other entry, to a span as
            long, drawn by the pair's id.
        metric, for decisions:
            `list_length`: ids in the list that the model writes, NaN if it writes none; `unfinished`: 1 if the list
            goes on after `ANSWER_TOKENS` tokens; `unknown_ids`: of the list, without an entry.
            `retains`, `pays`: 0 or 1, whether a key is in the list, and what the planner's label says.
            For a key that pays and is not in a finished list, in logits, the list with the key minus the list as it
            is: `failed_difference`; `donor_difference`: in the prompt with k's count raised to `DONOR_COUNTS`;
            `restored_difference`: with the donor's stream, at this layer's input, put in at the decision. Or
            `not_aligned`: 1, where the two prompts have different tokens outside the count.
        value: the number.
        answer: of a decision, what the model writes for the list.

    Raises:
        ValueError: if there is nothing to measure.
        AlignmentError: if a decision cannot be encoded; `analyse` leaves it out and says so.
    """
    measuring = Measuring(subject)
    encoded = [encode_pair(subject.tokenizer, decision_pair(decision)) for decision in decisions]
    by_id = {decision.id: decision for decision in decisions}
    frames = [measure_any(measuring, item, by_id) for item in progress([*pairs, *encoded])]
    if not frames:
        raise ValueError("pairs, decisions: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw, for each adapter."""
    args = cli.common_parser("retention_heads", DESCRIPTION, example=EXAMPLE).parse_args(argv)
    for adapter in cli.adapter_folders(args):
        pairs, decisions = cli.load_pairs(args, adapter), cli.load_decisions(args, adapter)
        subject = cli.load_subject(args, adapter)
        analyse(args, argv, subject, PairPlan.make(subject.tokenizer, pairs), decisions)
    return cli.DONE


def analyse(
    args: argparse.Namespace, argv: Sequence[str], subject: Subject, plan: PairPlan, decisions: Sequence[Decision]
) -> dict[str, Any]:
    """Measure what is not measured yet, write the folder, print the table; the summary."""
    encoded: dict[str, EncodedPair] = {}
    left_out = []
    for decision in decisions:
        try:
            encoded[decision.id] = encode_pair(subject.tokenizer, decision_pair(decision))
        except AlignmentError as error:
            left_out.append({"id": decision.id, "reason": error.reason})
    used = {decision.id: decision for decision in decisions if decision.id in encoded}
    run = RunFolder.open("retention_heads", args, argv, subject)
    measuring = Measuring(subject)
    frame = run.collect(
        [*plan.encoded, *encoded.values()],
        lambda item: measure_any(measuring, item, used),
        cli.progress_bar(args, f"retention heads {subject.name}", "prompt"),
    )
    summary = summarise(frame, args.seed) | {"left_out": plan.left_out_records(), "decisions_left_out": left_out}
    write_decisions(used.values(), run.folder / "decisions.jsonl")
    shown = [example | _shown(used[example["id"]]) for example in examples(frame, summary)]
    (run.folder / "examples.json").write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    run.finish(plan, frame, summary, figures(frame, summary))
    title = f"{subject.name} on {Path(subject.base_identity['name']).name}"
    cli.say(args, table(summary, title=title, left_out=plan.reasons(), folder=run.folder))
    return summary


def _shown(decision: Decision) -> dict[str, Any]:
    """What is needed to look at an example."""
    return {"reference": decision.action, "labels": dict(decision.labels), "observation": decision.user}


if __name__ == "__main__":
    raise SystemExit(main())
