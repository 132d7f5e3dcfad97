"""Which layers' part of the adapter the decision needs, and which of them are enough.

The adapter's delta is switched, never the base model's weights. In one pair, for attention and MLP of every layer l,

    off       trained, but for this part of layer l         is this part of the delta needed?
    on        base, but for this part of layer l            is it enough?
    on_up_to  base, with the delta on in layers 0 … l       cumulative, from the first layer
    on_from   base, with the delta on in layers l … L - 1   cumulative, from the last one

and the logit difference is taken in A and in B. The two answer different questions, and neither adds up to the whole:
layers can stand in for one another, or work only together (2404.15255).

`interp.knockout_drive` runs them all in about the time of fifty full forwards.

Then whole episodes are played with larger parts switched off, which shows what becomes of valid answers and the score.

    python -m interp.knockout --adapter ckpt/ep400
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from counterfactuals import Episode, play_together
from interp import cli, lora_svd
from interp.answers import answer
from interp.knockout_drive import OUTSIDE, Drive, Row, adapted_parts
from interp.knockout_report import figures, table
from interp.knockout_summary import importance, summarise
from interp.run_record import PairPlan, RunFolder
from interp.subject import Subject
from interp.tokens import EncodedPair

__all__ = [
    "adapted_parts",
    "analyse",
    "figures",
    "main",
    "measure",
    "measure_pair",
    "play_trial",
    "summarise",
    "trials",
]

COLUMNS = ("pair", "group", "kind", "model", "switch", "part", "layer", "metric", "value")
DEFAULT_PAIRS, DEFAULT_EPISODES = 8, 4
DESCRIPTION = """Which layers' part of the adapter the decision needs, and which of them are enough.

Without --limit the first 8 pairs are used. On two cores a 135M model takes about a minute a pair, and half a minute for
each of the nine configurations in which --episodes graphs are played. Intervals need six graphs, of pairs and of
episodes."""
EXAMPLE = "python -m interp.knockout --adapter ckpt/ep400 --limit 16 --episodes 8"


def measure(
    subject: Subject, pairs: Sequence[EncodedPair], *, progress: Callable[[Iterable], Iterable] = iter
) -> pd.DataFrame:
    """The decision of every pair under every configuration.

    Args:
        pairs: see `interp.tokens.encode_pairs`.
        progress: wraps the pairs, to show how far it is; `tqdm` will do.

    Returns:
        One row per pair, configuration and metric, with the columns
        pair, group, kind: the pair's; of rows from `play_trial` the episode's id and graph, and `episode`.
        model: `base` or `trained`, the model in which something is switched.
        switch: `none`, `off`, `on`, `on_up_to`, `on_from`, see above.
        part: `attention`, `mlp` (`other`, should a layer have more), `outside` (embeddings and head, if they are
            adapted) or `all`; for episodes what is switched, in words.
        layer: whose part is switched, or where switching on ends or begins; -1 where no layer is meant.
        metric: `logit_difference_a`, `logit_difference_b`, `effect` (A - B), in logits, and for `none` `engine_error`
            (how far the logits are from the model's own forward, at worst); of episodes those of `play_trial`.
        value: the number.

        A part of a layer in which nothing is adapted has no rows.

    Raises:
        ValueError: if there are no pairs.
        UnsupportedArchitecture: if driving the layers one by one does not give the model's own logits.
    """
    frames = [measure_pair(subject, pair) for pair in progress(pairs)]
    if not frames:
        raise ValueError("pairs: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


@torch.inference_mode()
def measure_pair(subject: Subject, pair: EncodedPair) -> pd.DataFrame:
    """The rows of one pair, as described in `measure`."""
    drive = Drive(subject, pair)
    records = []
    for model, switched in (("base", subject.base), ("trained", subject.trained)):
        with switched():
            error = drive.engine_error(model)
        records += _records(Row(model, "none", "all", -1, 0), drive.differences(drive.logits[model])[0])
        records.append((model, "none", "all", -1, "engine_error", error))
        for row, found in drive.configurations(model):
            records += _records(row, found)
    frame = pd.DataFrame(records, columns=["model", "switch", "part", "layer", "metric", "value"])
    return frame.assign(pair=pair.id, group=pair.group, kind=pair.kind)[list(COLUMNS)]


def _records(row: Row, found: Tensor) -> list[tuple[str, str, str, int, str, float]]:
    a, b = found.tolist()
    metrics = {"logit_difference_a": a, "logit_difference_b": b, "effect": a - b}
    return [(row.model, row.switch, row.part, row.layer, metric, value) for metric, value in metrics.items()]


@dataclass(frozen=True)
class Trial:
    """A configuration to be played. Whatever its result depends on is in a field: results are kept by contents.

    Attributes:
        model, switch, part: as in `measure`; `part` says in words what is switched.
        on: the modules in which the adapter is on.
        episodes: (id, group, rules, system prompt) of what is played.
    """

    model: str
    switch: str
    part: str
    on: tuple[str, ...]
    episodes: tuple[tuple[str, str, str, str], ...]


def trials(subject: Subject, frame: pd.DataFrame, episodes: Sequence[Episode]) -> list[Trial]:
    """What is played: nothing on, all on, one part only; without each third of the layers; without the tenth of the
    layers that the pairs' decisions need most, and least.

    Args:
        frame: of `measure`, with the pairs from which that is seen.
    """
    parts, n_layers = adapted_parts(subject), subject.n_layers
    played = tuple((episode.id, episode.group, episode.rules, episode.system) for episode in episodes)

    def names(kinds: Collection[str], without: Collection[int] = ()) -> tuple[str, ...]:
        chosen = (found for (layer, part), found in parts.items() if part in kinds and layer not in without)
        return tuple(name for found in chosen for name in found)

    kinds = list(dict.fromkeys(part for _, part in parts))
    made = [Trial("base", "none", "all", (), played), Trial("trained", "none", "all", names(kinds), played)]
    made += [Trial("base", "on", f"{kind} only", names([kind]), played) for kind in kinds if kind != OUTSIDE[1]]
    lost = importance(frame)
    few = max(1, n_layers // 10)
    thirds = [third.tolist() for third in np.array_split(np.arange(n_layers), min(3, n_layers))]
    layer_sets = {f"no layers {third[0]}–{third[-1]}": third for third in thirds}
    for title, order in (("most", lost.sort_values(ascending=False)), ("least", lost.abs().sort_values())):
        layers = sorted(order.index[:few].tolist())
        layer_sets[f"no layers {', '.join(map(str, layers))} ({title} needed)"] = layers
    made += [Trial("trained", "off", title, names(kinds, layers), played) for title, layers in layer_sets.items()]
    return made


def play_trial(subject: Subject, trial: Trial, episodes: Sequence[Episode]) -> pd.DataFrame:
    """Play all episodes under one configuration, with greedy answers.

    Returns:
        Rows as described in `measure`, one per episode and metric: `score`, `calibrated_score`, `valid_share` (of the
        answers, to the letter), `valid`, `invalid`, `steps` (nodes placed by answers), `retained` (valid answers that
        retain something); see `counterfactuals.Outcome`.
    """

    def answers(prompts: list[Any]) -> list[str]:
        return answer(subject.causal_lm, subject.tokenizer, prompts)

    with subject.only(trial.on):
        outcomes = play_together(episodes, answers)
    rows = []
    for episode, outcome in zip(episodes, outcomes, strict=True):
        share = outcome.valid / (outcome.valid + outcome.invalid)
        for metric, value in (dataclasses.asdict(outcome) | {"valid_share": share}).items():
            where = (episode.id, episode.group, "episode", trial.model, trial.switch, trial.part, -1)
            rows.append((*where, metric, float(value)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw, for each adapter."""
    parser = cli.common_parser("knockout", DESCRIPTION, example=EXAMPLE)
    parser.set_defaults(limit=DEFAULT_PAIRS)
    parser.add_argument("--episodes", type=_whole_number, default=DEFAULT_EPISODES, metavar="N",
                        help="graphs that are played for the score, 0 for none (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    for adapter in cli.adapter_folders(args):
        pairs = cli.load_pairs(args, adapter)
        subject = cli.load_subject(args, adapter)
        plan = PairPlan.make(subject.tokenizer, pairs)
        analyse(args, argv, subject, plan, episodes=load_episodes(args, adapter, plan), profile=load_profile(adapter))
    return cli.DONE


def analyse(
    args: argparse.Namespace,
    argv: Sequence[str],
    subject: Subject,
    plan: PairPlan,
    *,
    episodes: Sequence[Episode] = (),
    profile: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """Measure what is not there yet, write the folder of one adapter, print its table.

    Args:
        plan: its pairs of the main kind, the first one's, are used: the first `--limit`, or `DEFAULT_PAIRS`, of them.
        episodes: what is played; none leaves the score out, and the summary says so.
        profile: of `interp.lora_svd.profile`; None leaves the comparison with it out, and the summary says so.
    """
    run = RunFolder.open("knockout", args, argv, subject)
    plan = _narrowed(plan, args.limit or DEFAULT_PAIRS)
    frame = run.collect(
        plan.encoded, lambda pair: measure_pair(subject, pair), cli.progress_bar(args, f"knockout {subject.name}")
    )
    if episodes:
        played = run.collect(
            cast(Any, trials(subject, frame, episodes)),  # kept by their contents, as pairs are
            lambda trial: play_trial(subject, cast(Trial, trial), episodes),
            cli.progress_bar(args, f"episodes {subject.name}", unit="configuration"),
        )
        frame = pd.concat([frame, played], ignore_index=True)
    summary = summarise(frame, args.seed, profile=profile) | {"left_out": plan.left_out_records()}
    run.finish(plan, frame, summary, figures(frame, args.seed, profile=profile))
    title = f"{subject.name} on {Path(subject.base_identity['name']).name}"
    cli.say(args, table(summary, title=title, left_out=plan.reasons(), folder=run.folder))
    return summary


def _narrowed(plan: PairPlan, limit: int) -> PairPlan:
    """The first pairs of the main kind; the others are left out, and said to be."""
    kind = plan.encoded[0].kind
    used = [pair for pair in plan.encoded if pair.kind == kind][:limit]
    ids = {pair.id for pair in used}
    unused = [pair for pair in plan.encoded if pair.id not in ids]
    reasons = [(p.id, f"not among the first {limit}" if p.kind == kind else f"kind {p.kind}") for p in unused]
    return PairPlan(tuple(p for p in plan.pairs if p.id in ids), tuple(used), (*plan.left_out, *reasons))


def load_episodes(args: argparse.Namespace, adapter: Path, plan: PairPlan) -> list[Episode]:
    """The episodes of the pairs' environment; none where it has none, or with `--episodes 0`."""
    has_episodes = {pair.environment for pair in plan.pairs} == {"scheduler"}
    return cli.load_episodes(args, adapter, args.episodes) if has_episodes and args.episodes else []


def load_profile(adapter: Path) -> pd.DataFrame:
    """The size of the adapter's delta by layer and part."""
    return lora_svd.profile(lora_svd.measure(adapter, adapter_only=True))


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
