"""Activation patching: at which layer the decision leaves the changed value and reaches the token that decides.

For every pair, model and layer, one run's activations are put into the other's (interchange of real activations, never
noise: arXiv 2309.16042). Three directions are measured (`interp.flip`): denoising and noising, which are no mirror
images (arXiv 2404.15255), and the trained model's activations put into the base model on the same prompt (arXiv
2402.14811). Beside them stand

    components   what attention, MLP and single heads add to the stream, denoising (`interp.components`)
    attribution  the same to first order, as a screen whose agreement is reported (`interp.attribution`)
    controls     patches and adapters that must move nothing, or all (`interp.controls`), on the first pairs
    doses        the logit difference against the count: pairs of kind `dose`; and pairs in which another key changes

    python -m interp.patching --adapter ckpt/ep400

By default every pair is patched in the residual stream at the value and the decision in all directions and at the key
in denoising, and in the attention and MLP outputs at the decision. The first `--control-pairs` pairs have these two at
the value as well and the residual stream between value and decision, both in every third layer, every head at the
decision, attribution, and the controls.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp import cli
from interp.attribution import attribution_rows
from interp.components import COMPONENTS
from interp.controls import control_rows, find_donor
from interp.flip import SWEEPS, positions_of
from interp.lora_weights import written_directions
from interp.pair_runs import COLUMNS, NONE, POSITIONS, PairRuns, every_third, places
from interp.patching_growth import write_growth
from interp.patching_report import figures, plot, table
from interp.patching_summary import summarise
from interp.run_record import PairPlan, RunFolder
from interp.subject import Subject
from interp.tokens import EncodedPair, encode_pairs

__all__ = ["COLUMNS", "analyse", "figures", "main", "measure", "measure_pair", "plot", "summarise"]

DEFAULT_COMPONENTS = ("residual", "attention", "mlp")
DEFAULT_POSITIONS = ("value", "key", "decision")
CONTROL_PAIRS = 8
DOSES_PER_GRAPH = 5
DESCRIPTION = "At which layer the decision leaves the changed value and reaches the token that decides."
_written: weakref.WeakKeyDictionary[Subject, list[torch.Tensor]] = weakref.WeakKeyDictionary()
EXAMPLE = "python -m interp.patching --adapter ckpt/ep400 --count 64 --seed 0"


@dataclass(frozen=True)
class Task(EncodedPair):
    """A pair and what is measured of it. Part of the name under which a result is kept for --resume.

    Attributes:
        components, positions: of the sweeps; without components, the pair's own runs only.
        thorough: also the residual stream between, attention and MLP at the value, all heads at the decision,
            attribution and the controls.
        donor_a, donor_b: token ids of another pair of as many tokens; empty where there is none.
        seed: of what the controls draw.
    """

    components: tuple[str, ...] = DEFAULT_COMPONENTS
    positions: tuple[str, ...] = DEFAULT_POSITIONS
    thorough: bool = False
    donor_a: tuple[int, ...] = ()
    donor_b: tuple[int, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, pair: EncodedPair, **what: Any) -> Task:
        """What is to be done with a pair."""
        return cls(**{field.name: getattr(pair, field.name) for field in fields(EncodedPair)}, **what)

    @property
    def donor(self) -> EncodedPair | None:
        """The other pair, as far as running it needs."""
        if not self.donor_a:
            return None
        known = {field.name: getattr(self, field.name) for field in fields(EncodedPair)}
        return EncodedPair(**known | {"ids_a": self.donor_a, "ids_b": self.donor_b})


def measure(
    subject: Subject,
    pairs: Sequence[EncodedPair],
    *,
    components: Sequence[str] = DEFAULT_COMPONENTS,
    positions: Sequence[str] = DEFAULT_POSITIONS,
    control_pairs: int = 0,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> pd.DataFrame:
    """Patch every pair in every direction, position, component and layer.

    Args:
        pairs: see `interp.tokens.encode_pairs`.
        components: some of `interp.components.COMPONENTS`; the residual stream, which gives the flip layer, always is.
        positions: some of `interp.pair_runs.POSITIONS`; the value and the decision always are.
        control_pairs: how many of the pairs, from the first, are measured thoroughly (see `Task`).
        seed: of what the controls draw.
        progress: wraps the pairs, to show how far it is; `tqdm` will do.

    Returns:
        One row per pair, model, direction, position, component, head, layer and metric, with the columns
        pair, group, kind: the pair's.
        model: `base` or `trained`, the model that runs; `zero_b` or `random_b` (`interp.controls`); `none` for facts.
        direction: `denoise`, `noise`, `cross`; a control's name; `baseline_a`, `baseline_b` for the model's own runs;
            `facts`, what is known of the pair: metrics `count` (the number in A), `place` (of the value in its field,
            from 0 to 1) and `role_current` (1 if the key is the current node, else 0), each where the pair tells.
        position: `value`, `decision`, `key`, `between` (`interp.pair_runs.places`), a control's; `none` without one.
        component: `residual`, `attention`, `mlp`, `heads`; `none` where nothing is patched.
        head: its number, -1 for none.
        layer: `residual`: the stream entering this layer was patched; the last one, L, is what the last layer returns.
            Other components: that of this layer. -1 where nothing is patched.
        metric: `logit_difference` (logits), `p_answer` (all tokens of the answer, teacher-forced), `p_first_answer`,
            `p_first_foil`, `kl` (nats, from the model's own run on A to the patched one, at the decision), `recovery`
            (of the logit difference, see `interp.flip`; NaN where donor and recipient are closer than `RECOVERY_EPS`),
            `attribution` (logits, first-order estimate of the patch's change). Heads and controls have the logit
            difference and its recovery only.
        value: the number.

    Raises:
        ValueError: if there are no pairs.
    """
    tasks = _tasks(pairs, components, positions, control_pairs, seed)
    frames = [measure_pair(subject, task) for task, _ in zip(tasks, progress(pairs), strict=True)]
    if not frames:
        raise ValueError("pairs: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


def measure_pair(subject: Subject, pair: EncodedPair) -> pd.DataFrame:
    """The rows of one pair, as described in `measure`; of a `Task`, what it asks for."""
    task = pair if isinstance(pair, Task) else Task.of(pair)
    found, named = PairRuns.make(subject, task), places(task)
    blocks = [*found.baselines(), *_facts(found)]
    asked = {*task.positions, "between"} if task.thorough else task.positions
    chosen = {name: named[name] for name in POSITIONS if name in named and name in asked}
    if "residual" in task.components:
        for (model, direction), (recipient, donor) in SWEEPS.items():
            wanted = chosen if direction == "denoise" else [p for p in positions_of(direction) if p in chosen]
            for position in wanted:
                runs = found.runs[recipient], found.runs[donor]
                ends = (recipient, donor)
                thinned = position == "between" and "between" not in task.positions
                layers = every_third(subject.n_layers + 1) if thinned else None
                blocks.append(
                    found.patched(model, direction, position, *runs, chosen[position], layers=layers, ends=ends)
                )
    components = [c for c in ("attention", "mlp") if c in task.components]
    if components:
        where = {p: at for p, at in chosen.items() if p == "decision" or (task.thorough and p == "value")}
        blocks += [_denoised(found, component, p, at) for component in components for p, at in where.items()]
    if "decision" in chosen and ("heads" in task.components or (task.thorough and components)):
        blocks.append(_denoised(found, "heads", "decision", chosen["decision"]))
    if task.thorough:
        screened = [*task.components, *(["heads"] if components and "heads" not in task.components else [])]
        blocks += attribution_rows(found, screened, {p: at for p, at in chosen.items() if p in ("value", "decision")})
        blocks += control_rows(found, task.donor, _directions(subject), task.seed)
    return pd.concat(blocks, ignore_index=True)


def _denoised(found: PairRuns, component: str, position: str, at: Sequence[int]) -> pd.DataFrame:
    blocks = []
    for model in ("base", "trained"):
        recipient, donor = found.runs[model, "baseline_b"], found.runs[model, "baseline_a"]
        layers = every_third(found.subject.n_layers) if position == "value" else None
        light = component == "heads"
        blocks.append(
            found.patched(
                model, "denoise", position, recipient, donor, at, component=component, layers=layers, light=light
            )
        )
    return pd.concat(blocks, ignore_index=True)


def _directions(subject: Subject) -> list[torch.Tensor]:
    if subject not in _written:
        _written[subject] = written_directions(subject.causal_lm)
    return _written[subject]


def _facts(found: PairRuns) -> list[pd.DataFrame]:
    pair, decode = found.pair, found.subject.tokenizer.decode

    def digits(name: str) -> str:
        start, end = pair.spans[name]
        return "".join(filter(str.isdigit, decode(list(pair.ids_a[start:end]))))

    facts: dict[str, float] = {}
    if count := digits("value"):
        facts["count"] = float(count)
    if "future_uses" in pair.spans:
        start, end = pair.spans["future_uses"]
        facts["place"] = (pair.spans["value"][0] - start) / max(1, end - start)
    if {"key", "current_node"} <= pair.spans.keys():
        facts["role_current"] = float(digits("key") == digits("current_node"))
    if not facts:
        return []
    values = {name: torch.tensor([value]) for name, value in facts.items()}
    return [found.rows(values, "none", "facts", **NONE)]


def _tasks(
    pairs: Sequence[EncodedPair], components: Sequence[str], positions: Sequence[str], control_pairs: int, seed: int
) -> list[Task]:
    """A task per pair. The controls are for the first pairs of the main kind, the first pair's."""
    main_kind = [index for index, pair in enumerate(pairs) if pair.kind == pairs[0].kind]
    tasks = []
    for index, pair in enumerate(pairs):
        thorough = index in main_kind[:control_pairs]
        donor = find_donor(pair, pairs, seed) if thorough else None
        tasks.append(
            Task.of(
                pair,
                components=tuple(c for c in COMPONENTS if c in {"residual", *components}),
                positions=tuple(p for p in POSITIONS if p in {"value", "decision", *positions}),
                thorough=thorough,
                donor_a=donor.ids_a if donor else (),
                donor_b=donor.ids_b if donor else (),
                seed=seed,
            )
        )
    return tasks


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this analysis beside the common ones."""
    add = parser.add_argument
    add("--components", nargs="+", choices=COMPONENTS, default=list(DEFAULT_COMPONENTS),
        help="what is patched; heads: every head of every layer at the decision, for all pairs (default: "
             "residual attention mlp, and the heads of the control pairs)")  # fmt: skip
    add("--positions", nargs="+", choices=POSITIONS, default=list(DEFAULT_POSITIONS),
        help="where (default: value key decision, and between them for the control pairs)")  # fmt: skip
    add("--control-pairs", type=_count, default=CONTROL_PAIRS, metavar="N",
        help="run controls, heads and attribution on the first N pairs; 0 for none (default: %(default)s)")  # fmt: skip


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw, for each adapter; then all adapters as a sequence."""
    parser = cli.common_parser("patching", DESCRIPTION, example=EXAMPLE)
    add_options(parser)
    parser.add_argument("--series", metavar="NAME", help="name of the sequence of adapters (default: first-last)")
    args = parser.parse_args(argv)
    adapters = cli.adapter_folders(args)
    for adapter in adapters:
        pairs = cli.load_pairs(args, adapter)
        subject = cli.load_subject(args, adapter)
        analyse(args, argv, subject, PairPlan.make(subject.tokenizer, pairs), adapter=adapter)
    if len(adapters) > 1:
        write_growth(args, adapters)
    return cli.DONE


def analyse(
    args: argparse.Namespace, argv: Sequence[str], subject: Subject, plan: PairPlan, *, adapter: Path | None = None
) -> dict[str, Any]:
    """Measure one adapter, as far as that is not done, and write its folder.

    Args:
        args: of a parser with `add_options`; options that it lacks have their defaults.
        plan: the pairs of the main kind.
        adapter: its folder, for the words in which doses are generated; None finds it in `args`.

    Returns:
        The summary, as written to `summary.json`.
    """
    control_pairs = getattr(args, "control_pairs", CONTROL_PAIRS)
    components = getattr(args, "components", DEFAULT_COMPONENTS)
    positions = getattr(args, "positions", DEFAULT_POSITIONS)
    folder = adapter or next(f for f in cli.adapter_folders(args) if f.name == subject.name)
    tasks = _tasks(plan.encoded, components, positions, control_pairs, args.seed)
    extra = _control_kinds(args, folder, subject, min(control_pairs, len(plan.encoded)))
    tasks += [Task.of(pair, components=(), seed=args.seed) for pair in extra.encoded]
    run = RunFolder.open("patching", args, argv, subject)
    frame = run.collect(
        tasks, lambda task: measure_pair(subject, task), cli.progress_bar(args, f"patching {subject.name}")
    )
    summary = summarise(frame, args.seed) | {
        "left_out": plan.left_out_records(),
        "left_out_of_controls": extra.left_out_records(),
    }
    both = PairPlan(plan.pairs + extra.pairs, plan.encoded + extra.encoded, plan.left_out + extra.left_out)
    run.finish(both, frame, summary, figures(frame, seed=args.seed))
    title = f"{subject.name} on {Path(subject.base_identity['name']).name}"
    cli.say(args, table(frame, seed=args.seed, title=title, left_out=plan.reasons(), folder=run.folder))
    return summary


def _control_kinds(args: argparse.Namespace, adapter: Path, subject: Subject, count: int) -> PairPlan:
    """Generated pairs of the control kinds, of so many graphs each; none beside a pair file, which has what it has."""
    if args.pairs is not None or count == 0:
        return PairPlan((), (), ())
    pairs = [
        *cli.generate_kind(args, adapter, "dose", count * DOSES_PER_GRAPH),
        *cli.generate_kind(args, adapter, "other_key", count),
    ]
    encoded, left_out = encode_pairs(subject.tokenizer, pairs)
    unused = {pair for pair, _ in left_out}
    return PairPlan(tuple(pair for pair in pairs if pair.id not in unused), tuple(encoded), tuple(left_out))


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, found {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
