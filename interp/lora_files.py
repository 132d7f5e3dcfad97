"""The factors of a LoRA adapter and the base weights under them, read from their files when they are asked for.

No model is loaded. Which s a module has follows PEFT's rules (`peft.tuners.lora`): alpha / r, or alpha / sqrt(r) when
rank-stabilised, with the module's own r and alpha where `rank_pattern` or `alpha_pattern` match its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import Tensor

from interp.adapter_files import UNREADABLE, WEIGHT_FILES, SubjectError, checked_tensors, not_tensors, read_config
from interp.base_models import files_sha256

PREFIX = "base_model.model."
FACTORS = re.compile(r"(?P<module>.+)\.lora_(embedding_)?(?P<factor>[AB])(\.weight)?")
BATCH_BYTES, BATCH_MODULES = 64 * 2**20, 16

Shapes = Mapping[str, tuple[int, ...]]


class NotAvailable(ValueError):
    """A base weight cannot be had; the message is short and fit for counting."""


@dataclass(frozen=True)
class LoraModule:
    """One module that the adapter changes.

    Attributes:
        name: in the base model, `model.layers.0.self_attn.q_proj`.
        layer: the first number in the name; -1 where there is none (embedding, unembedding).
        part: `attention`, `mlp` or `other`.
        projection: the last part of the name.
        shape: (m, n) of dW = s B A; m is what the module puts out.
        rank, scale: r and s.
        keys: of B and of A in the weights file.
        transposed: whether the base model keeps W^T.
    """

    name: str
    layer: int
    part: str
    projection: str
    shape: tuple[int, int]
    rank: int
    scale: float
    keys: tuple[str, str]
    transposed: bool


@dataclass(frozen=True)
class LoraFiles:
    """An adapter folder of which only names and shapes have been read.

    Attributes:
        modules: in the order of layers and names.
        left_out: (key, reason) of the tensors that are no factor of an s B A.
    """

    folder: Path
    file: Path
    config: LoraConfig
    modules: tuple[LoraModule, ...]
    left_out: tuple[tuple[str, str], ...]

    @classmethod
    def open(cls, folder: str | Path) -> LoraFiles:
        """Read names and shapes.

        Raises:
            SubjectError: if this is no LoRA adapter whose delta is s B A, or its file does not fit its configuration.
            BaseModelError: if `adapter_config.json` is missing or no JSON object.
        """
        folder = Path(folder)
        config_file = folder / "adapter_config.json"
        config = read_config(config_file)
        if config.layer_replication:
            raise SubjectError(
                f"{config_file}: layer_replication: expected none, since the base model's file has no such layers, "
                f"found {config.layer_replication!r}"
            )
        file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
        if file is None:
            raise SubjectError(f"{folder}: expected the adapter's weights ({' or '.join(WEIGHT_FILES)}), found neither")
        with _Tensors(file) as tensors:
            shapes = {key: tensors.shape(key) for key in tensors.keys}
        modules, left_out = _modules(file, config, shapes)
        if not modules:
            raise SubjectError(
                f"{file}: expected LoRA factors of at least one module, found {len(shapes)} other tensors"
            )
        return cls(folder, file, config, modules, left_out)

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.resolve().name

    @property
    def sha256(self) -> str:
        """As `interp.subject.Subject.adapter_sha256`."""
        return files_sha256([self.folder / "adapter_config.json", self.file])

    def batches(self) -> list[tuple[LoraModule, ...]]:
        """The modules in batches of one shape and rank, each small in memory."""
        same: dict[tuple[Any, ...], list[LoraModule]] = {}
        for module in self.modules:
            same.setdefault((module.shape, module.rank), []).append(module)
        batches = []
        for (shape, rank), modules in same.items():
            size = max(1, min(BATCH_MODULES, BATCH_BYTES // (8 * rank * sum(shape))))
            batches += [tuple(modules[start : start + size]) for start in range(0, len(modules), size)]
        return batches

    def factors(self, modules: Sequence[LoraModule]) -> tuple[Tensor, Tensor]:
        """B (modules, m, r) and A (modules, r, n), float64, of modules of one shape and rank.

        Raises:
            SubjectError: if the file holds numbers that are not finite.
        """
        with _Tensors(self.file) as tensors:
            b, a = (_stacked([tensors.read(module.keys[i]) for module in modules]) for i in (0, 1))
        for side, factor in enumerate((b, a)):
            finite = factor.sum((1, 2)).isfinite()  # in float64 nothing but inf and NaN leads there, and it is fast
            if not finite.all():
                key = modules[int((~finite).nonzero()[0])].keys[side]
                raise SubjectError(f"{self.file}: {key}: expected finite numbers, found others")
        return b, a


class BaseWeights:
    """The safetensors of a base model, of which a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Read the names.

        Raises:
            NotAvailable: if the folder has no safetensors.
        """
        self._files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with _Tensors(file) as tensors:
                self._files |= dict.fromkeys(tensors.keys, file)
        if not self._files:
            raise NotAvailable("the base model has no safetensors")

    def read(self, module: LoraModule) -> Tensor:
        """W (m, n) in float32, as the delta lies.

        Raises:
            NotAvailable: if there is no such tensor, or one that is quantised.
        """
        key = f"{module.name}.weight"
        if key not in self._files:
            raise NotAvailable("the base model's file has no weight of this name")
        with _Tensors(self._files[key]) as tensors:
            weight = tensors.read(key)
        if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise NotAvailable(f"the base weight is quantised ({weight.dtype})")
        weight = weight.float().mT if module.transposed else weight.float()
        if weight.shape != module.shape:
            raise NotAvailable("the base weight has another shape")
        return weight.contiguous()


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """In float64, without a copy in between."""
    stacked = torch.empty((len(tensors), *tensors[0].shape), dtype=torch.float64)
    for place, tensor in zip(stacked, tensors, strict=True):
        place.copy_(tensor)
    return stacked


def module_place(name: str) -> tuple[int, str, str]:
    """Layer, part and projection of a module by its name, as in `LoraModule`."""
    *parents, projection = name.split(".")
    layer = next((int(parent) for parent in parents if parent.isdecimal()), -1)
    above = " ".join(parents).lower()
    if "attn" in above or "attention" in above:
        return layer, "attention", projection
    return layer, "mlp" if {"mlp", "ffn", "feed_forward"} & set(above.split()) else "other", projection


class _Tensors:
    """A file of tensors, safetensors or PyTorch's, that is read piece by piece."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> _Tensors:
        try:
            if self._file.suffix == ".safetensors":
                self._open: Any = safe_open(self._file, framework="pt")
                self._open.__enter__()
                self.keys: list[str] = list(self._open.keys())
            else:
                self._open = torch.load(self._file, map_location="cpu", weights_only=True, mmap=True)
                checked_tensors(self._file, self._open)
                self.keys = list(self._open)
        except UNREADABLE as error:
            raise not_tensors(self._file, error) from error
        return self

    def __exit__(self, *error: object) -> None:
        if not isinstance(self._open, dict):
            self._open.__exit__(*error)

    def shape(self, key: str) -> tuple[int, ...]:
        found = self._open[key].shape if isinstance(self._open, dict) else self._open.get_slice(key).get_shape()
        return tuple(found)

    def read(self, key: str) -> Tensor:
        return self._open[key] if isinstance(self._open, dict) else self._open.get_tensor(key)


def _modules(
    file: Path, config: LoraConfig, shapes: Shapes
) -> tuple[tuple[LoraModule, ...], tuple[tuple[str, str], ...]]:
    """The modules whose factors a file holds, and (key, reason) of its other tensors."""
    pairs: dict[str, dict[str, str]] = {}
    left_out = []
    for key, shape in shapes.items():
        found = FACTORS.fullmatch(key)
        if found is None:
            left_out.append((key, "a whole weight, no factor of a delta"))
        elif len(shape) != 2:
            left_out.append((key, "a factor of a convolution"))
        else:
            pairs.setdefault(found["module"], {})[found["factor"]] = key
    modules = [_module(file, config, shapes, saved, keys) for saved, keys in pairs.items()]
    return tuple(sorted(modules, key=lambda module: (module.layer, module.name))), tuple(left_out)


def _module(file: Path, config: LoraConfig, shapes: Shapes, saved: str, keys: Mapping[str, str]) -> LoraModule:
    for factor in "BA":
        if factor not in keys:
            raise SubjectError(f"{file}: {saved}: expected lora_A and lora_B, found nothing for lora_{factor}")
    name = saved.removeprefix(PREFIX)
    (m, rank), (rank_of_a, n) = shapes[keys["B"]], shapes[keys["A"]]
    expected, scale = _rank_and_scale(config, name)
    if not rank == rank_of_a == expected:
        raise SubjectError(
            f"{file}: {saved}: expected rank {expected} as in adapter_config.json, found {rank} in B, {rank_of_a} in A"
        )
    transposed = bool(config.fan_in_fan_out) or "lora_embedding" in keys["A"]
    return LoraModule(name, *module_place(name), (m, n), rank, scale, (keys["B"], keys["A"]), transposed)


def _rank_and_scale(config: LoraConfig, name: str) -> tuple[int, float]:
    """r and s of a module, as `peft.tuners.lora.LoraModel` and `LoraLayer.update_layer` find them."""
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
