"""What random graphs are built of: blocks, and how often each is drawn.

A block is a list of (op, inputs); the input `P` is the last output before the block, others are the block's own nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

P = -1
BLOCKS: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "residual": (("matmul", (P,)), ("relu", (0,)), ("matmul", (1,)), ("add", (P, 2))),
    "diamond": (("matmul", (P,)), ("relu", (0,)), ("matmul", (P,)), ("gelu", (2,)), ("add", (1, 3))),
    "attention": (
        ("matmul", (P,)),
        ("matmul", (P,)),
        ("matmul", (P,)),
        ("matmul", (0, 1)),
        ("softmax", (3,)),
        ("matmul", (4, 2)),
    ),
    "long_skip": (
        ("matmul", (P,)),
        ("relu", (0,)),
        ("layernorm", (1,)),
        ("gelu", (2,)),
        ("add", (P, 3)),
        ("add", (0, 4)),
    ),
    "multi_skip": (
        ("matmul", (P,)),
        ("relu", (0,)),
        ("matmul", (1,)),
        ("add", (0, 2)),
        ("gelu", (3,)),
        ("layernorm", (4,)),
        ("add", (0, 5)),
    ),
    "bottleneck": (
        ("matmul", (P,)),
        ("relu", (0,)),
        ("matmul", (1,)),
        ("gelu", (2,)),
        ("matmul", (3,)),
        ("layernorm", (4,)),
    ),
    "self_attention": (
        ("layernorm", (P,)),
        ("matmul", (0,)),
        ("matmul", (0,)),
        ("matmul", (0,)),
        ("transpose", (2,)),
        ("matmul", (1, 4)),
        ("softmax", (5,)),
        ("matmul", (6, 3)),
        ("matmul", (7,)),
        ("add", (P, 8)),
    ),
    "mlp": (
        ("layernorm", (P,)),
        ("matmul", (0,)),
        ("gelu", (1,)),
        ("matmul", (2,)),
        ("add", (P, 3)),
    ),
    "mixer": (
        ("layernorm", (P,)),
        ("transpose", (0,)),
        ("matmul", (1,)),
        ("gelu", (2,)),
        ("matmul", (3,)),
        ("transpose", (4,)),
        ("add", (P, 5)),
    ),
    "conv_residual": (
        ("conv2d", (P,)),
        ("relu", (0,)),
        ("conv2d", (1,)),
        ("add", (P, 2)),
        ("relu", (3,)),
    ),
    "conv_bottleneck": (
        ("conv2d", (P,)),
        ("relu", (0,)),
        ("conv2d", (1,)),
        ("relu", (2,)),
        ("conv2d", (3,)),
        ("add", (P, 4)),
        ("relu", (5,)),
    ),
    "pool": (("conv2d", (P,)), ("relu", (0,)), ("reduce", (1,))),
}
MIX: Mapping[str, float] = {
    "chain": 0.15,
    "residual": 0.20,
    "diamond": 0.10,
    "attention": 0.10,
    "long_skip": 0.20,
    "multi_skip": 0.15,
    "bottleneck": 0.10,
}
VARIED_MIX: Mapping[str, float] = {
    "chain": 0.10,
    "residual": 0.10,
    "diamond": 0.10,
    "attention": 0.05,
    "long_skip": 0.10,
    "multi_skip": 0.10,
    "bottleneck": 0.05,
    "self_attention": 0.10,
    "mlp": 0.10,
    "mixer": 0.05,
    "conv_residual": 0.05,
    "conv_bottleneck": 0.05,
    "pool": 0.05,
}
