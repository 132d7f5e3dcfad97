"""The same patches by different means, each as its own users would do them. T tokens, L layers, H heads.

All work on the trained model, on prompts A and B of a pair, and give m = logit(answer) - logit(foil) at the decision,
of the two first tokens that differ. A sweep patches the residual stream that enters each layer at one position.

engine           `interp.sweep` as the analyses use it: the answer's later tokens run along, for its log-probability
engine, prompt   the same on the prompt alone, which is all that the other sides give
TransformerLens  `run_with_cache` with a filter, and its own `patching.generic_activation_patch`
nnsight          one trace with many invokes of the recipient's prompt, each of which patches one cell
forwards         plain Hugging Face forwards with a hook, one per cell

Where a side can be told to unembed the last position only, it is. All share the subject's tensors; TransformerLens and
nnsight have modules of their own around them, since both change the modules that they are given.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import pandas as pd
import torch
from torch import Tensor

from interp.attribution import attribute, gradients
from interp.components import patch_component
from interp.subject import Subject
from interp.sweep import Run, patch, run_pair
from interp.tokens import EncodedPair

INVOKES = 10  # in one trace of nnsight: more are no faster per cell, and hold as many prompts' activations at once
DIRECTIONS = ("denoise", "noise")


class Side(Protocol):
    """One way to patch; `runs` is what `caches` returned for the pair. Heads and gradients are denoising.

    `caches` records what patching needs of both prompts: the stream of all layers, the head outputs of `layer`.
    `residual` is (L,) m with the stream patched at one position, `heads` (H,) m with each head of `layer` patched at
    the decision, and `gradient` (L,) the first-order change of m by the stream at the decision.
    """

    def caches(self, pair: EncodedPair) -> Any: ...
    def residual(self, pair: EncodedPair, runs: Any, direction: str, position: int) -> Tensor: ...
    def heads(self, pair: EncodedPair, runs: Any) -> Tensor: ...
    def gradient(self, pair: EncodedPair, runs: Any) -> Tensor: ...


def margin(logits: Tensor, pair: EncodedPair) -> Tensor:
    """m, from (..., vocab) logits at the decision."""
    return logits[..., pair.answer[0]] - logits[..., pair.foil[0]]


def _ordered(runs: tuple[Any, Any], direction: str) -> tuple[Any, Any]:
    """(recipient, donor) of (A, B)."""
    return runs[::-1] if direction == "denoise" else runs


class Engine:
    """This repository's engine."""

    def __init__(self, subject: Subject, layer: int, *, prompt_only: bool = False) -> None:
        self.subject, self.layer, self.prompt_only = subject, layer, prompt_only

    def caches(self, pair: EncodedPair) -> tuple[Run, Run]:
        a, b = run_pair(self.subject, pair)
        return (a.to_decision(), b.to_decision()) if self.prompt_only else (a, b)

    def residual(self, pair: EncodedPair, runs: Any, direction: str, position: int) -> Tensor:
        recipient, donor = _ordered(runs, direction)
        return margin(patch(self.subject, recipient, donor, [position]).logits, pair)[:-1]

    def heads(self, pair: EncodedPair, runs: Any) -> Tensor:
        recipient, donor = _ordered(runs, "denoise")
        found = patch_component(self.subject, recipient, donor, [pair.decision], "heads", [self.layer])
        return margin(found.logits, pair)

    def gradient(self, pair: EncodedPair, runs: Any) -> Tensor:
        recipient, donor = _ordered(runs, "denoise")
        slopes = gradients(self.subject, recipient, pair.answer[0], pair.foil[0])
        return attribute({"residual": slopes["residual"]}, recipient, donor, [pair.decision])["residual"][:-1]


class TransformerLens:
    """TransformerLens on its bridge."""

    def __init__(self, subject: Subject, layer: int) -> None:
        from transformer_lens import patching

        self.patching, self.bridge, self.layer = patching, subject.bridge(), layer
        self.z = f"blocks.{layer}.attn.hook_z"

    @torch.no_grad()
    def caches(self, pair: EncodedPair) -> Any:
        def wanted(name: str) -> bool:
            return name.endswith("hook_resid_pre") or name == self.z

        return tuple(self.bridge.run_with_cache(torch.tensor([ids]), names_filter=wanted)[1] for ids in _prompts(pair))

    def residual(self, pair: EncodedPair, runs: Any, direction: str, position: int) -> Tensor:
        cells = pd.DataFrame({"layer": range(self.bridge.cfg.n_layers), "pos": position})
        return self._patch(pair, runs, direction, "resid_pre", self.patching.layer_pos_patch_setter, cells)

    def heads(self, pair: EncodedPair, runs: Any) -> Tensor:
        cells = pd.DataFrame({"layer": self.layer, "pos": pair.decision, "head_index": range(self.bridge.cfg.n_heads)})
        return self._patch(pair, runs, "denoise", "z", self.patching.layer_pos_head_vector_patch_setter, cells)

    def gradient(self, pair: EncodedPair, runs: Any) -> Tensor:
        streams: list[Tensor] = []  # lowest layer first
        slopes: list[Tensor] = []  # highest layer first

        def begin(embedded: Tensor, hook: Any) -> Tensor:
            return embedded.detach().requires_grad_()  # no weight takes a gradient: the graph begins here

        def keep(stream: Tensor, hook: Any) -> None:
            streams.append(stream.detach())

        def keep_slope(slope: Tensor, hook: Any) -> None:
            slopes.append(slope.detach())

        def is_stream(name: str) -> bool:
            return name.endswith("hook_resid_pre")

        hooks = {"fwd_hooks": [("hook_embed", begin), (is_stream, keep)], "bwd_hooks": [(is_stream, keep_slope)]}
        with torch.enable_grad(), self.bridge.hooks(**hooks):
            margin(self.bridge(torch.tensor([pair.ids_b]))[0, -1], pair).backward()
        donor = [runs[0][f"blocks.{layer}.hook_resid_pre"] for layer in range(len(streams))]
        return _first_order(streams, donor, slopes[::-1], pair.decision)

    @torch.no_grad()
    def _patch(
        self, pair: EncodedPair, runs: Any, direction: str, name: str, setter: Callable[..., Any], cells: pd.DataFrame
    ) -> Tensor:
        prompt, _ = _ordered(_prompts(pair), direction)
        _, cache = _ordered(runs, direction)
        found: Tensor = self.patching.generic_activation_patch(
            self.bridge,
            torch.tensor([prompt]),
            cache,
            lambda logits: margin(logits[0, -1], pair),
            setter,
            name,
            index_df=cells,
        )
        return found


class NNsight:
    """nnsight on a `TransformersModel`. Its traces read the source of their `with` blocks: these cannot be shared."""

    def __init__(self, subject: Subject, layer: int) -> None:
        nnsight: Any = importlib.import_module("nnsight")  # changes torch on import, so only where it is asked for
        tensors = [*subject.causal_lm.parameters(), *subject.causal_lm.buffers()]
        twin = copy.deepcopy(subject.causal_lm, {id(tensor): tensor for tensor in tensors})
        self.save, self.layer = nnsight.save, layer
        self.model: Any = nnsight.TransformersModel(twin, tokenizer=copy.deepcopy(subject.tokenizer))
        self.width = subject.decoder.layers[0].self_attn.head_dim

    @torch.no_grad()
    def caches(self, pair: EncodedPair) -> Any:
        return tuple(self._cache(torch.tensor([ids])) for ids in _prompts(pair))

    def _cache(self, prompt: Tensor) -> tuple[list[Tensor], Tensor]:
        save, model, chosen = self.save, self.model, self.layer
        with model.trace(prompt, logits_to_keep=1):
            streams = save([])
            for number, layer in enumerate(model.model.layers):
                streams.append(layer.input)
                if number == chosen:
                    z = save(layer.self_attn.o_proj.input)
        return streams, z

    @torch.no_grad()
    def residual(self, pair: EncodedPair, runs: Any, direction: str, position: int) -> Tensor:
        prompt = torch.tensor([_ordered(_prompts(pair), direction)[0]])
        streams, _ = _ordered(runs, direction)[1]
        save, model, found = self.save, self.model, []
        for chunk in _chunks(range(len(streams))):
            with model.trace(logits_to_keep=1) as tracer:
                logits = save([])
                for layer in chunk:
                    with tracer.invoke(prompt):
                        model.model.layers[layer].input[:, position] = streams[layer][:, position]
                        logits.append(model.output.logits[0, -1])
            found += logits
        return margin(torch.stack(found), pair)

    @torch.no_grad()
    def heads(self, pair: EncodedPair, runs: Any) -> Tensor:
        prompt, z, at, width = torch.tensor([pair.ids_b]), runs[0][1], pair.decision, self.width
        save, model, chosen, found = self.save, self.model, self.layer, []
        for chunk in _chunks(range(z.shape[-1] // width)):
            with model.trace(logits_to_keep=1) as tracer:
                logits = save([])
                for head in chunk:
                    with tracer.invoke(prompt):
                        own = slice(head * width, (head + 1) * width)
                        model.model.layers[chosen].self_attn.o_proj.input[:, at, own] = z[:, at, own]
                        logits.append(model.output.logits[0, -1])
            found += logits
        return margin(torch.stack(found), pair)

    @torch.enable_grad()
    def gradient(self, pair: EncodedPair, runs: Any) -> Tensor:
        prompt, save, model = torch.tensor([pair.ids_b]), self.save, self.model
        answer, foil = pair.answer[0], pair.foil[0]
        with model.trace(prompt, logits_to_keep=1):
            streams, slopes = save([]), save([])
            for number, layer in enumerate(model.model.layers):
                if number == 0:
                    layer.input.requires_grad_()
                streams.append(layer.input)
            logits = model.output.logits[0, -1]
            with (logits[answer] - logits[foil]).backward():
                for stream in reversed(streams):
                    slopes.append(stream.grad)
        return _first_order(streams, runs[0][0], slopes[::-1], pair.decision)


class Forwards:
    """Hugging Face forwards with hooks, one per cell: what there is without any library."""

    def __init__(self, subject: Subject, layer: int) -> None:
        self.model, self.layers, self.layer = subject.causal_lm, subject.decoder.layers, layer
        self.width = self.layers[0].self_attn.head_dim

    @torch.no_grad()
    def caches(self, pair: EncodedPair) -> Any:
        return tuple(self._cache(ids) for ids in _prompts(pair))

    def residual(self, pair: EncodedPair, runs: Any, direction: str, position: int) -> Tensor:
        prompt, _ = _ordered(_prompts(pair), direction)
        _, (streams, _) = _ordered(runs, direction)
        cells = [(layer, streams[number], slice(None)) for number, layer in enumerate(self.layers)]
        return torch.stack([self._patched(pair, prompt, position, *cell) for cell in cells])

    def heads(self, pair: EncodedPair, runs: Any) -> Tensor:
        (_, z), module = runs[0], self.layers[self.layer].self_attn.o_proj
        starts = range(0, z.shape[-1], self.width)
        cells = [(module, z, slice(start, start + self.width)) for start in starts]
        return torch.stack([self._patched(pair, pair.ids_b, pair.decision, *cell) for cell in cells])

    def gradient(self, pair: EncodedPair, runs: Any) -> Tensor:
        with torch.enable_grad():
            streams, _ = self._cache(pair.ids_b, pair)
        return _first_order(streams, runs[0][0], [stream.grad for stream in streams], pair.decision)

    def _cache(self, ids: Sequence[int], backward: EncodedPair | None = None) -> tuple[list[Tensor], Tensor]:
        streams: list[Tensor] = []
        z: list[Tensor] = []

        def stream(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            value = args[0]
            if backward is not None:
                value = value if streams else value.detach().requires_grad_()
                value.retain_grad()
            streams.append(value)
            return (value, *args[1:])

        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.callback(layer.register_forward_pre_hook(stream).remove)
            module = self.layers[self.layer].self_attn.o_proj
            hooks.callback(module.register_forward_pre_hook(lambda _, args: z.append(args[0])).remove)
            logits = self._forward(ids)
            if backward is not None:
                margin(logits, backward).backward()
        return streams, z[0]

    @torch.no_grad()
    def _patched(
        self, pair: EncodedPair, ids: Sequence[int], position: int, module: Any, donor: Tensor, columns: slice
    ) -> Tensor:
        def put(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            value = args[0].clone()
            value[:, position, columns] = donor[:, position, columns]
            return (value, *args[1:])

        handle = module.register_forward_pre_hook(put)
        try:
            return margin(self._forward(ids), pair)
        finally:
            handle.remove()

    def _forward(self, ids: Sequence[int]) -> Tensor:
        """(vocab,) logits at the last position."""
        found: Tensor = self.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
        return found


def _prompts(pair: EncodedPair) -> tuple[Sequence[int], Sequence[int]]:
    return pair.ids_a, pair.ids_b


def _first_order(streams: list[Tensor], donor: list[Tensor], slopes: Sequence[Tensor | None], at: int) -> Tensor:
    """(L,) (donor - stream) . slope at one position; each (1, T, d_model), lowest layer first."""
    found = []
    for x, y, slope in zip(streams, donor, slopes, strict=True):
        if slope is None:
            raise RuntimeError("gradient: expected one at every layer's input, found none at some")
        found.append((y[0, at] - x.detach()[0, at]) @ slope[0, at])
    return torch.stack(found)


def _chunks(cells: range) -> list[range]:
    return [cells[start : start + INVOKES] for start in range(0, len(cells), INVOKES)]


SIDES: dict[str, Callable[[Subject, int], Side]] = {
    "engine": Engine,
    "engine, prompt": lambda subject, layer: Engine(subject, layer, prompt_only=True),
    "TransformerLens": TransformerLens,
    "nnsight": NNsight,
    "forwards": Forwards,
}
