"""Curves of training runs: a column a run, the numbers of the log, the command beside them, and no run no figure."""

import json

import pytest

from env.training.plot import CURVES, WINDOW, main, plot, read_log


@pytest.fixture
def log(tmp_path):
    lines = [
        {"episode": i, "step": 1 + i // 4, "source": "task1_chain", "score": i / 100, "loss": 0.5, "fuse_rate": 1.0,
         "retain_rate": 0.5, "hint_win_rate": None if i % 2 else 0.25}
        for i in range(80)
    ]  # fmt: skip
    file = tmp_path / "training.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_points_are_means_of_a_step_and_lines_of_the_last_episodes(log):
    figure = plot({"one": read_log(log), "two": read_log(log)})
    assert len(figure.axes) == 2 * len(CURVES)
    points, line = figure.axes[0].get_lines()
    assert points.get_xdata()[0] == 1.5
    assert points.get_ydata()[0] == pytest.approx(1.5)  # percent
    assert line.get_ydata()[-1] == pytest.approx(79 - (WINDOW - 1) / 2)


def test_the_command_writes_figure_and_record(log, tmp_path):
    out = tmp_path / "out"
    assert main([str(log), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"training.pdf", "training.png", "run.json"}
    assert json.loads((out / "run.json").read_text())["command"].startswith("python -m env.training.plot ")


def test_what_is_no_log_is_refused_in_a_line(tmp_path, capsys):
    file = tmp_path / "training.jsonl"
    file.write_text('{"episode": 1}\n')
    assert main([str(file), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
