"""The portfolio: what is taken, what is left out of a sequence, and what a file may hold."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from env.passes import load_program, shared_evaluator
from env.training import passes_portfolio
from env.training.passes_portfolio import FAILED, coreset, gains, main, read_portfolio, without_idle_passes
from tests.passes.worlds import GOOD, IDLE, small


def test_passes_that_do_nothing_are_left_out():
    """Of what is left, no pass can be missed; and it is no worse than the whole."""
    program = load_program("musl/math/roundf")
    padded = [flag for one in ("--sroa", "--simplifycfg", "--instcombine", "--gvn") for flag in (one, "--lcssa", one)]
    kept = without_idle_passes(program, padded, shared_evaluator())
    shorter = [kept[:place] + kept[place + 1 :] for place in range(len(kept))]
    whole, least, *others = shared_evaluator().evaluate_all(program.content, [padded, kept, *shorter])
    assert 1 < len(kept) < len(padded)
    assert least.instructions <= whole.instructions
    assert all(other.instructions > least.instructions for other in others)
    assert len(without_idle_passes(small(), IDLE, shared_evaluator())) == 1  # the tool takes no empty sequence


def test_gains_are_the_environments_and_what_fails_is_last():
    table = gains([small(4), small()], [GOOD, IDLE], quiet=True)
    assert table.tolist() == [[0.75, -0.75], [0.0, -6.0]]
    assert FAILED == -1.0


def test_each_sequence_adds_most_to_the_mean_of_the_best():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(30, 7))
    taken = coreset(table, 4)
    assert len(set(taken)) == 4
    for size in range(4):
        before = list(taken[:size])
        others = [column for column in range(7) if column not in before]
        value = {column: table[:, [*before, column]].max(1).mean() for column in others}
        assert taken[size] == max(value, key=value.get)
    assert coreset(table[:, :2], 5) == coreset(table[:, :2], 2)


@given(arrays(float, (6, 5), elements=st.floats(-1, 1)))
def test_a_greedy_portfolio_is_no_worse_than_its_bound(table):
    """The mean of the best is submodular: greedy gains 1 - 1/e of what the best pair gains over the best single one."""
    taken = coreset(table, 2)
    floor = table.min(1).mean()
    best = max(table[:, list(pair)].max(1).mean() for pair in combinations(range(5), 2))
    assert table[:, taken].max(1).mean() - floor >= (1 - 1 / np.e) * (best - floor) - 1e-9


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "expected lists of passes, found none"),
        ("{}", "expected lists of passes, found none"),
        ("nonsense", "expected lists of passes, found none"),
        ('{"sequences": [["--barrier"]]}', "expected passes that LLVM 20 can run, found '--barrier'"),
    ],
)
def test_a_file_that_is_none_is_refused(text, problem, tmp_path):
    (tmp_path / "portfolio.json").write_text(text)
    with pytest.raises(ValueError, match=r"portfolio\.json: sequences: " + problem):
        read_portfolio(tmp_path / "portfolio.json")


def test_the_command_writes_what_can_be_read_and_is_named_by_its_seed(tmp_path, monkeypatch):
    programs = [load_program("musl/math/roundf"), load_program("musl/math/cosl")]
    monkeypatch.setattr(passes_portfolio, "load_programs", lambda split: programs)
    monkeypatch.setattr(passes_portfolio, "WALKS", 3)
    outs = [tmp_path / name for name in ("a.json", "b.json")]
    for out in outs:
        assert main(["--out", str(out), "--candidates", "2", "--size", "2", "--quiet"]) == 0
    assert outs[0].read_text() == outs[1].read_text()
    record = json.loads(outs[0].read_text())
    best = gains(programs, read_portfolio(outs[0]), quiet=True).max(1).mean()
    assert record["mean_over_oz_of_the_best"][-1] == pytest.approx(best, abs=1e-5)
    assert main(["--out", str(tmp_path), "--candidates", "1", "--quiet"]) == 2
