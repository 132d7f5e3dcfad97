"""A decision is what the environment shows and the planner says; a decision file keeps it."""

import json
from dataclasses import replace

import pytest

from counterfactuals import Decision, PairError, generate_decisions, generate_pairs, read_decisions, write_decisions
from counterfactuals.__main__ import main
from env.scheduler import Graph, SchedulerEnv, parse_action
from env.scheduler.cost import TILES
from env.scheduler.hardware import PRESETS
from env.scheduler.planner import TOLERANCE, best_latency
from env.scheduler.policies import heuristic
from env.scheduler.values import ValueTable

DECISIONS = generate_decisions(30, 3, hardware="bandwidth_bound")


def replayed(decision):
    env = SchedulerEnv(Graph.from_json(decision.meta["graph"]))
    env.reset()
    for action in decision.meta["actions"]:
        env.step(action)
    return env


def best_after(env, table, action):
    """Cycles of the fastest schedule that goes on with an action text, by the planner's own value of the next state."""
    after = env.clone()
    after.step(action)
    return best_latency(table, after.episode)


def test_a_decision_is_what_the_environment_shows():
    for decision in DECISIONS:
        env = replayed(decision)
        assert env.observation() == decision.user
        action = heuristic(json.loads(decision.user))
        assert action.to_text() == decision.action
        assert parse_action(decision.action) == action
        assert list(action.retain) == decision.labels["heuristic_retain"]


def test_slots_hold_their_text_and_every_choice_makes_a_valid_action():
    for decision in DECISIONS:
        for slot in ("fuse_with_prev", "tile", "retain"):
            before, after = decision.around(slot)
            assert before.endswith(f'"{slot}": ')
            assert before + decision.slot_text(slot) + after == decision.action
            for text in decision.choices[slot]:
                assert json.loads(before + text + after)[slot] == json.loads(text)
                env = replayed(decision)
                env.step(before + text + after)
                assert "invalid" not in (env.episode.error or "")


def test_spans_hold_the_counts():
    for decision in DECISIONS:
        uses = json.loads(decision.user)["future_uses"]
        named = {name.partition(":")[2] for name in decision.spans if name.startswith("key:")}
        assert named == set(uses)
        for i, count in uses.items():
            texts = [decision.user[slice(*decision.spans[f"{part}:{i}"])] for part in ("key", "value")]
            assert texts == [i, str(count)]


def test_where_the_kernel_must_end_what_pays_is_what_a_best_list_holds():
    """The planner's labels against the value of every action there is: tile, fusion and each subset tried in the
    environment, the next state valued by the planner."""
    tried = 0
    for decision in DECISIONS:
        ids = list(decision.labels["planner_retains"])
        if not decision.labels["kernel_must_end"] or len(ids) > 2:
            continue
        env = replayed(decision)
        table = ValueTable(env.graph)
        subsets = [[], *[[i] for i in ids], ids][: 2 ** len(ids)]
        best = {}
        for fuse in ("true", "false"):
            for tile in TILES:
                for kept in subsets:
                    text = f'{{"fuse_with_prev": {fuse}, "tile": {tile}, "retain": [{", ".join(kept)}]}}'
                    latency = best_after(env, table, text)
                    best[tuple(kept)] = min(best.get(tuple(kept), float("inf")), latency)
        for i, label in decision.labels["planner_retains"].items():
            without = min(latency for kept, latency in best.items() if i not in kept)
            gain = without - min(best.values())
            assert (label == "pays") == (gain > TOLERANCE * env.greedy_latency)
            tried += label == "pays"
    assert tried >= 3


def test_labels_come_in_all_kinds_and_off_the_teachers_path_too():
    labels = {label for decision in DECISIONS for label in decision.labels["planner_retains"].values()}
    assert labels == {"pays", "costs", "does_not_matter"}
    assert {decision.labels["off_path"] for decision in DECISIONS} == {True, False}
    assert all(decision.labels["planner_retains"] for decision in DECISIONS)
    assert len({decision.group for decision in DECISIONS}) >= 15


def test_a_seed_names_its_decisions():
    again = generate_decisions(8, 3, hardware="bandwidth_bound")
    assert [d.to_json() for d in again] == [d.to_json() for d in DECISIONS[:8]]
    assert generate_decisions(1, 4)[0].to_json() != generate_decisions(1, 3)[0].to_json()


def test_a_file_gives_the_decisions_back(tmp_path):
    file = tmp_path / "decisions.jsonl"
    write_decisions(DECISIONS, file)
    assert read_decisions(file) == DECISIONS
    file.write_text(DECISIONS[0].to_json() + "\n{}\n" + DECISIONS[0].to_json(), encoding="utf-8")
    with pytest.raises(PairError) as caught:
        read_decisions(file)
    assert f"{file}:2: expected the field(s)" in str(caught.value)
    assert f"{file}:3: id: expected an id used once" in str(caught.value)
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(PairError, match="at least one decision"):
        read_decisions(file)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"action": ""}, "action: expected a string"),
        ({"slots": {"retain": (0, 999)}, "choices": {"retain": ()}}, r"slots.retain: expected 0 <= start"),
        ({"choices": {}}, "choices: expected one entry per slot"),
        ({"spans": {"key:1": (5, 5)}}, "spans.key:1"),
        ({"labels": 3}, "labels: expected an object, found 3"),
        ({"messages": ({"role": "assistant", "content": "x"},)}, "last message with role user"),
    ],
)
def test_a_broken_decision_is_refused(changes, problem):
    with pytest.raises(PairError, match=problem):
        replace(DECISIONS[0], **changes)


def test_the_references_text_has_to_be_a_choice():
    choices = {**DECISIONS[0].choices, "tile": ("1",)}
    with pytest.raises(PairError, match=r"choices.tile: expected the action's own"):
        replace(DECISIONS[0], choices=choices)


@pytest.mark.parametrize("generate", [generate_pairs, generate_decisions])
def test_hardware_changes_the_machine_only(generate):
    for published, bound in zip(generate(6, 1), generate(6, 1, hardware="bandwidth_bound"), strict=False):
        before, after = (Graph.from_json(item.meta["graph"]) for item in (published, bound))
        assert after.hardware.slow_mem_bandwidth < before.hardware.slow_mem_bandwidth
        if isinstance(published, Decision):  # a pair is searched for, and the heuristic may refuse another state
            assert after.nodes == before.nodes
        machines = [p.hardware(max(after.sizes)) for name, p in PRESETS.items() if name.endswith("bandwidth_bound")]
        assert after.hardware in machines
    with pytest.raises(PairError, match="hardware: expected one of published, bandwidth_bound, found 'slow'"):
        generate(1, 0, hardware="slow")
    with pytest.raises(PairError, match="rules: expected documented"):
        generate(1, 0, rules="upstream")


def test_the_command_writes_decisions(tmp_path, capsys):
    file = tmp_path / "decisions.jsonl"
    argv = ["--decisions", "--count", "5", "--seed", "3", "--hardware", "bandwidth_bound", "--out", str(file)]
    assert main(argv) == 0
    assert read_decisions(file) == DECISIONS[:5]
    assert "5 decisions" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*argv, "--kind", "dose"])
