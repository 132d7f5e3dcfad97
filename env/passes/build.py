"""Make the programs from musl's sources.

    pip install ziglang==0.15.2                     (elsewhere: it brings musl's sources and clang 20)
    python -m env.passes.build --zig SITE_PACKAGES/ziglang --work DIR

Each C file of musl that is not of another machine is compiled to bitcode for x86_64-linux-musl as clang -O1 would,
with the passes held back: -O0 would mark every function as not to be optimised, and leave out what -O1 tells about
types. Kept are modules of MINIMUM to MAXIMUM instructions, and of those with equal features, which the agent could not
tell apart, the first. DIR keeps the compiled files, and a second run compiles only what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from env.passes.evaluator import Evaluator
from env.passes.programs import Program

DATA = Path(__file__).parent / "data"
MINIMUM, MAXIMUM = 100, 10_000
TARGET = "x86_64-linux-musl"
FLAGS = (
    *("-target", TARGET, "-std=c99", "-nostdinc", "-ffreestanding", "-D_XOPEN_SOURCE=700", "-w"),
    *("-O1", "-Xclang", "-disable-llvm-passes"),
)
MUSL_HEADERS = ("arch/x86_64", "arch/generic", "src/include", "src/internal", "include")
SYSTEM_HEADERS = (TARGET, "x86-linux-any", "generic-musl", "any-linux-any")
# Of 10 families, 8 are for training.
SPLIT_OF_DIGIT = ("train",) * 8 + ("validation", "test")


def sources(musl: Path) -> list[str]:
    """The generic C files below musl's `src`, by their paths there."""
    machines = {path.name for path in (musl / "arch").iterdir()} | {
        "aarch64", "arm", "i386", "x86_64", "x32", "riscv32", "riscv64", "mips", "mips64", "mipsn32", "powerpc",
        "powerpc64", "s390x", "m68k", "loongarch64", "microblaze", "or1k", "sh",
    }  # fmt: skip
    paths = sorted(path.relative_to(musl / "src") for path in (musl / "src").rglob("*.c"))
    return [path.as_posix() for path in paths if path.parent.name not in machines]


def compile_all(zig: Path, work: Path) -> dict[str, Path]:
    """Compile every source into `work`; those that clang refuses are left out."""
    musl, headers = zig / "lib/libc/musl", zig / "lib/libc/include"
    includes = [f"-I{musl / name}" for name in MUSL_HEADERS] + [f"-I{headers / name}" for name in SYSTEM_HEADERS]
    compiled = {}
    for source in tqdm(sources(musl), desc="compile"):
        target = work / source.replace(".c", ".bc")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            arguments = [*FLAGS, *includes, "-c", "-emit-llvm", f"./{source}", "-o", str(partial)]
            done = subprocess.run([str(zig / "zig"), "clang", *arguments], cwd=musl / "src", capture_output=True)
            if done.returncode:
                continue
            partial.rename(target)
        compiled[source] = target
    return compiled


def family(source: str) -> str:
    """What files that are variants of one text have in common: `math/sinf.c` and `math/sinl.c` are of `math/sin`."""
    stem = source.removesuffix(".c")
    return re.sub(r"(?<=\w)[fl]$", "", stem) if stem.startswith(("math/", "complex/")) else stem


def split_of(source: str) -> str:
    """The split of a source file: by the hash of its family, so that it never changes."""
    return SPLIT_OF_DIGIT[int(hashlib.sha256(family(source).encode()).hexdigest(), 16) % 10]


def choose(compiled: dict[str, Path], evaluator: Evaluator) -> tuple[dict[str, Program], dict[str, int]]:
    """The programs to keep, by source, and how many were left out and why."""
    kept: dict[str, Program] = {}
    left_out = {"too small": 0, "too large": 0, "equal features": 0}
    seen = set()
    for source, path in tqdm(compiled.items(), desc="measure"):
        content = path.read_bytes()
        outcome = evaluator.evaluate(content, features=True)
        count = outcome.instructions or 0
        if count < MINIMUM:
            left_out["too small"] += 1
        elif count > MAXIMUM:
            left_out["too large"] += 1
        elif outcome.features in seen:
            left_out["equal features"] += 1
        else:
            seen.add(outcome.features)
            name = "musl/" + source.removesuffix(".c")
            kept[source] = Program.measured(name, content, evaluator, split_of(source))
    return kept, left_out


def write(kept: dict[str, Program], zig: Path, left_out: dict[str, int], out: Path) -> None:
    """Write the archive, the manifest and musl's licence; the same programs give the same files."""
    musl = zig / "lib/libc/musl"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for program in kept.values():
            member = tarfile.TarInfo(program.name)
            member.size = len(program.content)
            tar.addfile(member, io.BytesIO(program.content))
    (out / "musl.tar.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    version = re.search(r'"(.+)"', (musl / "src/internal/version.h").read_text())
    compiler = subprocess.run([str(zig / "zig"), "clang", "--version"], capture_output=True, text=True, check=True)
    record: dict[str, Any] = {
        "source": f"musl {version[1] if version else 'unknown'}, as in the Python package ziglang {_zig_version(zig)}",
        "sources_sha256": _digest(musl / "src" / source for source in sources(musl)),
        "licence": "MIT; LICENSE.musl beside this file",
        "compiler": compiler.stdout.splitlines()[0],
        "flags": " ".join(FLAGS),
        "minimum_instructions": MINIMUM,
        "maximum_instructions": MAXIMUM,
        "left_out": left_out,
        "programs": [_record(source, program, musl) for source, program in kept.items()],
    }
    lines = ",\n".join("  " + json.dumps(program) for program in record.pop("programs"))
    head = json.dumps(record, indent=1).removesuffix("\n}")
    (out / "musl.json").write_text(f'{head},\n "programs": [\n{lines}\n ]\n}}\n')
    shutil.copyfile(musl / "COPYRIGHT", out / "LICENSE.musl")


def _record(source: str, program: Program, musl: Path) -> dict[str, Any]:
    return {
        "name": program.name,
        "split": program.split,
        "sha256": hashlib.sha256(program.content).hexdigest(),
        "source_sha256": _digest([musl / "src" / source]),
        "instructions": program.instructions,
        "oz_instructions": program.oz_instructions,
        "features": list(program.features),
    }


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _zig_version(zig: Path) -> str:
    return subprocess.run([str(zig / "zig"), "version"], capture_output=True, text=True, check=True).stdout.strip()


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zig", type=Path, required=True, help="the folder of the package ziglang")
    parser.add_argument("--work", type=Path, required=True, help="where compiled files are kept")
    parser.add_argument("--out", type=Path, default=DATA)
    options = parser.parse_args(argv)
    compiled = compile_all(options.zig, options.work)
    with Evaluator() as evaluator:
        kept, left_out = choose(compiled, evaluator)
    left_out = {"not compiled": len(sources(options.zig / "lib/libc/musl")) - len(compiled)} | left_out
    write(kept, options.zig, left_out, options.out)


if __name__ == "__main__":
    main()
