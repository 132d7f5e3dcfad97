"""Measuring in forks: what a pass may do to its process costs one result."""

import os
import threading
from pathlib import Path

import pytest

from env.passes.autophase import features
from env.passes.catalogue import KINDS, OZ, PassError, all_passes, pipelines, runnable
from env.passes.evaluator import Evaluator
from env.passes.llvm import LLVMError, Module, load
from env.passes.programs import load_program
from tests.passes.modules import HEAVY, SMALL

CRC32 = (Path(__file__).parents[1] / "data" / "passes_crc32.bc").read_bytes()


@pytest.fixture(scope="module")
def evaluator():
    with Evaluator() as shared:
        yield shared


def _raw(monkeypatch):
    """Let tests name LLVM's own pipelines, some of which do harm on purpose."""
    monkeypatch.setattr("env.passes.evaluator.pipelines", tuple)


def test_the_map_names_every_pass_of_the_paper():
    counts = {kind: sum(p.kind == kind for p in all_passes()) for kind in KINDS}
    assert counts == {"same": 106, "renamed": 11, "substitute": 4, "none": 3}
    assert len({p.flag for p in all_passes()}) == 124
    assert all((p.pipeline is None) == (p.kind == "none") for p in all_passes())
    assert all(p.note for p in all_passes() if p.kind in ("substitute", "none"))


def test_all_mapped_passes_run(evaluator):
    outcomes = evaluator.evaluate_all(CRC32, [[flag] for flag in runnable()])
    assert {flag: o.failure for flag, o in zip(runnable(), outcomes, strict=True) if o.failure} == {}


@pytest.mark.parametrize("flag", ["--barrier", "--loop-reroll", "--prune-eh"])
def test_a_pass_without_successor_is_refused(evaluator, flag):
    with pytest.raises(PassError, match=f"{flag} has no successor in LLVM 20"):
        evaluator.evaluate(SMALL, [flag])


@pytest.mark.parametrize("flag", ["sroa", "--nonsense", "", 7, None, "--sroa,adce", "default<Oz>"])
def test_what_is_no_pass_is_refused(flag):
    with pytest.raises(PassError, match="pass: expected"):
        pipelines([flag])


def test_one_dash_or_two():
    assert pipelines(["-loop-reduce", "--loop-reduce", "--sroa", "-Oz"]) == (
        "loop-reduce",
        "loop-reduce",
        "sroa",
        "default<Oz>",
    )


def test_counts_of_a_small_program(evaluator):
    assert evaluator.evaluate(SMALL).instructions == 8 - 1
    assert evaluator.evaluate(SMALL, ["--dce"]).instructions == 6
    assert evaluator.evaluate(SMALL, ["--mem2reg"]).instructions == 4
    assert evaluator.evaluate(SMALL, ["--mem2reg", "--instcombine"]).instructions == 1
    assert evaluator.baseline(SMALL) == 1


def test_shared_beginnings_change_nothing(evaluator):
    """A fork continues from the very state that the passes before it left."""
    sequences = [
        ["--sroa", "--early-cse", "--gvn"],
        ["--sroa", "--early-cse", "--instcombine", "--simplifycfg"],
        ["--sroa"],
        ["--sroa", "--inline", "--gvn"],
        [],
        ["--sroa", "--early-cse", "--gvn"],
        ["--inline", OZ],
    ]
    together = evaluator.evaluate_all(CRC32, sequences, features=True)
    for sequence, outcome in zip(sequences, together, strict=True):
        module = Module(load(), CRC32)
        for pipeline in pipelines(sequence):
            assert module.run(pipeline) is None
        assert outcome.instructions == module.instruction_count()
        assert outcome.named_features() == features(module)
    with Evaluator() as other:
        assert [other.evaluate(CRC32, sequence, features=True) for sequence in sequences] == together


def test_a_pass_that_ends_its_process_costs_one_result(monkeypatch, evaluator):
    _raw(monkeypatch)
    sequences = [
        ["sroa"],
        ["sroa", "trigger-crash-module", "gvn"],
        ["sroa", "gvn"],
        ["trigger-crash-function"],
        ["gvn"],
    ]
    outcomes = evaluator.evaluate_all(CRC32, sequences)
    assert [o.instructions is None for o in outcomes] == [False, True, False, True, False]
    assert outcomes[1].failure.startswith("pass 2 (trigger-crash-module) was ended by SIG")
    assert outcomes[3].failure.startswith("pass 1 (trigger-crash-function) was ended by SIG")
    assert outcomes[2] == evaluator.evaluate(CRC32, ["sroa", "gvn"])


def test_instcombine_is_run_so_that_it_does_not_abort(monkeypatch, evaluator):
    """One round is not enough for this one; LLVM's own default ends the process over that."""
    program = load_program("musl/math/cbrt").content
    assert evaluator.evaluate(program, ["--instcombine"]).instructions is not None
    _raw(monkeypatch)
    failure = evaluator.evaluate(program, ["instcombine"]).failure
    assert failure == "pass 1 (instcombine) ended the process with status 1"


def test_an_unknown_pipeline_is_told(monkeypatch, evaluator):
    _raw(monkeypatch)
    assert evaluator.evaluate(SMALL, ["sroa", "nonsense"]).failure == "pass 2 (nonsense) is not known to LLVM"


def test_what_does_not_end_in_time_costs_one_result():
    with Evaluator(seconds=0.02) as hasty:
        slow, quick = hasty.evaluate_all(HEAVY, [[OZ], ["--dce"]])[0], hasty.evaluate(SMALL, ["--dce"])
    assert slow.failure == "pass 1 (default<Oz>) did not end in time"
    assert quick.instructions == 6


def test_no_program_leaves_the_worker_alive(evaluator):
    with pytest.raises(LLVMError, match="expected LLVM IR, found"):
        evaluator.evaluate(b"no program")
    assert evaluator.evaluate(SMALL).instructions == 7


def test_a_worker_that_died_is_started_again():
    with Evaluator() as evaluator:
        evaluator.evaluate(SMALL)
        evaluator._worker.kill()
        with pytest.raises(LLVMError, match="expected an answer from the worker"):
            evaluator.evaluate(SMALL, ["--dce"])
        assert evaluator.evaluate(SMALL, ["--dce"]).instructions == 6


def test_what_was_measured_is_kept_by_content(monkeypatch):
    with Evaluator() as evaluator:
        first = evaluator.evaluate(SMALL, ["--dce"])
        monkeypatch.setattr(evaluator, "_ask", None)
        assert evaluator.evaluate(bytes(bytearray(SMALL)), ["-dce"]) is first
        with pytest.raises(TypeError):
            evaluator.evaluate(SMALL + b"\n", ["--dce"])


def test_threads_and_forks_share_an_evaluator():
    with Evaluator() as evaluator:
        found = []
        flags = ["--dce", "--mem2reg", "--sroa", "--gvn"]
        threads = [
            threading.Thread(target=lambda flag=flag: found.append(evaluator.evaluate(SMALL, [flag]).instructions))
            for flag in flags
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(evaluator.evaluate(SMALL, [flag]).instructions for flag in flags)
        child = os.fork()
        if child == 0:
            right = evaluator.evaluate(SMALL, ["--mem2reg", "--instcombine"]).instructions == 1
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert evaluator.evaluate(SMALL, ["--adce"]).instructions == 6
