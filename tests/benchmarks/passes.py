"""What measuring pass sequences costs, beside `opt` as a process where one is installed.

    python tests/benchmarks/passes.py

Processor time is that of the worker and its forks, without their start; the clock is the fastest of some rounds.
Nothing is found in the cache: every sequence is new. An `opt` of another LLVM does other work with the same passes, so
its time says what starting a process costs, not which LLVM is faster.
"""

import argparse
import resource
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from env.passes import Evaluator, load_program
from env.passes.catalogue import OZ, pipelines
from env.passes.synergy import read_graph

CRC32 = Path(__file__).parents[1] / "data" / "passes_crc32.bc"
PROGRAM = "musl/time/strftime"
# Passes that LLVM 14 knows by the same names.
PLAIN = [
    "--sroa",
    "--early-cse",
    "--simplifycfg",
    "--gvn",
    "--dce",
    "--adce",
    "--dse",
    "--reassociate",
    "--sink",
    "--sccp",
] * 2


def children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(batches, content, **options):
    """(fastest by the clock, mean processor time) of a batch, seconds."""
    before, clocks = children(), []
    with Evaluator() as evaluator:
        evaluator.evaluate(content, ["--lcssa"])
        for batch in batches:
            start = time.perf_counter()
            evaluator.evaluate_all(content, batch, **options)
            clocks.append(time.perf_counter() - start)
    used = children() - before
    before = children()
    with Evaluator() as evaluator:
        evaluator.evaluate(content, ["--lcssa"])
    return min(clocks), (used - (children() - before)) / len(batches)


def opt_times(opt, rounds):
    command = [opt, "-passes=" + ",".join(pipelines(PLAIN)), str(CRC32), "-o", "/dev/null"]
    before, clocks = children(), []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        clocks.append(time.perf_counter() - start)
    return min(clocks), (children() - before) / rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    program, crc32 = load_program(PROGRAM), CRC32.read_bytes()
    walks = read_graph().walks(rounds, np.random.default_rng(0), 20, 20)
    pairs = [[("--sroa", flag, other) for other in ("--gvn", "--dce", "--sink")] for flag in PLAIN[:rounds]]
    rolled = [[PLAIN[i:] + PLAIN[:i]] for i in range(10)]
    rows = {
        f"20 passes on {program.instructions} instructions": timed([[walk] for walk in walks], program.content),
        "-Oz on the same": timed([[["--lcssa"] * i + [OZ]] for i in range(rounds)], program.content),
        "features of the same": timed([[["--lcssa"] * (i + 2)] for i in range(rounds)], program.content, features=True),
        "three sequences that share a beginning": timed(pairs, program.content),
        "20 passes on 242 instructions": timed(rolled, crc32),
    }
    if opt := shutil.which("opt"):
        version = subprocess.run([opt, "--version"], capture_output=True, text=True, check=True).stdout
        name = next(line.strip() for line in version.splitlines() if "version" in line)
        rows[f"the same by {name} as a process"] = opt_times(opt, rounds)
    else:
        print("no `opt` found: nothing to compare with")
    for name, (clock, used) in rows.items():
        print(f"{name:60} {1000 * clock:8.1f} ms by the clock {1000 * used:8.1f} ms of processor")


if __name__ == "__main__":
    main()
