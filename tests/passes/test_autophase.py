"""AutoPhase features: the recorded vector of the original, and modules counted by hand."""

import json
from pathlib import Path

import pytest

from env.passes.autophase import FEATURES, features
from env.passes.llvm import LLVMError, Module, load
from tests.passes.modules import EVERYTHING, EVERYTHING_FEATURES, ODDITIES

DATA = Path(__file__).parents[1] / "data"
CRC32 = (DATA / "passes_crc32.bc").read_bytes()
RECORDED = json.loads((DATA / "passes_autophase.json").read_text())["features"]


def test_the_original_s_vector_of_its_own_program():
    found = features(Module(load(), CRC32))
    assert list(found) == list(FEATURES) == list(RECORDED)
    assert found == RECORDED


def test_a_module_counted_by_hand():
    found = features(Module(load(), EVERYTHING))
    assert {name: (found[name], count) for name, count in EVERYTHING_FEATURES.items() if found[name] != count} == {}
    assert len(found) == len(EVERYTHING_FEATURES) == 56


def test_wide_constants_and_callees_of_another_type():
    found = features(Module(load(), ODDITIES))
    assert (found["numConstZeroes"], found["numConstOnes"], found["binaryConstArg"]) == (1, 1, 3)
    assert found["returnInt"] == 0


@pytest.mark.parametrize(("size", "low", "mid"), [(14, 1, 0), (15, 0, 1), (500, 0, 1), (501, 0, 0)])
def test_blocks_by_size(size, low, mid):
    body = "".join(f"  %v{i} = add i32 %x, {i + 2}\n" for i in range(size - 1))
    found = features(Module(load(), f"define void @f(i32 %x) {{\n{body}  ret void\n}}".encode()))
    assert (found["BlockLow"], found["BlockMid"], found["TotalInsts"]) == (low, mid, size)


def test_modules_can_be_closed():
    llvm = load()
    for content in (CRC32, EVERYTHING) * 20:
        module = Module(llvm, content)
        assert module.run("default<Oz>") is None
        assert module.is_valid()
        module.close()


def test_what_is_no_program_is_told():
    with pytest.raises(LLVMError, match="expected LLVM IR, found"):
        Module(load(), b"no program")
