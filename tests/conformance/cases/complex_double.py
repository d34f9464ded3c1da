"""Complex numbers and doubles: lazy conjugation, views as reals, gradients; doubles keep their digits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


def complexes(*shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.complex(randn(*shape, seed=seed), randn(*shape, seed=seed + 50)).to(dtype).requires_grad_(grad)


def broadcast_and_conjugate() -> Case:
    """pytorch/pytorch#174891, #148950, #171852: sums with broadcasts, lazy conjugation, real and imaginary parts."""

    def fn(z: Tensor, m: Tensor) -> Any:
        a = z + m
        c = torch.conj(z) * a
        r = torch.view_as_real((z * (2 - 1j)).resolve_conj())
        return a, c, r.sum(-1), a.abs() + c.real, torch.conj(a), torch.polar(z.abs(), z.angle()).imag

    return Case(
        fn, [(complexes(3, 4, grad=True), torch.ones(3, 1, dtype=torch.complex64))], grad=True, tol=(1e-4, 1e-5)
    )


def real_parts_meet_kernels() -> Case:
    """Real code before and after complex code, as in rotary embeddings by complex products."""

    def fn(x: Tensor, f: Tensor) -> Any:
        z = torch.view_as_complex((x * 2).reshape(3, 4, 2))
        y = torch.view_as_real(z * torch.polar(torch.ones_like(f), f)).flatten(1)
        return y.relu() + x, torch.fft.rfft(x.tanh()).abs(), z.real.exp()

    return Case(fn, [(randn(3, 8, grad=True), randn(4, seed=1, grad=True))], grad=True, tol=(1e-4, 1e-4))


def complex_double_algebra() -> Case:
    """complex128 products, norms, sums, solves and mutation through ``real``."""

    def fn(z: Tensor, w: Tensor) -> Any:
        y = z @ w.mH
        v = z.clone()
        v.real.mul_(2)
        return (
            y,
            v,
            y.sum(0),
            torch.linalg.vector_norm(z),
            z.conj().sum(),
            (z * w).imag,
            torch.linalg.solve(w.detach() + 2, z),
            z**2,
        )

    return Case(
        fn,
        [(complexes(3, 3, grad=True, dtype=torch.complex128), complexes(3, 3, seed=3, dtype=torch.complex128))],
        grad=True,
    )


def doubles_keep_their_digits() -> Case:
    """float64 chains, reductions and norms to the last digits, beside fp32 and with numbers of Python."""

    def fn(x: Tensor, s: Tensor) -> Any:
        y = (x * 0.1 + 1e-9) / 3
        return (
            y,
            y.sum(0),
            F.layer_norm(x, (7,)),
            x.softmax(-1),
            F.gelu(x),
            y.exp().log1p(),
            s + y[0],
            x.var(1),
            x.sqrt(),
            x * s,
        )

    x = randn(5, 7, dtype=torch.float64).abs().requires_grad_()
    return Case(fn, [(x, randn(7, seed=1, grad=True))], grad=True, tols={torch.float64: (1e-13, 1e-13)})


def negative_bit_and_conjugate_views() -> Case:
    """Results that are lazily negated or conjugated reach kernels resolved."""

    def fn(z: Tensor) -> Any:
        c = z.conj()
        return (
            c.imag + 1,
            c.imag.exp(),
            c.real * 2,
            c.t(),
            c.imag.contiguous(),
            torch.view_as_real(c.resolve_conj()).neg(),
        )

    return Case(fn, [(complexes(2, 3),)])


CASES = (
    broadcast_and_conjugate,
    real_parts_meet_kernels,
    complex_double_algebra,
    doubles_keep_their_digits,
    negative_bit_and_conjugate_views,
)
