import json
import re

import pytest

from env.scheduler import SchedulerEnv, load_task
from env.scheduler.planner import plan
from env.scheduler.replay import FORMAT, Replay, ReplayError, _unbundled, frames, main, page, read_replay, table


@pytest.fixture
def replay():
    graph = load_task("task2_residual")
    return Replay(graph, "documented", tuple(action.to_text() for action in plan(graph).actions), "planner")


def written(tmp_path, record):
    file = tmp_path / "episode.json"
    file.write_text(record if isinstance(record, str) else json.dumps(record), encoding="utf-8")
    return file


def test_a_file_gives_back_what_was_written(replay, tmp_path):
    assert read_replay(written(tmp_path, replay.to_json())) == replay


def test_frames_are_what_the_environment_answers(replay):
    env = SchedulerEnv(replay.graph)
    observation, _ = env.reset()
    seen = frames(replay)
    assert (seen[0]["command"], seen[0]["observation"]) == (None, observation)
    total = 0.0
    for text, frame in zip(replay.actions, seen[1:], strict=True):
        observation, reward, ended, *_ = env.step(text)
        assert (frame["command"], frame["observation"], frame["reward"]) == (text, observation, reward)
        assert frame["done"] == ended
        total += reward
    assert seen[-1]["score"] == pytest.approx(total)
    assert seen[-1]["view"]["latency"] == pytest.approx(plan(replay.graph).latency)
    assert all(frame["score"] is None for frame in seen[:-1])


def test_the_table_has_a_line_a_step_and_names_what_went_wrong(replay, tmp_path, capsys):
    texts = ("nonsense", '{"fuse_with_prev": true, "tile": 128, "retain": [9]}')
    assert main([str(written(tmp_path, Replay(replay.graph, "documented", texts).to_json()))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:6:2]][:2] == [["1", "0", "-0.1000"], ["2", "0", "0.0000"]]
    assert lines[2].strip().startswith("invalid action: expected a JSON object")
    assert lines[4].strip() == "retain ignored: [9]"
    assert lines[-1].endswith("not ended")
    assert f"score {frames(replay)[-1]['score']:.4f}" in table(replay)


def test_the_table_sends_nothing_to_the_terminal_but_text(replay):
    lines = table(Replay(replay.graph, "documented", ("\x1b[2J\n\r" + 200 * "x",), "\x1b]0;")).splitlines()
    assert all(line.isprintable() and len(line) < 200 for line in lines)
    assert len(lines) == 4  # the heading, the step, its error, what it comes to


def test_the_page_holds_everything_and_asks_for_nothing(replay):
    html = page(replay)
    data = re.search(r'<script type="application/json" id="recording">(.*?)</script>', html, re.S)
    assert json.loads(data[1]) == json.loads(json.dumps({"replay": replay.to_json(), "frames": frames(replay)}))
    assert not re.search(r"(?:src|href)=\"(?!data:,)", html)
    assert not re.search(r"^\s*(?:import|export)\b", html, re.M)
    assert html.count("<script") == html.count("</script>") == 2
    assert "default-src 'none'" in html


def test_nothing_in_a_replay_ends_its_script(replay):
    hostile = "</script><script>alert(1)</script><!-- &amp; "
    html = page(Replay(replay.graph, "documented", (hostile,), hostile))
    assert hostile not in html
    assert html.count("<script") == 2
    data = re.search(r'id="recording">(.*?)</script>', html, re.S)[1]
    assert json.loads(data)["replay"]["made_by"] == hostile


def test_modules_are_put_into_one_script():
    module = (
        'import { a,\n  b } from "./a.js";\nexport const c = 1;\nexport async function d() {}\nconst text = "export";\n'
    )
    assert _unbundled(module) == 'const c = 1;\nasync function d() {}\nconst text = "export";\n'


def test_top_level_names_of_the_page_are_unique():
    from importlib.resources import files

    names = []
    for file in files("env.server").joinpath("static").iterdir():
        if file.name.endswith(".js"):
            found = re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", file.read_text(), re.M)
            names += found
    assert len(names) == len(set(names)) > 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "scheduler-replay-0"}, "format: expected an object of the format 'scheduler-replay-1', found "),
        ({"rules": "mine"}, "rules: expected one of documented, upstream, found 'mine'"),
        ({"actions": [1]}, "actions: expected a list of texts, found [1]"),
        ({"actions": None}, "actions: expected a list of texts, found None"),
        ({"made_by": 3}, "made_by: expected a text, found 3"),
        ({"graph": []}, "graph: expected an object, found []"),
        ({"graph": {"id": "g", "hardware": {}, "nodes": []}}, "graph g: expected the key 'fast_mem_capacity'"),
    ],
)
def test_what_is_no_replay_is_refused_by_name(replay, tmp_path, capsys, change, message):
    file = written(tmp_path, replay.to_json() | change)
    assert main([str(file), "--html", str(tmp_path / "out.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    with pytest.raises(ReplayError, match=r"episode\.json: "):
        read_replay(written(tmp_path, text))


def test_a_missing_file_and_too_many_actions_are_refused(replay, tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    longer = Replay(replay.graph, "documented", (*replay.actions, "more"))
    with pytest.raises(ReplayError, match=rf"expected the {len(replay.actions)} with which the episode ends, found"):
        frames(longer)
    assert FORMAT in json.dumps(longer.to_json())


def test_a_graph_that_the_rules_refuse_is_refused(replay, tmp_path, capsys):
    record = replay.to_json()
    record["graph"]["hardware"]["fast_mem_capacity"] = 16
    assert main([str(written(tmp_path, record))]) == 2
    assert "expected a working set of at most 16 bytes" in capsys.readouterr().err
