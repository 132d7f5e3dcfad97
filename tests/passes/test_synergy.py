"""Synergy pairs, the graph, walks, and searches along it."""

import json
from collections import Counter
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest

from env.passes.catalogue import pipelines, runnable
from env.passes.evaluator import shared_evaluator
from env.passes.llvm import Module, load
from env.passes.programs import ProgramError, load_program
from env.passes.search import Genetics, best_of_walks, genetic_search
from env.passes.synergy import SynergyGraph, chosen, main, read_graph, synergy_pairs
from tests.passes.worlds import GOOD, GRAPH, PASSES, TINY, small


def _count(content, sequence):
    module = Module(load(), content)
    for pipeline in pipelines(sequence):
        module.run(pipeline)
    return module.instruction_count()


@pytest.mark.parametrize("program", [small(), load_program("musl/math/cbrt")], ids=lambda p: p.name)
def test_pairs_are_those_of_the_definition(program):
    passes = (*PASSES, "--early-cse", "--dce")
    plain = tuple(
        (a, b)
        for a in passes
        for b in passes
        if _count(program.content, [a, b]) < _count(program.content, [b]) < program.instructions
    )
    assert synergy_pairs(program, shared_evaluator(), passes) == plain
    assert plain


def test_the_graph_counts_programs():
    graph = SynergyGraph.of([[("a", "b"), ("a", "b"), ("b", "c")], [("a", "b")], []])
    assert graph.programs == {("a", "b"): 2, ("b", "c"): 1}
    assert graph.successors == {"a": ("b",), "b": ("c",)}


def test_walks_go_along_edges_and_have_every_length():
    walks = GRAPH.walks(2000, np.random.default_rng(0), 3, 6)
    assert all(pair in GRAPH.programs for walk in walks for pair in pairwise(walk))
    assert {len(walk) for walk in walks} == {3, 4, 5, 6}
    assert min(Counter(len(walk) for walk in walks).values()) > 400
    assert walks == GRAPH.walks(2000, np.random.default_rng(0), 3, 6)


def test_a_walk_that_ends_early_is_made_anew():
    graph = SynergyGraph.of([[("a", "a"), ("a", "end")]])
    walks = graph.walks(50, np.random.default_rng(0), 4, 5)
    assert {len(walk) for walk in walks} == {4, 5}
    assert all(set(walk[:-1]) == {"a"} for walk in walks)


@pytest.mark.parametrize("pairs", [[], [("a", "b"), ("b", "c")]])
def test_a_graph_without_long_walks_is_told(pairs):
    with pytest.raises(ValueError, match="expected walks of 30 passes"):
        SynergyGraph.of([pairs]).walks(1, np.random.default_rng(0))


def test_the_best_of_walks_is_the_best():
    program, rng = load_program("musl/math/cbrt"), np.random.default_rng(1)
    found = best_of_walks(program, GRAPH, shared_evaluator(), rng, 12)
    walks = GRAPH.walks(12, np.random.default_rng(1))
    counts = [_count(program.content, walk) for walk in walks]
    assert found.instructions == min(counts) == _count(program.content, found.sequence)
    assert found.sequence in walks
    assert found.measured == 12


def test_genetic_search_stays_on_the_graph_and_finds_what_is_planted():
    program = small()
    idle = [(a, b) for a in ("--lcssa", "--loop-rotate") for b in ("--lcssa", "--loop-rotate")]
    graph = SynergyGraph.of(
        [[*idle, ("--lcssa", "--mem2reg"), ("--mem2reg", "--instcombine"), ("--instcombine", "--lcssa")]]
    )
    found = genetic_search(program, graph, shared_evaluator(), np.random.default_rng(0), Genetics(12, 4, 3))
    assert found.instructions == 1
    assert all(pair in graph.programs for pair in pairwise(found.sequence))
    assert 10 <= len(found.sequence) <= 30


def test_more_generations_are_never_worse_and_draws_are_the_seed_s():
    program = load_program("musl/math/cbrt")
    found = [
        genetic_search(program, GRAPH, shared_evaluator(), np.random.default_rng(3), Genetics(6, generations, 2))
        for generations in (0, 1, 3)
    ]
    assert [f.instructions for f in found] == sorted((f.instructions for f in found), reverse=True)
    assert found[0].measured <= 6
    again = genetic_search(program, GRAPH, shared_evaluator(), np.random.default_rng(3), Genetics(6, 3, 2))
    assert again == found[2]


def test_a_search_in_which_nothing_runs_is_told(monkeypatch):
    program = small()
    monkeypatch.setattr("env.passes.evaluator.pipelines", tuple)
    graph = SynergyGraph.of([[("trigger-crash-module", "trigger-crash-module")]])
    with pytest.raises(ValueError, match="expected a sequence that runs"):
        genetic_search(program, graph, shared_evaluator(), np.random.default_rng(0), TINY)


def test_the_stored_graph_carries_walks_of_passes_that_run():
    graph = read_graph()
    assert {flag for pair in graph.programs for flag in pair} <= set(runnable())
    walks = graph.walks(20, np.random.default_rng(0))
    assert all(10 <= len(walk) <= 30 for walk in walks)
    assert graph.programs[tuple(GOOD)] > 1


def test_a_stored_line_is_measured_again():
    """The first program of the file, by the command that the file names, for the pairs of a few passes."""
    lines = files("env.passes").joinpath("data/synergy.jsonl").read_text().splitlines()
    head, first = json.loads(lines[0]), json.loads(lines[1])
    assert head["command"] == "python -m env.passes.synergy --largest 200"
    assert first["program"] == chosen(1)[0].name
    stored = {(runnable()[a], runnable()[b]) for a, b in first["pairs"]}
    few = ("--sroa", "--instcombine", "--gvn", "--simplifycfg", "--early-cse", "--inline")
    measured = synergy_pairs(chosen(1)[0], shared_evaluator(), few)
    assert set(measured) == {pair for pair in stored if set(pair) <= set(few)}


def test_the_command_goes_on_where_its_file_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("env.passes.synergy.synergy_pairs", lambda program, _: ((program.name, program.name),))
    monkeypatch.setattr("env.passes.synergy.runnable", lambda: tuple(p.name for p in chosen(9)))
    out = tmp_path / "synergy.jsonl"
    main(["--programs", "2", "--out", str(out), "--quiet"])
    before = out.read_text()
    main(["--programs", "4", "--out", str(out), "--quiet"])
    after = out.read_text()
    assert after.startswith(before)
    assert len(after.splitlines()) == 1 + 4
    assert read_graph(out).programs == {(p.name, p.name): 1 for p in chosen(4)}


def test_a_file_that_cannot_be_written_is_told(tmp_path, capsys):
    assert main(["--out", str(tmp_path / "missing" / "synergy.jsonl"), "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("error: [Errno 2] No such file or directory")


def test_a_file_without_pairs_is_told(tmp_path):
    (tmp_path / "none.jsonl").write_text('{"about": "nothing"}\n')
    with pytest.raises(ProgramError, match="expected pairs of at least one program"):
        read_graph(tmp_path / "none.jsonl")
