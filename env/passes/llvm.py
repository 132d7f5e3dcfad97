"""LLVM inside this process, through its C API.

A pass may end the process it runs in (a failed check, a crash, a loop without end), and nothing can catch that. So
programs are measured in forks (`env.passes.worker`); call a `Module` yourself only where losing the process is no loss.

Only the standard library is imported here: a fork costs what the process holds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "karellen-llvm-core"
VERSION = "20.1.8"
TARGET = "X86"
RETURN_STATUS = 2  # LLVMVerifierFailureAction: neither print nor abort

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "LLVMContextCreate": (c_void_p, ()),
    "LLVMContextDispose": (None, (c_void_p,)),
    "LLVMCreateMemoryBufferWithMemoryRangeCopy": (c_void_p, (c_char_p, c_size_t, c_char_p)),
    "LLVMParseIRInContext": (c_int, (c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_void_p))),
    "LLVMDisposeModule": (None, (c_void_p,)),
    "LLVMDisposeMessage": (None, (c_void_p,)),
    "LLVMVerifyModule": (c_int, (c_void_p, c_int, POINTER(c_void_p))),
    "LLVMGetTarget": (c_char_p, (c_void_p,)),
    "LLVMGetTargetFromTriple": (c_int, (c_char_p, POINTER(c_void_p), POINTER(c_void_p))),
    "LLVMCreateTargetMachine": (c_void_p, (c_void_p, c_char_p, c_char_p, c_char_p, c_int, c_int, c_int)),
    "LLVMDisposeTargetMachine": (None, (c_void_p,)),
    "LLVMCreatePassBuilderOptions": (c_void_p, ()),
    "LLVMDisposePassBuilderOptions": (None, (c_void_p,)),
    "LLVMRunPasses": (c_void_p, (c_void_p, c_char_p, c_void_p, c_void_p)),
    "LLVMGetErrorMessage": (c_void_p, (c_void_p,)),
    "LLVMDisposeErrorMessage": (None, (c_void_p,)),
    "LLVMGetFirstFunction": (c_void_p, (c_void_p,)),
    "LLVMGetNextFunction": (c_void_p, (c_void_p,)),
    "LLVMGetFirstBasicBlock": (c_void_p, (c_void_p,)),
    "LLVMGetNextBasicBlock": (c_void_p, (c_void_p,)),
    "LLVMGetFirstInstruction": (c_void_p, (c_void_p,)),
    "LLVMGetNextInstruction": (c_void_p, (c_void_p,)),
    "LLVMGetBasicBlockTerminator": (c_void_p, (c_void_p,)),
    "LLVMGetNumSuccessors": (c_uint, (c_void_p,)),
    "LLVMGetSuccessor": (c_void_p, (c_void_p, c_uint)),
    "LLVMGetInstructionOpcode": (c_int, (c_void_p,)),
    "LLVMGetNumOperands": (c_int, (c_void_p,)),
    "LLVMGetOperand": (c_void_p, (c_void_p, c_uint)),
    "LLVMIsAConstant": (c_void_p, (c_void_p,)),
    "LLVMIsAConstantInt": (c_void_p, (c_void_p,)),
    "LLVMIsABinaryOperator": (c_void_p, (c_void_p,)),
    "LLVMIsAUnaryInstruction": (c_void_p, (c_void_p,)),
    "LLVMIsAFunction": (c_void_p, (c_void_p,)),
    "LLVMGetCalledValue": (c_void_p, (c_void_p,)),
    "LLVMGetCalledFunctionType": (c_void_p, (c_void_p,)),
    "LLVMGlobalGetValueType": (c_void_p, (c_void_p,)),
    "LLVMGetReturnType": (c_void_p, (c_void_p,)),
    "LLVMGetTypeKind": (c_int, (c_void_p,)),
    "LLVMGetIntTypeWidth": (c_uint, (c_void_p,)),
    "LLVMTypeOf": (c_void_p, (c_void_p,)),
    "LLVMConstInt": (c_void_p, (c_void_p, c_ulonglong, c_int)),
    "LLVMCountIncoming": (c_uint, (c_void_p,)),
}


class LLVMError(RuntimeError):
    """LLVM is missing, or refused a program; the message is one line."""


def library_path() -> Path:
    """Where LLVM's shared library lies.

    Raises:
        LLVMError: if the package that holds it is not installed.
    """
    try:
        found = [file for file in files(PACKAGE) or () if file.name.startswith("libLLVM.so.")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise LLVMError(
            f"LLVM: expected the package {PACKAGE}=={VERSION} (Linux, x86-64), found none; install [passes]"
        )
    return Path(str(found[0].locate())).resolve()


@cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """LLVM's shared library, with the signatures of what is used here and the x86 target registered.

    Raises:
        LLVMError: if it cannot be loaded.
    """
    if not sys.platform.startswith("linux"):
        raise LLVMError(f"LLVM: expected Linux, found {sys.platform}")
    try:
        library = ctypes.CDLL(str(path or library_path()))
    except OSError as error:
        raise LLVMError(f"LLVM: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for part in ("TargetInfo", "Target", "TargetMC"):
        getattr(library, f"LLVMInitialize{TARGET}{part}")()
    return library


class Module:
    """One program in LLVM's memory.

    Args:
        llvm: the library, from `load`.
        content: bitcode or textual IR.

    Raises:
        LLVMError: if the content is neither.
    """

    def __init__(self, llvm: ctypes.CDLL, content: bytes) -> None:
        self.llvm = llvm
        self._context = llvm.LLVMContextCreate()
        buffer = llvm.LLVMCreateMemoryBufferWithMemoryRangeCopy(content, len(content), b"module")
        reference, message = c_void_p(), c_void_p()
        if llvm.LLVMParseIRInContext(self._context, buffer, byref(reference), byref(message)):
            problem = self._text(message.value)
            llvm.LLVMContextDispose(self._context)
            raise LLVMError(f"program: expected LLVM IR, found {' '.join(problem.split())}")
        self.reference = reference.value
        self._machine = self._target_machine()
        self._options = llvm.LLVMCreatePassBuilderOptions()

    def close(self) -> None:
        """Free the module; it must not be used any more."""
        self.llvm.LLVMDisposePassBuilderOptions(self._options)
        if self._machine:
            self.llvm.LLVMDisposeTargetMachine(self._machine)
        self.llvm.LLVMDisposeModule(self.reference)
        self.llvm.LLVMContextDispose(self._context)

    def run(self, pipeline: str) -> str | None:
        """Run one pipeline of the new pass manager on the module; returns LLVM's complaint if it does not know it."""
        error = self.llvm.LLVMRunPasses(self.reference, pipeline.encode(), self._machine, self._options)
        if not error:
            return None
        message = self.llvm.LLVMGetErrorMessage(error)
        text = ctypes.string_at(message).decode(errors="replace")
        self.llvm.LLVMDisposeErrorMessage(message)
        return text

    def is_valid(self) -> bool:
        """Whether LLVM's verifier accepts the module."""
        message = c_void_p()
        broken = self.llvm.LLVMVerifyModule(self.reference, RETURN_STATUS, byref(message))
        self.llvm.LLVMDisposeMessage(message)
        return not broken

    def functions(self) -> Iterator[int]:
        """All functions, declarations included."""
        return _chain(self.llvm.LLVMGetFirstFunction(self.reference), self.llvm.LLVMGetNextFunction)

    def blocks(self, function: int) -> Iterator[int]:
        """The basic blocks of a function; none of a declaration."""
        return _chain(self.llvm.LLVMGetFirstBasicBlock(function), self.llvm.LLVMGetNextBasicBlock)

    def instructions(self, block: int) -> Iterator[int]:
        """The instructions of a basic block, in order."""
        return _chain(self.llvm.LLVMGetFirstInstruction(block), self.llvm.LLVMGetNextInstruction)

    def instruction_count(self) -> int:
        """How many instructions the module's functions have."""
        return sum(1 for f in self.functions() for block in self.blocks(f) for _ in self.instructions(block))

    def _target_machine(self) -> int | None:
        """The machine of the module's triple, as `opt` takes it: passes that ask for costs get that machine's."""
        triple, target, message = self.llvm.LLVMGetTarget(self.reference), c_void_p(), c_void_p()
        if not triple or self.llvm.LLVMGetTargetFromTriple(triple, byref(target), byref(message)):
            return None
        optimize, relocation, code_model = 2, 0, 0  # the defaults of LLVM's three enumerations
        machine: int | None = self.llvm.LLVMCreateTargetMachine(
            target, triple, b"", b"", optimize, relocation, code_model
        )
        return machine

    def _text(self, message: int | None) -> str:
        text = ctypes.string_at(message).decode(errors="replace") if message else ""
        self.llvm.LLVMDisposeMessage(message)
        return text


def _chain(first: int | None, following: ctypes._NamedFuncPointer) -> Iterator[int]:
    while first:
        yield first
        first = following(first)
