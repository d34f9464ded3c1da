"""The CUDA kernels of dsc's operators for 8-bit and tf32 products: Triton's, or PyTorch's where those are better.

Importing this module registers them; a kernel is compiled at its first launch.  PyTorch multiplies whole matrices and
rows (``_scaled_mm`` from sm_90 on, ``_int_mm``), which need no scales inside; blocks are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsc.codegen.templates import gemm8, quantise8
from dsc.codegen.triton_run import LANGUAGE, load_source
from dsc.precision import emulate, ops

WIDE = ("tensor", "row")
"""Grains whose scales span more than a tile."""


@lru_cache
def kernel(source: str, name: str) -> Any:
    """What Triton calls a JITFunction."""
    return load_source(source)[name]


def quantise(x: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor]:
    q, s, _, _ = rounded(x, dtype, grain, along=True, across=False)
    return q, s


def quantise_both(x: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rounded(x, dtype, grain, along=True, across=True)


def quantise_by(x: Tensor, amax: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor]:
    q, s, _, _ = rounded(x, dtype, grain, along=True, across=False, amax=(amax, amax))
    return q, s


def quantise_both_by(
    x: Tensor, amax: Tensor, amax_t: Tensor, dtype: str, grain: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rounded(x, dtype, grain, along=True, across=True, amax=(amax, amax_t))


def quantise_of(inputs: list[Tensor], producer: str, dtype: str, grain: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if grain in WIDE:  # the maximum is that of what is produced
        return rounded(ops.PRODUCERS[producer](*inputs), dtype, grain, along=True, across=True)
    x, *others = (t.contiguous() for t in inputs)
    return rounded(x, dtype, grain, along=True, across=True, other=others[0] if others else x, producer=producer)


def rounded(
    x: Tensor,
    dtype: str,
    grain: str,
    along: bool,
    across: bool,
    other: Tensor | None = None,
    producer: str = "",
    amax: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch; where a scale spans more than a tile, its maximum is found first, unless it is given for both directions."""
    rows, columns = x.shape
    stored, limit = emulate.STORED[dtype], emulate.LIMIT[dtype]
    q = x.new_empty((rows, columns) if along else (0, 0), dtype=stored)
    qt = x.new_empty((columns, rows) if across else (0, 0), dtype=stored)
    inverse = inverse_t = s = x.new_empty(emulate.scale_shape(rows, columns, grain), dtype=torch.float32)
    st = x.new_empty(emulate.scale_shape(columns, rows, grain), dtype=torch.float32)
    if grain in WIDE:
        top = emulate.largest(x, grain) if amax is None else amax[0].reshape(s.shape)
        inverse = emulate.inverse_scale(top.float(), dtype, grain)
        s, st, inverse_t = inverse.reciprocal(), inverse.reciprocal(), inverse
        if across and grain == "row":
            top = emulate.largest(x.t(), grain) if amax is None else amax[1].reshape(columns, 1)
            inverse_t = emulate.inverse_scale(top.float(), dtype, grain)
            st = inverse_t.reciprocal()
    constants = quantise8.constants(grain, along, across, limit, dtype == "int8", producer)
    if x.numel():
        with LANGUAGE, torch.cuda.device(x.device):
            kernel(quantise8.SOURCE, "quantise")[(quantise8.programs(rows, columns),)](
                x,
                x if other is None else other,
                q,
                s,
                qt,
                st,
                inverse,
                inverse_t,
                rows,
                columns,
                *x.stride(),
                **constants,
                num_warps=quantise8.WARPS,
            )
    return q, s, qt, st


def mm8(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """``dsc::mm8`` on CUDA."""
    grain_a, grain_b = emulate.grain_of(a, scale_a), emulate.grain_of(b, scale_b)
    if grain_a in ("tensor", "row") and (found := library(a, scale_a, b, scale_b, dtype)) is not None:
        return found
    return blocks(a, scale_a, b, scale_b, grain_a, grain_b, dtype)


def library(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor | None:
    """PyTorch's product, where it takes these operands."""
    (m, k), n = a.shape, b.shape[0]
    if k % 16 or n % 16 or not a.numel() or not b.numel():
        return None
    if a.dtype == torch.int8:
        if m <= 16:
            return None
        return (torch._int_mm(a, b.t()).float() * scale_a * scale_b.t()).to(dtype)
    if torch.cuda.get_device_capability(a.device) < (9, 0) or (scale_a.dim() == 2 and dtype != torch.bfloat16):
        return None
    product: Tensor = torch.ops.aten._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=dtype)
    return product


def blocks(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, grain_a: str, grain_b: str, dtype: torch.dtype
) -> Tensor:
    """The Triton kernel: any shape, any grain."""
    (m, k), n = a.shape, b.shape[0]
    c = a.new_empty((m, n), dtype=dtype)
    if not c.numel():
        return c
    constants = gemm8.constants(grain_a, grain_b, a.dtype == torch.int8, k)
    with LANGUAGE, torch.cuda.device(a.device):
        kernel(gemm8.SOURCE, "mm8")[(gemm8.programs(m, n),)](
            a, scale_a, b, scale_b, c, m, n, k, **constants, num_warps=gemm8.WARPS, num_stages=gemm8.STAGES
        )
    return c


def mm_tf32(a: Tensor, b: Tensor) -> Tensor:
    """``dsc::mm_tf32`` on CUDA."""
    if a.dim() == 3:
        return torch.stack([mm_tf32(x, y) for x, y in zip(a, b)])
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    if c.numel():
        with LANGUAGE, torch.cuda.device(a.device):
            kernel(gemm8.SOURCE, "mm_tf32")[(gemm8.programs(m, n),)](
                a, b, c, m, n, k, *a.stride(), *b.stride(), **gemm8.TF32, num_warps=8, num_stages=4
            )
    return c


KERNELS: Mapping[str, Callable[..., Any]] = {
    "quantise": quantise,
    "quantise_both": quantise_both,
    "quantise_of": quantise_of,
    "quantise_by": quantise_by,
    "quantise_both_by": quantise_both_by,
    "mm8": mm8,
    "mm_tf32": mm_tf32,
}
for _name, _kernel in KERNELS.items():
    torch.library.impl(f"{ops.NAMESPACE}::{_name}", "CUDA", _kernel)
