"""Low precision rounds where eager rounds: at every operator, and at explicit casts; halves overflow there too.

Pointwise chains are compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn

EXACT = (0.0, 0.0)


def half_overflow_is_consistent() -> Case:
    """pytorch/pytorch#183607: a product that overflows, and what is asked of it, agree."""

    def fn(x: Tensor) -> Any:
        y = x * x
        z = x.float().to(torch.float16) + 65000
        return (
            y,
            torch.isinf(y),
            torch.where(torch.isinf(y), torch.zeros_like(y), y),
            y / x,
            torch.isfinite(z),
            z - 65000,
        )

    v = torch.tensor([300.0, -300.0, 2.0, 1e-4, 0.0, 255.9])
    return Case(fn, [(v.half().repeat(7),), (v.half(),)], tol=EXACT)


def rotary_in_bfloat16() -> Case:
    """pytorch/pytorch#182225, #168186: rotary embedding with chunks, negation, cat and broadcasts."""

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def fn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * c + turned(q) * s, k * c + turned(k) * s, (q * c).type(k.dtype) + turned(k)

    def made(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k = randn(2, 3, 5, 8, grad=True, dtype=dtype), randn(2, 1, 5, 8, seed=1, grad=True, dtype=dtype)
        return q, k, randn(2, 5, 8, seed=2, dtype=dtype), randn(2, 5, 8, seed=3, dtype=dtype)

    calls = [made(torch.bfloat16), made(torch.float32)]
    return Case(fn, calls, grad=True, tol=(1.6e-2, 4e-2), tols={torch.float32: (1e-5, 1e-5)})


def pointwise_chains_bit_by_bit() -> Case:
    """Sums, products, quotients, square roots, comparisons and selections in bf16 and fp16."""

    def fn(x: Tensor, y: Tensor) -> Any:
        a = x * y + x - y / (x.abs() + 1)
        b = torch.where(a > 0, a * 1.1, a * 0.9).clamp(-2, 2)
        return (
            a,
            b,
            (b * b).sqrt() + a.reciprocal(),
            -a.abs() * 3 + b.relu() - 0.1,
            torch.maximum(a, b) * 7.3,
            a.square() * x,
        )

    pairs = [(randn(7, 33, dtype=d), randn(7, 33, seed=1, dtype=d)) for d in (torch.bfloat16, torch.float16)]
    return Case(fn, pairs, tol=EXACT)


def casts_are_rounding_points() -> Case:
    """float → 16 bits → float loses digits in between, however the compiler fuses; also float64 → float32."""

    def fn(x: Tensor) -> Any:
        a = x.bfloat16().float() * 3
        b = (x * 1000).half().float() + 1
        c = x.double().float() - x
        return a, b, c, a.half(), (x + 1e-4).bfloat16().bfloat16().float(), x.half().double(), (x * 1e6).half()

    return Case(fn, [(randn(5, 21),)], tol=EXACT)


def mixed_precision_operands() -> Case:
    """bf16 beside fp32, fp16 beside bf16, 0-dim operands and numbers: dtype and rounding of each step."""

    def fn(b: Tensor, h: Tensor, f: Tensor, z: Tensor) -> Any:
        return (
            b + f,
            b + h,
            b * z,
            b * 0.3333,
            (b * f).bfloat16() + b,
            h.add(b, alpha=1),
            torch.where(b > 0, b, f),
            b + z.double(),
        )

    arguments = (
        randn(9, dtype=torch.bfloat16),
        randn(9, seed=1, dtype=torch.float16),
        randn(9, seed=2),
        torch.tensor(0.7),
    )
    return Case(fn, [arguments], tol=EXACT)


def activations_in_half() -> Case:
    """gelu, silu, sigmoid, tanh, softmax and norms, forward and backward, within the rounding of the dtype."""

    def fn(x: Tensor, w: Tensor) -> Any:
        return (
            F.gelu(x),
            F.silu(x),
            x.sigmoid() * x,
            x.tanh(),
            x.softmax(-1),
            F.layer_norm(x, (16,), w),
            F.rms_norm(x, (16,), w),
            x.exp(),
        )

    calls = [
        (randn(6, 16, dtype=d, grad=True), randn(16, seed=1, dtype=d, grad=True))
        for d in (torch.bfloat16, torch.float16)
    ]
    return Case(fn, calls, grad=True, tols={torch.bfloat16: (1.6e-2, 2e-2), torch.float16: (2e-3, 4e-3)})


def sums_in_half() -> Case:
    """Sums of many halves are kept in 32 bits and rounded once; a sum may overflow, a mean may not."""

    def fn(x: Tensor) -> Any:
        return x.sum(), x.mean(), x.sum(0), x.mean(1), x.sum(dtype=torch.float32), x.var(1), x.norm(dim=1)

    big = torch.full((64, 64), 30.0, dtype=torch.float16)
    return Case(fn, [(big,), (randn(64, 33, dtype=torch.bfloat16),)], tols={torch.bfloat16: (1e-2, 1e-2)})


def accumulation_stays_in_the_dtype() -> Case:
    """A loop of additions in bf16 rounds at each, and so may stand still."""

    def fn(x: Tensor) -> Any:
        total = torch.zeros_like(x)
        for _ in range(12):
            total = total + x
        total += 256
        for _ in range(3):
            total = total + 0.5
        return total, total - 256

    return Case(fn, [(randn(17, dtype=torch.bfloat16),), (randn(17, dtype=torch.float16),)], tol=EXACT)


CASES = (
    half_overflow_is_consistent,
    rotary_in_bfloat16,
    pointwise_chains_bit_by_bit,
    casts_are_rounding_points,
    mixed_precision_operands,
    activations_in_half,
    sums_in_half,
    accumulation_stays_in_the_dtype,
)
