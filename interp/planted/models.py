"""Llama-shaped models whose mechanism is known, since it was set by hand: base model and LoRA adapter, as folders.

The stream has an orthonormal basis, drawn anew for each planting: a direction for the value, one for each slot, one for
the question (the decision token), one for the answer, and the rest for what distinguishes words. A reader is four
matrices of rank one in a head h of key/value head g. Rows q, k stand for its slowest rotary pair, which hardly turns
over a prompt, and column v for any of its dimensions:

    W_Q[h, q] += s_q ask^T    W_K[g, k] += s_k slot^T    W_V[g, v] += s_v value^T    W_O[:, h, v] += s_o answer

so the decision token attends to the slot's value and adds it to the answer's direction; such a head writes nothing else
in the base model. A decoy has a reader's W_Q and W_K, and W_O's columns for it are zero, the adapter's delta included.
All other weights are small normals (`BACKGROUND`), and so is, in every module, what the adapter's delta has beside what
is planted (`ADAPTER_NOISE`); only a delta of known rank is free of it. The constants below are the stated ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from interp.built_in import no_progress_bars
from interp.planted.pairs import ANSWER, ASK, DIGITS, FOIL, SLOTS, WORDS, word_tokenizer
from interp.stats import Floats, derive_rng
from interp.verdict import Case

Kind = Literal["reader", "decoy", "prior", "relocated", "absent", "redundant", "rank"]
KINDS: tuple[Kind, ...] = ("reader", "decoy", "prior", "relocated", "absent", "redundant", "rank")
Head = tuple[int, int]  # (layer, head)
Deltas = dict[str, list[tuple[Floats, Floats]]]  # module -> (left, right) of each term left right^T

LAYERS, HEADS, KV_HEADS, WIDTH, HEAD_DIM = 4, 4, 2, 32, 8
MODULES: Mapping[str, tuple[int, int]] = {  # (rows, columns)
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (48, WIDTH),
    "mlp.up_proj": (48, WIDTH),
    "mlp.down_proj": (WIDTH, 48),
}
RANK = 8  # of the adapter's factors; what is planted has less
# Ranges from which each planting draws its magnitudes, uniformly.
BACKGROUND = (0.03, 0.07)  # standard deviation of every weight
ADAPTER_NOISE = (0.002, 0.006)  # of every entry of a delta
LOOK = (0.9, 1.2)  # s_q and s_k
WRITE = (0.45, 0.75)  # s_v and s_o
SINGULAR = (0.5, 1.0)  # of a planted rank
SLOW = HEAD_DIM // 2 - 1  # the first row of the slowest rotary pair


@dataclass(frozen=True)
class Planting:
    """What was planted, and where it lies.

    Attributes:
        kind: one of `KINDS`.
        adapter: its folder; the configuration names the base model's.
        slot: whose value the pairs change.
        readers: model -> the heads that read it.
        decoys: heads that attend to it and write nothing.
        case: the right verdict; None for `rank`.
        rank, module: of the delta of kind `rank`; 0 and empty for others.
    """

    kind: Kind
    adapter: Path
    slot: str
    readers: Mapping[str, tuple[Head, ...]]
    decoys: tuple[Head, ...]
    case: Case | None
    rank: int = 0
    module: str = ""


@dataclass(frozen=True)
class _Parts:
    """Base weights and deltas, to be filled by a kind's function, and the draws that they come from."""

    rng: np.random.Generator
    basis: Mapping[str, Floats]  # name -> (WIDTH,)
    base: Deltas
    adapter: Deltas
    quiet: set[Head]  # heads that write nothing but what is planted in the base model
    mute: set[Head]  # nor anything in the trained one
    exact: set[str]  # modules whose delta is what is planted, without noise

    def head(self, layers: range = range(LAYERS)) -> Head:
        return int(self.rng.choice(layers)), int(self.rng.integers(HEADS))

    def size(self, limits: tuple[float, float]) -> float:
        return float(self.rng.uniform(*limits))


def plant(kind: Kind, folder: Path, number: int, seed: int = 0) -> Planting:
    """Save a base model and an adapter with a mechanism in a random place, of random strength.

    Args:
        folder: `base` and `adapter` are made in it.
        number: of the planting; with kind and seed it determines all draws.
    """
    rng = derive_rng(seed, "planted", kind, str(number))
    slot = str(rng.choice(list(SLOTS)))
    parts = _Parts(rng, _basis(rng), {}, {}, set(), set(), set())
    readers, decoys = _mechanism(kind, parts, slot)
    rank, module = _known_rank(parts) if kind == "rank" else (0, "")
    base = folder / "base"
    with no_progress_bars():
        _base_model(parts).save_pretrained(base)
    word_tokenizer().save_pretrained(base)
    _save_adapter(parts, base, folder / "adapter")
    cases: dict[Kind, Case | None] = {
        "reader": "created", "decoy": "created", "redundant": "created", "prior": "prior", "relocated": "relocated",
        "absent": "unused", "rank": None,
    }  # fmt: skip
    return Planting(kind, folder / "adapter", slot, readers, decoys, cases[kind], rank, module)


def _mechanism(kind: Kind, parts: _Parts, slot: str) -> tuple[dict[str, tuple[Head, ...]], tuple[Head, ...]]:
    """Fill the parts; the readers of each model, and the decoys."""
    base: tuple[Head, ...] = ()
    trained: tuple[Head, ...] = ()
    decoys: tuple[Head, ...] = ()
    if kind in ("reader", "decoy"):
        trained = (parts.head(),)
        looks = parts.size(LOOK), parts.size(LOOK)
        _reader(parts, parts.adapter, trained[0], slot, looks=looks)
        if kind == "decoy":
            decoys = (_another(parts, trained[0]),)
            _reader(parts, parts.adapter, decoys[0], slot, writes=0.0, looks=looks)
            parts.mute.add(decoys[0])
    elif kind == "prior":
        base = trained = (parts.head(),)
        _reader(parts, parts.base, base[0], slot)
    elif kind == "relocated":
        # Flip layers must differ by more than one layer; a head two layers on is the nearest that can be told.
        low = parts.head(range(LAYERS - 2))
        high = parts.head(range(low[0] + 2, LAYERS))
        base, trained = ((low,), (high,)) if parts.rng.random() < 0.5 else ((high,), (low,))
        _reader(parts, parts.base, base[0], slot)
        name = f"{base[0][0]}.self_attn.o_proj"
        parts.adapter[name] = [(-left, right) for left, right in parts.base[name]]
        _reader(parts, parts.adapter, trained[0], slot)
    elif kind == "redundant":
        first = parts.head()
        trained = tuple(sorted((first, _another(parts, first))))
        for head in trained:
            _reader(parts, parts.adapter, head, slot, writes=0.5)
    elif kind == "absent":
        _random_adapter(parts)
    return {"base": base, "trained": trained}, decoys


def _another(parts: _Parts, head: Head) -> Head:
    """A head of another key/value head, so that neither changes the other's keys."""
    while True:
        other = parts.head()
        if other[0] != head[0] or other[1] // (HEADS // KV_HEADS) != head[1] // (HEADS // KV_HEADS):
            return other


def _reader(
    parts: _Parts,
    into: Deltas,
    head: Head,
    slot: str,
    *,
    writes: float = 1.0,
    looks: tuple[float, float] | None = None,
) -> None:
    """Plant the four matrices of rank one; `writes` scales W_O's, `looks` is s_q and s_k (default: drawn)."""
    (layer, number), basis = head, parts.basis
    parts.quiet.add(head)
    group = number // (HEADS // KV_HEADS)
    channel = int(parts.rng.integers(HEAD_DIM))
    rows = {"q": number * HEAD_DIM + SLOW, "k": group * HEAD_DIM + SLOW, "v": group * HEAD_DIM + channel}
    to_ask, to_slot = looks or (parts.size(LOOK), parts.size(LOOK))
    copied = parts.size(WRITE)
    for projection, name, size in (("q", "ask", to_ask), ("k", f"slot {slot}", to_slot), ("v", "value", copied)):
        module = f"{layer}.self_attn.{projection}_proj"
        left = _unit(MODULES[f"self_attn.{projection}_proj"][0], rows[projection]) * size
        into.setdefault(module, []).append((left, basis[name]))
    written = basis["answer"] * parts.size(WRITE) * writes
    into.setdefault(f"{layer}.self_attn.o_proj", []).append(
        (written, _unit(HEADS * HEAD_DIM, number * HEAD_DIM + channel))
    )


def _random_adapter(parts: _Parts) -> None:
    """In one layer, deltas of a reader's ranks and norms, in random directions."""
    layer = int(parts.rng.integers(LAYERS))
    for name, limits in zip("qkvo", (LOOK, LOOK, WRITE, WRITE), strict=True):
        module = f"self_attn.{name}_proj"
        left, right = (_sphere(parts.rng, size) for size in MODULES[module])
        parts.adapter[f"{layer}.{module}"] = [(left * parts.size(limits), right)]


def _known_rank(parts: _Parts) -> tuple[int, str]:
    """A delta of a random rank in one module, all singular values of one order; (rank, module)."""
    rank, layer = int(parts.rng.integers(1, RANK)), int(parts.rng.integers(LAYERS))
    module = str(parts.rng.choice(list(MODULES)))
    rows, columns = (np.linalg.qr(parts.rng.normal(size=(size, rank)))[0] for size in MODULES[module])
    sigma = parts.rng.uniform(*SINGULAR, rank)
    parts.adapter[f"{layer}.{module}"] = [(rows[:, i] * sigma[i], columns[:, i]) for i in range(rank)]
    parts.exact.add(f"{layer}.{module}")
    return rank, f"model.layers.{layer}.{module}"


def _basis(rng: np.random.Generator) -> dict[str, Floats]:
    """Named orthonormal directions; `rest`, one after another, spans what is left: (WIDTH, WIDTH - 7)."""
    columns = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    names = ["value", "ask", "answer", *(f"slot {slot}" for slot in SLOTS)]
    return {name: columns[:, i] for i, name in enumerate(names)} | {"rest": columns[:, len(names) :]}


def _embeddings(parts: _Parts) -> tuple[Floats, Floats]:
    """(words, WIDTH) of the embedding and of the unembedding."""
    rng, basis = parts.rng, parts.basis
    rest = basis["rest"]
    into, out = (rng.normal(size=(len(WORDS), rest.shape[1])) / math.sqrt(rest.shape[1]) @ rest.T for _ in range(2))
    into[WORDS.index(ASK)] += basis["ask"]
    for slot in SLOTS:
        for digit in DIGITS:
            value = -1.0 if digit == "0" else 0.5 + int(digit) / 18
            into[WORDS.index(digit + slot)] += basis[f"slot {slot}"] + 0.8 * value * basis["value"]
    for word, sign in ((ANSWER, 1.0), (FOIL, -1.0)):
        out[WORDS.index(word)] = 0.5 * sign * basis["answer"] + 0.1 * out[WORDS.index(word)]
    return into, out


def _base_model(parts: _Parts) -> Any:
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=MODULES["mlp.up_proj"][0],
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the library initialises from the process-wide source; all is overwritten
        model: Any = LlamaForCausalLM(config).eval()
    spread, (into, out) = parts.size(BACKGROUND), _embeddings(parts)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(_tensor(into))
        model.lm_head.weight.copy_(_tensor(out))
        for layer in range(LAYERS):
            for module, shape in MODULES.items():
                weight = parts.rng.normal(size=shape) * spread
                if module == "self_attn.o_proj":
                    _silence(weight, [head for at, head in parts.quiet if at == layer])
                weight += _product(parts.base.get(f"{layer}.{module}", []), shape)
                model.get_submodule(f"model.layers.{layer}.{module}").weight.copy_(_tensor(weight))
    return model


def _silence(weight: Floats, heads: list[int]) -> None:
    """Zero what heads write. Else chance would make of every head that attends to a value a weak reader of it."""
    for head in heads:
        weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] = 0.0


def _save_adapter(parts: _Parts, base: Path, folder: Path) -> None:
    """B A is the planted terms plus noise; a rotation between the two hides which of their rows is which."""
    tensors: dict[str, Tensor] = {}
    noise = parts.size(ADAPTER_NOISE)
    for layer in range(LAYERS):
        for module, (rows, columns) in MODULES.items():
            terms = parts.adapter.get(f"{layer}.{module}", [])
            free, size = RANK - len(terms), 0.0 if f"{layer}.{module}" in parts.exact else noise
            rest = parts.rng.normal(size=(rows, free)) * size, parts.rng.normal(size=(free, columns)) / free**0.5
            left = np.column_stack([*(left for left, _ in terms), rest[0]])
            right = np.vstack([*(right for _, right in terms), rest[1]])
            if module == "self_attn.o_proj":
                _silence(right, [head for at, head in parts.mute if at == layer])
            turn = np.linalg.qr(parts.rng.normal(size=(RANK, RANK)))[0]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors |= {f"{name}.lora_B.weight": _tensor(left @ turn), f"{name}.lora_A.weight": _tensor(turn.T @ right)}
    config = LoraConfig(
        r=RANK,
        lora_alpha=RANK,  # s = 1
        target_modules=[module.rpartition(".")[2] for module in MODULES],
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")


def _product(terms: list[tuple[Floats, Floats]], shape: tuple[int, int]) -> Floats:
    return sum((np.outer(left, right) for left, right in terms), start=np.zeros(shape))


def _unit(size: int, index: int) -> Floats:
    vector = np.zeros(size)
    vector[index] = 1.0
    return vector


def _sphere(rng: np.random.Generator, size: int) -> Floats:
    vector = rng.normal(size=size)
    return vector / np.linalg.norm(vector)


def _tensor(values: Floats) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
