"""Sizes that change between calls, also to 1 and 0: the values are those of a program compiled for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, randn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.l = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, a: Tensor) -> Any:
        m = a.shape[0] * 2 + 1
        out = a.new_zeros(m, 16)
        out[: a.shape[0]] = a
        out = out + self.l(self.n(out))
        return out / (a.shape[0] + 1), out.mean(), a.shape[0] // 2


def dynamic_batch_layer_norm_linear() -> Case:
    """pytorch/pytorch#172822, #183696, #94640: layer norm, slice assignment and arithmetic on sizes."""
    torch.manual_seed(0)
    calls = [(torch.randn(n, 16).requires_grad_(),) for n in (4, 7, 1, 12, 0)]
    return Case(Block(), calls, grad=True, dynamic=True, tol=(1e-4, 1e-5))


def sizes_change_without_being_told() -> Case:
    """The compiler is not told: the second size makes the dimension a symbol."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.gelu(x @ w)
        return y.softmax(-1), y.sum(0), y.cumsum(0)[-1:], y.view(-1)[::2], x.shape[0] * 2.5

    return Case(
        fn, [(randn(n, 6, grad=True), randn(6, 4, grad=True)) for n in (3, 5, 8, 1, 2)], grad=True, tol=(1e-4, 1e-5)
    )


def two_symbols_that_meet() -> Case:
    """Two dynamic dimensions are equal in one call and differ in the next; broadcasting sees it."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return x[:, None] + y, (x[:, None] * y).mean(1), torch.cat([x, y]), x.sum() / y.numel()

    return Case(
        fn,
        [(randn(a, grad=True), randn(b, grad=True)) for a, b in ((3, 4), (4, 4), (1, 5), (6, 1))],
        grad=True,
        dynamic=True,
    )


def sequence_length_in_attention() -> Case:
    """Causal attention and position embeddings over sequences of changing length."""

    def fn(x: Tensor, p: Tensor) -> Any:
        t = x.shape[1]
        h = x + p[:t]
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        s = (h @ h.mT / t**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        return s @ h, F.scaled_dot_product_attention(h, h, h, is_causal=True)

    calls = [(randn(2, t, 8, grad=True), randn(16, 8, seed=1, grad=True)) for t in (5, 9, 1, 16)]
    return Case(fn, calls, grad=True, dynamic=True, tol=(1e-4, 1e-5))


def images_of_any_size() -> Case:
    """Convolution, batch norm, pooling and interpolation of images of changing size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    calls = [(randn(b, 3, h, w, grad=True),) for b, h, w in ((2, 8, 8), (3, 9, 7), (2, 16, 5), (1, 4, 4))]
    return Case(net, calls, grad=True, dynamic=True, tol=(1e-4, 1e-4))


def sizes_that_data_decides() -> Case:
    """nonzero, masks and unique: the size of the result is known only when it runs."""

    def fn(x: Tensor) -> Any:
        y = x[x > 0]
        return y * 2, (x > 0).nonzero(), torch.unique((x * 2).round()), y.sum(), y.shape[0]

    return Case(fn, [(randn(n, seed=n),) for n in (5, 9, 3)])


def strides_change_too() -> Case:
    """The same program on plain, transposed and sliced tensors in turn."""

    def fn(x: Tensor) -> Any:
        return (x * 2).relu(), x.sum(0), x.t() + 1, (x + x.flip(0)).softmax(-1)

    return Case(
        fn, [(randn(4, 4),), (randn(4, 4).t(),), (randn(4, 8)[:, ::2],), (randn(1, 4).expand(4, 4),), (randn(6, 4),)]
    )


def turned_round_joins_of_changing_sizes() -> Case:
    """``flip`` of a ``cat``: indices run backwards over two blocks of one symbolic size."""

    def fn(x: Tensor) -> Any:
        y = torch.cat([x, x + 1], 0)
        return (
            y.flip(0),
            torch.cat([x, x], 1).flip(1) * 2,
            y.flip(0).view(2, -1).flip(0),
            torch.stack([x, x * 2]).flip(0, 1),
        )

    return Case(fn, [(randn(n, n),) for n in (5, 16, 9)], dynamic=True)


def turned_parts_of_joins() -> Case:
    """``flip`` of a part of a ``cat``: where the part ends at a multiple of the rows' length, a negative index was divided."""

    def fn(*parts: Tensor) -> list[Tensor]:
        rows = [torch.cat(parts[i : i + 2], 1).reshape(-1) for i in range(0, len(parts), 2)]
        turned = [r[:stop].flip(0) + 1 for r in rows for stop in range(1, len(r) + 1)]
        return [*turned, *(r.view(2, -1).flip(1).reshape(-1)[1:].flip(0) * 2 for r in rows)]

    sizes = ((1, 1), (1, 2), (2, 2), (3, 1), (4, 2))
    parts = [randn(rows, n, seed=i) for rows in (2, 4) for i, pair in enumerate(sizes) for n in pair]
    return Case(fn, [tuple(parts)])


def sizes_that_guards_make_one() -> Case:
    """A size is computed, and found to be 1 only by what it is broadcast with; in the last call it is another."""

    def fn(x: Tensor, y: Tensor) -> Any:
        part = x[: x.shape[0] // 4]
        d = x.unsqueeze(0).diagonal(1, 0, 2)
        return part * y + y.sum(0, keepdim=True), torch.maximum(part, y), torch.addcdiv(d, x, d.abs() + 1), part / y

    calls = [(randn(a, 3, grad=True), randn(b, 3, grad=True)) for a, b in ((5, 7), (6, 9), (9, 2), (4, 3))]
    return Case(fn, calls, grad=True, dynamic=True)


def either_of_two_relations() -> Case:
    """What is compiled holds if one of two relations of sizes does, and others as well: kept graphs serve no other sizes."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return torch.cat([x[: x.shape[0] // 4].expand(y.shape[0], -1), y], 1).softmax(1)

    return Case(fn, [(randn(a, 3), randn(b, 3)) for a, b in ((5, 7), (9, 2), (6, 9), (14, 3))], dynamic=True)


CASES = (
    turned_round_joins_of_changing_sizes,
    turned_parts_of_joins,
    dynamic_batch_layer_norm_linear,
    sizes_change_without_being_told,
    two_symbols_that_meet,
    sequence_length_in_attention,
    images_of_any_size,
    sizes_that_data_decides,
    strides_change_too,
    sizes_that_guards_make_one,
    either_of_two_relations,
)
