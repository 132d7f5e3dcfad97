"""What pass sequences make of programs: instruction counts, kept by content, from a worker that survives its passes."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from env.passes.autophase import FEATURES
from env.passes.catalogue import OZ, pipelines
from env.passes.llvm import LLVMError, library_path
from env.passes.worker import CODE, DONE, FIRST_FEATURE, INSTRUCTIONS, INVALID, SIGNALLED, STATUS, STEP, UNKNOWN

ROOT = Path(__file__).parents[2]
START = "import sys; sys.path.insert(0, sys.argv[1]); from env.passes.worker import main; main(sys.argv[2])"
SECONDS = 10.0
KEPT = 200_000  # outcomes
LATE = "did not end in time"  # the one failure that another try may not have, so it is not kept


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program.

    Attributes:
        instructions: how many it has in the end; None if it did not get there.
        failure: why it did not, one line; "" if it did.
        features: the AutoPhase features in the end, in the order of `FEATURES`, if they were asked for.
    """

    instructions: int | None
    failure: str = ""
    features: tuple[int, ...] | None = None

    def named_features(self) -> dict[str, int]:
        """The features by name.

        Raises:
            ValueError: if they were not asked for, or the program did not get there.
        """
        if self.features is None:
            raise ValueError("features: expected an outcome that was measured with them, found one without")
        return dict(zip(FEATURES, self.features, strict=True))


class Evaluator:
    """Measures programs in one worker process, which is started when it is needed and again when it has died.

    One pass is one run of LLVM's pass manager, as in `opt` called pass by pass. Each sequence runs in a fork, so one
    that aborts, crashes or does not end costs its own result only.

    Args:
        seconds: processor time that one sequence may take.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._worker: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[bytes, tuple[str, ...], bool], Outcome] = OrderedDict()

    def evaluate(self, content: bytes, sequence: Sequence[str] = (), *, features: bool = False) -> Outcome:
        """What one sequence of flags makes of a program (bitcode or textual IR).

        Raises:
            PassError: if the sequence names a pass that LLVM 20 does not have.
            LLVMError: if the content is no program, or LLVM cannot be run.
        """
        return self.evaluate_all(content, [sequence], features=features)[0]

    def evaluate_all(
        self, content: bytes, sequences: Sequence[Sequence[str]], *, features: bool = False
    ) -> list[Outcome]:
        """What each sequence makes of a program; sequences that begin alike share that part of the work.

        Raises:
            PassError: if a sequence names a pass that LLVM 20 does not have.
            LLVMError: if the content is no program, or LLVM cannot be run.
        """
        digest = hashlib.sha256(content).digest()
        keys = [(digest, pipelines(sequence), features) for sequence in sequences]
        with self._lock:
            found = {key: self._kept[key] for key in keys if key in self._kept}
            wanted = [key for key in dict.fromkeys(keys) if key not in found]
            if wanted:
                slots = self._ask(content, [key[1] for key in wanted], features)
                outcomes = [_outcome(slot, key[1], features) for slot, key in zip(slots, wanted, strict=True)]
                found.update(zip(wanted, outcomes, strict=True))
            for key, outcome in found.items():
                if not outcome.failure.endswith(LATE):
                    self._kept[key] = outcome
                    self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return [found[key] for key in keys]

    def baseline(self, content: bytes) -> int:
        """How many instructions -Oz leaves.

        Raises:
            LLVMError: if -Oz fails on the program.
        """
        outcome = self.evaluate(content, [OZ])
        if outcome.instructions is None:
            raise LLVMError(f"-Oz: expected an instruction count, found {outcome.failure}")
        return outcome.instructions

    def close(self) -> None:
        """End the worker. It starts again when it is needed."""
        worker, self._worker = self._worker, None
        if worker is None or self._owner != os.getpid():
            return
        assert worker.stdin
        assert worker.stdout
        worker.stdin.close()
        worker.wait()
        worker.stdout.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, content: bytes, sequences: Sequence[tuple[str, ...]], features: bool) -> list[tuple[int, ...]]:
        worker = self._running()
        assert worker.stdin
        assert worker.stdout
        try:
            pickle.dump((content, sequences, features, self.seconds), worker.stdin)
            worker.stdin.flush()
            answer = pickle.load(worker.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            status = worker.wait()
            worker.stdout.close()
            self._worker = None
            raise LLVMError(f"LLVM: expected an answer from the worker, found it ended ({status})") from None
        except BaseException:
            worker.kill()
            worker.wait()
            self._worker = None
            raise
        if isinstance(answer, str):
            raise LLVMError(answer)
        result: list[tuple[int, ...]] = answer
        return result

    def _running(self) -> subprocess.Popen[bytes]:
        """The worker; a process that was forked from the one that started it starts its own."""
        if self._worker is None or self._owner != os.getpid():
            command = [sys.executable, "-S", "-c", START, str(ROOT), str(library_path())]
            self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._owner = os.getpid()
        return self._worker


@cache
def shared_evaluator() -> Evaluator:
    """The evaluator that everything in this process uses unless it is given another one."""
    return Evaluator()


def _outcome(slot: tuple[int, ...], sequence: tuple[str, ...], features: bool) -> Outcome:
    status, code = slot[STATUS], slot[CODE]
    if status == DONE:
        return Outcome(slot[INSTRUCTIONS], features=slot[FIRST_FEATURE:] if features else None)
    if status == INVALID:
        return Outcome(None, "the passes left a program that LLVM's verifier refuses")
    name = f"pass {slot[STEP] + 1} ({sequence[slot[STEP]]})" if sequence else "the measurement"
    if status == UNKNOWN:
        return Outcome(None, f"{name} is not known to LLVM")
    if status != SIGNALLED:
        return Outcome(None, f"{name} ended the process with status {code}")
    if code in (signal.SIGPROF, signal.SIGALRM):
        return Outcome(None, f"{name} {LATE}")
    return Outcome(None, f"{name} was ended by {signal.Signals(code).name}")
