"""How long the passes of a sweep may be, so that it stays below a number of bytes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from interp.subject import Subject, SubjectError

if TYPE_CHECKING:
    from interp.sweep import Run

PROOF_ROWS = 3  # of the comparison of a pass with the model's own forward

_limits: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class MemoryLimitError(SubjectError):
    """A model or a sweep of it that does not fit into the memory it was given."""


def limit_memory(model: Subject | nn.Module, size: int) -> None:
    """Keep what sweeps of a model hold, its weights included, below a number of bytes, by shorter passes.

    Shorter passes give the same numbers up to rounding. It is a bound on tensors, from above, as `_fixed_bytes` and
    `_row_bytes` count them; the interpreter and its libraries take some hundred megabytes besides.

    Raises:
        MemoryLimitError: if the weights alone do not fit.
    """
    causal = model.causal_lm if isinstance(model, Subject) else model
    if (weights := _weight_bytes(causal)) >= size:
        raise MemoryLimitError(
            f"--max-memory: expected more than the weights of {type(causal).__name__} take, {weights / 1e6:.4g} MB, "
            f"found {size / 1e6:.4g} MB; --load-in-4bit makes them smaller"
        )
    _limits[causal] = size


def rows_that_fit(causal: Any, recipient: Run, positions: Sequence[int], cells: int, most: int) -> int:
    """How many rows a pass of a sweep may have, `most` if there is no limit.

    Args:
        positions: patched, ascending; a pass begins at the first one.
        cells: of the whole sweep.

    Raises:
        MemoryLimitError: if not even one row fits.
    """
    if (limit := _limits.get(causal)) is None:
        return most
    fixed, each = _fixed_bytes(causal, recipient, positions, cells), _row_bytes(causal, recipient, positions[0])
    proof = PROOF_ROWS * _row_bytes(causal, recipient, recipient.start)
    least = fixed + max(proof, _row_bytes(causal, recipient, 0))  # a whole prompt is run at least once, in one row
    if least > limit:
        raise MemoryLimitError(
            f"--max-memory: expected {least / 1e6:.4g} MB or more for a sweep over {len(recipient.ids)} tokens, found "
            f"{limit / 1e6:.4g} MB"
        )
    return min(most, (limit - fixed) // each)


def _weight_bytes(causal: nn.Module) -> int:
    """Of parameters and buffers; of 4-bit weights with their scales, and room for the largest of them unpacked."""
    weights = [*causal.parameters(), *causal.buffers()]
    packed = [state for weight in weights if (state := getattr(weight, "quant_state", None)) is not None]
    scales = sum(state.absmax.nbytes for state in packed)
    unpacked = max((4 * math.prod(state.shape) for state in packed), default=0)
    return sum(weight.nbytes for weight in weights) + scales + unpacked


def _fixed_bytes(causal: Any, recipient: Run, positions: Sequence[int], cells: int) -> int:
    """What a sweep holds whatever the length of its passes: weights, runs, masks and results.

    Runs: of both models, each of two prompts, and room for the list of which `run_pair` makes a third one.
    """
    tensors = (recipient.residual, *recipient.keys, *recipient.values, *recipient.components.values())
    runs = 3 * sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    end, config = len(recipient.ids) + len(recipient.tail), causal.config.get_text_config()
    groups = config.num_attention_heads // recipient.keys[0].shape[1]
    masks = 5 * groups * (end - positions[0]) * end  # as bool and as float
    results = 4 * cells * (3 * recipient.logits.shape[-1] + 2 * len(positions) * recipient.residual.shape[-1])
    return _weight_bytes(causal) + runs + masks + results


def _row_bytes(causal: Any, recipient: Run, first: int) -> int:
    """What one row of a pass takes at most. Norms and adapters compute in float32, so that is what is counted."""
    config, end = causal.config.get_text_config(), len(recipient.ids) + len(recipient.tail)
    model, (kv_heads, _, head) = recipient.residual.shape[-1], recipient.keys[0].shape[1:]
    inner = config.intermediate_size * (getattr(config, "num_experts_per_tok", None) or 1)
    wide = max(inner, config.num_attention_heads * head)  # six at once: a linear layer, its adapter, their sum, …
    stream = (end - first) * (10 * model + 6 * wide)
    return 4 * (stream + 4 * end * kv_heads * head + 3 * len(recipient.answer) * recipient.logits.shape[-1])
