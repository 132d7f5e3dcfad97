"""How large a LoRA delta is on the inputs that a module really gets: E ||dW x|| / E ||W x||.

A delta may be large in directions that no input has. Measured on a pair's prompt A with both models' own activations
x: those of the trained model, and those of the base model. The first position is left out: it takes the attention that
has no other use, and its activations, hundreds of times larger than the rest, would be most of a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pandas as pd
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from interp.lora_files import module_place
from interp.subject import Subject
from interp.tokens import EncodedPair

COLUMNS = ("module", "layer", "part", "projection", "pair", "group", "model", "position", "metric", "value")


def functional_size(
    subject: Subject, pairs: Sequence[EncodedPair], *, progress: Callable[[Iterable], Iterable] = iter
) -> pd.DataFrame:
    """Norms of what the delta and the base weight make of the same inputs, in every adapted linear module.

    Embeddings, whose input is a token id, are not measured.

    Returns:
        One row per pair, model, module, position and metric, with the columns
        pair, group: the pair's.
        model: `trained` or `base`, whose activations x are.
        module, layer, part, projection: as in `interp.lora_files.LoraModule`.
        position: `prompt`, the mean over all positions but the first, or `decision`.
        metric: `delta_output` ||dW x||, `base_output` ||W x|| (without its bias). The functional size of several pairs
            is the ratio of the two means.
        value: the number, in the units of the activations.

    Raises:
        ValueError: if there are no pairs.
    """
    frames = [measure_pair(subject, pair) for pair in progress(pairs)]
    if not frames:
        raise ValueError("pairs: expected at least one, found none")
    return pd.concat(frames, ignore_index=True)


@torch.inference_mode()
def measure_pair(subject: Subject, pair: EncodedPair) -> pd.DataFrame:
    """The rows of one pair, as described in `functional_size`."""
    ids = torch.tensor([pair.ids_a], device=subject.model.device)
    rows: list[dict[str, Any]] = []
    for model, switched in (("base", subject.base), ("trained", subject.trained)):
        norms: dict[str, tuple[Tensor, Tensor]] = {}
        with switched(), ExitStack() as hooks:
            for name, layer in _linear_layers(subject):
                keep = partial(_keep_norms, norms, name, layer)
                hooks.callback(layer.base_layer.register_forward_hook(keep).remove)
            subject.causal_lm(input_ids=ids, use_cache=False)
        for name, outputs in norms.items():
            layer_number, part, projection = module_place(name)
            place = {"module": name, "layer": layer_number, "part": part, "projection": projection, "model": model}
            for metric, values in zip(("delta_output", "base_output"), outputs, strict=True):
                rows.append(place | {"position": "prompt", "metric": metric, "value": float(values[1:].mean())})
                rows.append(place | {"position": "decision", "metric": metric, "value": float(values[-1])})
    return pd.DataFrame(rows).assign(pair=pair.id, group=pair.group)[list(COLUMNS)]


def loaded_scales(subject: Subject) -> dict[str, float]:
    """Module -> s, as the loaded layers apply it."""
    modules = subject.causal_lm.named_modules()
    return {name: layer.scaling[_adapter(layer)] for name, layer in modules if isinstance(layer, LoraLayer)}


def _keep_norms(
    norms: dict[str, tuple[Tensor, Tensor]],
    name: str,
    layer: Any,
    base_layer: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> None:
    adapter = _adapter(layer)
    down, up = layer.lora_A[adapter], layer.lora_B[adapter]
    delta = up(down(inputs[0].to(down.weight.dtype))) * layer.scaling[adapter]
    bias = getattr(base_layer, "bias", None)
    own = output if bias is None else output - bias
    norms[name] = _norms(delta), _norms(own)


def _norms(outputs: Tensor) -> Tensor:
    """(1, tokens, m) to (tokens,)."""
    return outputs[0].float().norm(dim=-1).double().cpu()


def _linear_layers(subject: Subject) -> Iterator[tuple[str, Any]]:
    for name, layer in subject.causal_lm.named_modules():
        if isinstance(layer, LoraLayer) and _adapter(layer) in layer.lora_A:
            yield name, layer


def _adapter(layer: Any) -> str:
    (name,) = layer.active_adapters
    return name
