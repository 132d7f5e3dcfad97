"""Tiny random models, a tiny tokenizer and LoRA adapters, saved to folders as real ones are.

Everything is float32 and drawn from the seed that is given; the process-wide random source is left as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # wide, so that a wrong position, head or layer shows in the logits
}
KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (  # scaled rotary frequencies
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 6}),
    "qwen2": (  # full attention below, a window above
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokens that split digits singly, with ` [`, ` []`, `]}` and `":` as single tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "["), ("Ġ[", "]"), ("]", "}"), ('"', ":")]
    vocabulary = {token: number for number, token in enumerate(letters + ["".join(pair) for pair in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random causal model in eval mode: 4 layers, 4 heads of 8, 2 key/value heads, width 32, untied head."""
    config_class, model_class, extra = KINDS[kind]
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": len(tokenizer)}
    config = config_class(**{**SIZES, **extra, **ids, "tie_word_embeddings": False, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # not all zeros, not all ones
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def save_base(folder: str | Path, kind: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer; returns the folder."""
    folder = Path(folder)
    tiny_model(kind, seed=seed, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(
    folder: str | Path,
    base: str | Path,
    *,
    seed: int = 0,
    size: float = 0.2,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] | str = ALL_PROJECTIONS,
    dropout: float = 0.1,
    **options: Any,
) -> Path:
    """Save a random LoRA adapter on the model in `base`; returns the folder.

    Args:
        size: standard deviation of every B; 0 gives a fresh adapter, whose delta is zero.
        dropout: on by default, so that a model left in train mode is seen.
        options: further fields of `LoraConfig` (`rank_pattern`, `use_rslora`, `layers_to_transform`, `bias`, …). With
            `bias` or `modules_to_save`, whatever these make trainable is moved away from the base as well.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wide = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=wide, task_type="CAUSAL_LM", **options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.copy_(noise * size)
            elif "lora_" in name:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif parameter.requires_grad:
                parameter.add_(noise * size)
    peft_model.save_pretrained(str(folder))
    return Path(folder)


def tiny_pair_folders(folder: str | Path, kind: str = "llama", **adapter_options: Any) -> tuple[Path, Path]:
    """(adapter folder, base folder) under `folder`, ready for `Subject.load(adapter)`."""
    base = save_base(Path(folder) / "base", kind)
    return save_adapter(Path(folder) / "adapter", base, **adapter_options), base
