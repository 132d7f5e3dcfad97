"""Adapters of the pass-ordering dialogue: small ones, and what is stored beside them."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from env.passes.prompts import SYSTEM_PROMPT
from env.training.store import TrainingError
from interp.base_models import ResolvedBase

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROGRAMS = "programs.txt"


def with_adapter(model: Any, rank: int, seed: int) -> PeftModel:
    """The model with a fresh LoRA on the attention's four projections, alpha twice the rank.

    With rank 4 that is 0.9 MB in bfloat16 for the built-in model; all seven projections would be 2.4 MB.
    """
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def write_passes_adapter(
    model: PeftModel, folder: Path, base: ResolvedBase, training: Mapping[str, Any], programs: Collection[str]
) -> None:
    """Write the adapter `default` in bfloat16 into a folder, with how and on which programs it was trained."""
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path = base.name
    config.inference_mode = True
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    record = {"environment": "passes", "system": SYSTEM_PROMPT, "base": base.identity(), "training": training}
    (folder / "workbench.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / PROGRAMS).write_text("".join(f"{name}\n" for name in sorted(set(programs))))


def earlier_training(folder: Path) -> Mapping[str, Any]:
    """How a stored adapter of this environment was trained.

    Raises:
        TrainingError: if the folder has no record of it, or one of another environment.
    """
    file = folder / "workbench.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        environment, training = record["environment"], record["training"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{file}: expected the record of a training run, found {error}") from None
    if environment != "passes":
        raise TrainingError(f"{file}: environment: expected 'passes', found {environment!r}")
    return dict(training)


def trained_programs(folder: Path) -> set[str]:
    """The programs that a stored adapter was trained on.

    Raises:
        TrainingError: if there is no list of them.
    """
    try:
        return set((folder / PROGRAMS).read_text(encoding="utf-8").split())
    except OSError as error:
        raise TrainingError(f"{folder / PROGRAMS}: expected the programs it was trained on, found {error}") from None
