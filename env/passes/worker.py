"""The process in which programs are measured: it holds parsed programs, and forks for everything that runs a pass.

A request is (program, sequences, whether features are wanted, seconds); sequences that begin alike share the work: a
fork is made where they part, so what they share is run once and every branch continues from the very same state. A
result is a slot of memory that the forks share: a pass that ends its process leaves the slot as it was, and the parent
writes down how the process ended. The seconds are processor time of one sequence, so a busy machine changes no result.
"""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from env.passes.autophase import FEATURES, features
from env.passes.llvm import LLVMError, Module, load

PENDING, DONE, INVALID, UNKNOWN, SIGNALLED, EXITED = range(6)
# A slot: how it went, the signal or exit status, the pass that was last begun, instructions, features.
STATUS, CODE, STEP, INSTRUCTIONS, FIRST_FEATURE = range(5)
SLOT = FIRST_FEATURE + len(FEATURES)
KEPT = 64  # programs
STUCK = 30  # how much longer than its processor time a sequence may take by the clock

Request = tuple[bytes, Sequence[tuple[str, ...]], bool, float]


class _Tree:
    """The sequences of one request, and the memory that their results are written to."""

    def __init__(self, sequences: Sequence[tuple[str, ...]], with_features: bool, seconds: float) -> None:
        self.sequences, self.with_features, self.seconds = sequences, with_features, seconds
        self.slots = memoryview(mmap.mmap(-1, 8 * SLOT * max(1, len(sequences)))).cast("q")

    def result(self, item: int) -> tuple[int, ...]:
        return tuple(self.slots[item * SLOT : (item + 1) * SLOT])

    def _write(self, items: Iterable[int], field: int, value: int) -> None:
        for item in items:
            self.slots[item * SLOT + field] = value

    def fork(self, module: Module, items: Sequence[int], depth: int, seconds: float) -> None:
        """Run the rest of some sequences, alike up to `depth`, in a process of their own."""
        child = os.fork()
        if child == 0:
            self._child(module, items, depth, seconds)
        _, status = os.waitpid(child, 0)
        lost = [item for item in items if self.slots[item * SLOT + STATUS] == PENDING]
        signalled = os.WIFSIGNALED(status)
        self._write(lost, CODE, os.WTERMSIG(status) if signalled else os.waitstatus_to_exitcode(status))
        self._write(lost, STATUS, SIGNALLED if signalled else EXITED)

    def _child(self, module: Module, items: Sequence[int], depth: int, seconds: float) -> NoReturn:
        status = 1
        try:
            self._grow(module, items, depth, seconds)
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _grow(self, module: Module, items: Sequence[int], depth: int, seconds: float) -> None:
        while items:
            self._measure(module, [item for item in items if len(self.sequences[item]) == depth])
            branches: dict[str, list[int]] = {}
            for item in items:
                if len(self.sequences[item]) > depth:
                    branches.setdefault(self.sequences[item][depth], []).append(item)
            if not branches:
                return
            *others, (pipeline, items) = branches.items()
            for _, branch in others:
                self.fork(module, branch, depth, seconds)
            self._write(items, STEP, depth)
            # Only the pass is timed: waiting for forks, which on a busy machine takes long, is nobody's fault.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, seconds * STUCK)
            problem = module.run(pipeline)
            seconds = signal.setitimer(signal.ITIMER_PROF, 0)[0]
            signal.setitimer(signal.ITIMER_REAL, 0)
            if problem is not None:
                self._write(items, STATUS, UNKNOWN)
                return
            depth += 1

    def _measure(self, module: Module, items: Sequence[int]) -> None:
        if not items:
            return
        if not module.is_valid():
            self._write(items, STATUS, INVALID)
            return
        self._write(items, INSTRUCTIONS, module.instruction_count())
        if self.with_features:
            for position, value in enumerate(features(module).values()):
                self._write(items, FIRST_FEATURE + position, value)
        self._write(items, STATUS, DONE)


def serve(library: Path, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more: a list of slots each, or a text if the program is none."""
    llvm = load(library)
    modules: dict[bytes, Module] = {}
    while True:
        try:
            content, sequences, with_features, seconds = pickle.load(requests)
        except EOFError:
            return
        answer: Any
        try:
            module = modules.pop(content, None) or Module(llvm, content)
        except LLVMError as error:
            answer = str(error)
        else:
            modules[content] = module
            if len(modules) > KEPT:
                modules.pop(next(iter(modules))).close()
            tree = _Tree(sequences, with_features, seconds)
            if sequences:
                tree.fork(module, range(len(sequences)), 0, seconds)
            answer = [tree.result(item) for item in range(len(sequences))]
        pickle.dump(answer, answers)
        answers.flush()


def main(library: str) -> None:
    """Serve on standard input and output. LLVM's own words go nowhere, this module's to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the client's to handle: it closes the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    sys.stderr = os.fdopen(os.dup(2), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    serve(Path(library), sys.stdin.buffer, answers)
