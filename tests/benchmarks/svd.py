"""The SVD of an adapter's deltas beside reading its file, and beside a dense SVD of every delta.

    python -m tests.benchmarks.svd [--layers N] [--rank R] [--dense N] [--threads N]

The adapter has random weights and the shapes of Llama-3.1-8B, all seven projections: 224 modules with 32 layers. It is
made in a temporary folder. Peak memory is that of a process of its
own that measures the adapter, beside one that only imports what is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from interp import lora_svd
from interp.lora_delta import delta_spectrum
from interp.lora_files import LoraFiles

# (outputs, inputs) of a layer's modules
WIDTH, KEYS, INNER = 4096, 1024, 14336
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KEYS, WIDTH),
    "self_attn.v_proj": (KEYS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
PEAK = (  # of this process's own memory; ru_maxrss would begin with that of the parent
    "import pathlib, re, sys; from interp import lora_svd; "
    "sys.argv[1:] and lora_svd.measure(sys.argv[1], adapter_only=True); "
    "print(re.search(r'VmHWM:\\s*(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])"
)


def make_adapter(folder: Path, layers: int, rank: int) -> Path:
    """An adapter of random float32 factors; returns its weights file."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(layers):
        for name, (m, n) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(rank, n, generator=generator) / n**0.5
            weights[f"{key}.lora_B.weight"] = torch.randn(m, rank, generator=generator) * 0.01
    targets = [name.split(".")[1] for name in SHAPES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    file = folder / "adapter_model.safetensors"
    save_file(weights, file)
    return file


def read_all(file: Path) -> float:
    """Every number once: mapping a file into memory alone reads nothing."""
    with safe_open(file, framework="pt") as tensors:
        return sum(float(tensors.get_tensor(key).sum()) for key in tensors.keys())  # noqa: SIM118


def forget(file: Path) -> None:
    """Ask the system to drop its copy of a file, so that the next reading is one from the disk, if there is one."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dense(folder: Path, name: str) -> torch.Tensor:
    """What is done without factors: the delta, and its SVD in float32."""
    files = LoraFiles.open(folder)
    module = next(module for module in files.modules if module.name.endswith(name))
    b, a = files.factors([module])
    return torch.linalg.svdvals(module.scale * b[0].float() @ a[0].float())


def best(work: Callable[[], Any], rounds: int) -> float:
    """The fastest of some rounds, in seconds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_memory(*argv: str) -> int:
    """Bytes; Linux only."""
    done = subprocess.run([sys.executable, "-c", PEAK, *argv], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--dense", nargs="*", default=["k_proj"], metavar="PROJECTION",
                        help="projections of which one module is decomposed whole (default: k_proj)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="the fastest counts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = make_adapter(folder, args.layers, args.rank)
        size, modules = file.stat().st_size, args.layers * len(SHAPES)
        forget(file)
        from_disk = best(lambda: read_all(file), 1)
        reading = best(lambda: read_all(file), args.rounds)
        whole = best(lambda: lora_svd.measure(folder, adapter_only=True), args.rounds)
        print(f"{modules} modules, rank {args.rank}, {size / 2**20:.0f} MiB, {args.threads} threads")
        print(f"reading the file  {from_disk:8.3f} s from the disk, {reading:.3f} s from memory")
        print(f"measure           {whole:8.3f} s, {whole / from_disk:.1f} and {whole / reading:.1f} times as long; "
              f"goal: at most 10")  # fmt: skip
        files = LoraFiles.open(folder)
        for projection in args.dense:
            module = next(module for module in files.modules if module.name.endswith(projection))
            slow = best(lambda name=projection: dense(folder, name), 1)  # type: ignore[misc]
            fast = best(lambda module=module: delta_spectrum(*files.factors([module]), module.scale), args.rounds)  # type: ignore[misc]
            print(f"{projection} {module.shape}: dense SVD {slow:.2f} s, from the factors {fast:.4f} s, "
                  f"{slow / fast:.0f} times faster; goal: at least 100")  # fmt: skip
        bare, peak = peak_memory(), peak_memory(str(folder))
        print(f"peak memory {peak / 2**20:.0f} MiB, of which imports {bare / 2**20:.0f} MiB; "
              f"goal: below {size / 2**20 + 1024:.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()
