"""The command: what it prints, writes and returns."""

import json

import pytest

from interp import selftest
from tests.planted.test_scores import FOUND, MISSED


@pytest.fixture
def planted(monkeypatch):
    """Have the command find what is given to this, without a model."""

    def plant(*outcomes):
        monkeypatch.setattr(selftest, "run", lambda todo, jobs: iter(outcomes))

    return plant


def test_all_bounds_met_is_success_and_the_numbers_are_written(planted, tmp_path, capsys):
    planted(FOUND)
    file = tmp_path / "scores.json"
    assert selftest.main(["--plantings", "1", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "every stated bound is met" in out
    assert "planted" in err
    record = json.loads(file.read_text())
    assert record["plantings"] == 1
    assert {score["name"]: score["estimate"] for score in record["scores"]}["heads: precision"] == 1.0


def test_a_missed_bound_is_failure_also_in_silence(planted, capsys):
    planted(FOUND, MISSED)
    assert selftest.main(["--plantings", "2", "--quiet"]) == selftest.MISSED
    assert capsys.readouterr() == ("", "")
    assert selftest.main(["--plantings", "2"]) == selftest.MISSED
    assert "missed: heads: precision" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [["--plantings", "0"], ["--seed", "-1"], ["--jobs", "x"], ["--json", "no/such/file.json"], ["--json", "."]]
)
def test_bad_input_is_one_line(argv, capsys):
    assert selftest.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_seed_gives_its_outcomes_in_other_processes_too():
    todo = selftest.tasks(2, 5, ["rank"])
    here, there = list(selftest.run(todo)), list(selftest.run(todo, jobs=2))
    assert here == there
    assert len({outcome.module for outcome in [*here, *selftest.run(selftest.tasks(6, 6, ["rank"]))]}) > 2
