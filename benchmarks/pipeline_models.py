"""Shapes of large models for the pipeline benchmark, on the meta device: no tensor is ever allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc.models import encdec, gpt, llama
from dsc.models.llama import Attention, SwiGLU, rotary_table


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    tensor: int = 1
    """Cards of a tensor-parallel group."""


@dataclass(frozen=True)
class MixtureConfig:
    """As DeepSeek-MoE 16B: fine experts, the first layer dense."""

    vocab: int = 102400
    length: int = 4096
    layers: int = 27
    heads: int = 16
    width: int = 2048
    hidden: int = 10944
    experts: int = 64
    chosen: int = 8
    expert_hidden: int = 1408


class Experts(nn.Module):
    """SwiGLU experts that choose their tokens, as many each (Zhou et al., 2022, arXiv:2202.09368): static shapes."""

    def __init__(self, c: MixtureConfig) -> None:
        super().__init__()
        self.experts, self.chosen = c.experts, c.chosen
        self.router = nn.Linear(c.width, c.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(c.experts, c.width, 2 * c.expert_hidden))
        self.down = nn.Parameter(torch.empty(c.experts, c.expert_hidden, c.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).softmax(-1)
        weight, index = weights.t().topk(tokens.shape[0] * self.chosen // self.experts, dim=-1)
        gate, up = torch.bmm(tokens[index], self.gate_up).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.down) * weight.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, index.flatten(), y.flatten(0, 1)).view(x.shape)


class MixtureBlock(nn.Module):
    def __init__(self, c: MixtureConfig, dense: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(c.width), nn.RMSNorm(c.width)
        self.attention = Attention(c.width, c.heads, c.heads)
        self.mix: nn.Module = SwiGLU(c.width, c.hidden) if dense else Experts(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y: Tensor = x + self.mix(self.norm2(x))
        return y


class Mixture(nn.Module):
    """A decoder with mixtures of experts."""

    def __init__(self, c: MixtureConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(c.vocab, c.width)
        self.blocks = nn.ModuleList(MixtureBlock(c, i == 0) for i in range(c.layers))
        self.norm = nn.RMSNorm(c.width)
        self.head = nn.Linear(c.width, c.vocab, bias=False)
        cos, sin = rotary_table(c.length, c.width // c.heads, 10000.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(idx)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens(length: int, count: int = 2) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda batch: tuple(torch.zeros(batch, length, dtype=torch.long, device="meta") for _ in range(count))


CASES = {
    c.name: c
    for c in (
        Case(
            "llama3-8b",
            lambda: llama.Llama(llama.Config(128256, 4096, 32, 32, 8, 4096, 14336, theta=500000.0)),
            tokens(4096),
        ),
        Case("gpt3-175b", lambda: gpt.GPT(gpt.Config(50257, 2048, 96, 96, 12288)), tokens(2048), tensor=8),
        Case("moe-16b", lambda: Mixture(MixtureConfig()), tokens(4096)),
        Case(
            "encdec-3b",
            lambda: encdec.EncoderDecoder(encdec.Config(32128, 1024, 24, 32, 2048, 5120)),
            tokens(1024, 3),
        ),
    )
}


def build(case: Case) -> nn.Module:
    """The model in bfloat16 on the meta device."""
    with torch.device("meta"):
        return case.build().to(torch.bfloat16)
