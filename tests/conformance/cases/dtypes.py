"""Dtypes of cumulative sums, reductions, comparisons and promotions are eager's, with and without ``dtype=``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, rand, randn


def cumulative_sums() -> Case:
    """pytorch/pytorch#189518, #109925, #132107: of bools, integers, constants and infinities, reversed too."""

    def fn(b: Tensor, x: Tensor) -> Any:
        ones = torch.ones((2, 4), dtype=torch.bool)
        return (
            ones.cumsum(1, dtype=torch.bfloat16), torch.full([2, 4], 1).to(torch.bool).cumsum(1), b.cumsum(0),
            b.cumsum(1, dtype=torch.int8), x.cumsum(1), x.flip(1).cumsum(1).flip(1), torch.cumprod(x, 0),
            torch.logcumsumexp(x, 1), x.cummax(1), torch.full((3,), float("inf")).cumsum(0),
        )  # fmt: skip

    return Case(fn, [(rand(3, 5) > 0.4, randn(3, 6, grad=True))], grad=True, tol=(1e-4, 1e-5))


def pad_of_split_reduction() -> Case:
    """pytorch/pytorch#189895: offsets of sequences, by a padded cumulative sum of row lengths."""

    def fn(mask: Tensor) -> Any:
        n = mask.sum(-1, dtype=torch.int32)
        pad = torch.nn.functional.pad
        return (
            pad(n.cumsum(0, dtype=torch.int32), (1, 0)),
            pad(n, (1, 2), value=-5),
            pad(mask.float().mean(-1), (0, 1), value=9.0),
        )

    rows = torch.arange(4 * 3000).reshape(4, 3000) % 3 == 0
    return Case(fn, [(torch.ones(1, 16384, dtype=torch.bool),), (rows,)], tol=(1e-5, 1e-6))


def reductions_with_dtype() -> Case:
    """``dtype=`` of sum, prod, mean and softmax converts before reducing."""

    def fn(x: Tensor, i: Tensor, h: Tensor) -> Any:
        return (
            x.sum(dtype=torch.float64), i.sum(dtype=torch.float32), i.float().mean(dtype=torch.float64), h.sum(0, dtype=torch.float32),
            h.softmax(-1, dtype=torch.float32), x.prod(0, dtype=torch.float64), h.log_softmax(0, dtype=torch.float32),
            h.mean(dtype=torch.float32), (i > 2).sum(dtype=torch.int16), x.cumsum(0, dtype=torch.float64),
        )  # fmt: skip

    return Case(
        fn, [(randn(3, 4, grad=True), torch.arange(6), randn(3, 4, seed=1, dtype=torch.float16, grad=True))], grad=True
    )


def promotion_table() -> Case:
    """Sums, comparisons and selections of every pair of dtypes."""
    names = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
    kinds = (*names, torch.float32, torch.float64)

    def fn(*xs: Tensor) -> Any:
        pairs = [(a, b) for i, a in enumerate(xs) for b in xs[i:]]
        return [a * b for a, b in pairs], [torch.where(a > b, a, b) for a, b in pairs]

    return Case(fn, [tuple(torch.arange(1, 6).remainder(3).to(d) for d in kinds)])


def bool_arithmetic() -> Case:
    """Sums and products of bools are bools, their sums are counts, and subtraction is refused elsewhere."""

    def fn(a: Tensor, b: Tensor) -> Any:
        return (
            a + b,
            a * b,
            a | b,
            a ^ b,
            ~a,
            a.sum(),
            a.float() - b.float(),
            a.any(),
            a & True,
            a == b,
            a < b,
            a.cumsum(0),
            a.amax(),
        )

    return Case(fn, [(torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False]))])


def arange_linspace_and_full() -> Case:
    """Dtype and values of created tensors, also with float steps and negative ones."""

    def fn(x: Tensor) -> Any:
        n = x.shape[0]
        return (
            torch.arange(n), torch.arange(0.5, n, 0.7), torch.arange(n, 0, -2), torch.arange(3, dtype=torch.float16),
            torch.linspace(0, 1, n), torch.full((2,), 7), torch.full((2,), True), torch.full((2,), 1.5, dtype=torch.int32),
            torch.eye(n), torch.tensor([1.5, 2]), torch.ones(2, dtype=torch.int8) * 3, torch.logspace(0, 2, 3), torch.scalar_tensor(3),
        )  # fmt: skip

    return Case(fn, [(torch.zeros(5),)])


def comparisons_with_numbers() -> Case:
    """Integers against fractions, bools against integers, numbers beyond the dtype."""

    def fn(i: Tensor, u: Tensor, b: Tensor, h: Tensor) -> Any:
        return i > 1.5, i == 2.0, u < 300, u > -1, b > 0, b == 1, h > 0.1, h == 0.1, i <= 2**40, i != 1, u >= 255.5

    numbers = torch.tensor([0.1, 0.0999, 1.0, 2.0], dtype=torch.float16)
    return Case(
        fn,
        [
            (
                torch.arange(4, dtype=torch.int32),
                torch.arange(254, 258).to(torch.uint8),
                torch.tensor([True, False]),
                numbers,
            )
        ],
    )


def losses_of_several_dtypes() -> Case:
    """The result has the dtype of the input; fake tensors say the promoted one."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return F.huber_loss(x, y), F.soft_margin_loss(x, y), F.huber_loss(y, x, reduction="none") * 2, F.mse_loss(x, y)

    return Case(
        fn,
        [(randn(4, 3), randn(4, 3, seed=1).double()), (randn(4, 3).bfloat16(), randn(4, 3, seed=1))],
        tol=(1e-2, 1e-2),
    )


CASES = (
    losses_of_several_dtypes,
    cumulative_sums,
    pad_of_split_reduction,
    reductions_with_dtype,
    promotion_table,
    bool_arithmetic,
    arange_linspace_and_full,
    comparisons_with_numbers,
)
