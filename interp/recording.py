"""What passes through the layers of a decoder while it runs: its residual stream, and what each component adds to it.

    mid_l = h_l + attention_l(norm(h_l)),    h_{l+1} = mid_l + mlp_l(norm(mid_l)),
    attention_l = W_O [z_1; …; z_H] + bias,  with W_O = W + s B A where o_proj carries an adapter

A head's z is its own d_head slice of what enters `o_proj`: with grouped queries there are as many as query heads, and
what a head writes is that slice through the module as it is switched, adapter included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

PRE_NORM_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


@dataclass(frozen=True)
class Recorded:
    """Filled by one forward, lowest layer first; L layers, rows x tokens x width each.

    Attributes:
        streams: L + 1, what enters each layer, and the final norm.
        attention, mlp: L, what the two components add to the stream; empty unless all layers are `is_pre_norm`.
        heads: L, what enters `o_proj`, all heads side by side; empty likewise.
    """

    streams: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    mlp: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)

    def of(self, component: str) -> list[Tensor]:
        """The list of a component, `residual`, `attention`, `mlp` or `heads`."""
        found: list[Tensor] = self.streams if component == "residual" else getattr(self, component)
        return found


def is_pre_norm(layer: nn.Module) -> bool:
    """Whether a layer is made as in Llama, Mistral and Qwen, so that its components can be told apart."""
    names = {name for name, _ in layer.named_children()}
    return names == PRE_NORM_LAYER and hasattr(layer.self_attn, "o_proj")


@contextmanager
def recording(decoder: Any) -> Iterator[Recorded]:
    """Record what a forward inside this context does; the hooks are gone on leaving, also after an exception."""
    found = Recorded()

    def stream(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.streams.append(args[0] if args else kwargs["hidden_states"])

    def head(module: nn.Module, args: tuple[Any, ...]) -> None:
        found.heads.append(args[0])

    def attention(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.attention.append(output[0])

    def mlp(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found.mlp.append(output)

    handles: list[Any] = []
    try:
        for module in (*decoder.layers, decoder.norm):
            handles.append(module.register_forward_pre_hook(stream, with_kwargs=True))
        if all(map(is_pre_norm, decoder.layers)):
            for layer in decoder.layers:
                handles.append(layer.self_attn.o_proj.register_forward_pre_hook(head))
                handles.append(layer.self_attn.register_forward_hook(attention))
                handles.append(layer.mlp.register_forward_hook(mlp))
        yield found
    finally:
        for handle in handles:
            handle.remove()
