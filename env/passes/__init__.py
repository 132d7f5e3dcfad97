"""Ordering LLVM passes: an agent calls tools in a dialogue and recommends a sequence that leaves few instructions.

After Compiler-R1 (arXiv 2506.15701), with LLVM 20 in the place of LLVM 10, so its numbers do not carry over.
"""

from typing import TYPE_CHECKING, Any

from env.passes.action import ActionError, parse_turn
from env.passes.catalogue import PassError, all_passes, runnable
from env.passes.evaluator import Evaluator, Outcome, shared_evaluator
from env.passes.llvm import LLVMError
from env.passes.programs import Program, ProgramError, load_program, load_programs

if TYPE_CHECKING:
    from env.passes.passes import PassesEnv as PassesEnv

__all__ = [
    "ActionError",
    "Evaluator",
    "LLVMError",
    "Outcome",
    "PassError",
    "Program",
    "ProgramError",
    "all_passes",
    "load_program",
    "load_programs",
    "parse_turn",
    "runnable",
    "shared_evaluator",
]


def __getattr__(name: str) -> Any:
    """`PassesEnv` when it is asked for: the worker imports this package, and every fork pays for what is loaded."""
    if name == "PassesEnv":
        from env.passes.passes import PassesEnv

        return PassesEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
