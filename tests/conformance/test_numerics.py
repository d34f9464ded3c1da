"""What ``numerics="eager"`` promises, on every 16-bit number there is: bit by bit, or within so many units in the last place.

The README's section on numerics says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]

EXACT: Mapping[str, Function] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "relu": torch.relu,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "product": lambda x: x * 1.1,
    "sum": lambda x: x + 0.3,
    "difference": lambda x: 1 - x,
    "quotient": lambda x: x / 3,
    "number over x": lambda x: 3 / x,
    "square": lambda x: x * x,
    "power 2": lambda x: x**2,
    "clamp": lambda x: x.clamp(-1, 1),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "maximum": lambda x: torch.maximum(x, 1 - x),
    "fp32": lambda x: x.float(),
    "fp16": lambda x: x.half(),
    "bf16": lambda x: x.bfloat16(),
    "chain": lambda x: ((x * 1.7 + 0.1) / (x.abs() + 2) - x.float().half().to(x.dtype)).clamp(-3, 3) * x,
}
"""One rounding each, in eager and in a kernel."""

NEAR: Mapping[str, Function] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "sin": lambda x: torch.sin(x.clamp(-100, 100)),
    "cos": lambda x: torch.cos(x.clamp(-100, 100)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "power 1.7": lambda x: x**1.7,
    "rsqrt": torch.rsqrt,
}
"""Approximated: kernels and ATen each with polynomials of their own."""

SMOOTH: Mapping[str, Function] = {
    "erf": torch.erf,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
}
"""Of these ATen's 16-bit kernels are coarse near 0 and in the tails: dsc is held against float64, not against ATen."""


def numbers(dtype: torch.dtype) -> Tensor:
    """Every 16-bit pattern, or fp32 numbers of many sizes."""
    if dtype == torch.float32:
        scales = torch.logspace(-6, 2, 9)[:, None]
        return (torch.randn(9, 4000, generator=torch.Generator().manual_seed(0)) * scales).flatten()
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def compiled(functions: Mapping[str, Function], x: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    got: list[Tensor] = torch.compile(lambda v: [f(v) for f in functions.values()], backend="dsc")(x)
    return got


def places(t: Tensor) -> Tensor:
    """Integers in the order of the floats: neighbours differ by 1, both zeros are 0."""
    i = t.contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()]).long()
    return torch.where(i < 0, -(i + (1 << (8 * t.element_size() - 1))), i)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bit_by_bit(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    for name, got in zip(EXACT, compiled(EXACT, x)):
        want = EXACT[name](x)
        assert got.dtype == want.dtype
        differ = (got != want) & ~(got.isnan() & want.isnan())
        assert not differ.any(), f"{name} of {x[differ][:3].tolist()}: {got[differ][:3]}, eager {want[differ][:3]}"


@pytest.mark.parametrize(("dtype", "units"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 8)], ids=str)
def test_near_eager(dtype: torch.dtype, units: int) -> None:
    """Within ``units`` of the last place, results below the smallest normal number apart."""
    x = numbers(dtype)
    for name, got in zip(NEAR, compiled(NEAR, x)):
        want = NEAR[name](x)
        assert torch.equal(got.isnan(), want.isnan()), name
        normal = ~want.isnan() & ((want.abs() >= torch.finfo(dtype).tiny) | (got.abs() >= torch.finfo(dtype).tiny))
        apart = (places(got) - places(want)).abs()[normal]
        assert int(apart.max()) <= units, f"{name}: {int(apart.max())} units apart"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_smooth_functions_beside_float64(dtype: torch.dtype) -> None:
    """Within half a unit of the dtype of the true value, and a margin of 4 fp32 units of the largest step inside."""
    x = numbers(dtype)
    x = x[x.isfinite() & (x.abs().float() < 100)]
    eps = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    for name, got in zip(SMOOTH, compiled(SMOOTH, x)):
        true = SMOOTH[name](x.double())
        allowed = (eps * true.abs()) * 1.01 + 4 * torch.finfo(torch.float32).eps * (true.abs() + x.double().abs())
        worst = ((got.double() - true).abs() - allowed).max()
        tiny = torch.finfo(dtype).tiny  # what underflows may be 0
        assert float(worst) <= tiny, f"{name}: beyond what rounding explains by {float(worst):.1e}"
