"""Graphs of real PyTorch modules, by `torch.export`.

Every traced operation becomes a node of one of the nine kinds (`KINDS`). Kinds stand for a cost per element here, so an
operation goes to the kind whose work is nearest: what multiplies by weights to matmul or conv2d; normalisations over
an axis to layernorm; other reductions and pooling to reduce; smooth functions of one element to gelu, piecewise linear
ones to relu; arithmetic of two tensors, and batch normalisation with fixed statistics, to add; what only moves data to
transpose. Scaled dot-product attention is taken apart into matmul, softmax, matmul.

Views move nothing and are folded into what they look at, a permutation among them unless it moves the last axis. What
depends on weights and constants only is left out, and weights and the module's inputs do not exist as tensors: an
operation that reads nothing else has no inputs. A tensor of shape (a, b, c) is [a b, c].

`python -m env.scheduler.trace --write` makes the data of `env.scheduler.real` again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from env.scheduler.graph import Graph, Hardware, Node
from env.scheduler.hardware import find_preset

VIEW = "view"
KINDS: Mapping[str, str] = {
    op: kind
    for kind, ops in {
        "matmul": "linear matmul mm bmm mv dot addmm addbmm baddbmm einsum",
        "conv2d": "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d",
        "layernorm": "layer_norm native_layer_norm rms_norm group_norm native_group_norm instance_norm",
        "softmax": "softmax _softmax log_softmax _log_softmax",
        "reduce": "sum mean amax amin prod var std logsumexp cumsum argmax max_pool1d max_pool2d avg_pool1d avg_pool2d "
        "adaptive_avg_pool1d adaptive_avg_pool2d linalg_vector_norm",
        "relu": "relu relu6 leaky_relu prelu hardtanh hardsigmoid hardswish clamp clamp_min clamp_max neg abs",
        "gelu": "gelu silu sigmoid tanh exp log sqrt rsqrt reciprocal pow erf sin cos softplus elu mish log1p expm1",
        "add": "add sub rsub mul div maximum minimum where masked_fill addcmul lerp eq ne lt le gt ge logical_and "
        "_native_batch_norm_legit_no_training",
        "transpose": "transpose permute t numpy_T mT cat stack pad constant_pad_nd embedding gather index_select roll "
        "flip repeat upsample_nearest1d upsample_nearest2d upsample_bilinear2d pixel_shuffle pixel_unshuffle",
        VIEW: "view _unsafe_view reshape flatten unflatten squeeze unsqueeze expand expand_as select slice narrow "
        "split split_with_sizes chunk unbind getitem to _to_copy type_as alias detach clone contiguous lift_fresh_copy "
        "dropout diagonal view_as movedim _assert_tensor_metadata",
    }.items()
    for op in ops.split()
}
ATTENTION = "scaled_dot_product_attention"


class TraceError(ValueError):
    """A module has operations that are none of the nine kinds; the message names all of them."""


def from_torch(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    hardware: str | Hardware = "medium",
    name: str | None = None,
) -> Graph:
    """The graph of a module's forward pass.

    Args:
        module: in evaluation mode.
        example_inputs: positional arguments of `forward`; their shapes decide the graph's.
        example_kwargs: its keyword arguments.
        hardware: a machine or the name of a preset.
        name: the graph's id, by default the class of the module.

    Raises:
        TraceError: if operations are of no known kind.
        ValueError: if the module is in training mode, or the preset is unknown.
        GraphError: if no operation is left.
        Exception: whatever `torch.export` raises for a module that it cannot trace.
    """
    name = name or type(module).__name__
    if module.training:
        raise ValueError(f"graph {name}: expected a module in evaluation mode, found one in training mode")
    with torch.no_grad():
        program = torch.export.export(module, example_inputs, dict(example_kwargs or {}))
        tracer = _Tracer(program.run_decompositions({}))  # an empty table: no in-place operations, nothing taken apart
    tracer.walk()
    if tracer.unknown:
        listed = ", ".join(f"{op} ({count})" for op, count in sorted(tracer.unknown.items()))
        raise TraceError(f"graph {name}: expected operations that env.scheduler.trace.KINDS lists, found {listed}")
    nodes = tuple(tracer.nodes)
    if not isinstance(hardware, Hardware):
        hardware = find_preset(hardware).hardware(max((node.output_bytes for node in nodes), default=0))
    return Graph(name, nodes, hardware, f"{type(module).__name__}, traced by torch.export")


class _Tracer:
    """Walks an exported program in order and collects nodes.

    Attributes:
        nodes: the graph's so far.
        unknown: how often operations of no known kind occur.
        held: what a traced value holds: ids of nodes, none for the module's inputs.
        constants: traced values that depend on weights only.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.nodes: list[Node] = []
        self.unknown: Counter[str] = Counter()
        self.held: dict[fx.Node, tuple[int, ...]] = {}
        inputs = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
        self.constants = {node for node in program.graph.nodes if node.op == "get_attr"} | {
            node for node in program.graph.nodes if node.op == "placeholder" and node.name not in inputs
        }

    def walk(self) -> None:
        for traced in self.program.graph.nodes:
            if traced.op != "call_function":
                self.held[traced] = ()
            elif all(source in self.constants for source in traced.all_input_nodes):
                self.constants.add(traced)
                self.held[traced] = ()
            else:
                self.held[traced] = self._visit(traced, _op_name(traced))

    def _visit(self, traced: fx.Node, op: str) -> tuple[int, ...]:
        """Ids that hold the value of an operation."""
        read = self._read(*traced.all_input_nodes)
        if KINDS.get(op) == VIEW or _keeps_last_axis(traced, op):
            return read
        if op == ATTENTION:
            return self._attention(traced)
        if op not in KINDS:
            self.unknown[op] += 1
            return ()
        return self._add(KINDS[op], _shape(traced), read)

    def _attention(self, traced: fx.Node) -> tuple[int, ...]:
        arguments: Sequence[Any] = traced.args
        query, key, value = arguments[:3]  # one tensor may be all three
        mask = [source for source in traced.all_input_nodes if source not in (query, key, value)]
        shape = (*_shape(query)[:-1], _shape(key)[-2])
        scores = self._add("matmul", shape, self._read(query, key, *mask))
        weights = self._add("softmax", shape, scores)
        return self._add("matmul", _shape(traced), weights + self.held[value])

    def _read(self, *sources: fx.Node) -> tuple[int, ...]:
        return tuple(dict.fromkeys(i for source in sources for i in self.held[source]))

    def _add(self, kind: str, shape: tuple[int, ...], read: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        self.nodes.append(Node(len(self.nodes), kind, (rows, columns), read))
        return (len(self.nodes) - 1,)


def _shape(traced: fx.Node) -> tuple[int, ...]:
    """Shape of what an operation makes; of several tensors the first, the others are statistics."""
    value = traced.meta["val"]
    return tuple(int(side) for side in (value[0] if isinstance(value, (tuple, list)) else value).shape)


def _op_name(traced: fx.Node) -> str:
    """`linear` of `aten.linear.default`; the whole name of what is not PyTorch's own."""
    target = traced.target
    if isinstance(target, torch._ops.OpOverload):
        return target._opname if target.namespace == "aten" else str(target)
    return getattr(target, "__name__", str(target))


def _keeps_last_axis(traced: fx.Node, op: str) -> bool:
    """Whether an operation is a permutation that leaves the last axis in its place."""
    arguments: Sequence[Any] = traced.args
    if op == "transpose":
        rank = len(_shape(traced))
        first, second = (axis % rank for axis in arguments[1:3])
        return first == second or rank - 1 not in (first, second)
    return op == "permute" and arguments[1][-1] in (-1, len(arguments[1]) - 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    from env.scheduler.architectures import trace_all

    parser = argparse.ArgumentParser(prog="python -m env.scheduler.trace", description="Trace the shipped real graphs.")
    parser.add_argument("--write", action="store_true", help="write real.json beside this module (default: to stdout)")
    options = parser.parse_args(arguments)
    lines = ",\n".join(json.dumps(graph.to_json()) for graph in trace_all())
    text = f'{{"graphs": [\n{lines}\n]}}\n'
    if options.write:
        Path(__file__).with_name("real.json").write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
