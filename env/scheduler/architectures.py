"""The modules behind the shipped real graphs, at the sizes that they have in their models. Weights do not matter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from env.scheduler.graph import Graph
from env.scheduler.trace import from_torch

TOKENS = 256
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "attn_implementation": "sdpa",
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, the first with a stride, and a 1x1 convolution as skip (He et al., arXiv 1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip = nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a 1x1 convolution as skip (He et al., arXiv 1512.03385)."""

    def __init__(self, channels_in: int, width: int) -> None:
        super().__init__()
        channels = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip = nn.Sequential(nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class UNetLevel(nn.Module):
    """One level of a U-Net: down, a bottom of two convolutions, up, concatenate the skip (arXiv 1505.04597, padded)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.encoder = _two_convolutions(channels, channels)
        self.bottom = _two_convolutions(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, 2)
        self.decoder = _two_convolutions(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.encoder(x)
        bottom = self.bottom(nn.functional.max_pool2d(skip, 2))
        return self.decoder(torch.cat([skip, self.up(bottom)], dim=1))


class MixerBlock(nn.Module):
    """An MLP over tokens and one over channels (Tolstikhin et al., arXiv 2105.01601)."""

    def __init__(self, tokens: int, tokens_hidden: int, channels: int, channels_hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.over_tokens = _mlp(tokens, tokens_hidden)
        self.over_channels = _mlp(channels, channels_hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))


def _two_convolutions(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
    )


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def trace_all() -> Iterator[Graph]:
    """The shipped graphs: a decoder layer of SmolLM2-135M on 256 tokens, two blocks of ResNets on their 56x56 stage,
    a U-Net level on 64x64, a block of Mixer-S/16 on 224x224 images."""
    config = LlamaConfig(**SMOLLM2_135M)
    tokens = torch.zeros(1, TOKENS, config.hidden_size)
    rotations = torch.zeros(1, TOKENS, config.hidden_size // config.num_attention_heads)
    modules: dict[str, tuple[nn.Module, Tensor]] = {
        "smollm2_135m_layer": (LlamaDecoderLayer(config, layer_idx=0), tokens),
        "resnet_basic_block": (BasicBlock(64, 128, stride=2), torch.zeros(1, 64, 56, 56)),
        "resnet_bottleneck": (Bottleneck(64, 64), torch.zeros(1, 64, 56, 56)),
        "unet_level": (UNetLevel(64), torch.zeros(1, 64, 64, 64)),
        "mixer_block": (MixerBlock(196, 256, 512, 2048), torch.zeros(1, 196, 512)),
    }
    for name, (module, example) in modules.items():
        kwargs = {"position_embeddings": (rotations, rotations)} if isinstance(module, LlamaDecoderLayer) else None
        yield from_torch(module.eval(), (example,), example_kwargs=kwargs, name=name)
