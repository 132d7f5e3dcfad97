"""Where a LoRA adapter wrote, and how: the SVD of its delta dW = s B A, module by module.

No model is loaded for it: the factors come from the adapter's file, and the base weights that some metrics compare the
delta with from the base model's, tensor by tensor. How large the delta is on real inputs (`interp.lora_activations`)
needs the model, and pairs.

    python -m interp.lora_svd --adapter ckpt/ep400
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from numpy import linalg, nan
from scipy.sparse.linalg import ArpackNoConvergence
from torch import Tensor

from interp import cli, lora_svd_growth
from interp.base_models import BaseModelError, ResolvedBase, resolve_base
from interp.lora_activations import loaded_scales, measure_pair
from interp.lora_delta import (
    INTRUDER_COUNT,
    delta_spectrum,
    delta_svd,
    intruders,
    leading_svd,
    leading_svd_of_sum,
    overlap,
    random_overlap,
    spectrum_metrics,
)
from interp.lora_files import BaseWeights, LoraFiles, LoraModule, NotAvailable
from interp.lora_svd_report import figures, plot, table
from interp.lora_svd_summary import profile, summarise
from interp.run_record import AdapterIdentity, PairPlan, RunFolder
from interp.stats import derive_rng
from interp.subject import Subject, SubjectError

__all__ = ["figures", "main", "measure", "plot", "profile", "summarise"]

COLUMNS = (
    "adapter", "module", "layer", "part", "projection", "pair", "group", "model", "position", "metric", "index",
    "value", "note",
)  # fmt: skip
RANKS = ("stable_rank", "effective_rank", "energy_rank_90", "energy_rank_99")
AGAINST_BASE = (
    "relative_frobenius", "relative_spectral", "overlap_left", "overlap_left_random", "overlap_right",
    "overlap_right_random", "intruders", "intruders_undetermined",
)  # fmt: skip
DEFAULT_PAIRS = 8
DESCRIPTION = "Where a LoRA adapter wrote, and how: size, rank and directions of its delta in every module."
EXAMPLE = "python -m interp.lora_svd --adapter ckpt/ep400"


def measure(
    adapter: str | Path,
    base: str | Path | None = None,
    *,
    adapter_only: bool = False,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
) -> pd.DataFrame:
    """Measure the delta of every module of an adapter.

    Args:
        adapter: its folder.
        base: a folder, the built-in name or a hub id; None is what `adapter_config.json` names.
        adapter_only: leave out what needs the base weights.
        seed: of the start vectors of the Krylov methods.
        progress: wraps the batches of modules, to show how far it is.

    Returns:
        One row per module and metric, with the columns
        adapter, module, layer, part, projection: as in `interp.lora_files.LoraModule`; the adapter's folder name.
        pair, group, model, position: empty here; `interp.lora_activations` fills them.
        metric: `rows`, `columns`, `rank`, `scale` of dW (m, n) = s B A; `sigma`, its singular values; those of
            `interp.lora_delta.spectrum_metrics`; and against the base weight W `relative_frobenius` ||dW||_F / ||W||_F,
            `relative_spectral` sigma_1 / ||W||_2, `overlap_left` and `overlap_right` of dW's 90 % energy directions
            with W's r leading ones, each with the expectation for random ones (`…_random`), and among the first 10
            singular vectors of W + dW the `intruders` and `intruders_undetermined`.
        index: of a singular value, from 1; 0 for all other metrics.
        value: the number; NaN where it is undefined or not available.
        note: why it is NaN; empty otherwise.

    Raises:
        SubjectError: if the folder holds no LoRA adapter whose delta is s B A.
        BaseModelError: if a base was asked for that cannot be had. If the one that the adapter names cannot be had, the
            metrics against it are NaN, and `note` says why.
    """
    files = LoraFiles.open(adapter)
    found = "not asked for" if adapter_only else find_base(files, base)
    return measure_files(files, found, seed=seed, progress=progress)


def find_base(files: LoraFiles, base: str | Path | None = None) -> ResolvedBase | str:
    """The base model, or why the one that the adapter names cannot be had.

    Raises:
        BaseModelError: if `base` is given and cannot be had.
    """
    try:
        return resolve_base(files.folder, base)
    except BaseModelError as error:
        if base is not None:
            raise
        return str(error)


def measure_files(
    files: LoraFiles, base: ResolvedBase | str, *, seed: int = 0, progress: Callable[[Iterable], Iterable] = iter
) -> pd.DataFrame:
    """As `measure`, with what `LoraFiles.open` and `find_base` return."""
    source = _open_base(base)
    rows: list[dict[str, Any]] = []
    for modules in progress(files.batches()):
        b, a = files.factors(modules)
        rows += _spectra(modules, b, a)
        for module, b_one, a_one in zip(modules, b, a, strict=True):
            rows += _against_base(module, b_one, a_one, source, seed)
    frame = pd.DataFrame(rows).assign(adapter=files.name, pair="", group="", model="", position="")
    return frame.sort_values(["layer", "module"], kind="stable", ignore_index=True)[list(COLUMNS)]


def _open_base(base: ResolvedBase | str) -> BaseWeights | str:
    """The base model's weights, or why they are not available."""
    if isinstance(base, str):
        return base
    try:
        return BaseWeights(base.path)
    except NotAvailable as error:
        return str(error)


def _spectra(modules: Sequence[LoraModule], b: Tensor, a: Tensor) -> Iterator[dict[str, Any]]:
    """The rows that need the factors only, of modules of one shape and rank."""
    shape, rank = modules[0].shape, modules[0].rank
    sigma = delta_spectrum(b, a, b.new_tensor([module.scale for module in modules]))
    metrics = spectrum_metrics(sigma, shape)
    for i, module in enumerate(modules):
        fixed = {"rows": shape[0], "columns": shape[1], "rank": rank, "scale": module.scale}
        for metric, value in (fixed | {name: values[i] for name, values in metrics.items()}).items():
            zero = metric in RANKS and metrics["spectral"][i] == 0
            yield _row(module, metric, value, note="the delta is zero" if zero else "")
        for index, value in enumerate(sigma[i].tolist(), start=1):
            yield _row(module, "sigma", value, index)


def _against_base(
    module: LoraModule, b: Tensor, a: Tensor, source: BaseWeights | str, seed: int
) -> Iterator[dict[str, Any]]:
    """The rows that compare a module's delta with the base weight under it."""
    found, note = dict.fromkeys(AGAINST_BASE, nan), ""
    try:
        if isinstance(source, str):
            raise NotAvailable(source)
        found |= _comparison(module, b, a, source.read(module), seed)
    except NotAvailable as error:
        note = f"base weight not available: {error}"
    except ArpackNoConvergence:
        note = "the Krylov SVD did not converge"
    for metric, value in found.items():
        undefined = "" if value == value else note or "the delta or the base weight is zero"
        yield _row(module, metric, value, note=undefined)


def _comparison(module: LoraModule, b: Tensor, a: Tensor, weight: Tensor, seed: int) -> dict[str, float]:
    """Metric -> value; what is undefined, since dW or W is zero, is left out."""
    norm = float(linalg.norm(weight.numpy().ravel()))
    delta = delta_svd(b, a, module.scale)
    size = float(linalg.norm(delta.sigma.numpy()))
    if norm == 0:
        return {}
    rank = min(module.rank, *module.shape)
    rng = derive_rng(seed, "lora_svd", module.name)
    own = leading_svd(weight, max(rank, 2 * INTRUDER_COUNT), rng)
    found = {"relative_frobenius": size / norm, "relative_spectral": float(delta.sigma[0] / own.sigma[0])}
    if size == 0:  # W + 0 has W's own singular vectors
        return found | {"intruders": 0, "intruders_undetermined": 0}
    count = int(spectrum_metrics(delta.sigma, module.shape)["energy_rank_90"])
    wrote, leading = delta.directions(count), own.directions(rank)
    tuned = leading_svd_of_sum(weight, b, a, module.scale, INTRUDER_COUNT, rng)
    intruding = intruders(tuned, own)
    return found | {
        "overlap_left": overlap(wrote.left, leading.left),
        "overlap_left_random": random_overlap(count, rank, module.shape[0]),
        "overlap_right": overlap(wrote.right, leading.right),
        "overlap_right_random": random_overlap(count, rank, module.shape[1]),
        "intruders": intruding.count,
        "intruders_undetermined": intruding.undetermined,
    }


def _row(module: LoraModule, metric: str, value: float, index: int = 0, note: str = "") -> dict[str, Any]:
    return {
        "module": module.name, "layer": module.layer, "part": module.part, "projection": module.projection,
        "metric": metric, "index": index, "value": float(value), "note": note,
    }  # fmt: skip


def analyse(
    args: argparse.Namespace,
    argv: Sequence[str],
    adapter: Path,
    subject: Subject | None = None,
    plan: PairPlan | None = None,
) -> dict[str, Any]:
    """Measure one adapter, write everything, print the table, and return the summary.

    Args:
        subject, plan: the loaded model and pairs for the functional size; without them it is left out.
    """
    files = LoraFiles.open(adapter)
    base = "not asked for" if args.adapter_only else find_base(files, args.base)
    run = RunFolder.open("lora_svd", args, argv, subject or identity(files, base))
    bar = cli.progress_bar(args, f"SVD of {files.name}", unit="batch")
    frame = measure_files(files, base, seed=args.seed, progress=bar)
    if subject is not None and plan is not None:
        _check_scales(files, loaded_scales(subject))
        bar = cli.progress_bar(args, f"activations of {files.name}")
        sizes = run.collect(plan.encoded, partial(measure_pair, subject), bar)
        sizes = sizes.assign(adapter=files.name, index=0, note="")[list(COLUMNS)]
        frame = pd.concat([frame, sizes], ignore_index=True)
    left_out = [{"id": key, "reason": reason} for key, reason in files.left_out]
    left_out += plan.left_out_records() if plan else []
    summary = summarise(frame, args.seed) | {"left_out": left_out}
    run.finish(plan, frame, summary, figures(frame, args.seed))
    cli.say(args, f"{table(summary)}\nleft out: {len(left_out)}\nwritten to {run.folder}")
    return summary


def identity(files: LoraFiles, base: ResolvedBase | str) -> AdapterIdentity:
    """What the record of a run without a model says it is about."""
    known: Mapping[str, str | None]
    if isinstance(base, str):
        known = {"name": files.config.base_model_name_or_path, "sha256": None, "why": base}
    else:
        known = base.identity()
    return AdapterIdentity(files.name, files.sha256, known)


def _check_scales(files: LoraFiles, scales: Mapping[str, float]) -> None:
    for module in files.modules:
        if (loaded := scales.get(module.name)) != module.scale:
            raise SubjectError(
                f"{files.folder}: {module.name}: expected the scale of the loaded layer, {loaded}, found "
                f"{module.scale} by the rules for adapter_config.json"
            )


@cli.command
def main(argv: Sequence[str]) -> int:
    """Measure, summarise and draw each adapter; with several, how the delta grows and turns from one to the next."""
    args = _parser().parse_args(argv)
    folders = cli.adapter_folders(args)
    args.count = args.count or (None if args.pairs else DEFAULT_PAIRS)
    for adapter in folders:
        if args.adapter_only or args.no_activations:
            analyse(args, argv, adapter)
            continue
        pairs = cli.load_pairs(args, adapter)
        subject = cli.load_subject(args, adapter)
        analyse(args, argv, adapter, subject, PairPlan.make(subject.tokenizer, pairs))
    if len(folders) > 1:
        lora_svd_growth.analyse(args, argv, folders)
    return cli.DONE


def _parser() -> argparse.ArgumentParser:
    parser = cli.common_parser("lora_svd", DESCRIPTION, example=EXAMPLE)
    parser.add_argument("--no-activations", action="store_true", help="load no model: leave out the functional size")
    parser.add_argument(
        "--adapter-only", action="store_true", help="read the adapter's file alone: nothing of the base"
    )
    parser.add_argument("--series", metavar="NAME", help="name of a series of adapters (default: first-last)")
    parser.set_defaults(count=None)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
