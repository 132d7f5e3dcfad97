"""What a sweep of Llama-3.1-8B would take on this machine, from two of its layers in bfloat16.

A layer's time at r rows is that of r cells patched at layer 0 less that of r cells at layer 1 of a model of two
layers: what is left is one whole layer. The real model runs r = 1, 2, …, L - 1 rows through its layers, the first one
excepted; between the rows that were measured time is interpolated linearly. Assumed is that all layers cost the same
(the last one is cheaper), that the whole model is in memory, and that it has no adapter; not counted are the
interpreter and what it takes to load a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from interp.sweep import Run, checked, drive, run_pair
from tests.benchmarks.machine import best, memory, reset_peak
from tests.benchmarks.scale_models import LLAMA_8B, Shape, make_model, make_pair

ROWS = (1, 8, 32)
BYTES = 2  # of a bfloat16


def measure_large(length: int = 300, suffix: int = 48, rounds: int = 2, real: Shape = LLAMA_8B) -> dict[str, Any]:
    """Seconds and bytes, measured and extrapolated to `real`; rows at the decision have one token, at the value S."""
    shape = replace(real, layers=2, vocabulary=1024)  # the unembedding is measured apart
    causal = make_model(shape, dtype=torch.bfloat16)
    pair = make_pair(length, suffix, shape.vocabulary)
    a, b = run_pair(causal, pair)
    caches = best(lambda: run_pair(causal, pair), rounds) / shape.layers
    found: dict[str, Any] = {
        "real": vars(real),
        "measured_layers": shape.layers,
        "tokens": length,
        "from_value_on": suffix,
        "caches_per_layer": caches,
        "unembedding_per_row": _unembedding(real),
    }
    for name, position in (("decision", pair.decision), ("value", pair.first_difference)):
        found[name] = _sweep(causal, b, a, position, rounds, real)
        found[name]["seconds_of_real"] += real.layers * found["unembedding_per_row"]
    found["job_of_real"] = real.layers * caches + 2 * sum(
        found[name]["seconds_of_real"] for name in ("decision", "value")
    )
    found["bytes_of_real"] = _bytes(
        real, shape, (a, b), max(found[name]["pass_bytes"] for name in ("decision", "value"))
    )
    return found


def _sweep(causal: Any, recipient: Run, donor: Run, position: int, rounds: int, real: Shape) -> dict[str, Any]:
    causal, decoder, chosen = checked(causal, recipient, donor, [position])
    tokens = len(recipient.ids) - position
    seconds = []
    for rows in ROWS:

        def cells(layer: int, rows: int = rows) -> Any:
            value = donor.residual[layer, position - donor.start][None]
            return drive(causal, decoder, recipient, chosen, [(layer, value)] * rows)

        with torch.inference_mode():
            whole, last = (best(lambda layer=layer: cells(layer), rounds, least=0.2) for layer in (0, 1))  # type: ignore[misc]
        seconds.append(whole - last)
    with torch.inference_mode():
        reset_peak()
        before = memory("VmRSS")
        cells(0, real.layers)
        pass_bytes = max(0, memory("VmHWM") - before)
    each = np.interp(range(1, real.layers), ROWS, seconds)
    return {
        "rows": list(ROWS),
        "seconds_of_a_layer": seconds,
        "seconds_per_token_layer": seconds[-1] / (ROWS[-1] * tokens),
        "rate": 2 * real.layer_weights * ROWS[-1] * tokens / seconds[-1],
        "seconds_of_real": float(each.sum()),
        "pass_bytes": pass_bytes,
    }


def _unembedding(real: Shape) -> float:
    """Seconds per row, from a sixteenth of the vocabulary."""
    part = torch.zeros(real.vocabulary // 16, real.width, dtype=torch.bfloat16)
    rows = torch.zeros(real.layers, real.width, dtype=torch.bfloat16)
    return 16 * best(lambda: nn.functional.linear(rows, part), 3) / real.layers


def _bytes(real: Shape, shape: Shape, runs: tuple[Run, Run], pass_bytes: int) -> dict[str, int]:
    """Weights, the runs of A and B of base and trained model (their share per layer is measured), and one pass."""
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for run in runs
        for tensor in (run.residual, *run.keys, *run.values, *run.components.values())
    }
    found = {
        "weights": BYTES * real.weights,
        "runs": 2 * sum(tensors.values()) * real.layers // shape.layers,
        "pass": pass_bytes,
    }
    return {**found, "total": sum(found.values())}
