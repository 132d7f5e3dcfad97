"""The files of a LoRA adapter, read and checked before a model is loaded for them."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from torch import Tensor

from interp.base_models import files_sha256, read_json

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
UNREADABLE = (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError)
# What PEFT starts from one of these leaves the base weights as they are; any other start takes the first B A off them.
PLAIN_STARTS = (True, False, "gaussian", "eva", "mica")
MAX_RANK = 2**16  # beyond any matrix, and small enough to be made before its file is found not to fit
PLAIN_ONLY = ("use_qalora", "alora_invocation_tokens", "lora_bias", "target_parameters")


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_RANK


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _are(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _maps_to(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_is_pattern(key) and kind(of) for key, of in value.items())


def _is_index(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (TypeError, re.error):
        return False
    return value != ""


_FLAG = ("true or false", lambda value: type(value) is bool)
_NAMES = (
    "null, a regular expression or a list of names",
    lambda value: value is None or _is_pattern(value) or _are(_is_name)(value),
)
# What the files of PEFT hold; its own classes take anything, and fail where it is used.
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": (f"a whole number from 1 to {MAX_RANK}", _is_rank),
    "lora_alpha": ("a number", _is_number),
    "lora_dropout": ("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1),
    "rank_pattern": (f"regular expressions, each with a whole number from 1 to {MAX_RANK}", _maps_to(_is_rank)),
    "alpha_pattern": ("regular expressions, each with a number", _maps_to(_is_number)),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "layers_pattern": _NAMES,
    "modules_to_save": ("null or a list of names", lambda value: value is None or _are(_is_name)(value)),
    "layers_to_transform": (
        "null, a layer or a list of layers",
        lambda value: value is None or _is_index(value) or _are(_is_index)(value),
    ),
    "trainable_token_indices": (
        "null, a list of token ids, or such lists by module",
        lambda value: value is None or _are(_is_index)(value) or _maps_to(_are(_is_index))(value),
    ),
    "bias": ("none, all or lora_only", lambda value: value in ("none", "all", "lora_only")),
    "revision": ("null or a string", lambda value: value is None or isinstance(value, str)),
    "task_type": ("CAUSAL_LM or null", lambda value: value in ("CAUSAL_LM", None)),
    "fan_in_fan_out": _FLAG,
    "use_rslora": _FLAG,
}


class SubjectError(ValueError):
    """An adapter cannot be analysed; one line names the file, the key, what was expected and what was found."""


@dataclass(frozen=True)
class AdapterFiles:
    """A folder that PEFT wrote: the LoRA configuration, and name -> tensor on the CPU."""

    folder: Path
    config_file: Path
    weights_file: Path
    config: LoraConfig
    weights: dict[str, Tensor]

    @property
    def sha256(self) -> str:
        """Over configuration and weights (`interp.base_models.files_sha256`)."""
        return files_sha256([self.config_file, self.weights_file])


def read_adapter(folder: str | Path) -> AdapterFiles:
    """Read the folder of a LoRA adapter.

    Raises:
        BaseModelError: if `adapter_config.json` is missing or no JSON object.
        SubjectError: if it describes no LoRA adapter, or if the weights are missing or unreadable.
    """
    folder = Path(folder)
    config_file = folder / "adapter_config.json"
    config = read_config(config_file)
    weights_file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if weights_file is None:
        raise SubjectError(f"{folder}: expected the adapter's weights ({' or '.join(WEIGHT_FILES)}), found neither")
    try:
        weights = load_peft_weights(str(folder), device="cpu")
    except UNREADABLE as error:
        raise not_tensors(weights_file, error) from error
    checked_tensors(weights_file, weights)
    for key, tensor in weights.items():
        if not (tensor.is_floating_point() and tensor.float().isfinite().all()):
            found = f"{tensor.dtype}" if not tensor.is_floating_point() else "others"
            raise SubjectError(f"{weights_file}: {key}: expected finite numbers of floating point, found {found}")
    return AdapterFiles(folder, config_file, weights_file, config, weights)


def not_tensors(file: Path, error: Exception) -> SubjectError:
    """The error to raise for a weights file that cannot be read; `error` is one of `UNREADABLE`."""
    if isinstance(error, pickle.UnpicklingError):  # whose message is a page of advice
        return SubjectError(f"{file}: expected a file of tensors, found a pickle that is broken or holds other things")
    reason = " ".join(str(error).split()) or type(error).__name__
    return SubjectError(f"{file}: expected a file of tensors, found {reason}")


def checked_tensors(file: Path, content: Any) -> None:
    """Raise a `SubjectError` unless a weights file holds tensors by name."""
    if not isinstance(content, Mapping):
        raise SubjectError(f"{file}: expected tensors by name, found {type(content).__name__}")
    for key, value in content.items():
        if not (isinstance(key, str) and isinstance(value, Tensor)):
            raise SubjectError(f"{file}: {key}: expected a name and a tensor, found {type(value).__name__}")


def read_config(file: Path) -> LoraConfig:
    """The configuration of an adapter whose delta is s B A.

    Raises:
        BaseModelError: if the file is missing or no JSON object.
        SubjectError: if it describes another kind of adapter, or if its folder holds several adapters and none itself.
    """
    inside = sorted(path.parent.name for path in file.parent.glob("*/adapter_config.json"))
    if inside and not file.exists():
        raise SubjectError(f"{file}: expected one adapter's folder, found those of {', '.join(inside)} in it; name one")
    record = read_json(file, "the configuration of a PEFT adapter")
    if record.get("peft_type") != "LORA":
        raise SubjectError(f"{file}: peft_type: expected LORA, found {record.get('peft_type')!r}")
    if record.get("use_dora"):
        raise SubjectError(f"{file}: use_dora: expected false, since the delta of DoRA is not s B A, found true")
    for name, (expected, fits) in FIELDS.items():
        if name in record and not fits(record[name]):
            raise SubjectError(f"{file}: {name}: expected {expected}, found {record[name]!r}")
    try:
        config = LoraConfig.from_pretrained(str(file.parent))
    except (TypeError, ValueError) as error:
        raise SubjectError(f"{file}: expected the configuration of a LoRA adapter, found {error}") from error
    _refuse_other_deltas(file, config)
    return config


def _refuse_other_deltas(file: Path, config: LoraConfig) -> None:
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for name in (*variants, *PLAIN_ONLY):
        if value := getattr(config, name, None):
            raise SubjectError(f"{file}: {name}: expected none, since the delta is then not s B A, found {value!r}")
    if (start := config.init_lora_weights) not in PLAIN_STARTS:
        raise SubjectError(
            f"{file}: init_lora_weights: expected true, false, gaussian, eva or mica, since other starts change the "
            f"base weights and the delta is then not s B A, found {start!r}"
        )
