"""The 56 AutoPhase features: what a program looks like to the agent (arXiv 2003.00671).

They are counted as CompilerGym's InstCount pass counts them (compiler_gym/third_party/autophase), which the dataset of
the paper was made with: declarations are functions; an edge is counted once for each time it stands in a terminator;
"memory" instructions include calls; constants are counted per operand, whatever the operand means.
"""

from __future__ import annotations

from collections import Counter
from ctypes import CDLL

from env.passes.llvm import Module

FEATURES = (
    "BBNumArgsHi", "BBNumArgsLo", "onePred", "onePredOneSuc", "onePredTwoSuc", "oneSuccessor", "twoPred",
    "twoPredOneSuc", "twoEach", "twoSuccessor", "morePreds", "BB03Phi", "BBHiPhi", "BBNoPhi", "BeginPhi",
    "BranchCount", "returnInt", "CriticalCount", "NumEdges", "const32Bit", "const64Bit", "numConstZeroes",
    "numConstOnes", "UncondBranches", "binaryConstArg", "NumAShrInst", "NumAddInst", "NumAllocaInst", "NumAndInst",
    "BlockMid", "BlockLow", "NumBitCastInst", "NumBrInst", "NumCallInst", "NumGetElementPtrInst", "NumICmpInst",
    "NumLShrInst", "NumLoadInst", "NumMulInst", "NumOrInst", "NumPHIInst", "NumRetInst", "NumSExtInst",
    "NumSelectInst", "NumShlInst", "NumStoreInst", "NumSubInst", "NumTruncInst", "NumXorInst", "NumZExtInst",
    "TotalBlocks", "TotalInsts", "TotalMemInst", "TotalFuncs", "ArgsPhi", "testUnary",
)  # fmt: skip

INTEGER_TYPE = 8  # LLVMIntegerTypeKind
BR, PHI, CALL = 2, 44, 45  # LLVMOpcode
# LLVMOpcode of the instructions that have a feature of their own.
OPCODES = {
    1: "Ret", 2: "Br", 8: "Add", 10: "Sub", 12: "Mul", 20: "Shl", 21: "LShr", 22: "AShr", 23: "And", 24: "Or",
    25: "Xor", 26: "Alloca", 27: "Load", 28: "Store", 29: "GetElementPtr", 30: "Trunc", 31: "ZExt", 32: "SExt",
    41: "BitCast", 42: "ICmp", 44: "PHI", 45: "Call", 46: "Select",
}  # fmt: skip
INVOKE = 5
MEMORY = {26, 27, 28, 29, CALL, INVOKE}


def features(module: Module) -> dict[str, int]:
    """The features of a module, in the order of `FEATURES`."""
    counts: Counter[str] = Counter()
    for function in module.functions():
        counts["TotalFuncs"] += 1
        blocks = list(module.blocks(function))
        successors = {block: _successors(module.llvm, block) for block in blocks}
        predecessors = Counter(target for targets in successors.values() for target in targets)
        for block in blocks:
            _count_edges(counts, successors[block], predecessors, predecessors[block])
            _count_block(counts, module, block)
    return {name: counts[name] for name in FEATURES}


def _successors(llvm: CDLL, block: int) -> list[int]:
    terminator = llvm.LLVMGetBasicBlockTerminator(block)
    return [llvm.LLVMGetSuccessor(terminator, i) for i in range(llvm.LLVMGetNumSuccessors(terminator))]


def _count_edges(counts: Counter[str], targets: list[int], predecessors: Counter[int], before: int) -> None:
    after = len(targets)
    counts["TotalBlocks"] += 1
    counts["NumEdges"] += after
    # An edge is critical if it neither leaves its block alone nor enters the other one alone.
    counts["CriticalCount"] += sum(after > 1 and predecessors[target] > 1 for target in targets)
    counts["oneSuccessor"] += after == 1
    counts["twoSuccessor"] += after == 2
    counts["onePred"] += before == 1
    counts["twoPred"] += before == 2
    counts["morePreds"] += before > 2
    counts["onePredOneSuc"] += before == after == 1
    counts["onePredTwoSuc"] += before == 1 and after == 2
    counts["twoPredOneSuc"] += before == 2 and after == 1
    counts["twoEach"] += before == after == 2


def _count_block(counts: Counter[str], module: Module, block: int) -> None:
    llvm, size, phis, incoming = module.llvm, 0, 0, 0
    for instruction in module.instructions(block):
        opcode = llvm.LLVMGetInstructionOpcode(instruction)
        if opcode == PHI:
            counts["BeginPhi"] += size == 0
            phis += 1
            incoming += llvm.LLVMCountIncoming(instruction)
        size += 1
        _count_instruction(counts, llvm, instruction, opcode)
    counts["ArgsPhi"] += incoming
    counts["BBNoPhi" if phis == 0 else "BB03Phi" if phis <= 3 else "BBHiPhi"] += 1
    counts["BBNumArgsHi"] += incoming > 5
    counts["BBNumArgsLo"] += 1 <= incoming <= 5
    counts["BlockLow"] += size < 15
    counts["BlockMid"] += 15 <= size <= 500


def _count_instruction(counts: Counter[str], llvm: CDLL, instruction: int, opcode: int) -> None:
    counts["TotalInsts"] += 1
    counts["TotalMemInst"] += opcode in MEMORY
    if opcode in OPCODES:
        counts[f"Num{OPCODES[opcode]}Inst"] += 1
    operands = [llvm.LLVMGetOperand(instruction, i) for i in range(llvm.LLVMGetNumOperands(instruction))]
    if opcode == BR:
        counts["BranchCount"] += 1
        counts["UncondBranches"] += len(operands) == 1
    elif opcode == CALL:
        counts["returnInt"] += _returns_integer(llvm, instruction)
    counts["testUnary"] += bool(llvm.LLVMIsAUnaryInstruction(instruction))
    if llvm.LLVMIsABinaryOperator(instruction):
        counts["binaryConstArg"] += any(llvm.LLVMIsAConstant(operand) for operand in operands)
    for operand in operands:
        if llvm.LLVMIsAConstantInt(operand):
            _count_constant(counts, llvm, operand)


def _count_constant(counts: Counter[str], llvm: CDLL, constant: int) -> None:
    kind = llvm.LLVMTypeOf(constant)
    if llvm.LLVMGetTypeKind(kind) != INTEGER_TYPE:
        return
    width = llvm.LLVMGetIntTypeWidth(kind)
    counts["const32Bit"] += width == 32
    counts["const64Bit"] += width == 64
    # Constants are unique in their context, so equal values of any width are the same object.
    counts["numConstOnes"] += constant == llvm.LLVMConstInt(kind, 1, 0)
    counts["numConstZeroes"] += constant == llvm.LLVMConstInt(kind, 0, 0)


def _returns_integer(llvm: CDLL, call: int) -> bool:
    """Whether the callee is a known function, called by its own type, that returns an integer."""
    callee = llvm.LLVMGetCalledValue(call)
    if not llvm.LLVMIsAFunction(callee):
        return False
    called_as = llvm.LLVMGetCalledFunctionType(call)
    if called_as != llvm.LLVMGlobalGetValueType(callee):
        return False
    return bool(llvm.LLVMGetTypeKind(llvm.LLVMGetReturnType(called_as)) == INTEGER_TYPE)
