"""State of modules: running statistics, tied weights, buffers, parameters that are not used, train and eval."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, randn

TOLERANCE = (1e-4, 1e-4)


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.b1, self.b2 = nn.BatchNorm2d(4), nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.b2(self.b1(self.c(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


def running_statistics() -> Case:
    """pytorch/pytorch#194504: several steps of two batch norms, one with a cumulative average."""
    torch.manual_seed(0)
    net = Norms()
    return Case(net, [(torch.randn(n, 3, 6, 6),) for n in (4, 4, 5)], grad=True, tol=TOLERANCE)


def statistics_in_evaluation() -> Case:
    """In evaluation statistics are read and not written."""
    torch.manual_seed(0)
    net = Norms().eval()
    return Case(net, [(randn(n, 3, 6, 6, grad=True),) for n in (4, 2)], grad=True, tol=TOLERANCE)


def norms_of_every_kind() -> Case:
    """Group, instance, local response and batch norm without affine parameters or statistics."""
    torch.manual_seed(0)
    kinds = (
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.BatchNorm2d(4, affine=False),
    )
    net = nn.Sequential(*kinds, nn.LocalResponseNorm(2), nn.BatchNorm2d(4, track_running_stats=False))
    return Case(net, [(randn(3, 4, 5, 5, seed=i, grad=True),) for i in range(2)], grad=True, tol=TOLERANCE)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(19, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.emb.weight
        self.mod = nn.Parameter(torch.randn(2, 2, 8) * 0.1)

    def forward(self, tok: Tensor) -> Tensor:
        h = self.emb(tok)
        for scale, shift in self.mod.unbind(0):
            h = h + torch.tanh(F.layer_norm(h, (8,)) * (1 + scale) + shift)
        scale, shift = self.mod[0]
        return self.head(F.layer_norm(h, (8,)) * (1 + scale) + shift)  # type: ignore[no-any-return]


def tied_embedding_and_head() -> Case:
    """pytorch/pytorch#193061: one parameter as table and as head: both gradients add up."""
    torch.manual_seed(0)
    return Case(Tied(), [(torch.randint(0, 19, (3, 7)),)], grad=True, tol=(1e-4, 1e-5))


class Partly(nn.Module):
    """Parameters that no path reaches, that one branch reaches, and that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.branch, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        self.seen += x.shape[0]
        y = self.frozen(self.used(x)).tanh()
        return self.branch(y) if both else y


def unused_and_frozen_parameters() -> Case:
    """Gradients that are None stay None, in each branch; a counter is a buffer."""
    torch.manual_seed(0)
    return Case(Partly(), [(randn(3, 4), both) for both in (False, True, False)], grad=True, tol=(1e-5, 1e-6))


class Memory(nn.Module):
    """Buffers that the forward replaces, fills and reads: a cache, a ring and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(6, 4))
        self.register_buffer("mean", torch.zeros(4), persistent=True)
        self.register_buffer("step", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Any:
        self.cache[2:4] = x.detach()
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        self.step += 1
        return (x - self.mean) / self.step, self.cache.sum(0)


def buffers_written_and_replaced() -> Case:
    return Case(Memory(), [(randn(2, 4, seed=i, grad=True),) for i in range(3)], grad=True)


class Spectral(nn.Module):
    """Parametrised weights: a spectral norm, whose power iteration writes buffers, and a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
        self.b = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())  # type: ignore[no-any-return]


def parametrized_weights() -> Case:
    torch.manual_seed(0)
    return Case(Spectral(), [(randn(3, 4, grad=True),) for _ in range(2)], grad=True, tol=TOLERANCE)


def transformer_layer() -> Case:
    """nn.TransformerEncoderLayer and nn.MultiheadAttention with masks, in train mode without dropout."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, hidden: Tensor) -> Any:
            y = self.layer(x, src_key_padding_mask=hidden)
            return self.attention(y, y, y, key_padding_mask=hidden)

    torch.manual_seed(0)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return Case(Layers(), [(randn(2, 5, 8, grad=True), hidden)], grad=True, tol=TOLERANCE)


def residual_network() -> Case:
    """Two residual blocks with strides, batch norms and a pooled head, two steps."""

    class Residual(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
            self.n1, self.n2, self.skip = nn.BatchNorm2d(b), nn.BatchNorm2d(b), nn.Conv2d(a, b, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.n2(self.two(F.relu(self.n1(self.one(x)), inplace=True))) + self.skip(x))

    torch.manual_seed(0)
    net = nn.Sequential(Residual(3, 8), Residual(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return Case(net, [(randn(4, 3, 16, 16, seed=i),) for i in range(2)], grad=True, tol=(1e-3, 1e-3))


CASES = (
    running_statistics,
    statistics_in_evaluation,
    norms_of_every_kind,
    tied_embedding_and_head,
    unused_and_frozen_parameters,
    buffers_written_and_replaced,
    parametrized_weights,
    transformer_layer,
    residual_network,
)
