"""Adapter folders: weights in bfloat16, and beside them what rebuilds the prompts they were trained with."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

from env.scheduler.prompts import SYSTEM_PROMPT
from interp.base_models import ResolvedBase

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

GRAPHS = "graphs.txt"


class TrainingError(ValueError):
    """A run cannot start; the message is one line that says what was expected and what was found."""


def lora_config(rank: int) -> LoraConfig:
    """LoRA on all seven projections, with alpha twice the rank as in the published runs."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Provenance:
    """Where an adapter comes from, stored beside it.

    Attributes:
        base: the model that it belongs to.
        hardware: `published` or `bandwidth_bound`.
        audit: what retention is worth in the environment that it was trained in (`env.training.audit`).
        training: how it was trained.
        graphs: fingerprints of the graphs that it was trained on.
    """

    base: ResolvedBase
    hardware: str
    audit: Mapping[str, Any]
    training: Mapping[str, Any]
    graphs: Collection[str]


def store_adapter(model: PeftModel, folder: Path, provenance: Provenance) -> None:
    """Write an adapter folder; it appears when it is whole, and takes the place of an older one."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_adapter(model, partial, provenance)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def write_adapter(model: PeftModel, folder: Path, provenance: Provenance) -> None:
    """Write the adapter `default` of a model into a folder that is there. The model is left as it is."""
    config = copy.copy(model.peft_config["default"])
    config.base_model_name_or_path = provenance.base.name
    config.inference_mode = True
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    record = {
        "environment": "scheduler",
        "rules": "documented",
        "hardware": provenance.hardware,
        "system": SYSTEM_PROMPT,
        "base": provenance.base.identity(),
        "audit": provenance.audit,
        "training": provenance.training,
    }
    (folder / "workbench.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / GRAPHS).write_text("".join(f"{graph}\n" for graph in sorted(set(provenance.graphs))))


def trained_on(folder: Path) -> set[str]:
    """Fingerprints of the graphs that a stored adapter was trained on.

    Raises:
        TrainingError: if there is no list of them.
    """
    try:
        return set((folder / GRAPHS).read_text().split())
    except OSError as error:
        raise TrainingError(f"{folder / GRAPHS}: expected the graphs that it was trained on, found {error}") from None


def last_whole_checkpoint(work: Path) -> str | None:
    """The newest checkpoint that was written to its end; None if there is none, and the run starts over."""
    whole = [folder for folder in work.glob("checkpoint-*") if (folder / "trainer_state.json").exists()]
    return str(max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]))) if whole else None
