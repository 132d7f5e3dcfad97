"""The documented rules, by small graphs whose costs can be worked out by hand, and by what must always hold."""

import json
from dataclasses import replace

import numpy as np
import pytest

from env.scheduler import (
    TASKS,
    Action,
    ActionError,
    Graph,
    GraphError,
    Hardware,
    Node,
    SchedulerEnv,
    generate_graph,
    load_task,
    parse_action,
)
from env.scheduler.policies import constant, heuristic
from env.scheduler.topologies import DIFFICULTIES, TOPOLOGIES

SIDE = 64
BYTES = 4 * SIDE * SIDE
NO_OP = '{"fuse_with_prev": false, "tile": 128, "retain": []}'


def chain_with_skip(capacity=8 * BYTES, bandwidth=1.0, launch=100.0, fusion=4):
    """0 -> 1 -> 2 -> 3, and 3 also reads 0; pointwise, so that traffic decides."""
    nodes = (
        Node(0, "relu", (SIDE, SIDE)),
        Node(1, "relu", (SIDE, SIDE), (0,)),
        Node(2, "relu", (SIDE, SIDE), (1,)),
        Node(3, "add", (SIDE, SIDE), (0, 2)),
    )
    return Graph("skip", nodes, Hardware(capacity, bandwidth, launch, fusion))


def play(env, *actions):
    """Rewards and last info of some (fuse, tile, retain)."""
    env.reset()
    rewards = []
    for fuse, tile, retain in actions:
        _, reward, _, _, info = env.step(Action(fuse, tile, tuple(retain)).to_text())
        rewards.append(reward)
    return rewards, info


def test_everything_fused_stores_the_output_only():
    _, info = play(SchedulerEnv(chain_with_skip()), (False, 128, []), *[(True, 128, [])] * 3)
    assert info["total_latency"] == BYTES + 100
    assert (info["kernel_launches"], info["reloads"], info["error"]) == (1, 0, None)


def test_a_retained_tensor_is_neither_stored_nor_loaded():
    env = SchedulerEnv(chain_with_skip())
    _, info = play(env, (False, 128, [0]), (False, 128, [0]), (True, 128, [0, 2]), (False, 128, []))
    # kernel [0] moves nothing, [1, 2] reads 0 and keeps 0 and 2, [3] stores its output.
    assert info["total_latency"] == max(0, SIDE * SIDE * 0.1) + 2 * SIDE * SIDE * 0.1 + BYTES + 3 * 100
    assert info["reloads"] == 0


def test_what_is_not_listed_is_released_and_stored_when_it_is_alive_and_unwritten():
    env = SchedulerEnv(chain_with_skip())
    play(env, (False, 128, [0]), (False, 128, [1]))
    env.step(NO_OP)
    kernels = env.episode.kernels
    assert kernels[0].latency == pytest.approx(SIDE * SIDE * 0.1 + 100)
    assert kernels[1].latency == BYTES + 100  # 0 leaves and has to be written; 1 stays
    assert env.episode.fast == {1: False}


def test_a_tensor_that_was_written_leaves_for_nothing():
    env = SchedulerEnv(chain_with_skip())
    play(env, (False, 128, []), (False, 128, [0]), (False, 128, []), (False, 128, []))
    # [0] stores 0; [1] loads and keeps 0, stores 1; [2] lets 0 go, loads 1, stores 2; [3] loads both, stores 3.
    assert [k.latency - 100 for k in env.episode.kernels] == [BYTES, 2 * BYTES, 2 * BYTES, 3 * BYTES]


def test_the_last_use_is_free_and_then_the_tensor_is_gone_even_if_listed():
    env = SchedulerEnv(chain_with_skip())
    _, info = play(env, (False, 128, [0]), (False, 128, [0, 1]), (False, 128, [0, 1, 2]), (False, 128, [0, 2, 3]))
    assert info["total_latency"] == pytest.approx(3 * SIDE * SIDE * 0.1 + BYTES + 400)
    assert env.episode.fast == {}


def test_the_last_action_of_a_kernel_decides_its_tile_and_list():
    env = SchedulerEnv(chain_with_skip())
    play(env, (False, 128, [0]), (True, 32, []))
    assert (env.episode.kernel.tile, env.episode.kernel.retain) == (32, ())
    env.step(NO_OP)
    assert env.episode.fast == {}


def test_an_id_that_cannot_be_kept_is_named_and_a_repeat_counts_once():
    env = SchedulerEnv(chain_with_skip())
    _, info = play(env, (False, 128, [0, 0, 2, 7, -1]))
    assert info["error"] == "retain ignored: [2, 7, -1]"
    assert env.episode.kernel.retain == (0,)


def test_a_loaded_input_may_be_kept():
    env = SchedulerEnv(chain_with_skip())
    play(env, (False, 128, []), (False, 128, [0]), (False, 128, []))
    assert env.episode.fast == {0: True}


@pytest.mark.parametrize(
    ("capacity", "actions", "error"),
    [
        # At tile 32 a slice is 4096 bytes; three slices make 12288, so one whole tensor (16384) more is too much.
        (28000, [(False, 32, []), (True, 32, [0])], None),
        (28000, [(False, 32, [0]), (True, 32, [0, 1])], "not fused: needs 32768 of 28000 bytes; retain dropped: [1]"),
        (28000, [(False, 32, []), (False, 32, [1, 0])], "retain dropped: [0], does not fit in 28000 bytes"),
        (28000, [(False, 128, []), (False, 128, [])], "tile 32 used: 128 does not fit in 28000 bytes"),
        (28000, [(False, 32, [0]), (False, 32, [0]), (False, 32, []), (False, 32, [])], None),
    ],
)
def test_what_does_not_fit_is_said_at_once(capacity, actions, error):
    _, info = play(SchedulerEnv(chain_with_skip(capacity=capacity)), *actions)
    assert info["error"] == error if error is None else info["error"].startswith(error)


def test_residents_leave_when_nothing_else_helps_highest_id_first():
    nodes = (
        Node(0, "relu", (SIDE, SIDE)),
        Node(1, "relu", (SIDE, SIDE)),
        Node(2, "relu", (2 * SIDE, SIDE)),
        Node(3, "add", (SIDE, SIDE), (0, 1, 2)),
    )
    graph = Graph("full", nodes, Hardware(2 * BYTES + 3000, 1.0, 0.0, 4))
    env = SchedulerEnv(graph)
    _, info = play(env, (False, 32, [0]), (False, 32, [0, 1]), (False, 32, []))
    assert info["error"] == f"released: [1], no room in {2 * BYTES + 3000} bytes"
    assert env.episode.fast == {0: False}
    env.step(NO_OP)
    assert env.episode.kernels[2].latency == 2 * BYTES + BYTES + BYTES  # stores 2, and 0 and 1 that leave unwritten


def test_residents_that_are_read_leave_last():
    nodes = (*(Node(i, "relu", (SIDE, SIDE)) for i in range(3)), Node(3, "add", (SIDE, SIDE), (0, 1, 2)))
    graph = Graph("read", nodes, Hardware(2 * BYTES + 4096, 1.0, 0.0, 1))
    env = SchedulerEnv(graph)
    _, info = play(env, (False, 32, [0]), (False, 32, [0, 1]), (False, 32, [0, 1]), (False, 32, []))
    assert info["error"] == f"released: [1], no room in {2 * BYTES + 4096} bytes"
    # 1 is stored to make room and loaded again with 2; 0 is at hand; the output is stored.
    assert env.episode.kernels[-1].latency == 4 * BYTES


def test_a_node_that_fits_at_no_tile_is_refused_when_the_environment_is_built():
    with pytest.raises(GraphError, match=r"graph skip, node 1: expected a working set of at most 8000 bytes .* 8192"):
        SchedulerEnv(chain_with_skip(capacity=8000))


def test_invalid_texts_cost_a_tenth_and_three_in_a_row_end_the_episode():
    env = SchedulerEnv(chain_with_skip())
    env.reset()
    for text in ("", "{}"):
        observation, reward, terminated, truncated, info = env.step(text)
        assert (reward, terminated, truncated) == (-0.10, False, False)
        assert json.loads(observation)["error"] == info["error"]
        assert json.loads(observation)["current_node"] == 0
    env.step(NO_OP)
    rewards = [env.step("no")[1] for _ in range(2)]
    _, reward, terminated, truncated, info = env.step("no")
    assert rewards == [-0.10, -0.10]
    assert (terminated, truncated) == (False, True)
    naive = SchedulerEnv(chain_with_skip()).naive_latency
    assert info["total_latency"] == naive, "what is left is run naively, so that stopping never pays"
    assert env.step(NO_OP)[1:] == (0.0, False, True, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a text, found NoneType"),
        ("fuse", "text that is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 5000, "not JSON"),
        ("[]", "found a list"),
        ('{"tile": 128, "retain": []}', "found the keys tile, retain"),
        ('{"fuse_with_prev": 1, "tile": 128, "retain": []}', "fuse_with_prev: expected true or false, found 1"),
        ('{"fuse_with_prev": true, "tile": 96, "retain": []}', "tile: expected one of 32, 64, 128, 256, found 96"),
        ('{"fuse_with_prev": true, "tile": true, "retain": []}', "tile: .* found true"),
        ('{"fuse_with_prev": true, "tile": 128.0, "retain": []}', "tile: .* found 128.0"),
        ('{"fuse_with_prev": true, "tile": 128, "retain": "12"}', 'retain: .* found "12"'),
        ('{"fuse_with_prev": true, "tile": 128, "retain": [1.0]}', "retain: .* found 1.0 in it"),
        ('{"fuse_with_prev": true, "tile": 128, "retain": [[1]]}', "retain: .* found a list in it"),
        ('{"fuse_with_prev": true, "tile": 128, "retain": []} {}', "not JSON"),
    ],
)
def test_what_is_no_action_is_named(text, message):
    with pytest.raises(ActionError, match=message):
        parse_action(text)


@pytest.mark.parametrize("action", [Action(True, 128, (3, 5)), Action(False, 32)])
def test_an_action_reads_its_own_text(action):
    assert parse_action(action.to_text()) == action
    assert parse_action(action.to_text(), rules="upstream") == action


def test_the_action_text_is_the_documented_one():
    assert Action(True, 128, (3,)).to_text() == '{"fuse_with_prev": true, "tile": 128, "retain": [3]}'


def test_observations_show_the_documented_fields_in_order():
    env = SchedulerEnv(chain_with_skip())
    first, _ = env.reset()
    assert first == (
        '{"nodes":[{"id":0,"op":"relu","shape":[64,64],"inputs":[]},{"id":1,"op":"relu","shape":[64,64],"inputs":[0]},'
        '{"id":2,"op":"relu","shape":[64,64],"inputs":[1]},{"id":3,"op":"add","shape":[64,64],"inputs":[0,2]}],'
        '"current_node":0,"current_group":{"node_ids":[],"tile":128},"fast_mem":[],"capacity":131072,"max_fusion":4,'
        '"future_uses":{"0":2,"1":1,"2":1},'
        '"lookahead":[{"id":1,"op":"relu","inputs":[0]},{"id":2,"op":"relu","inputs":[1]}]}'
    )
    env.step('{"fuse_with_prev": false, "tile": 64, "retain": [0]}')
    env.step('{"fuse_with_prev": false, "tile": 64, "retain": [0]}')
    third, *_ = env.step('{"fuse_with_prev": true, "tile": 64, "retain": [0, 3]}')
    assert third == (
        '{"current_node":3,"current_node_info":{"id":3,"op":"add","shape":[64,64],"inputs":[0,2],"output_bytes":16384},'
        '"current_group":{"node_ids":[1,2],"tile":64},"fast_mem":[0],"capacity":131072,"max_fusion":4,'
        '"future_uses":{"0":1,"1":0,"2":1,"3":0},"lookahead":[],"error":"retain ignored: [3]"}'
    )


GRAPHS = [load_task(name) for name in TASKS] + [
    generate_graph(14, difficulty, topology, (128, 128), rng=np.random.default_rng([i, j]))
    for i, difficulty in enumerate(DIFFICULTIES)
    for j, topology in enumerate(TOPOLOGIES)
]


@pytest.mark.parametrize(
    "policy", [constant(True, 128), constant(True, 256), heuristic], ids=["fuse", "256", "teacher"]
)
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.id)
def test_the_return_is_the_score(graph, policy):
    env = SchedulerEnv(graph)
    observation, info = env.reset()
    total = 0.0
    while "score" not in info:
        observation, reward, _, _, info = env.step(policy(json.loads(observation)).to_text())
        assert reward <= 1
        total += reward
    assert total == pytest.approx(info["score"], abs=1e-12)
    assert info["score"] == pytest.approx((env.greedy_latency - info["total_latency"]) / env.greedy_latency)
    assert info["calibrated_score"] == pytest.approx(np.clip(info["score"] / 0.2, -1, 1))


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.id)
def test_what_the_heuristic_retains_is_alive_and_listed_in_order(graph):
    env = SchedulerEnv(graph)
    observation, info = env.reset()
    while "score" not in info:
        seen = json.loads(observation)
        action = heuristic(seen)
        assert list(action.retain) == sorted(set(action.retain))
        uses = {int(i): count for i, count in seen["future_uses"].items()}
        for i in graph.inputs[seen["current_node"]]:
            uses[i] -= 1
        assert all(uses[i] > 0 for i in action.retain)
        observation, *_, info = env.step(action.to_text())


def test_clones_do_not_see_each_other():
    env = SchedulerEnv(load_task("task5_adversarial"))
    env.reset()
    env.step(Action(False, 128, (0,)).to_text())
    before, twin = env.observation(), env.clone()
    twin.step(Action(True, 64, (0, 1)).to_text())
    twin.step("nonsense")
    assert env.observation() == before
    env.step(Action(True, 64, (0, 1)).to_text())
    assert (env.episode.uses, env.episode.fast, env.episode.kernel) == (
        twin.episode.uses,
        twin.episode.fast,
        twin.episode.kernel,
    )


def test_max_steps_truncates_and_what_is_left_is_run_naively():
    env = SchedulerEnv(chain_with_skip(), max_steps=1)
    env.reset()
    _, reward, terminated, truncated, info = env.step(NO_OP)
    assert (terminated, truncated) == (False, True)
    assert info["total_latency"] == env.naive_latency
    assert reward == pytest.approx(info["score"])


def test_unknown_rules_and_tasks_are_named():
    with pytest.raises(ValueError, match="rules: expected one of documented, upstream, found 'other'"):
        SchedulerEnv(chain_with_skip(), rules="other")
    with pytest.raises(ValueError, match="task: expected one of task1_chain"):
        load_task("task9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": []}, "expected at least one node"),
        ({"nodes": [{"id": 1, "op": "relu", "shape": [2, 2], "inputs": []}]}, "expected id 0"),
        ({"nodes": [{"id": 0, "op": "fft", "shape": [2, 2], "inputs": []}]}, "expected op to be one of .* found 'fft'"),
        ({"nodes": [{"id": 0, "op": "relu", "shape": [2, 0], "inputs": []}]}, "expected a positive shape"),
        ({"nodes": [{"id": 0, "op": "relu", "shape": [2, 2], "inputs": [3]}]}, r"expected inputs between 0 and 0"),
        ({"nodes": [{"id": 0, "op": "relu", "shape": [2, 2], "inputs": [0]}]}, "expected no cycle"),
        ({"nodes": [{"id": 0, "op": "relu", "shape": [2, 2], "inputs": [], "flops": 7}]}, "expected flops 0.4"),
        ({"nodes": [{"id": 0, "op": "relu", "shape": [2, 2]}]}, "expected the key 'inputs'"),
        ({"hardware": {}}, "expected the key 'fast_mem_capacity'"),
    ],
)
def test_broken_graphs_are_named(change, message):
    with pytest.raises(GraphError, match=message):
        Graph.from_json(chain_with_skip().to_json() | change)


def test_a_graph_reads_what_it_writes_and_its_fingerprint_ignores_its_name():
    graph = load_task("task3_attention")
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    assert replace(graph, id="other").fingerprint == graph.fingerprint
    assert replace(graph, hardware=replace(graph.hardware, max_fusion_depth=3)).fingerprint != graph.fingerprint
