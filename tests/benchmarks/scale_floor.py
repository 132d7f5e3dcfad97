"""How far a sweep is from the least that its matrix products take, and what takes the rest.

A sweep at a position S tokens before the end, the answer's tail included, is a batch of i rows of S tokens in layer i:
the cell of layer 0 is one of the two runs, whatever the position. Its floor is counted in token-layers, a token through
the seven matrices of a layer:

    S L (L - 1) / 2,  less the last layer's tokens that nothing reads: S - kept of each row, but for keys and values

Three times are compared: these operations at the highest rate that was measured here (of one layer's products at
`MANY` tokens), the same matrix products one after another at the sizes that they really have (with the model's own
weights, and nothing between them), and the sweep.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from interp.sweep import patch, run_pair
from interp.tokens import EncodedPair
from tests.benchmarks.machine import best, timed

MANY = 2048
KEYS_AND_VALUES = ("k_proj", "v_proj")
GROUPS = {  # of profiled operators, by the first of these that the name contains
    "attention": ("attention", "softmax"),
    "matrix products": ("addmm", "::mm", "bmm", "matmul", "::linear"),
    "copies": ("cat", "copy_", "clone", "contiguous", "index", "expand", "repeat", "::to", "empty", "resize", "fill"),
}


def token_layers(length: int, layers: int) -> int:
    """Of a sweep over all layers whose rows have `length` tokens."""
    return length * layers * (layers - 1) // 2


def measure_floor(causal: Any, pair: EncodedPair, position: int, rate: float, rounds: int) -> dict[str, Any]:
    """Floors, time and breakdown of the sweep at one position, B patched from A, in seconds.

    Args:
        rate: the machine's, operations per second, as `highest_rate` gives it.
    """
    recipient, donor = reversed(run_pair(causal, pair))
    decoder = causal.get_decoder()
    length, kept = len(pair.ids_a) - position + len(recipient.tail), len(pair.answer)

    def sweep() -> Any:
        return patch(causal, recipient, donor, [position])

    sweep()
    before = resource.getrusage(resource.RUSAGE_SELF)
    sweep()
    after = resource.getrusage(resource.RUSAGE_SELF)
    measured = best(sweep, rounds)
    plan = products(decoder, length, kept)
    operations = sum(2 * rows * weight.numel() for rows, weight in plan)
    alone = best(_runner(plan), rounds)
    return {
        "position": position,
        "tokens": length,
        "token_layers": token_layers(length, len(decoder.layers)),
        "operations": operations,
        "rate": rate,
        "at_the_highest_rate": operations / rate,
        "products_alone": alone,
        "measured": measured,
        "times_products_alone": measured / alone,
        "times_highest_rate": measured * rate / operations,
        "adapter_off": _without_adapter(causal, sweep, rounds),
        "system_seconds": after.ru_stime - before.ru_stime,
        "page_faults": after.ru_minflt - before.ru_minflt,
        "shares": breakdown(sweep),
    }


def highest_rate(causal: Any) -> float:
    """Operations per second of the fastest of a layer's products at `MANY` tokens."""
    rates = []
    for name, module in causal.get_decoder().layers[0].named_modules():
        if not name.endswith("_proj"):
            continue
        weight = module.weight
        given = torch.ones(MANY, weight.shape[1], dtype=weight.dtype)

        def product(given: Tensor = given, weight: Tensor = weight) -> Tensor:
            return nn.functional.linear(given, weight)

        with torch.inference_mode():
            rates.append(2 * MANY * weight.numel() / best(product, 5, least=0.05))
    return max(rates)


@torch.inference_mode()
def breakdown(work: Callable[[], Any]) -> dict[str, float]:
    """Shares of the time under a profiler: groups of operators, and what is left, interpreter and profiler included."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        seconds, _ = timed(work)
    shares = dict.fromkeys([*GROUPS, "element by element"], 0.0)
    for event in recorded.key_averages():
        name = str(event.key)
        group = next((g for g, parts in GROUPS.items() if any(part in name for part in parts)), "element by element")
        shares[group] += event.self_cpu_time_total / 1e6 / seconds
    return {**shares, "interpreter": 1 - sum(shares.values())}


def products(decoder: Any, length: int, kept: int) -> list[tuple[int, Tensor]]:
    """(rows, weight) of every matrix product of a sweep over all layers, in order, adapters included."""
    plan: list[tuple[int, Tensor]] = []
    for index, layer in enumerate(decoder.layers):
        modules = {name: module for name, module in layer.named_modules() if name.endswith("_proj")}
        for name, module in modules.items():
            short = index == len(decoder.layers) - 1 and not name.endswith(KEYS_AND_VALUES)
            rows = index * (kept if short else length)
            weights = [module.weight]
            if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
                active = module.active_adapters[0]
                weights += [module.lora_A[active].weight, module.lora_B[active].weight]
            plan += [(rows, weight) for weight in weights]
    return plan


def _runner(plan: list[tuple[int, Tensor]]) -> Callable[[], None]:
    """The products alone: inputs are made beforehand, outputs dropped."""
    longest: dict[int, int] = {}
    for rows, weight in plan:
        longest[weight.shape[1]] = max(rows, longest.get(weight.shape[1], 0))
    given = {inputs: torch.ones(rows, inputs, dtype=plan[0][1].dtype) for inputs, rows in longest.items()}

    @torch.inference_mode()
    def run() -> None:
        for rows, weight in plan:
            nn.functional.linear(given[weight.shape[1]][:rows], weight)

    return run


def _without_adapter(causal: Any, sweep: Callable[[], Any], rounds: int) -> float | None:
    """Seconds of the same sweep with the adapter's matrices skipped; None for a model without one."""
    switches = [module for module in causal.modules() if isinstance(module, BaseTunerLayer)]
    if not switches:
        return None
    taken = [module.forward for module in switches]
    try:
        for module in switches:
            module.forward = module.get_base_layer().forward
        return best(sweep, rounds)
    finally:
        for module, forward in zip(switches, taken, strict=True):
            module.forward = forward
