"""8-bit floats: scaling, saturation, NaN and casts back give eager's bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.case import Case, randn

BOTH = (torch.float8_e4m3fn, torch.float8_e5m2)


def scaling_round_trip() -> Case:
    """pytorch/ao#1912, pytorch/pytorch#178817: scale by the largest value of a row, clamp, cast and come back."""

    def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        m = torch.finfo(dtype).max
        s = m / x.abs().amax(-1, keepdim=True).clamp(min=1e-12).double()
        return (x.double() * s).float().clamp(-m, m).to(dtype), s.float()

    def fn(x: Tensor, raw: Tensor) -> Any:
        a, s = quantized(x, torch.float8_e4m3fn)
        b, r = quantized(x, torch.float8_e5m2)
        return a, s, a.float() / s, b.to(torch.bfloat16), r, *(raw.to(d).float() for d in BOTH)

    x = randn(4, 32)
    x[2] = 0
    raw = torch.tensor([0.0, 448.0, 460.0, 1e4, -1e6, float("inf"), float("nan"), 2.0**-10, 57344.0, 65000.0])
    return Case(fn, [(x, raw), (x.bfloat16().float() * 100, raw.repeat(7))], tol=(0.0, 0.0))


def casts_between_small_formats() -> Case:
    """Casts between both formats, halves and doubles, of an input and of an intermediate, with views between."""

    def fn(x: Tensor) -> Any:
        y = x * 1.7
        return [y.to(d).t().to(w) for d in BOTH for w in (torch.float16, torch.float64)], y.to(BOTH[0]).float().to(
            BOTH[1]
        )

    return Case(fn, [(randn(5, 7),), (randn(5, 7, dtype=torch.bfloat16),)], tol=(0.0, 0.0))


CASES = (scaling_round_trip, casts_between_small_formats)
