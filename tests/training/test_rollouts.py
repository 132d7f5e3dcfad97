"""What a state leaves open, candidates, their worth, and the packed log-probabilities: each against its plain form."""

import json
from dataclasses import replace
from itertools import chain, combinations, product

import numpy as np
import pytest
import torch
from peft import get_peft_model

from env.scheduler import TASKS, SchedulerEnv, generate_graph, load_task, parse_action
from env.scheduler.action import Action
from env.scheduler.cost import TILES
from env.scheduler.hardware import on
from env.scheduler.policies import heuristic
from env.scheduler.prompts import messages
from env.training.actions import MOST_LISTED, ActionTokens, Branch, listable
from env.training.actor import Actor
from env.training.curriculum import Curriculum
from env.training.packing import Tree, log_probs
from env.training.rollouts import Recipe, Rollouts, preferences
from env.training.sampling import TEMPERATURES, sample
from env.training.scoring import Heuristic, Planner, score
from env.training.store import lora_config
from tests.interp.tiny import tiny_model, tiny_tokenizer

ACTIONS = ActionTokens(tiny_tokenizer())


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=4096)


def small_env(seed=0, size=9, difficulty="hard", steps=0):
    graph = generate_graph(size, difficulty, "mixed", (256, 256), rng=np.random.default_rng(seed))
    env = SchedulerEnv(graph)
    env.reset()
    for _ in range(steps):
        env.step(heuristic(json.loads(env.observation())).to_text())
    return env


def prompt_of(env):
    text = ACTIONS.tokenizer.apply_chat_template(
        list(messages(env.observation())), tokenize=False, add_generation_prompt=True
    )
    return ACTIONS.tokenizer(text, add_special_tokens=False)["input_ids"]


def leaves(place: Branch, before=()):
    if not place.children:
        return [before]
    return [leaf for token, child in place.children.items() for leaf in leaves(child, (*before, token))]


def test_the_tree_holds_all_actions_and_no_other():
    ids = (2, 7, 12)
    lists = list(chain.from_iterable(combinations(ids, n) for n in range(4)))
    expected = [Action(fuse, tile, retain) for fuse, tile, retain in product((True, False), TILES, lists)]
    found = leaves(ACTIONS.tree(ids))
    assert sorted(found) == sorted(tuple(ACTIONS.tokens(action)) for action in expected)
    assert {parse_action(ACTIONS.action_text(tokens)) for tokens in found} == set(expected)


def test_listable_are_the_ids_within_reach_those_alive_first():
    seen = {
        "current_node": 9,
        "current_node_info": {"inputs": [8, 3]},
        "fast_mem": [1, 2, 3],
        "current_group": {"node_ids": [7, 8], "tile": 64},
        "future_uses": {"1": 0, "2": 1, "3": 1, "4": 5, "7": 2, "8": 2, "9": 1, "10": 1},
    }
    # Alive after 9 has read: 2, 7, 8, 9. Of the dead 1 and 3 both still fit in.
    assert listable(json.dumps(seen)) == (1, 2, 3, 7, 8, 9)
    seen["fast_mem"] = [0, 1, 2, 3]
    seen["future_uses"]["0"] = 3
    assert len(listable(json.dumps(seen))) == MOST_LISTED
    assert listable(json.dumps(seen)) == (0, 2, 3, 7, 8, 9)


@torch.inference_mode()
def plain_walk(model, prompt, tree, temperature, rng):
    """One candidate, with a full forward for each choice."""
    tokens, place = tree.forced()
    while place.children:
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
        children = list(place.children)
        scaled = logits[children].double().numpy() / temperature
        weights = np.exp(scaled - scaled.max())
        token = children[int(rng.choice(len(children), p=weights / weights.sum()))]
        forced, place = place.children[token].forced()
        tokens = [*tokens, token, *forced]
    return tokens


def test_candidates_are_those_of_a_plain_walk(model):
    envs = [small_env(seed, steps=seed) for seed in (1, 2, 4)]
    prompts = [prompt_of(env) for env in envs]
    assert len({len(prompt) for prompt in prompts}) == 3
    trees = [ACTIONS.tree(listable(env.observation())) for env in envs]

    def rngs():
        return [[np.random.default_rng([row, i]) for i in range(6)] for row in range(3)]

    found = sample(model, prompts, trees, rngs())
    for prompt, tree, candidates, generators in zip(prompts, trees, found, rngs(), strict=True):
        for i, (candidate, rng) in enumerate(zip(candidates, generators, strict=True)):
            assert candidate == plain_walk(model, prompt, tree, TEMPERATURES[i // 2], rng)
    assert len({tuple(candidate) for candidates in found for candidate in candidates}) > 6


def test_packed_log_probs_and_gradients_are_those_of_separate_sequences(model):
    policy = get_peft_model(tiny_model(max_position_embeddings=4096), lora_config(2))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    causal = policy.get_base_model()
    envs = [small_env(seed, steps=seed) for seed in (1, 3)]
    prompts = [prompt_of(env) for env in envs]
    candidates = [
        [ACTIONS.tokens(action) for action in (Action(True, 128, (1,)), Action(True, 128), Action(False, 32, (0, 1)))],
        [ACTIONS.tokens(action) for action in (Action(True, 64, (2,)), Action(True, 64, (2, 3)))],
    ]
    packed = log_probs(causal, prompts, [Tree.of(of_state) for of_state in candidates])
    grad_packed = torch.autograd.grad(sum(x.sum() for state in packed for x in state), lora(policy))
    total = torch.zeros(())
    for prompt, of_state, found in zip(prompts, candidates, packed, strict=True):
        for candidate, log_prob in zip(of_state, found, strict=True):
            logits = causal(input_ids=torch.tensor([prompt + candidate])).logits[0, len(prompt) - 1 : -1]
            plain = logits.log_softmax(-1).gather(-1, torch.tensor(candidate)[:, None])[:, 0]
            torch.testing.assert_close(log_prob, plain, atol=1e-4, rtol=1e-4)
            total = total + plain.sum()
    for found, plain in zip(grad_packed, torch.autograd.grad(total, lora(policy)), strict=True):
        torch.testing.assert_close(found, plain, atol=2e-3, rtol=2e-3)


def lora(policy):
    return [parameter for parameter in policy.parameters() if parameter.requires_grad]


def test_a_tree_computes_what_is_common_once():
    tree = Tree.of([[5, 6, 7], [5, 6, 8], [5, 9]])
    assert tree.tokens == (5, 6, 7, 8, 9)
    assert tree.parents == (-1, 0, 1, 1, 0)
    assert tree.paths == ((0, 1, 2), (0, 1, 3), (0, 4))
    assert tree.ancestors()[3].tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("seed", range(6))
def test_the_planner_knows_the_rewards_to_come(seed):
    env = small_env(seed, difficulty="hard_bandwidth_bound", steps=seed)
    teacher = Planner(env)
    played, total = env.clone(), 0.0
    while not played.episode.ended:
        total += played.step(teacher.action(played).to_text())[1]
    assert teacher.rest(env) == pytest.approx(total, abs=1e-9)
    # Nothing is better than what the planner does next.
    best = score(env, teacher.action(env).to_text(), teacher, "full")
    for fuse, tile, retain in product((True, False), TILES, ((), (0,), (env.episode.current,))):
        assert score(env, Action(fuse, tile, retain).to_text(), teacher, "full") <= best + 1e-9


def test_two_lookaheads():
    env = small_env(3, steps=2)
    teacher, text = Heuristic(), '{"fuse_with_prev": false, "tile": 64, "retain": []}'
    tried = env.clone()
    first = tried.step(text)[1]
    second = tried.step(heuristic(json.loads(tried.observation())).to_text())[1]
    assert score(env, text, teacher, "2") == pytest.approx(first + 0.5 * second)
    rest = second
    while not tried.episode.ended:
        rest += tried.step(heuristic(json.loads(tried.observation())).to_text())[1]
    assert score(env, text, teacher, "full") == pytest.approx(first + rest)
    # Whatever costs a tenth now is scored by what follows all the same.
    assert score(env, "nonsense", teacher, "2") == pytest.approx(-0.1 + 0.5 * _teacher_step(env))
    with pytest.raises(ValueError, match="lookahead: expected one of 2, full, found '3'"):
        score(env, text, teacher, "3")


def _teacher_step(env):
    tried = env.clone()
    tried.step("nonsense")
    return tried.step(heuristic(json.loads(tried.observation())).to_text())[1]


def test_preferences():
    assert preferences([0.1, 0.3, 0.3, 0.0], 1.0) == ((1, 3, pytest.approx(0.3)), (1, 0, pytest.approx(0.2)))
    assert preferences([0.0, 5.0], 1.0) == ((1, 0, 1.0),)
    assert preferences([0.0, 0.01], 0.02) == ((1, 0, pytest.approx(0.5)),)
    assert preferences([0.2, 0.2], 1.0) == ()
    assert len(preferences([1, 0, 0, 0, 0, 0], 1.0)) == 4


def test_the_curriculum_is_what_it_claims_to_be():
    curriculum = Curriculum(400, seed=5, largest=16)
    np.random.seed(0)  # noqa: NPY002 - the process-wide source must neither be used nor matter
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    graphs = [curriculum.graph(i) for i in range(400)]
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
    sources = [source for _, source in graphs]
    shares = {task: sources.count(task) / 400 for task in TASKS}
    assert sum(shares.values()) == pytest.approx(0.4, abs=0.08)
    assert all(share > 0.04 for share in shares.values())
    random = [(graph, float(source.split()[1])) for graph, source in graphs if source.startswith("random")]
    assert len({graph.fingerprint for graph, _ in random}) > 0.9 * len(random)
    assert random[0][1] < 0.22
    assert random[-1][1] > 0.78
    assert max(len(graph) for graph, _ in random) <= 17  # a skip may be added to the last block
    assert curriculum.graph(7)[0].fingerprint == Curriculum(400, seed=5, largest=16).graph(7)[0].fingerprint
    assert curriculum.graph(7)[0].fingerprint != Curriculum(400, seed=6, largest=16).graph(7)[0].fingerprint
    assert {source for _, source in map(Curriculum(9, 0, only_task="task1_chain").graph, range(9))} == {"task1_chain"}


def test_bandwidth_bound_hardware_changes_bandwidth_only():
    for task in TASKS:
        graph = load_task(task)
        moved = on("bandwidth_bound", graph)
        assert moved.nodes == graph.nodes
        assert moved.hardware.slow_mem_bandwidth < graph.hardware.slow_mem_bandwidth / 2
        assert moved.hardware.fast_mem_capacity == graph.hardware.fast_mem_capacity
    assert on("published", load_task("task1_chain")) is load_task("task1_chain")
    with pytest.raises(ValueError, match="hardware: expected one of published, bandwidth_bound, found 'fast'"):
        on("fast", load_task("task1_chain"))


def test_the_actor_is_the_policy():
    causal = tiny_model(max_position_embeddings=4096)
    actor = Actor(causal)
    policy = get_peft_model(causal, lora_config(2))
    ids = torch.arange(3, 40)[None]
    for seed in range(2):  # it follows what has changed since
        with torch.no_grad():
            for parameter in lora(policy):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
            torch.testing.assert_close(actor.follow(policy)(ids).logits, policy(ids).logits, atol=1e-4, rtol=1e-4)
            with policy.disable_adapter():
                assert not torch.allclose(actor.model(ids).logits, policy(ids).logits, atol=1e-2)


def test_an_episode_alone_is_the_same_as_among_others(model):
    rollouts = Rollouts(
        Recipe(teacher="planner", lookahead="full", states=3), Curriculum(4, 0, largest=8), ACTIONS.tokenizer
    )
    together, alone = rollouts.play(model, range(3)), [rollouts.play(model, [i])[0] for i in range(3)]
    assert [one.record() for one in together] == [one.record() for one in alone]
    assert [one.states for one in together] == [one.states for one in alone]
    for one in together:
        assert one.env.episode.ended
        assert len(one.learnt_at) == 3
        for state in one.states:
            assert len(set(state.candidates)) == len(state.candidates)
            assert state.pairs
            assert state.hint is None or all(winner == state.hint for winner, _, _ in state.pairs)
    assert any(one.states for one in together)


def test_hints_that_nothing_beats_are_imitated_wherever_not_all_candidates_say_the_same(model):
    recipe = Recipe(teacher="planner", lookahead="full", states=4, hints=(1.0, 1.0))
    curriculum = Curriculum(4, 0, largest=8)
    won = Rollouts(recipe, curriculum, ACTIONS.tokenizer).play(model, range(3))
    best = Rollouts(replace(recipe, imitate="best"), curriculum, ACTIONS.tokenizer).play(model, range(3))
    assert [one.hints for one in won] == [one.hints for one in best]
    states = [state for one in best for state in one.states]
    # The planner's hint is optimal, so nothing beats it.
    assert all(state.hint is not None and len(state.candidates) > 1 for state in states)
    taught = [state for one in won for state in one.states]
    assert {(state.prompt, state.pairs) for state in taught} == {(s.prompt, s.pairs) for s in states if s.pairs}
    assert 0 < sum(state.hint is None for state in taught) < len(taught)
    assert any(not state.pairs for state in states)
