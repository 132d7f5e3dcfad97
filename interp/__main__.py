"""Everything at once: all analyses of an adapter, the verdict, and the page.

    python -m interp --adapter ckpt/ep400

The subject is loaded once, pairs and ordinary states are made once, and every analysis writes its own folder, as its
own command does with the options that `run.json` records. Then `verdict.json` (`interp.verdict`) and `index.html`
(`interp.report`); of several adapters also the page that compares them (`interp.comparison`). Last the page that leads
to all reports (`interp.gallery`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterfactuals import Decision, Episode, PairError, read_pairs
from interp import cli, comparison, gallery, knockout, logit_lens, lora_svd, patching, report, retention_heads
from interp.report_texts import SECTIONS
from interp.run_record import PACKAGES, PairPlan
from interp.subject import Subject
from interp.verdict import Verdict, decide
from interp.verdict_audit import load_audit

PAIRS, DECISIONS, CONTROL_PAIRS, KNOCKOUT_PAIRS = 12, 16, 2, 6
DESCRIPTION = f"""All analyses of an adapter, a verdict with intervals, and a page that shows them.

Without --count, --pairs and --limit: {PAIRS} pairs and {DECISIONS} ordinary states; {CONTROL_PAIRS} pairs have the
controls, and {KNOCKOUT_PAIRS} the knock-out. For a model of 135M parameters in float32 that is a quarter of an hour to
forty minutes on two cores, by processor. A claim needs six graphs, one about retention readers twelve.
No episodes are played, so nothing is said of the score; --episodes 6 does, and takes several minutes more.
The commands of the single analyses use more by default, and --resume keeps what one of them has measured."""
EXAMPLE = "python -m interp --adapter ckpt/ep050 ckpt/ep400 --seed 0 --resume"


@dataclass(frozen=True)
class Work:
    """What all analyses of one adapter share."""

    given: Path  # the folder as it was written on the command line
    adapter: Path
    subject: Subject
    plan: PairPlan
    decisions: Sequence[Decision]
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class Analysis:
    """One analysis: the options that its own command would be given, those it has unasked, and how it is called."""

    options: Mapping[str, Any]
    defaults: Mapping[str, Any]
    run: Callable[[argparse.Namespace, Sequence[str]], Any]


def analyses(args: argparse.Namespace, work: Work) -> dict[str, Analysis]:
    """Every analysis by name, in the order in which they are run."""
    subject, plan, adapter, decisions = work.subject, work.plan, work.adapter, work.decisions
    profile = knockout.load_profile(adapter)
    states = {"limit": args.limit or max(len(plan.pairs) + len(plan.left_out), len(decisions))}
    few = {"limit": min(KNOCKOUT_PAIRS, args.limit or KNOCKOUT_PAIRS), "episodes": args.episodes}
    return {
        "lora_svd": Analysis(
            {}, {"adapter_only": False, "no_activations": False},
            lambda own, argv: lora_svd.analyse(own, argv, adapter, subject, plan),
        ),
        "patching": Analysis(
            {"control_pairs": args.control_pairs}, {},
            lambda own, argv: patching.analyse(own, argv, subject, plan, adapter=adapter),
        ),
        "retention_heads": Analysis(
            states, {}, lambda own, argv: retention_heads.analyse(own, argv, subject, plan, decisions)
        ),
        "logit_lens": Analysis(
            states, {}, lambda own, argv: logit_lens.analyse(own, argv, subject, plan, decisions, profile)
        ),
        "knockout": Analysis(
            few, {},
            lambda own, argv: knockout.analyse(own, argv, subject, plan, episodes=work.episodes, profile=profile),
        ),
    }  # fmt: skip


def own_command(args: argparse.Namespace, given: Path, analysis: Analysis) -> tuple[argparse.Namespace, list[str]]:
    """The options of one analysis, as its own command would have parsed them, and as they would be written."""
    common = ("base", "pairs", "count", "decisions", "limit", "device", "dtype", "load_in_4bit", "seed", "out")
    own = argparse.Namespace(**{**vars(args), "adapter": [given], **analysis.defaults, **analysis.options})
    defaults = cli.common_parser("interp", "", example="").parse_args(["--adapter", str(given)])
    argv = ["--adapter", str(given)]
    for name in dict.fromkeys((*common, *analysis.options)):
        value = getattr(own, name)
        if value == getattr(defaults, name, None) or value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        argv += [flag] if value is True else [flag, str(value)]
    return own, argv


def is_whole(folder: Path, name: str, argv: Sequence[str], work: Work) -> bool:
    """Whether a folder holds the whole result of this command for this adapter, these pairs and these versions."""
    file = folder / "run.json"
    if not file.exists():
        return False
    record = report.read_json(file)
    same = (
        record["command"] == shlex.join(["python", "-m", f"interp.{name}", *argv])
        and record["adapter"]["sha256"] == work.subject.adapter_sha256
        and record["base"] == dict(work.subject.base_identity)
        and record["versions"] == {package: importlib.metadata.version(package) for package in PACKAGES}
    )
    try:
        written = read_pairs(folder / "pairs.jsonl") if same else []
    except (OSError, PairError):  # it was tampered with: made anew
        return False
    return same and list(written[: len(work.plan.pairs)]) == list(work.plan.pairs[: len(written)])


def prepare(args: argparse.Namespace, given: Path, adapter: Path) -> Work:
    """Make pairs and states, and load the model."""
    pairs = cli.load_pairs(args, adapter)
    plain = {pair.environment for pair in pairs} == {"scheduler"}
    states = argparse.Namespace(**{**vars(args), "limit": args.limit or max(DECISIONS, len(pairs))})
    decisions = cli.load_decisions(states, adapter) if args.decisions or plain else []
    subject = cli.load_subject(args, adapter)
    plan = PairPlan.make(subject.tokenizer, pairs)
    episodes = knockout.load_episodes(args, adapter, plan)
    return Work(given, adapter, subject, plan, decisions, episodes)


def analyse(args: argparse.Namespace, given: Path, adapter: Path) -> None:
    """Run every analysis of one adapter that is not whole yet, and keep the tokens of an example."""
    work, folder = prepare(args, given, adapter), args.out / adapter.name
    if not args.resume:  # what is whole from here on belongs to this run
        for name in SECTIONS:
            (folder / name / "run.json").unlink(missing_ok=True)
    for name, analysis in analyses(args, work).items():
        own, argv = own_command(args, given, analysis)
        if args.resume and is_whole(folder / name, name, argv, work):
            cli.say(args, f"{name}: done before, in {folder / name}")
        else:
            analysis.run(own, argv)
    tokens = folder / "patching" / "tokens.parquet"
    report.write_json(folder / "example.json", report.example(tokens, work.subject.tokenizer.decode))


def conclude(args: argparse.Namespace, adapter: Path, audit: Mapping[str, Any] | None) -> Verdict:
    """Decide from the summaries that are there, write `verdict.json` and the page, print the verdict.

    Raises:
        InputError: if there is no result at all.
    """
    folder = args.out / adapter.name
    summaries, _ = report.read_results(folder)
    if not summaries:
        raise cli.InputError(f"{folder}: expected the results of at least one analysis, found none")
    verdict = decide(summaries, audit)
    report.write_json(folder / "verdict.json", {"adapter": adapter.name, **verdict.to_json()})
    page = report.write_page(folder)
    agreeing = sum(finding.agrees is True for finding in verdict.corroboration)
    against = sum(finding.agrees is False for finding in verdict.corroboration)
    cli.say(
        args,
        f"\n{adapter.name}\n  {verdict.sentence}\n  Other analyses: {agreeing} agree, {against} do not, "
        f"{len(verdict.corroboration) - agreeing - against} not known.\n  Audit: {verdict.audit.sentence}\n"
        f"  What to push on: {verdict.axis.to_json()['text']} {verdict.axis.why}\nwritten to {page}",
    )
    return verdict


@cli.command
def main(argv: Sequence[str]) -> int:
    """All analyses of each adapter, its verdict and its page; of several, the comparison."""
    args = _parser().parse_args(argv)
    adapters = cli.adapter_folders(args)
    args.count = args.count or (None if args.pairs else PAIRS)
    audits = [load_audit(adapter) for adapter in adapters]  # a bad one is found before anything is measured
    for given, adapter, audit in zip(args.adapter, adapters, audits, strict=True):
        if not args.page_only:
            analyse(args, given, adapter)
        conclude(args, adapter, audit)
    if len(adapters) > 1:
        comparison.compare(args, argv, adapters)
    cli.say(args, f"all reports: {gallery.write_gallery(args.out)}")
    return cli.DONE


def _parser() -> argparse.ArgumentParser:
    parser = cli.common_parser("<analysis>", DESCRIPTION, example=EXAMPLE)
    parser.prog = "python -m interp"
    add = parser.add_argument
    add("--control-pairs", type=_whole_number, default=CONTROL_PAIRS, metavar="N",
        help="controls, heads and attribution on the first N pairs; 0 for none (default: %(default)s)")  # fmt: skip
    add("--episodes", type=_whole_number, default=0, metavar="N",
        help="graphs that are played for the score (default: %(default)s)")  # fmt: skip
    add("--page-only", action="store_true", help="measure nothing: verdict and page from what is there")
    add("--series", metavar="NAME", help="name of the comparison of several adapters (default: first-last)")
    return parser


def _whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, found {text!r}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
