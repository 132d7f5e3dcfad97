"""The programs that are part of the package."""

from collections import Counter

import pytest

from env.passes.autophase import FEATURES
from env.passes.build import MAXIMUM, MINIMUM, family, split_of
from env.passes.evaluator import shared_evaluator
from env.passes.llvm import LLVMError
from env.passes.programs import SPLITS, Program, ProgramError, load_program, load_programs, manifest
from tests.passes.modules import SMALL
from tests.passes.worlds import small


def test_counts_and_splits():
    programs = load_programs()
    assert Counter(p.split for p in programs) == {"train": 292, "validation": 40, "test": 38}
    assert [p for split in SPLITS for p in load_programs(split)] == sorted(
        programs, key=lambda p: (SPLITS.index(p.split), programs.index(p))
    )
    assert all(MINIMUM <= p.instructions <= MAXIMUM for p in programs)
    assert all(0 < p.oz_instructions <= p.instructions for p in programs)


def test_no_source_family_is_in_two_splits_and_no_two_programs_look_alike():
    splits = {}
    for program in load_programs():
        source = program.name.removeprefix("musl/") + ".c"
        assert program.split == split_of(source)
        splits.setdefault(family(source), set()).add(program.split)
    assert all(len(found) == 1 for found in splits.values())
    assert len({p.features for p in load_programs()}) == len(load_programs())


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("math/sinf.c", "math/sin"),
        ("math/sinl.c", "math/sin"),
        ("math/sin.c", "math/sin"),
        ("complex/cexpf.c", "complex/cexp"),
        ("stdio/printf.c", "stdio/printf"),
    ],
)
def test_families(source, expected):
    assert family(source) == expected


@pytest.mark.parametrize("program", load_programs("test")[::8], ids=lambda p: p.name)
def test_what_the_manifest_says_is_measured_again(program):
    again = Program.measured(program.name, program.content, shared_evaluator(), program.split)
    assert again == program


def test_features_agree_with_the_counts():
    for program in load_programs():
        of = program.named_features()
        assert tuple(of) == FEATURES
        assert of["TotalInsts"] == program.instructions


def test_provenance_is_told():
    record = manifest()
    assert record["source"].startswith("musl 1.2.5")
    assert record["compiler"].startswith("clang version 20.1.2")
    assert "-disable-llvm-passes" in record["flags"]


def test_improvements():
    program = small(oz_instructions=4)
    assert (program.over_oz(3), program.over_oz(4), program.over_oz(6)) == (0.25, 0.0, -0.5)
    assert program.over_orig(7) == 0.0
    assert program.over_orig(1) == 6 / 7


def test_bad_names_and_bad_programs_are_told():
    with pytest.raises(ProgramError, match=r"expected one of the 370 in musl\.json, found 'musl/none'"):
        load_program("musl/none")
    with pytest.raises(ProgramError, match="expected one of train, validation, test, found 'dev'"):
        load_programs("dev")
    with pytest.raises(LLVMError, match="empty: expected a valid program with instructions, found none"):
        Program.measured("empty", b"declare void @f()", shared_evaluator())
    assert Program.measured("small", SMALL, shared_evaluator()).oz_instructions == 1
