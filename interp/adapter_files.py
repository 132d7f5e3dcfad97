"""The files of a LoRA adapter, read and checked before a model is loaded for them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig
from peft.utils import load_peft_weights
from safetensors import SafetensorError
from torch import Tensor

from interp.base_models import files_sha256, read_json

WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")


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
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise SubjectError(f"{weights_file}: expected a file of tensors, found {error}") from error
    return AdapterFiles(folder, config_file, weights_file, config, weights)


def read_config(file: Path) -> LoraConfig:
    record = read_json(file, "the configuration of a PEFT adapter")
    if record.get("peft_type") != "LORA":
        raise SubjectError(f"{file}: peft_type: expected LORA, found {record.get('peft_type')!r}")
    if record.get("use_dora"):
        raise SubjectError(f"{file}: use_dora: expected false, since the delta of DoRA is not s B A, found true")
    try:
        return LoraConfig.from_pretrained(str(file.parent))
    except (TypeError, ValueError) as error:
        raise SubjectError(f"{file}: expected the configuration of a LoRA adapter, found {error}") from error
