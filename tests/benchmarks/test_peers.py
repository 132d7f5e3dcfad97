"""The benchmarks' own arithmetic, and that all sides find the same: on tiny models, with nothing timed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from interp.sweep import patch, run_pair
from tests.benchmarks.peer_sides import SIDES
from tests.benchmarks.peers import disagreements, summarise, table
from tests.benchmarks.scale import fit
from tests.benchmarks.scale_floor import products, token_layers
from tests.benchmarks.scale_models import LLAMA_8B, Shape, make_model, make_pair
from tests.interp.tiny import tiny_pair_folders

TINY = Shape(width=32, inner=48, heads=4, kv_heads=2, layers=4, vocabulary=64)
CELLS = ("caches", "decision", "value", "heads", "gradient", "job")


def planted(times: dict[str, list[float]], differences: dict[str, float]) -> pd.DataFrame:
    """Every cell of a side takes its time of the round."""
    return pd.DataFrame(
        {"round": number, "pair": "p", "side": side, "cell": cell, "direction": "both", "seconds": seconds,
         "difference": None if cell in ("caches", "job") else differences[side]}
        for side, rounds in times.items()
        for number, seconds in enumerate(rounds)
        for cell in CELLS
    )  # fmt: skip


def test_ratios_are_taken_within_a_round() -> None:
    # A slow third round falls on both sides: the ratio of medians would be 20, the median of ratios is 30.
    frame = planted(
        {"engine": [1.0, 2.0, 9.0], "TransformerLens": [30.0, 40.0, 450.0]},
        {"engine": 0.0, "TransformerLens": 3e-5},
    )
    found = summarise(frame)
    job, decision = found["job"]["TransformerLens"], found["decision"]["TransformerLens"]
    assert (job["ratio"], job["ratio_range"], job["goal"], job["met"]) == (30.0, [20.0, 50.0], 30.0, True)
    assert (decision["difference"], decision["met"]) == (3e-5, False)
    assert "difference" not in job
    assert disagreements(found) == []
    assert "100 x" in table(found)


@pytest.mark.parametrize("difference", [2e-4, float("nan")])
def test_a_side_that_differs_is_named(difference: float) -> None:
    frame = planted({"engine": [1.0], "forwards": [2.0]}, {"engine": 0.0, "forwards": difference})
    named = [line.split(":")[0] for line in disagreements(summarise(frame))]
    assert named == [f"forwards, {cell}" for cell in ("decision", "value", "heads", "gradient")]


def test_all_sides_find_the_same(tmp_path: Path) -> None:
    # In a process of its own: nnsight changes Tensor.backward and adds a method to every object.
    adapter, base = tiny_pair_folders(tmp_path)
    peers = [side for side in SIDES if side != "engine" and (side != "nnsight" or importlib.util.find_spec(side))]
    argv = ["--adapter", adapter, "--base", base, "--rounds", "1", "--threads", "1", "--out", tmp_path, "--peers"]
    command = [sys.executable, "-m", "tests.benchmarks.peers", *map(str, argv), *peers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    for cell in ("decision", "value", "heads", "gradient"):
        assert set(summary["cells"][cell]) == {"engine", *peers}
    frame = pd.read_parquet(tmp_path / "results.parquet")
    assert len(frame) == (1 + len(peers)) * 8
    assert frame["difference"].max() <= 1e-4
    assert all((tmp_path / f"peers.{ending}").stat().st_size for ending in ("pdf", "png"))


def test_a_fit_recovers_what_was_planted() -> None:
    n = [3.0, 10.0, 30.0, 100.0]
    power, line = fit(n, [0.5 * x**1.75 for x in n]), fit(n, [2.0 + 0.25 * x for x in n])
    assert np.allclose([power.exponent, power.factor], [1.75, 0.5])
    assert np.allclose([line.slope, line.intercept], [0.25, 2.0])
    assert power.exponent_interval is not None
    assert np.allclose(power.exponent_interval, 1.75, atol=1e-6)
    assert fit(n[:2], [1.0, 2.0]).slope_interval is None


@pytest.mark.parametrize("place", ["decision", "value"])
def test_the_floor_counts_the_engine_s_own_products(place: str) -> None:
    causal, pair = make_model(TINY), make_pair(20, 7, TINY.vocabulary, answer=2)
    a, b = run_pair(causal, pair)
    position = pair.decision if place == "decision" else pair.first_difference
    patch(causal, b, a, [position])  # the first time the engine compares itself with the model
    counted = 0

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...], _: object) -> None:
        nonlocal counted
        counted += args[0].flatten(0, -2).shape[0] * module.weight.numel()  # type: ignore[operator]

    layers = causal.get_decoder().layers
    for layer in layers:
        for name, module in layer.named_modules():
            if name.endswith("_proj"):
                module.register_forward_hook(count)
    patch(causal, b, a, [position])
    length, kept = len(pair.ids_a) - position + 1, 2
    attention = layers[-1].self_attn
    extra = 3 * (length - kept) * (attention.q_proj.weight.numel() + attention.o_proj.weight.numel())
    assert (
        counted == sum(rows * weight.numel() for rows, weight in products(causal.get_decoder(), length, kept)) + extra
    )
    assert token_layers(length, TINY.layers) == length * (0 + 1 + 2 + 3)


def test_shapes_have_the_real_models_weights() -> None:
    assert LLAMA_8B.weights == 8_030_261_248 - (2 * 32 + 1) * 4096  # of the published model, norms left out
    adapted = replace(TINY, rank=3)
    matrices = [p.numel() for name, p in make_model(adapted).get_decoder().layers[0].named_parameters() if p.ndim == 2]
    assert sum(matrices) == adapted.layer_weights


def test_a_random_pair_differs_where_it_should() -> None:
    pair = make_pair(20, 7, 64, answer=2)
    assert [i for i in range(20) if pair.ids_a[i] != pair.ids_b[i]] == [13] == [pair.first_difference]
    assert (len(pair.ids_b), len(pair.answer)) == (20, 2)
