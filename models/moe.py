"""A decoder whose feedforward layers are mixtures of experts: LLaMA's attention, top-k routing as in Mixtral.

Jiang et al., "Mixtral of Experts", 2024 (arXiv:2401.04088); Fedus et al., "Switch Transformers", 2021
(arXiv:2101.03961) for the load-balancing loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsc.models.llama import Attention, rotary_table


@dataclass(frozen=True)
class Config:
    vocab: int = 8192
    max_length: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 256
    hidden: int = 512
    experts: int = 8
    chosen: int = 2  # experts that see a token
    balance: float = 0.01  # weight of the load-balancing loss
    theta: float = 10000.0
    epsilon: float = 1e-5


class Experts(nn.Module):
    """SwiGLU experts with a learned router.

    Dispatch is dense: every expert computes every token, and unchosen results get weight zero.  No shape then depends
    on the routing, no token is dropped, and the layer traces into one graph; the price is ``experts / chosen`` times
    the arithmetic.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.up = nn.Parameter(torch.empty(config.experts, config.width, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, width] -> ([B, T, width], load-balancing loss, a scalar)."""
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        selected = top_k_mask(probabilities, self.chosen)
        weights = probabilities * selected
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = F.silu(tokens @ self.gate) * (tokens @ self.up)  # [experts, B * T, hidden]
        y = ((hidden @ self.down) * weights.t()[:, :, None]).sum(0)
        return y.view(x.shape), load_balance(probabilities, selected)


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, config.epsilon)
        self.attention = Attention(config.width, config.heads, config.kv_heads)
        self.norm2 = nn.RMSNorm(config.width, config.epsilon)
        self.experts = Experts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, T, width], ``cos`` and ``sin`` [T, head_width / 2] -> ([B, T, width], load-balancing loss)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


class MoE(nn.Module):
    """Token embedding, blocks with rotary positions, a final RMSNorm, an untied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.balance = config.balance
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.epsilon)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        cos, sin = rotary_table(config.max_length, config.width // config.heads, config.theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """``idx``, ``targets`` [B, T] int64, T <= max_length -> cross entropy plus load balancing, a scalar."""
        length = idx.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens is longer than max_length={self.max_length}")
        x: Tensor = self.tokens(idx)
        balances: list[Tensor] = []
        for block in self.blocks:
            x, balance = block(x, self.cos[:length], self.sin[:length])
            balances.append(balance)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten()) + self.balance * torch.stack(balances).mean()


def top_k_mask(probabilities: Tensor, k: int) -> Tensor:
    """[N, experts] -> the same shape and dtype, one for the ``k`` largest of each row and zero elsewhere."""
    indices = probabilities.topk(k, dim=-1).indices
    return torch.zeros_like(probabilities).scatter(-1, indices, 1.0)


def load_balance(probabilities: Tensor, selected: Tensor) -> Tensor:
    """The load-balancing loss: experts * sum of (share of the choices * mean probability); 1 if the load is even.

    ``probabilities`` and ``selected`` [N, experts]; only the probabilities carry a gradient.
    """
    share = selected.mean(0) / selected.mean(0).sum()
    return probabilities.shape[-1] * (share * probabilities.mean(0)).sum()
