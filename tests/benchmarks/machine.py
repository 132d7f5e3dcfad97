"""What a benchmark ran on: a time means nothing without its machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Processor, cores and threads, versions, and the load when this was called: a busy machine blurs every ratio."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "load_average": round(os.getloadavg()[0], 2),
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the work returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def best(work: Callable[[], Any], rounds: int, least: float = 0.0) -> float:
    """Seconds of the fastest of some rounds; work shorter than `least` seconds is repeated within each."""
    once, _ = timed(work)
    repeats = max(1, int(least / max(once, 1e-7)))
    return min(timed(lambda: [work() for _ in range(repeats)])[0] / repeats for _ in range(rounds))


def positive(text: str) -> int:
    """A command line's number of things, at least one."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {number}")
    return number


def reset_peak() -> None:
    """Forget the largest memory this process has held so far (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `reset_peak`."""
    found = re.search(rf"{field}:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"))
    if found is None:
        raise OSError(f"{STATUS}: expected a line {field}, found none")
    return int(found[1]) * 1024


def write_json(file: Path, content: Any) -> None:
    """Write a summary; NaN, which JSON does not have, is an error."""
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.processor() or platform.machine()
