"""How the engine's time grows, how far it is from the least that it could take, and what a large model would take.

    python -m tests.benchmarks.scale [--parts curves floor large bfloat16] [--rounds N] [--threads N] [--out DIR]

curves    seconds against T (prompt tokens), S (tokens from the value on), L (layers), heads and pairs, on random models
          of SmolLM2-135M's shapes with a live adapter of rank 8; fitted by a + b n and a n^b, with 95 % intervals of b
floor     a sweep beside its matrix products alone and at the machine's highest rate (`tests.benchmarks.scale_floor`)
large     two layers of Llama-3.1-8B's shapes, extrapolated (`tests.benchmarks.scale_large`)
bfloat16  the real adapter in float32 and bfloat16 on the same pairs: flip layers, effect, recovery, seconds

Times are the fastest of the rounds: what else the machine does only adds to them. `--out` receives scale.parquet
(the curves' points), scale.json, and scale.pdf, .png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy import stats

from counterfactuals import generate_pairs
from interp import figures
from interp.components import patch_component
from interp.stats import flip_layer, recovery
from interp.subject import Subject
from interp.sweep import patch, run_pair
from interp.tokens import EncodedPair, encode_pairs
from tests.benchmarks.machine import best, machine, positive, timed, write_json
from tests.benchmarks.scale_floor import highest_rate, measure_floor
from tests.benchmarks.scale_large import measure_large
from tests.benchmarks.scale_models import SMOLLM2, make_model, make_pair

LENGTH, SUFFIX = 300, 48
POINTS = {
    "tokens": (150, 300, 450, 600),
    "suffix": (12, 24, 48, 96, 192),
    "layers": (6, 12, 18, 24, 30),
    "heads": (3, 9, 18, 36),
    "pairs": (1, 2, 3),
}
CROWDED = (24, 96, 450)  # of the sizes, those whose labels have no room
PARTS = ("curves", "floor", "large", "bfloat16")


@dataclass(frozen=True)
class Fit:
    """y = intercept + slope n, or y = factor n^exponent, least squares (the latter on logarithms).

    Attributes:
        slope, exponent: with the 95 % interval of Student's t, which two points do not have: then None.
        factor: seconds at n = 1.
    """

    intercept: float
    slope: float
    slope_interval: tuple[float, float] | None
    factor: float
    exponent: float
    exponent_interval: tuple[float, float] | None


def fit(n: ArrayLike, seconds: ArrayLike) -> Fit:
    """Both forms to the same points."""
    line, power = stats.linregress(n, seconds), stats.linregress(np.log(n), np.log(seconds))
    degrees = np.size(n) - 2

    def interval(found: Any) -> tuple[float, float] | None:
        if degrees < 1:
            return None
        half = stats.t.ppf(0.975, degrees) * found.stderr
        return float(found.slope - half), float(found.slope + half)

    return Fit(
        intercept=float(line.intercept),
        slope=float(line.slope),
        slope_interval=interval(line),
        factor=float(np.exp(power.intercept)),
        exponent=float(power.slope),
        exponent_interval=interval(power),
    )


def points(rounds: int) -> Iterator[dict[str, Any]]:
    """{axis, n, work, seconds} of every curve; one size varies at a time, the others stay as they are in SmolLM2."""
    model = make_model(SMOLLM2)
    for axis, sizes in POINTS.items():
        for n in sizes:
            causal, pair = model, make_pair(LENGTH, SUFFIX, SMOLLM2.vocabulary)
            if axis == "layers":
                causal = make_model(replace(SMOLLM2, layers=n))
            elif axis == "heads":
                causal = make_model(replace(SMOLLM2, heads=n, kv_heads=n // 3))
            elif axis == "tokens":
                pair = make_pair(n, SUFFIX, SMOLLM2.vocabulary)
            elif axis == "suffix":
                pair = make_pair(LENGTH, n, SMOLLM2.vocabulary)
            for name, work in works(causal, pair, axis, n):
                yield {"axis": axis, "n": n, "work": name, "seconds": best(work, rounds)}
            print(f"{axis} {n}", file=sys.stderr)


def works(causal: Any, pair: EncodedPair, axis: str, n: int) -> list[tuple[str, Callable[[], Any]]]:
    """What is timed along an axis, by name."""
    a, b = run_pair(causal, pair)

    def both(pair: EncodedPair) -> None:
        donor, recipient = run_pair(causal, pair)
        for position in (pair.decision, pair.first_difference):
            patch(causal, recipient, donor, [position])

    if axis == "pairs":
        pairs = [make_pair(LENGTH, SUFFIX, SMOLLM2.vocabulary, seed=seed) for seed in range(n)]

        def all_pairs() -> None:
            for other in pairs:
                both(other)

        return [("caches and sweeps", all_pairs)]
    if axis == "heads":
        layer = [causal.config.num_hidden_layers // 2]
        return [("heads of a layer", lambda: patch_component(causal, b, a, [pair.decision], "heads", layer))]
    return [
        ("caches", lambda: run_pair(causal, pair)),
        ("decision", lambda: patch(causal, b, a, [pair.decision])),
        ("value", lambda: patch(causal, b, a, [pair.first_difference])),
    ]


def curves(rounds: int, out: Path) -> dict[str, Any]:
    """Axis -> work -> fit; writes scale.parquet, scale.pdf and scale.png."""
    frame = pd.DataFrame(points(rounds))
    frame.to_parquet(out / "scale.parquet", index=False)
    figures.save(plot(frame), out / "scale")
    found: dict[str, Any] = {axis: {} for axis in POINTS}
    for key, part in frame.groupby(["axis", "work"], sort=False):
        axis, work = map(str, key)
        found[axis][work] = asdict(fit(part["n"], part["seconds"]))
    return found


def plot(frame: pd.DataFrame) -> Figure:
    """A panel per axis: points, and the power law through them."""
    colours = {"caches": figures.GREY, "decision": figures.BLUE, "value": figures.ORANGE,
               "caches and sweeps": figures.GREEN, "heads of a layer": "#56B4E9"}  # fmt: skip
    names = {"tokens": "prompt tokens, T", "suffix": "from the value on, S", "layers": "layers, L"}
    with figures.style():
        figure = Figure(figsize=(2 * figures.COLUMN, 1.8))
        for axes, axis in zip(figure.subplots(1, len(POINTS)), POINTS, strict=True):
            for work, part in frame[frame["axis"] == axis].groupby("work", sort=False):
                colour, found = colours[str(work)], fit(part["n"], part["seconds"])
                n = np.geomspace(part["n"].min(), part["n"].max())
                axes.plot(n, found.factor * n**found.exponent, color=colour, linewidth=0.8)
                axes.plot(part["n"], part["seconds"], "o", color=colour, markersize=3, label=work)
                end = (n[-1], found.factor * n[-1] ** found.exponent)
                figures.label(axes, f"$n^{{{found.exponent:.2f}}}$", end, (4, 0), colour=colour)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.margins(x=0.3)
            axes.minorticks_off()
            axes.set_xticks(POINTS[axis], ["" if n in CROWDED else str(n) for n in POINTS[axis]])
            axes.set_xlabel(names.get(axis, axis))
        figure.axes[0].set_ylabel("seconds")
        made = dict(pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(made.values(), made.keys(), loc="outside upper center", ncols=len(made))
    return figure


def floor(rounds: int) -> dict[str, Any]:
    """The two sweeps of a pair, with a live adapter, and as a model without one."""
    found = {}
    for name, shape in (("adapter", SMOLLM2), ("no_adapter", replace(SMOLLM2, rank=0))):
        causal, pair = make_model(shape), make_pair(LENGTH, SUFFIX, shape.vocabulary)
        rate = highest_rate(causal)
        for place, position in (("decision", pair.decision), ("value", pair.first_difference)):
            found[f"{place}_{name}"] = measure_floor(causal, pair, position, rate, rounds)
    return found


def bfloat16(adapter: Path, base: str | None, count: int, seed: int) -> dict[str, Any]:
    """Float32 against bfloat16, trained model, denoising: effect A - B in logits, flip layers, recovery, seconds."""
    found: dict[str, dict[str, Any]] = {}
    recovered: dict[str, np.ndarray[Any, Any]] = {}
    for dtype in ("float32", "bfloat16"):
        subject = Subject.load(adapter, base, dtype=dtype)
        pairs, _ = encode_pairs(subject.tokenizer, generate_pairs(count, seed=seed))
        margins(subject, pairs[0])  # compared with the model's own forward, once
        seconds, tables = timed(lambda subject=subject, pairs=pairs: np.stack([margins(subject, p) for p in pairs]))  # type: ignore[misc]
        b, a = tables[:, :1, 0], tables[:, :1, 1]  # (pairs, 1)
        mean = [recovery(tables[:, 1 + at, 2:].mean(0), b.mean(), a.mean(), 1e-9) for at in (0, 1)]
        recovered[dtype] = np.stack([recovery(tables[:, 1 + at, 2:], b, a, 1e-3) for at in (0, 1)])
        found[dtype] = {
            "effect": float((a - b).mean()),
            "value_flip": _number(flip_layer(mean[0], "falling")),
            "decision_flip": _number(flip_layer(mean[1], "rising")),
            "seconds_per_pair": seconds / len(pairs),
        }
    errors = np.abs(recovered["bfloat16"] - recovered["float32"])
    return {
        "pairs": len(pairs),
        **found,
        "recovery_error": {"median": _number(np.nanmedian(errors)), "largest": _number(np.nanmax(errors))},
    }


def margins(subject: Subject, pair: EncodedPair) -> np.ndarray[Any, Any]:
    """(3, L + 3): row 0 holds m of B and A; rows 1 and 2, from column 2, m by layer patched at value and decision."""
    a, b = run_pair(subject, pair)
    found = torch.zeros(3, subject.n_layers + 3, dtype=torch.float64)
    for number, run in enumerate((b, a)):
        found[0, number] = run.logits[pair.answer[0]] - run.logits[pair.foil[0]]
    for row, position in enumerate((pair.first_difference, pair.decision), start=1):
        logits = patch(subject, b, a, [position]).logits
        found[row, 2:] = logits[:, pair.answer[0]] - logits[:, pair.foil[0]]
    return found.numpy()


def _number(value: Any) -> float | None:
    """None where there is none: a curve without a flip."""
    return None if np.isnan(value) else float(value)


def report(found: dict[str, Any]) -> str:
    """The numbers that a reader wants first."""
    lines = []
    for axis, works_found in found.get("curves", {}).items():
        for work, law in works_found.items():
            between = law["exponent_interval"]
            shown = "no interval" if between is None else f"{between[0]:.2f} to {between[1]:.2f}"
            lines.append(f"{axis:8}{work:18} n^{law['exponent']:.2f} ({shown}), or {law['intercept']:.3f} s + "
                         f"{1000 * law['slope']:.3g} ms n")  # fmt: skip
    for name, entry in found.get("floor", {}).items():
        off = "" if entry["adapter_off"] is None else f", adapter skipped {entry['adapter_off']:.3f} s"
        shares = ", ".join(f"{group} {share:.0%}" for group, share in entry["shares"].items())
        lines.append(
            f"{name:20} {entry['measured']:.3f} s = {entry['times_products_alone']:.2f} x its products alone = "
            f"{entry['times_highest_rate']:.2f} x these at {entry['rate'] / 1e9:.0f} GFLOP/s{off}, "
            f"system {entry['system_seconds']:.3f} s for {entry['page_faults']} page faults; {shares}"
        )
    if large := found.get("large"):
        lines.append(f"Llama-3.1-8B, bfloat16, extrapolated: decision {large['decision']['seconds_of_real']:.1f} s, "
                     f"value {large['value']['seconds_of_real']:.0f} s, job {large['job_of_real']:.0f} s, memory "
                     f"{large['bytes_of_real']['total'] / 1e9:.1f} GB")  # fmt: skip
    if precision := found.get("bfloat16"):
        lines += [f"{dtype}: {precision[dtype]}" for dtype in ("float32", "bfloat16")]
        lines.append(f"recovery, bfloat16 - float32: {precision['recovery_error']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument(
        "--adapter", type=Path, default=Path("ckpt/imitation"), help="for bfloat16 (default: %(default)s)"
    )
    parser.add_argument("--base", help="for bfloat16 (default: what the adapter names)")
    parser.add_argument("--pairs", type=positive, default=4, help="for bfloat16 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of these pairs (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--threads", type=positive, default=2, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("reports/benchmarks"), help="default: %(default)s")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "curves": lambda: curves(args.rounds, args.out),
        "floor": lambda: floor(args.rounds),
        "large": lambda: measure_large(LENGTH, SUFFIX, args.rounds),
        "bfloat16": lambda: bfloat16(args.adapter, args.base, args.pairs, args.seed),
    }
    found: dict[str, Any] = {"machine": machine(["torch", "transformers", "peft"]), "rounds": args.rounds}
    for part in PARTS:
        if part in args.parts:
            seconds, found[part] = timed(work[part])
            print(f"{part}: {seconds:.0f} s", file=sys.stderr)
            write_json(args.out / "scale.json", found)
    print(report(found))


if __name__ == "__main__":
    main()
