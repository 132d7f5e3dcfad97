"""What holds for every graph and every text."""

import json
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from env.fusionops import Action, ActionError, FusionOpsEnv, Graph, GraphError, load_task, parse_action
from env.fusionops.cost import Kernel, iteration_latencies, kernel_cost
from env.fusionops.graph import MATMUL, POINTWISE, Hardware, Op, Tensor
from env.fusionops.hints import hints
from env.fusionops.observation import SECTIONS, residency_spans, section_span, sections
from env.fusionops.rules import PENALTIES, connected, ready, refusal
from env.fusionops.topologies import generate_graph

examples = settings(max_examples=60)
sides = st.integers(1, 40)


@st.composite
def graphs(draw):
    """Any graph: odd sizes, inputs named twice, several outputs, unread tensors, tight or ample memory."""
    external, count = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    existing, ops = list(range(external)), []
    for i in range(count):
        inputs = draw(st.lists(st.sampled_from(existing), min_size=1, max_size=3))
        made = range(len(existing), len(existing) + draw(st.integers(1, 2)))
        kind, cost = draw(st.sampled_from([MATMUL, POINTWISE])), draw(st.integers(0, 500))
        ops.append(Op(i, kind, tuple(inputs), tuple(made), cost))
        existing += made
    tensors = tuple(Tensor(i, draw(sides), draw(sides)) for i in existing)
    hardware = Hardware(draw(st.sampled_from([500, 3000, 10**6])), draw(st.sampled_from([0.5, 3, 100])), (8, 16))
    return Graph("any", tensors, tuple(ops), hardware)


@st.composite
def kernels(draw):
    """A graph with arguments of a kernel: ops that may run, sizes, what is kept, an order of the tiles."""
    graph = draw(graphs())
    ops = tuple(draw(st.lists(st.integers(0, len(graph) - 1), unique=True, min_size=1)))
    config = draw(st.tuples(sides, sides, sides))
    made = [t for op in ops for t in graph.ops[op].outputs]
    retain = tuple(draw(st.lists(st.sampled_from(made), max_size=2)))
    fast = frozenset(draw(st.lists(st.sampled_from([t.id for t in graph.tensors]), max_size=2)))
    columns, rows = Kernel.of(graph, ops, fast).grid(config)
    order = draw(st.sampled_from(["none", "raster", "reversed", "shuffled"]))
    tiles = list(range(columns * rows))
    if order == "shuffled":
        np.random.default_rng(draw(st.integers(0, 99))).shuffle(tiles)
    traversal = None if order == "none" else tuple(tiles[:: -1 if order == "reversed" else 1])
    return graph, ops, config, retain, traversal, fast


texts = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}ops={} config={} retain={} traversal={}".format,
        st.sampled_from(["", "SCHEDULE ", "I say "]),
        *(
            st.one_of(st.lists(st.integers(-2, 9), max_size=5).map(str), st.text("0123456789,[] -x", max_size=12))
            for _ in range(4)
        ),
    ),
)


@examples
@given(kernels())
def test_the_cost_is_the_sum_over_iterations(kernel):
    cost, every = kernel_cost(*kernel), list(iteration_latencies(*kernel))
    if cost.fits:
        assert cost.iterations == len(every)
        assert cost.latency == pytest.approx(sum(every), rel=1e-9)
    else:
        assert (cost.latency, cost.iterations) == (0.0, 0)


@examples
@given(kernels())
def test_row_by_row_is_the_default(kernel):
    graph, ops, config, retain, _, fast = kernel
    columns, rows = Kernel.of(graph, ops, fast).grid(config)
    raster = kernel_cost(graph, ops, config, retain, range(columns * rows), fast)
    assert kernel_cost(graph, ops, config, retain, None, fast).latency == pytest.approx(raster.latency, rel=1e-9)


@examples
@given(kernels())
def test_retaining_and_holding_never_cost_time_and_never_save_room(kernel):
    graph, ops, config, retain, traversal, fast = kernel
    graph = replace(graph, hardware=replace(graph.hardware, fast_memory_capacity=10**9))
    kept = kernel_cost(graph, ops, config, retain, traversal, fast)
    written = kernel_cost(graph, ops, config, (), traversal, fast)
    assert kept.latency <= written.latency
    assert kept.working_set == written.working_set
    cold = kernel_cost(graph, ops, config, retain, traversal)
    assert kept.latency <= cold.latency * (1 + 1e-12)
    unread = frozenset(t.id for t in graph.tensors) - {t for op in ops for t in graph.ops[op].inputs} - fast
    crowded = kernel_cost(graph, ops, config, retain, traversal, fast | unread)
    assert crowded.latency == kept.latency
    assert crowded.working_set == kept.working_set + sum(graph.tensors[t].size for t in unread)


@examples
@given(graphs(), st.lists(texts, max_size=12))
def test_any_text_gives_a_step_that_can_be_told(graph, written):
    env = FusionOpsEnv(graph)
    env.reset()
    for text in written:
        before, twin = env.episode, env.clone()
        observation, reward, terminated, truncated, info = env.step(text)
        assert env.observation_space.contains(observation)
        json.dumps(info)
        assert not (terminated and truncated)
        assert 0 <= env.score <= 1
        if info["error"]:
            assert reward == PENALTIES[info["error"]["class"]]
            assert (env.episode.scheduled, env.episode.fast) == (before.scheduled, before.fast)
            assert env.episode.latency == before.latency
            assert env.episode.step_count == before.step_count + (info["error"]["class"] != "parse")
        else:
            assert env.episode.fast == set(env.episode.last.action.retain)
            assert env.episode.scheduled == before.scheduled | set(env.episode.last.action.ops)
        assert twin.episode == before
        assert twin.step(text)[0] == observation


@examples
@given(texts)
def test_what_is_read_can_be_written_and_read_again(text):
    try:
        action = parse_action(text)
    except ActionError:
        return
    assert parse_action(action.to_text()) == action


@given(
    st.lists(st.integers(-9, 10**30)),
    st.tuples(*[st.integers(-9, 10**30)] * 3),
    st.lists(st.integers(0, 99)),
    st.none() | st.lists(st.integers(0, 99), min_size=1).map(tuple),
)
def test_an_action_survives_its_text(ops, config, retain, traversal):
    action = Action(tuple(ops), config, tuple(retain), traversal)
    assert parse_action(f"so: {action.to_text()}, I think") == action


def test_numbers_of_any_length_are_told():
    env = FusionOpsEnv(load_task("task3_matmul"))
    env.reset()
    long = "9" * 4000
    for text in (f"ops=[{long}]", f"ops=[0] config=[{long},{long},1]", f"ops=[0] config=[128,128,1] retain=[{long}]"):
        observation, *_, info = env.step(text)
        json.dumps(info)
        assert info["error"]["kind"] in ("unknown_op", "oom", "retain_not_produced")
        assert len(observation) < 3000
    assert env.step("ops=[" + "9" * 5000 + "]")[-1]["error"]["class"] == "parse"


@examples
@given(graphs())
def test_hints_are_valid_unless_nothing_is(graph):
    env = FusionOpsEnv(graph)
    env.reset()
    for _ in range(len(graph)):
        episode = env.episode
        if not (proposed := hints(graph, episode.scheduled, episode.fast)) or episode.covered:
            break
        checks = [refusal(graph, episode.scheduled, episode.fast, hint) for hint in proposed]
        assert not any(checks) or (len(checks) == 1 and checks[0].kind == "oom")
        assert 1 <= len(proposed) <= 4
        env.step(proposed[0].to_text())


@examples
@given(graphs(), st.data())
def test_connected_agrees_with_merging(graph, data):
    ops = data.draw(st.lists(st.integers(0, len(graph) - 1), unique=True))
    groups = [{op} for op in ops]
    for a in ops:
        for b in graph.predecessors[a]:
            touching = [g for g in groups if a in g or b in g]
            if b in ops:
                groups = [g for g in groups if g not in touching] + [set().union(*touching)]
    assert connected(graph, ops) == (len(groups) <= 1)


@examples
@given(graphs(), st.data())
def test_sharing_an_input_is_no_link_and_order_does_not_matter(graph, data):
    ops = data.draw(st.permutations(range(len(graph))))
    assert connected(graph, ops) == connected(graph, sorted(ops))
    assert ready(graph, set(ops)) == ()


@examples
@given(graphs(), st.lists(texts, max_size=6))
def test_observations_have_their_sections_and_say_each_place_once(graph, written):
    env = FusionOpsEnv(graph)
    observation, _ = env.reset()
    for text in [*written, ""]:
        found = sections(observation)
        assert tuple(found) == SECTIONS
        for title, body in found.items():
            start, end = section_span(observation, title)
            assert observation[start:end] == body
        episode = env.episode
        made = {t for op in episode.scheduled for t in graph.ops[op].outputs}
        places = {t: observation[start:end] for t, (start, end) in residency_spans(observation).items()}
        assert places == {t: "fast" if t in episode.fast else "slow" for t in made | set(graph.graph_inputs)}
        observation, *_ = env.step(text)


def test_a_refusal_is_told_with_class_reason_and_advice():
    env = FusionOpsEnv(load_task("task1_linear"))
    env.reset()
    observation, *_ = env.step("ops=[1]")
    assert sections(observation)["Last result"] == (
        "refused (dependency): op 1 reads tensor 1, which op 0 has not made. Run that op first, or list it too."
    )
    assert "of 40000" in sections(env.step("ops=[0] config=[256,256,1]")[0])["Last result"]
    assert sections(env.step("ops=[0]")[0])["Last result"].startswith("ran ops [0] with config [128,128,1], latency")


def test_more_than_the_capacity_can_be_retained_and_then_nothing_fits():
    graph = load_task("task2_diamond")
    env = FusionOpsEnv(replace(graph, hardware=replace(graph.hardware, fast_memory_capacity=20_000)))
    env.reset()
    *_, info = env.step("ops=[0,1,2] config=[32,32,1] retain=[1,2,3]")
    assert info["error"] is None
    for text in ("ops=[3] config=[1,1,1]", "ops=[]"):
        assert env.step(text)[-1]["error"]["kind"] == "oom"


def test_gymnasium_accepts_it():
    check_env(FusionOpsEnv(load_task("task1_linear")), skip_render_check=True)


@pytest.mark.parametrize("ops", [1, 7, 30])
def test_generated_graphs(ops):
    graph = generate_graph(ops, 64, rng=np.random.default_rng(1))
    assert len(graph) == ops
    assert all(len(op.inputs) == 2 for op in graph.ops if op.type == MATMUL)
    assert graph == generate_graph(ops, 64, rng=np.random.default_rng(1))
    assert graph.fingerprint != generate_graph(ops, 64, rng=np.random.default_rng(2)).fingerprint
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


def _with(**changes):
    record = load_task("task2_diamond").to_json()
    return {**record, **changes}


def _machine(capacity, bandwidth, native):
    return _with(
        hardware={
            "fast_memory_capacity": capacity,
            "slow_memory_bandwidth": bandwidth,
            "native_granularity": native,
        }
    )


def _ops(position, **changes):
    ops = load_task("task2_diamond").to_json()["ops"]
    ops[position] |= changes
    return _with(ops=ops)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, "expected the key 'hardware', found none"),
        (_with(tensors=[]), "op 0: expected tensors between 0 and -1"),
        (_with(ops=[]), "at least one"),
        (_with(ops=[None]), "task2_diamond"),
        (_ops(1, id=4), "op 4: expected id 1"),
        (_ops(1, type="Conv"), "expected type Pointwise or MatMul, found 'Conv'"),
        (_ops(1, inputs=[1.0]), r"found \[1.0\]"),
        (_ops(1, inputs=[99]), "expected tensors between"),
        (_ops(1, inputs=[]), "expected inputs and outputs"),
        (_ops(1, outputs=[1]), "expected every tensor made once"),
        (_ops(0, inputs=[6]), r"no cycle, found ops that wait for each other: \[0, 1, 2, 3, 4, 5\]"),
        (_ops(1, base_cost=float("nan")), "base_cost of 0 or more"),
        (_ops(1, base_cost=10**400), "base_cost of 0 or more"),
        (_ops(1, base_cost="much"), "task2_diamond"),
        (_with(max_steps=-1), "max_steps"),
        (_with(graph_inputs=[1]), r"graph_inputs: expected \[0\], as the ops say, found \[1\]"),
        (_with(tensors=[{"id": 0, "width": 0, "height": 1}]), "tensor 0: expected a width and height"),
        (_with(tensors=[{"id": 0, "width": 10**9, "height": 1}]), "tensor 0: expected a width and height"),
        (_machine(1, 0, [1, 1]), "above 0"),
        (_machine(1.5, 1, [1, 1]), "whole"),
        (_machine(1, 1, [1]), "unpack"),
    ],
)  # fmt: skip
def test_a_broken_graph_is_refused_in_one_line(record, problem):
    with pytest.raises(GraphError, match=problem) as caught:
        Graph.from_json(record)
    assert "\n" not in str(caught.value)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="task1_linear"):
        load_task("task9")
