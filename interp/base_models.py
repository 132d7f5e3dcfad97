"""Where base weights come from: a local folder, the built-in model, or a model of the Hugging Face hub.

The network is asked for two things only: the built-in model while it is not yet in the cache folder, and a hub id
(`owner/name`) that is no local folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from interp import built_in
from interp.built_in import BaseModelError, no_progress_bars

BUILT_IN = built_in.NAME
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")  # the first one with a match holds the weights
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class ResolvedBase:
    """A base model on this machine.

    Attributes:
        path: folder with configuration, weights and tokenizer.
        name: what was asked for: a folder, the built-in name or a hub id.
        sha256: of the GGUF file for the built-in model; for any other of the weight files (`files_sha256`).
        expected_sha256: what `workbench.json` beside the adapter records, where that is another one and `--base` was
            given nevertheless; None otherwise.
    """

    path: Path
    name: str
    sha256: str
    expected_sha256: str | None = None

    def identity(self) -> dict[str, str]:
        """`name`, `sha256` and, for a base other than the adapter's recorded one, `expected_sha256`."""
        mismatch = {"expected_sha256": self.expected_sha256} if self.expected_sha256 else {}
        return {"name": self.name, "sha256": self.sha256, **mismatch}


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        BaseModelError: if the file is missing, unreadable or holds anything else; `what` says what it should be.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, endless numbers, endless nesting
        raise BaseModelError(f"{path}: expected {what}, found {error}") from error
    if not isinstance(record, dict):
        raise BaseModelError(f"{path}: expected {what}, a JSON object, found {type(record).__name__}")
    return record


def files_sha256(paths: Sequence[Path]) -> str:
    """The sha256 of one file, or of the list that `sha256sum` prints for several (names without folders)."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(paths) == 1:
        return digests[0]
    listing = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


def resolve_base(adapter: str | Path, override: str | Path | None = None) -> ResolvedBase:
    """The base model of an adapter folder: `override` where it is given, or else what `adapter_config.json` names.

    Raises:
        BaseModelError: if neither leads to a model, or if `workbench.json` beside the adapter records another base and
            none was given explicitly.
    """
    adapter = Path(adapter)
    config_file = adapter / "adapter_config.json"
    config = read_json(config_file, "the configuration of a PEFT adapter")
    if override is not None:
        base = find_base(str(override))
    else:
        key = f"{config_file}: base_model_name_or_path"
        name = config.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise BaseModelError(f"{key}: expected the name of the base model, found {name!r}; --base overrides it")
        base = find_base(name, named_by=key, revision=config.get("revision"))
    return _checked(base, adapter / "workbench.json", given=override is not None)


def find_base(name: str, *, named_by: str = "--base", revision: str | None = None) -> ResolvedBase:
    """The base model with a name: a folder, the built-in name or a hub id, in this order.

    Args:
        named_by: where the name comes from, for messages.
        revision: of a hub id; None is the main one.

    Raises:
        BaseModelError: if there is no such model or it cannot be had.
    """
    if name == BUILT_IN:
        return ResolvedBase(built_in.built_in_folder(), BUILT_IN, built_in.GGUF_SHA256)
    path = Path(name).expanduser()
    if not path.exists() and _is_hub_id(name):
        path = _from_hub(name, named_by, revision)
    if not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "a file" if path.exists() else "no such folder"
        raise BaseModelError(
            f"{named_by}: expected a model folder, the built-in name {BUILT_IN} or a hub id (owner/name), "
            f"found {name!r} ({found}); --base overrides it"
        )
    return ResolvedBase(path.resolve(), name, files_sha256(_weight_files(path)))


def load_base(
    base: ResolvedBase, *, device: str = "cpu", dtype: str = "float32", load_in_4bit: bool = False
) -> tuple[Any, Any]:
    """(causal model in eval mode, tokenizer) of a base model. `model.name_or_path` is `base.name`.

    Args:
        device: `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: of the weights, or with `load_in_4bit` of the computation: `float32`, `bfloat16` or `float16`.
        load_in_4bit: quantise the linear layers but the head to 4 bit (NF4) with bitsandbytes, on cpu or cuda. A folder
            that holds such weights already is computed in `dtype` too, whatever its configuration says.

    Raises:
        BaseModelError: if the device, the type or the quantisation cannot be had here, or the folder does not load.
    """
    where, precision = _checked_device(device), _checked_dtype(dtype)
    options: dict[str, Any] = {"dtype": precision, "local_files_only": True, "output_loading_info": True}
    config = _loaded(base, AutoConfig.from_pretrained, local_files_only=True)
    quantised = load_in_4bit or hasattr(config, "quantization_config")
    in_4bit = load_in_4bit or _holds_4bit(config)
    if in_4bit:
        _require_4bit(where, "--load-in-4bit" if load_in_4bit else f"{base.path / 'config.json'}: quantization_config")
    elif quantised and where.type != "cuda":
        raise BaseModelError(
            f"{base.path / 'config.json'}: quantization_config: expected none, or 4 bit of bitsandbytes, without a "
            f"CUDA device (--device cuda), found another on {where.type!r}; --base gives the model in full precision"
        )
    if load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=precision
        )
    if quantised:
        options["device_map"] = {"": where}
    model, info = _loaded(base, AutoModelForCausalLM.from_pretrained, **options)
    if missing := sorted(info["missing_keys"]):
        raise BaseModelError(
            f"{base.path}: {missing[0]}: expected all weights of {type(model).__name__}, found none for "
            f"{len(missing)} of them"
        )
    if in_4bit:
        _compute_plainly(model, precision)
    tokenizer = _loaded(base, AutoTokenizer.from_pretrained, local_files_only=True)
    model.name_or_path = base.name
    return (model if quantised else model.to(where)).eval(), tokenizer


def _loaded(base: ResolvedBase, load: Callable[..., Any], **options: Any) -> Any:
    try:
        with no_progress_bars():
            return load(base.path, **options)
    except Exception as error:  # the parsers of weights and tokenizers raise bare ones
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise BaseModelError(f"{base.path}: expected a causal model and its tokenizer, found {reason}") from error


def _checked(base: ResolvedBase, record_file: Path, *, given: bool) -> ResolvedBase:
    """`base`, compared with what the training command wrote beside the adapter."""
    if not record_file.exists():
        return base
    recorded = read_json(record_file, "the record of a training run").get("base")
    if not isinstance(recorded, dict) or not isinstance(recorded.get("sha256"), str):
        raise BaseModelError(f"{record_file}: base: expected an object with a name and a sha256, found {recorded!r}")
    expected = recorded["sha256"]
    if expected == base.sha256:
        return base
    if not given:
        raise BaseModelError(
            f"{record_file}: base.sha256: expected the base that the adapter was trained on, {recorded.get('name')!r} "
            f"with {expected}, found {base.name!r} with {base.sha256}; --base {base.name} uses it nevertheless"
        )
    return ResolvedBase(base.path, base.name, base.sha256, expected_sha256=expected)


def _is_hub_id(name: str) -> bool:
    """True for `owner/name`, unless `owner` is a folder here: then it is a local path that leads nowhere."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name)) and not Path(name).parent.exists()


def _from_hub(name: str, named_by: str, revision: str | None) -> Path:
    try:
        with no_progress_bars():
            return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise BaseModelError(
            f"{named_by}: expected a model that can be had, found {name!r}: no folder here, and the hub did "
            f"not give it ({type(error).__name__}: {_first_line(error)}); --base DIR overrides it"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    for pattern in WEIGHT_PATTERNS:
        files = sorted(path for path in folder.glob(pattern) if not path.name.startswith("adapter_"))
        if files:
            return files
    raise BaseModelError(f"{folder}: expected weights ({' or '.join(WEIGHT_PATTERNS)}), found none")


def _checked_device(device: str) -> torch.device:
    if device == "auto":  # recorded streams are stacked over layers, and batches go through them by hand
        raise BaseModelError("--device: expected one device for all layers (cpu, cuda, cuda:N or mps), found 'auto'")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise BaseModelError(f"--device: expected cpu, cuda, cuda:N or mps, found {device!r}") from error
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if where.type not in available or (where.index or 0) >= available[where.type]:
        have = ", ".join(f"{kind} ({count})" for kind, count in available.items() if count)
        raise BaseModelError(f"--device: expected a device of this machine ({have}), found {device!r}")
    return where


def _checked_dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise BaseModelError(f"--dtype: expected {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def _holds_4bit(config: Any) -> bool:
    """Whether a configuration says that the folder's weights are bitsandbytes' 4 bit."""
    found = getattr(config, "quantization_config", None)
    return isinstance(found, dict) and found.get("quant_method") == "bitsandbytes" and bool(found.get("load_in_4bit"))


def _require_4bit(where: torch.device, asked_by: str) -> None:
    if where.type not in ("cpu", "cuda"):
        raise BaseModelError(f"{asked_by}: expected cpu or a CUDA device for 4 bit (--device), found {where.type!r}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise BaseModelError(
            f"{asked_by}: expected the package bitsandbytes, which 4 bit needs "
            "(pip install 'scheduler-interp[quantised]'), found none"
        )


def _compute_plainly(model: Any, precision: torch.dtype) -> None:
    """Make a model with 4-bit layers compute in `precision`, from weights that stay as they were loaded.

    On a CPU with AVX-512 BF16 a `Linear4bit` in eval mode would repack its weight in place at its first forward and
    compute in bfloat16 whatever its type. `state_dict`, which PEFT calls to place an adapter, undoes the packing of the
    weight but not that of its scales: the base model would be another one afterwards.
    """
    for module in model.modules():
        if isinstance(module, importlib.import_module("bitsandbytes").nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
            module.compute_dtype, module.compute_type_is_set = precision, True
            module.weight.quant_state.dtype = precision
        else:  # a folder of packed weights is loaded in the type of its files
            for parameter in module.parameters(recurse=False):
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(precision)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
