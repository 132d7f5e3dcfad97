"""The subject of every analysis: a base model and its LoRA adapter, loaded once, switched live on one set of weights.

Nothing is merged. With the adapter off the model is the base model, which is checked when it is loaded: an adapter for
which that does not hold is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from interp.adapter_files import AdapterFiles, SubjectError, read_adapter
from interp.base_models import ResolvedBase, load_base, resolve_base
from interp.built_in import BaseModelError

DECODER_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
PROBE_LENGTH = 16

ModuleChoice = Callable[[str], bool] | Collection[str]
"""Some of `Subject.adapted_modules`: a predicate of the name, or the names."""


class UnsupportedArchitecture(SubjectError):
    """The model is of an architecture that is not covered; the message names it and what was expected."""


class Subject:
    """A causal language model with a LoRA adapter, in eval mode, frozen; trained unless it is switched.

    Attributes:
        model: the `PeftModel`.
        tokenizer: of the base model.
        name: name of the adapter folder.
        config: configuration of the base model.
        adapter_sha256: over `adapter_config.json` and the adapter's weights (`interp.base_models.files_sha256`).
        base_identity: `name` and `sha256` of the base (`ResolvedBase.identity`).
    """

    def __init__(self, model: PeftModel, tokenizer: Any, adapter: AdapterFiles, base: ResolvedBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = adapter.folder.resolve().name
        self.config = model.get_base_model().config
        self.adapter_sha256 = adapter.sha256
        self.base_identity = base.identity()
        self._base_path = base.path
        self._bridge: Any = None
        self._switches = _switches(self.causal_lm)
        model.eval().requires_grad_(False)

    @classmethod
    def load(
        cls,
        adapter: str | Path,
        base: str | Path | None = None,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        load_in_4bit: bool = False,
    ) -> Subject:
        """Load an adapter folder and its base model.

        Args:
            adapter: a folder with `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).
            base: a folder, the built-in name or a hub id; None is what `adapter_config.json` names.
            device, dtype, load_in_4bit: as for `interp.base_models.load_base`.

        Raises:
            SubjectError: if the folder holds no LoRA adapter of this base, or one that cannot be switched off.
            BaseModelError: if the base model cannot be had, or not on this device.
        """
        files = read_adapter(adapter)
        resolved = resolve_base(adapter, base)
        causal, tokenizer = load_base(resolved, device=device, dtype=dtype, load_in_4bit=load_in_4bit)
        _refuse_base_weights(causal, files)
        expected = _probe(causal, resolved)
        subject = cls(_wrap(causal, files), tokenizer, files, resolved)
        with subject.base():
            if not torch.equal(_probe(subject.model, resolved), expected):
                raise SubjectError(
                    f"{files.config_file}: expected an adapter that leaves the base model when it is "
                    f"switched off, found one that changes it for good{_suspects(files.config)}"
                )
        return subject

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face causal model inside the `PeftModel`; it switches with it."""
        return self.model.get_base_model()

    @property
    def decoder(self) -> Any:
        """The stack inside the causal model (`find_decoder`).

        Raises:
            UnsupportedArchitecture: if it has none of the kind.
        """
        return find_decoder(self.causal_lm)

    @property
    def n_layers(self) -> int:
        """Number of decoder layers, L."""
        return int(self.config.get_text_config().num_hidden_layers)

    @property
    def is_trained(self) -> bool:
        """True while the adapter is on, in all modules or in some."""
        return any(not module.disable_adapters for _, module in self._switches)

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """Names of the modules that the adapter changes, inside the causal model: `model.layers.0.mlp.up_proj`, …"""
        return tuple(dict.fromkeys(name for name, _ in self._switches))

    @contextmanager
    def base(self) -> Iterator[Subject]:
        """The base model inside this context: the adapter is off. The state before is restored on leaving."""
        with self._switched(lambda _: False):
            yield self

    @contextmanager
    def trained(self) -> Iterator[Subject]:
        """The trained model inside this context: the adapter is on. The state before is restored on leaving."""
        with self._switched(lambda _: True):
            yield self

    @contextmanager
    def only(self, modules: ModuleChoice) -> Iterator[Subject]:
        """The base model with the adapter on in some modules. The state before is restored on leaving.

        Raises:
            ValueError: if a name is none of `adapted_modules`.
        """
        with self._switched(self._predicate(modules)):
            yield self

    @contextmanager
    def without(self, modules: ModuleChoice) -> Iterator[Subject]:
        """The trained model with the adapter off in some modules. The state before is restored on leaving.

        Raises:
            ValueError: if a name is none of `adapted_modules`.
        """
        chosen = self._predicate(modules)
        with self._switched(lambda name: not chosen(name)):
            yield self

    def bridge(self) -> Any:
        """A TransformerLens `TransformerBridge` over the same weights; it switches with the subject.

        Booting replaces modules of the model it is given and makes attention eager, so the bridge gets its own modules
        around the same tensors, and this model stays as it is. Every call returns the same bridge. Feed token ids:
        given text, the bridge would put a beginning-of-sequence token before a chat prompt that has one.
        """
        if self._bridge is None:
            from transformer_lens.model_bridge import TransformerBridge

            tensors = [*self.causal_lm.parameters(), *self.causal_lm.buffers()]
            twin = copy.deepcopy(self.causal_lm, {id(tensor): tensor for tensor in tensors})
            switches = _switches(twin)  # before booting, which renames modules
            self._bridge = TransformerBridge.boot_transformers(
                str(self._base_path),
                hf_model=twin,
                tokenizer=copy.deepcopy(self.tokenizer),
                device=str(twin.device),
                dtype=twin.dtype,
            )
            self._switches += switches
        return self._bridge

    def _predicate(self, modules: ModuleChoice) -> Callable[[str], bool]:
        if callable(modules):
            return modules
        if unknown := sorted(set(modules) - set(self.adapted_modules)):
            raise ValueError(f"modules: expected some of adapted_modules, found {', '.join(unknown)}")
        return set(modules).__contains__

    @contextmanager
    def _switched(self, on: Callable[[str], bool]) -> Iterator[None]:
        before = {name: not module.disable_adapters for name, module in self._switches}
        try:
            self._switch(on)
            yield
        finally:
            self._switch(before.__getitem__)

    def _switch(self, on: Callable[[str], bool]) -> None:
        for name, module in self._switches:
            if module.disable_adapters == on(name):
                module.enable_adapters(on(name))
                module.requires_grad_(False)  # switching on makes an adapter trainable


def find_decoder(causal: Any) -> Any:
    """The module of a causal model that has `embed_tokens`, `layers`, `norm` and `rotary_emb`.

    Raises:
        UnsupportedArchitecture: if there is none (absolute positions, other layouts).
    """
    decoder = causal.get_decoder()
    missing = [part for part in DECODER_PARTS if not hasattr(decoder, part)]
    if missing:
        raise UnsupportedArchitecture(
            f"{type(causal).__name__}: this architecture is not covered: expected a decoder with "
            f"{', '.join(DECODER_PARTS)}, found no {', '.join(missing)}"
        )
    return decoder


def _refuse_base_weights(causal: nn.Module, files: AdapterFiles) -> None:
    """Refuse weights that overwrite the base model's own, as trained biases do: they stay when the adapter is off."""
    own = causal.state_dict()
    saved = set(files.config.modules_to_save or ())
    for key, found in files.weights.items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if name not in own or saved & set(name.split(".")):
            continue
        if own[name].shape != found.shape or not torch.equal(own[name].cpu(), found.to(own[name].dtype)):
            raise SubjectError(
                f"{files.weights_file}: {key}: expected nothing but LoRA weights, found a trained weight of the base "
                f"model, which stays when the adapter is switched off{_suspects(files.config)}"
            )


def _wrap(causal: Any, files: AdapterFiles) -> PeftModel:
    """The base model with the adapter, every tensor of which must be in the file and find its place."""
    try:
        model = PeftModel.from_pretrained(causal, str(files.folder), config=files.config)
    except (ValueError, RuntimeError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise SubjectError(
            f"{files.folder}: expected an adapter of {causal.name_or_path}, found {reason}{_suspects(files.config)}"
        ) from error
    expected = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    missing = sorted(expected - files.weights.keys())
    surplus = sorted(key for key in files.weights.keys() - expected if "lora_" in key)
    for keys, problem in ((missing, "nothing for"), (surplus, "a weight without a place:")):
        if keys:
            raise SubjectError(f"{files.weights_file}: expected the adapter's weights, found {problem} {keys[0]}")
    return model


def _probe(model: Any, base: ResolvedBase) -> Tensor:
    """(PROBE_LENGTH, vocab) logits on token ids spread over the vocabulary."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(PROBE_LENGTH, device=model.device) * (vocabulary // PROBE_LENGTH)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    if not torch.isfinite(logits).all():
        raise BaseModelError(f"{base.name}: expected finite logits, found others in {model.dtype}; try --dtype float32")
    return logits


def _suspects(config: Any) -> str:
    """The settings of an adapter that are known to reach beyond LoRA's own weights, for a message."""
    names = ("bias", "modules_to_save", "layer_replication", "trainable_token_indices")
    found = {name: getattr(config, name, None) for name in names}
    text = ", ".join(f"{name} is {value!r}" for name, value in found.items() if value and value != "none")
    return f" ({text})" if text else ""


def _switches(causal: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of all that can be switched; what a wrapper holds comes after it, since it switches that too."""
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [(name, module) for name, module in causal.named_modules() if isinstance(module, kinds)]
