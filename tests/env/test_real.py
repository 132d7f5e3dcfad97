"""Graphs traced from PyTorch modules: small ones by hand, the shipped ones against what they were traced from."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from env.scheduler import Graph, GraphError, Hardware, SchedulerEnv
from env.scheduler.graph import FLOPS_PER_ELEMENT
from env.scheduler.hardware import PRESETS, preset
from env.scheduler.policies import constant, heuristic
from env.scheduler.real import REAL_GRAPHS, load_real
from env.scheduler.trace import KINDS, VIEW, TraceError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Lambda(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.body = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.body(self, *inputs)


def trace(forward, *inputs, **parts):
    """Kind, shape and inputs of each node of a small module."""
    graph = Graph.from_torch(Lambda(forward, **parts).eval(), inputs)
    return [(node.op, node.shape, node.inputs) for node in graph.nodes]


X = torch.zeros(2, 3, 8)


def test_an_mlp_with_a_skip():
    traced = trace(
        lambda m, x: m.norm(x + m.down(torch.relu(m.up(x)))),
        X,
        up=nn.Linear(8, 16),
        down=nn.Linear(16, 8),
        norm=nn.LayerNorm(8),
    )
    assert traced == [
        ("matmul", (6, 16), ()),
        ("relu", (6, 16), (0,)),
        ("matmul", (6, 8), (1,)),
        ("add", (6, 8), (2,)),  # the other summand is the module's input, which is no tensor here
        ("layernorm", (6, 8), (3,)),
    ]


def test_views_are_folded_and_permutations_count_if_the_last_axis_moves():
    def forward(m, x):
        y = torch.tanh(x)
        return y.reshape(6, 2, 4).transpose(0, 1).permute(1, 0, 2).flatten(1)[:3].exp() @ y.view(6, 8).T

    assert trace(forward, X) == [
        ("gelu", (6, 8), ()),
        ("gelu", (3, 8), (0,)),
        ("transpose", (8, 6), (0,)),
        ("matmul", (3, 6), (1, 2)),
    ]


def test_the_last_axis_is_found_from_the_end_too():
    assert trace(lambda m, x: x.exp().transpose(-1, -2).exp(), X)[1] == ("transpose", (16, 3), (0,))
    assert len(trace(lambda m, x: x.exp().transpose(-3, -2).permute(0, 1, -1).exp(), X)) == 2
    assert trace(lambda m, x: x.exp().permute(-1, 0, 1).exp(), X)[1] == ("transpose", (16, 3), (0,))


def test_operations_in_place_read_what_was_there_before():
    def forward(m, x):
        y = x.exp()
        z = y * 2
        y += 1
        return m.relu(y) + z

    assert trace(forward, X, relu=nn.ReLU(inplace=True)) == [
        ("gelu", (6, 8), ()),
        ("add", (6, 8), (0,)),
        ("add", (6, 8), (0,)),
        ("relu", (6, 8), (2,)),
        ("add", (6, 8), (3, 1)),
    ]


def test_attention_is_taken_apart_also_if_one_tensor_is_all_three():
    attention = nn.functional.scaled_dot_product_attention
    assert trace(lambda m, x: attention(*[x.exp()] * 3), X) == [
        ("gelu", (6, 8), ()),
        ("matmul", (6, 3), (0,)),
        ("softmax", (6, 3), (1,)),
        ("matmul", (6, 8), (2, 0)),
    ]
    masked = trace(lambda m, q, mask: attention(q.exp(), q, q, attn_mask=mask * 2.0), X, torch.zeros(3, 3))
    assert masked == [
        ("gelu", (6, 8), ()),
        ("add", (3, 3), ()),
        ("matmul", (6, 3), (0, 1)),
        ("softmax", (6, 3), (2,)),
        ("matmul", (6, 8), (3,)),
    ]


def test_grouped_queries_have_scores_of_all_heads():
    queries, keys = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
    attention = nn.functional.scaled_dot_product_attention
    traced = trace(lambda m, q, k: attention(q, k, k, enable_gqa=True), queries, keys)
    assert traced == [("matmul", (12, 5), ()), ("softmax", (12, 5), (0,)), ("matmul", (12, 8), (1,))]


def test_what_depends_on_weights_only_is_no_operation():
    weight = nn.Parameter(torch.ones(8, 8))
    assert trace(lambda m, x: x @ torch.softmax(m.w * torch.arange(8), dim=0), X, w=weight) == [("matmul", (6, 8), ())]


def test_convolutions_pooling_and_concatenation():
    def forward(m, x):
        y = m.norm(m.conv(x))
        return torch.cat([y, m.up(nn.functional.max_pool2d(y, 2))], dim=1).mean()

    parts = {"conv": nn.Conv2d(2, 4, 3, padding=1), "norm": nn.BatchNorm2d(4), "up": nn.ConvTranspose2d(4, 4, 2, 2)}
    assert trace(forward, torch.zeros(1, 2, 8, 8), **parts) == [
        ("conv2d", (32, 8), ()),
        ("add", (32, 8), (0,)),
        ("reduce", (16, 4), (1,)),
        ("conv2d", (32, 8), (2,)),
        ("transpose", (64, 8), (1, 3)),
        ("reduce", (1, 1), (4,)),
    ]


def test_all_operations_of_no_known_kind_are_named():
    module = Lambda(lambda m, x: torch.fft.fft(x).real + torch.sort(x).values + torch.sort(-x).values).eval()
    with pytest.raises(
        TraceError, match=r"graph Lambda: expected .*, found fft_fft \(1\), sort \(2\), view_as_real \(1\)"
    ):
        Graph.from_torch(module, (X,))


def test_a_module_in_training_or_without_operations_is_refused():
    with pytest.raises(ValueError, match="graph Dropout: expected a module in evaluation mode"):
        Graph.from_torch(nn.Dropout(), (X,))
    with pytest.raises(GraphError, match="graph nothing: expected at least one node"):
        Graph.from_torch(nn.Identity().eval(), (X,), name="nothing")


def test_a_traced_graph_runs_on_the_machine_asked_for():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU()).eval()
    machine = Hardware(10_000, 1.0, 2.0, 3)
    assert Graph.from_torch(module, (X,), hardware=machine).hardware == machine
    assert Graph.from_torch(module, (X,), hardware="hard").hardware.fast_mem_capacity == 3 * 4 * 6 * 16
    with pytest.raises(ValueError, match="preset: expected one of"):
        Graph.from_torch(module, (X,), hardware="abacus")


def test_every_operation_goes_to_one_of_the_nine_kinds_or_is_a_view():
    assert set(KINDS.values()) == {*FLOPS_PER_ELEMENT, VIEW}
    assert all(hasattr(torch.ops.aten, op) or op == "getitem" for op in KINDS)


@pytest.mark.slow
def test_the_shipped_graphs_are_what_the_modules_trace_to():
    from env.scheduler.architectures import trace_all

    assert [graph.to_json() for graph in trace_all()] == [load_real(name).to_json() for name in REAL_GRAPHS]


@pytest.mark.parametrize(
    ("name", "nodes", "kinds", "last"),
    [
        ("smollm2_135m_layer", 36, {"matmul": 9, "softmax": 1, "reduce": 2, "transpose": 2}, (256, 576)),
        ("resnet_basic_block", 9, {"conv2d": 3, "relu": 2, "add": 4}, (128 * 28, 28)),
        ("resnet_bottleneck", 12, {"conv2d": 4, "relu": 3, "add": 5}, (256 * 56, 56)),
        ("unet_level", 15, {"conv2d": 7, "relu": 6, "reduce": 1, "transpose": 1}, (64 * 64, 64)),
        ("mixer_block", 12, {"matmul": 4, "layernorm": 2, "transpose": 2, "gelu": 2, "add": 2}, (196, 512)),
    ],
)
def test_the_shipped_graphs_have_the_operations_of_their_networks(name, nodes, kinds, last):
    graph = load_real(name)
    assert len(graph) == nodes
    assert {kind: sum(node.op == kind for node in graph.nodes) for kind in kinds} == kinds
    assert graph.nodes[-1].shape == last
    assert [node.id for node in graph.nodes if not graph.consumers[node.id]] == [nodes - 1]


@pytest.mark.parametrize("machine", PRESETS)
@pytest.mark.parametrize("name", REAL_GRAPHS)
def test_the_policies_run_on_them(name, machine):
    for policy in (heuristic, constant(True, 128)):
        env = SchedulerEnv(preset(machine, load_real(name)))
        observation, info = env.reset()
        while "score" not in info:
            observation, *_, info = env.step(policy(json.loads(observation)).to_text())
        assert math.isfinite(info["score"])
        assert info["total_latency"] > 0
        assert env.greedy_latency <= env.naive_latency


def test_an_unknown_real_graph_is_named():
    with pytest.raises(ValueError, match=r"real graph: expected one of smollm2_135m_layer, .*, found 'vgg'"):
        load_real("vgg")


def test_loading_a_real_graph_needs_no_pytorch():
    program = (
        "import sys; from env.scheduler.real import REAL_GRAPHS, load_real; "
        "[load_real(name) for name in REAL_GRAPHS]; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
