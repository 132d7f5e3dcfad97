"""What holds for every graph, every machine and every text, under both rule sets."""

import json
import math
import random

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from env.scheduler import Action, Graph, Hardware, Node, SchedulerEnv, generate_graph, load_task
from env.scheduler.cost import TILES
from env.scheduler.graph import FLOPS_PER_ELEMENT
from env.scheduler.hardware import PRESETS
from env.scheduler.rules import INVALID_TEXT_REWARD, RULES
from env.scheduler.topologies import FURTHER_TOPOLOGIES, SIDES, TOPOLOGIES

LARGEST = 16
examples = settings(max_examples=60)


@st.composite
def generated(draw):
    """A graph of a family, on a machine of a preset."""
    return generate_graph(
        draw(st.integers(2, LARGEST)),
        draw(st.sampled_from(sorted(PRESETS))),
        draw(st.sampled_from(TOPOLOGIES + FURTHER_TOPOLOGIES)),
        (draw(st.sampled_from(SIDES)), draw(st.sampled_from(SIDES))),
        rng=np.random.default_rng(draw(st.integers(0, 2**32))),
        sides=draw(st.sampled_from([(), SIDES])),
    )


@st.composite
def wild(draw):
    """Any graph whose nodes fit: ids in no order, inputs named twice, odd shapes, free traffic, tight memory."""
    count = draw(st.integers(1, 10))
    places = draw(st.permutations(range(count)))
    reads = [draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)]
    kinds = st.sampled_from(sorted(FLOPS_PER_ELEMENT))
    shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))
    nodes = [Node(places[i], draw(kinds), draw(shapes), tuple(places[j] for j in reads[i])) for i in range(count)]
    largest = max(node.output_bytes for node in nodes)
    hardware = Hardware(
        draw(st.integers(4 * largest, 8 * largest)),
        draw(st.sampled_from([-1.0, 0.0, 0.01, 1.0, 100.0])),
        draw(st.sampled_from([0.0, 10.0, 1e6])),
        draw(st.integers(1, 5)),
    )
    return Graph("wild", tuple(sorted(nodes, key=lambda node: node.id)), hardware)


graphs = st.one_of(generated(), wild())


def random_actions(seed):
    """Enough actions for any graph. Drawn at random: what hypothesis prefers, small values, would retain little."""
    rng = random.Random(seed)
    retained = ((), tuple(range(LARGEST)), (1, 2, 3), (-1, 5, 5, LARGEST + 2))
    return [
        Action(rng.random() < 0.6, rng.choice(TILES), rng.choice((*retained, tuple(rng.sample(range(LARGEST), 5)))))
        for _ in range(LARGEST)
    ]


episodes = st.integers(0, 2**32).map(random_actions)
written = episodes.map(lambda played: played[0].to_text())
texts = st.one_of(written, written, written, st.text(max_size=20), st.just('{"fuse_with_prev": true, "tile": 1e999}'))
rule_sets = pytest.mark.parametrize("rules", RULES)


def play(env, played):
    """The steps of an episode, until it ends: (observation, reward, terminated, truncated, info)."""
    env.reset()
    steps = []
    for text in played:
        steps.append(env.step(text))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


def strictly_json(text):
    """JSON without the numbers that Python alone can read."""
    return json.loads(text, parse_constant=pytest.fail)


@rule_sets
@examples
@given(graph=graphs, played=st.lists(texts, min_size=2 * LARGEST, max_size=2 * LARGEST))
def test_any_text_is_survived(rules, graph, played):
    env = SchedulerEnv(graph, rules=rules)
    before = 0.0
    for observation, reward, _, _, info in play(env, played):
        assert strictly_json(observation)["current_node"] in range(-1, len(graph))
        assert env.observation_space.contains(observation)
        assert math.isfinite(reward)
        assert before <= info["total_latency"] < math.inf
        before = info["total_latency"]
    assert all(kernel.latency >= 0 for kernel in env.episode.kernels)


@examples
@given(graph=graphs, played=st.lists(texts, min_size=2 * LARGEST, max_size=2 * LARGEST))
def test_the_return_is_the_score_less_the_penalties(graph, played):
    steps = play(SchedulerEnv(graph), [*played, "", "", ""])
    invalid = sum((info["error"] or "").startswith("invalid action") for *_, info in steps)
    total = sum(reward for _, reward, *_ in steps)
    assert total == pytest.approx(steps[-1][4]["score"] + invalid * INVALID_TEXT_REWARD, rel=1e-9, abs=1e-9)


@rule_sets
@examples
@given(graph=graphs, played=episodes)
def test_every_node_is_placed_once_and_in_order(rules, graph, played):
    env = SchedulerEnv(graph, rules=rules)
    play(env, [action.to_text() for action in played])
    assert tuple(i for kernel in env.episode.kernels for i in kernel.members) == graph.order
    assert all(len(kernel.members) <= graph.hardware.max_fusion_depth for kernel in env.episode.kernels)
    assert env.episode.uses == [0] * len(graph)


@examples
@given(graph=graphs, played=episodes)
def test_fast_memory_never_holds_more_than_its_capacity(graph, played):
    env = SchedulerEnv(graph)
    env.reset()
    for action in played:
        env.step(action.to_text())
        held = {*env.episode.fast, *env.episode.kernel.retain}
        assert sum(graph.sizes[i] for i in held) <= graph.hardware.fast_mem_capacity


def roomy(graph):
    """The graph on a machine in which everything fits."""
    capacity = 2 * sum(graph.sizes)
    hardware = graph.hardware
    room = Hardware(capacity, hardware.slow_mem_bandwidth, hardware.kernel_launch_cost, hardware.max_fusion_depth)
    return Graph(graph.id, graph.nodes, room)


def computed(env):
    """Members, tile and compute cycles of the kernels of an episode."""
    kernels = [(kernel.members, kernel.tile) for kernel in env.episode.kernels]
    return [(members, tile, env.roofline.compute(members, tile)) for members, tile in kernels]


@examples
@given(graph=graphs, played=episodes)
def test_retaining_changes_traffic_only(graph, played):
    env, bare = SchedulerEnv(roomy(graph)), SchedulerEnv(roomy(graph))
    play(env, [action.to_text() for action in played])
    play(bare, [Action(action.fuse_with_prev, action.tile).to_text() for action in played])
    assert computed(env) == computed(bare)
    assert env.episode.launches == bare.episode.launches


@examples
@given(graph=graphs, played=episodes)
def test_with_room_for_everything_retaining_all_is_never_slower(graph, played):
    env, bare = SchedulerEnv(roomy(graph)), SchedulerEnv(roomy(graph))
    everything = tuple(range(len(graph)))
    play(env, [Action(action.fuse_with_prev, action.tile, everything).to_text() for action in played])
    play(bare, [Action(action.fuse_with_prev, action.tile).to_text() for action in played])
    assert env.episode.reloads == 0
    assert env.episode.latency <= bare.episode.latency * (1 + 1e-12)


def state(env):
    """All that an episode is made of, as values."""
    episode = env.episode
    return {name: repr(getattr(episode, name)) for name in episode.__slots__ if name not in ("graph", "roofline")}


@rule_sets
@examples
@given(graph=graphs, played=episodes, others=episodes)
def test_clones_share_no_state(rules, graph, played, others):
    env = SchedulerEnv(graph, rules=rules)
    for action, other in zip(played, others, strict=True):
        before, twin, alike = state(env), env.clone(), env.clone()
        twin.step(other.to_text())
        twin.step(action.to_text())
        assert state(env) == state(alike) == before
        assert env.step(action.to_text()) == alike.step(action.to_text())
        assert state(env) == state(alike)


@rule_sets
@examples
@given(graph=graphs, played=st.lists(texts, max_size=LARGEST), seed=st.integers(0, 2**32 - 1))
def test_the_same_texts_give_the_same_episode(rules, graph, played, seed):
    env, other = SchedulerEnv(graph, rules=rules), SchedulerEnv(Graph.from_json(graph.to_json()), rules=rules)
    first = env.reset(seed=seed)
    steps = play(env, played)
    assert env.reset(seed=seed) == first == other.reset()
    assert play(env, played) == steps == play(other, played)


@rule_sets
@pytest.mark.parametrize("task", ["task1_chain", "task5_adversarial"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_gymnasium_finds_no_fault(rules, task):
    check_env(SchedulerEnv(load_task(task), rules=rules), skip_render_check=True)


FRAGMENTS = (
    '{"fuse_with_prev": true, "tile": 128, "retain": [3]}',
    '{"fuse_with_prev": false, "tile": 32, "retain": []}',
    '```json\n{"fuse_with_prev": true, "tile": 256, "retain": [0, 1]}\n```',
    "fuse: yes tile=64 retain: [1, 2]",
    "retain: [1_0, +2, ٣]",
    "Infinity", "-Infinity", "NaN", "null", "true", "false", "1e400", "-0.0", "0.5", "1" * 5000, "-9" * 30, "[" * 3000,
    '{"a":' * 1500, "]" * 50, "{", "}", "[", "]", ",", ":", '"', "\\", "\\ud800", "\ud800", "\x00", "\u2028", "\ufeff",
    "é", "日本", "🙂", "٣٤", " ", "\n", "```", "'", "//", "fuse", "tile", "retain", '"retain": ', '"tile": ', "[3]",
    '["3"]', "[[]]", "[null]", "[true]", "[1.0]", "[NaN]", "{}", "[]", '""',
)  # fmt: skip


def mutated(rng):
    """A text that is nearly an action, or nothing like one: fragments joined, cut, doubled and spliced."""
    text = rng.choice(FRAGMENTS[:5]) if rng.random() < 0.7 else "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 3)))
    for _ in range(rng.randint(0, 3)):
        start, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        text = text[:start] + rng.choice(("", rng.choice(FRAGMENTS), text[start:end] * 2)) + text[end:]
    return text


@pytest.mark.slow
@rule_sets
def test_fifty_thousand_texts_are_survived(rules):
    rng = random.Random(rules)
    env = SchedulerEnv(load_task("task2_residual"), rules=rules)
    env.reset()
    invalid = 0
    for _ in range(50_000):
        observation, reward, terminated, truncated, info = env.step(mutated(rng))
        invalid += str(info["error"]).startswith("invalid action")
        strictly_json(observation)
        assert math.isfinite(reward)
        if terminated or truncated:
            env.reset()
    assert 1_000 < invalid < 49_000, "both kinds of text have to occur"
