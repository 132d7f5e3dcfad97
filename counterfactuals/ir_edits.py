"""Edits of a program that leave a program: one line of its textual IR (a stack slot or a small constant in it), or
`mem2reg` of one variable."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from env.passes import load_program
from env.passes.llvm import LLVMError, Module, load

_SLOT = re.compile(r"  (%\d+) = alloca (\S+),")
_ACCESS = re.compile(r"(  %\d+ = load (?P<load>\S+), ptr |  store (?P<store>\S+) \S+, ptr )(?P<slot>%\d+)(?P<rest>,.*)")
_SMALL = re.compile(r"\bi(?:8|16|32|64) ([01])(?=,|$)|\b(?:add|sub|mul|and|or|xor)[a-z ]* i\d+ %\d+, ([01])$")


@dataclass(frozen=True)
class Edit:
    """A line of a program's textual IR, counted from 0, and what stands there instead."""

    line: int
    text: str

    def applied(self, name: str) -> str:
        """The textual IR of the edited program.

        Raises:
            IndexError: if the program has no such line.
        """
        lines = textual(name).split("\n")
        lines[self.line] = self.text
        return "\n".join(lines)


@dataclass(frozen=True)
class Promotion:
    """`mem2reg` of one variable: its stack slot, by the line of its `alloca`, counted from 0."""

    line: int

    def applied(self, name: str) -> str:
        """The textual IR of the program in which that variable is in registers.

        Accesses of all other slots are volatile while the pass runs, which hides them from it.

        Raises:
            IndexError: if the program has no such line.
            ValueError: if it declares no slot, or the program has volatile accesses of its own.
        """
        text = textual(name)
        lines = text.split("\n")
        slot = _SLOT.match(lines[self.line])
        if slot is None or " volatile " in text:
            raise ValueError(f"{name}: expected a variable's slot and no volatile access, found {lines[self.line]!r}")
        own = range(self.line, lines.index("}", self.line))  # to the end of its function
        for number, line in enumerate(lines):
            found = _ACCESS.fullmatch(line)
            if found and not (number in own and found["slot"] == slot[1]):
                lines[number] = re.sub(r"\b(load|store)\b", r"\1 volatile", line, count=1)
        return _printed("\n".join(lines).encode(), after="mem2reg").replace(" volatile ", " ")


@cache
def textual(name: str) -> str:
    """The textual IR of a stored program."""
    return _printed(load_program(name).content)


def _printed(content: bytes, after: str | None = None) -> str:
    """A module as text, as it is or after a pass."""
    llvm = load()
    llvm.LLVMPrintModuleToString.restype, llvm.LLVMPrintModuleToString.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    module = Module(llvm, content)
    problem = after and module.run(after)
    printed = llvm.LLVMPrintModuleToString(module.reference)
    text = ctypes.string_at(printed).decode()
    llvm.LLVMDisposeMessage(printed)
    module.close()
    if problem:
        raise LLVMError(f"{after}: {problem}")
    return text


def slot_edits(text: str) -> Iterator[Edit]:
    """Each load and store of a stack slot, sent to each other slot of its type in the function."""
    lines = text.split("\n")
    slots: dict[str, str] = {}
    for number, line in enumerate(lines):
        if line.startswith("define"):
            slots = {}
        elif found := _SLOT.match(line):
            slots[found[1]] = found[2]
        elif found := _ACCESS.fullmatch(line):
            kind = found["load"] or found["store"]
            if slots.get(found["slot"]) == kind:
                others = [slot for slot, of in slots.items() if of == kind and slot != found["slot"]]
                yield from (Edit(number, found[1] + slot + found["rest"]) for slot in others)


def promotions(text: str) -> Iterator[Promotion]:
    """Each stack slot of a scalar that is loaded or stored."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if found := _SLOT.match(line):
            end = lines.index("}", number)
            accesses = (_ACCESS.fullmatch(access) for access in lines[number:end])
            if any(access and access["slot"] == found[1] for access in accesses):
                yield Promotion(number)


def constant_edits(text: str) -> Iterator[Edit]:
    """Each integer operand 0 or 1 of an instruction that is no address and no call, made 7."""
    for number, line in enumerate(text.split("\n")):
        if not line.startswith("  ") or any(word in line for word in ("getelementptr", "alloca", " call ", "switch")):
            continue
        for found in _SMALL.finditer(line):
            start, end = found.span(1) if found[1] else found.span(2)
            yield Edit(number, f"{line[:start]}7{line[end:]}")
