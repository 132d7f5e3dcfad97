"""Episodes played by policies whose outcome is known."""

import json

import pytest

from counterfactuals import PairError, play_together, scheduler_episodes
from env.scheduler import TASKS, SchedulerEnv, load_task
from env.scheduler.policies import heuristic
from env.scheduler.prompts import SYSTEM_PROMPT


def teacher(prompt):
    return heuristic(json.loads(prompt[-1]["content"])).to_text()


def score_of(episode, policy):
    """The score by the environment alone."""
    env = SchedulerEnv(episode.graph, episode.rules)
    observation, info = env.reset()
    while not env.episode.ended:
        observation, _, _, _, info = env.step(policy(({"role": "user", "content": observation},)))
    return info["score"], info["calibrated_score"]


@pytest.fixture(scope="module")
def episodes():
    return scheduler_episodes(6, seed=3)


def test_a_policy_gets_the_environments_own_score(episodes):
    for episode in episodes:
        outcome = episode.play(teacher)
        assert (outcome.score, outcome.calibrated_score) == score_of(episode, teacher)
        assert (outcome.valid, outcome.invalid, outcome.steps) == (len(episode.graph), 0, len(episode.graph))


def test_together_is_as_alone_in_fewer_calls(episodes):
    sizes = []

    def answers(prompts):
        sizes.append(len(prompts))
        return [teacher(prompt) for prompt in prompts]

    assert play_together(episodes, answers) == [episode.play(teacher) for episode in episodes]
    lengths = [len(episode.graph) for episode in episodes]
    assert sizes == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_invalid_answers_are_counted_and_end_the_episode(episodes):
    outcome = episodes[0].play(lambda prompt: "fuse please")
    assert (outcome.valid, outcome.invalid, outcome.steps, outcome.retained) == (0, 3, 0, 0)
    assert outcome.score < 0  # completed naively, and charged


def test_retained_counts_answers_that_retain_something(episodes):
    def keep_the_current(prompt):
        node = json.loads(prompt[-1]["content"])["current_node"]
        return json.dumps({"fuse_with_prev": False, "tile": 64, "retain": [node] if node % 2 else []})

    outcome = episodes[0].play(keep_the_current)
    assert outcome.retained == sum(node.id % 2 for node in episodes[0].graph.nodes)
    assert outcome.valid == len(episodes[0].graph)


def test_the_published_rules_take_what_is_invalid_to_the_letter():
    (episode,) = scheduler_episodes(1, seed=0, rules="upstream")
    outcome = episode.play(lambda prompt: "fuse: true, tile: 64")
    assert (outcome.valid, outcome.invalid) == (0, len(episode.graph))
    assert outcome.steps == len(episode.graph)


def test_the_prompts_are_the_agents_own(episodes):
    seen = []
    scheduler_episodes(1, seed=3, system="Schedule!")[0].play(lambda prompt: seen.append(prompt) or teacher(prompt))
    assert [message["role"] for message in seen[0]] == ["system", "user"]
    assert {prompt[0]["content"] for prompt in seen} == {"Schedule!"}
    assert episodes[0].system == SYSTEM_PROMPT


def test_more_begin_with_the_same_and_none_that_was_seen(episodes):
    assert scheduler_episodes(3, seed=3) == episodes[:3]
    assert scheduler_episodes(3, seed=4)[0].group != episodes[0].group
    seen = {episodes[0].group, episodes[2].group}
    fewer = scheduler_episodes(4, seed=3, seen=seen)
    assert [episode.group for episode in fewer] == [episodes[i].group for i in (1, 3, 4, 5)]
    assert all(7 <= len(episode.graph) <= 12 for episode in episodes)
    assert len({episode.id for episode in episodes}) == 6


def test_the_other_machines_are_the_same_graphs_with_less_bandwidth(episodes):
    slower = scheduler_episodes(6, seed=3, hardware="bandwidth_bound")
    for one, other in zip(episodes, slower, strict=True):
        assert one.graph.nodes == other.graph.nodes
        assert other.graph.hardware.slow_mem_bandwidth < one.graph.hardware.slow_mem_bandwidth


def test_fixed_tasks_come_first():
    found = scheduler_episodes(1, seed=0, tasks=TASKS)
    assert [episode.id for episode in found[:-1]] == list(TASKS)
    assert found[0].graph == load_task(TASKS[0])
    assert len(scheduler_episodes(0, seed=0, tasks=TASKS)) == len(TASKS)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"rules": "other"}, "rules: expected one of documented, upstream, found 'other'"),
        ({"hardware": "fast"}, "hardware: expected one of published, bandwidth_bound, found 'fast'"),
        ({"tasks": ["task9"]}, "task9"),
    ],
)
def test_bad_arguments_are_named(arguments, problem):
    with pytest.raises(PairError, match=problem):
        scheduler_episodes(1, seed=0, **arguments)


def test_no_graph_left_is_said():
    class Everything:
        def __contains__(self, group):
            return True

    with pytest.raises(PairError, match="found too few"):
        scheduler_episodes(1, seed=0, seen=Everything())
