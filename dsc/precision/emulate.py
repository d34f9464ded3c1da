"""What 8-bit matrix products mean, in plain PyTorch: the reference for every kernel, and what runs on a CPU.

1. A matrix is quantised along its rows, the direction of the contraction.  What shares a scale is its grain: the whole
   matrix (``tensor``), a row (``row``), 1 x 128 of a row (``1x128``), a tile (``128x128``); blocks are cut at the edges.
2. ``scale = amax / max``, where max is 448 (e4m3), 57344 (e5m2) or 127 (int8); of rows the reciprocal is a power of two,
   rounded down, so that scaling is exact.  Where amax is 0 the scale is 1.
3. ``q = round(clamp(x / scale, -max, max))``, to nearest, ties to even.  e5m2 saturates, as on a GPU.
4. What is not finite stays so: its scale is infinite or NaN, and the products that read it are NaN.
5. The product is that of the dequantised values in fp32, rounded once to the dtype of the result.  fp8 by rows,
   and whole matrices of two dtypes, are multiplied by ``_scaled_mm``.  For whole ones of one dtype that one has a kernel on
   some CPUs, and adds ``a * b * scale_a * scale_b`` up one by one on others, a thousand times slower: there, up to
   ``IN_ORDER`` terms, the sum here is the same to the last bit, above that it is a product's.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (formats); DeepSeek-V3, 2024, section 3.3 (blocks);
Xi et al., "Jetfire", 2024 (int8 blocks).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from dsc.precision.formats import BLOCK

LIMIT: Mapping[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
STORED: Mapping[str, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip
IN_ORDER = 2**24
"""Terms of a product of whole fp8 matrices that are summed in the order of ``_scaled_mm``: some tens of milliseconds."""
GRAINS = ("tensor", "row", "1x128", "128x128")


def quantise(x: Tensor, dtype: str, grain: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``x`` [R, C] -> values [R, C] in 8 bits, and fp32 scales of the shape ``scale_shape``.

    ``amax``: what ``largest`` would find, in any shape and dtype.
    """
    x = x.float().contiguous()
    top = largest(x, grain) if amax is None else amax.float().reshape(scale_shape(x.shape[0], x.shape[1], grain))
    inverse = inverse_scale(top, dtype, grain)
    limit = LIMIT[dtype]
    q = (x * spread(inverse, x.shape, grain)).clamp_(-limit, limit)
    if dtype == "int8":
        q = q.round_().nan_to_num_(0.0)  # NaN lives on in the scale
    return q.to(STORED[dtype]), inverse.reciprocal_()


def quantise_both(
    x: Tensor, dtype: str, grain: str, amax: Tensor | None = None, amax_t: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x`` and its transpose, each along its own rows.  Tiles and whole matrices have the same values both ways."""
    q, s = quantise(x, dtype, grain, amax)
    if grain in ("tensor", "128x128"):
        return q, s, turned(q), turned(s)
    return q, s, *quantise(x.t(), dtype, grain, amax_t)


def turned(x: Tensor) -> Tensor:
    """The transpose in memory of its own; of a single scale a copy."""
    return x.t().clone(memory_format=torch.contiguous_format)


def scale_shape(rows: int, columns: int, grain: str) -> tuple[int, ...]:
    """Of the scales of a matrix [rows, columns]; sizes may be symbols."""
    match grain:
        case "tensor":
            return ()
        case "row":
            return (rows, 1)
        case "1x128":
            return (rows, blocks(columns))
        case _:
            return (blocks(rows), blocks(columns))


def blocks(n: int) -> int:
    return (n + BLOCK - 1) // BLOCK


def largest(x: Tensor, grain: str) -> Tensor:
    """The largest magnitude that shares each scale, NaN where there is one."""
    size = x.abs()
    match grain:
        case "tensor":
            return size.amax() if size.numel() else size.new_zeros(())
        case "row":
            return size.amax(1, keepdim=True)
    rows, columns = x.shape
    tall = BLOCK if grain == "128x128" else 1
    pad = torch.nn.functional.pad(size, (0, -columns % BLOCK, 0, -rows % tall))
    return pad.view(pad.shape[0] // tall, tall, pad.shape[1] // BLOCK, BLOCK).amax((1, 3))


def inverse_scale(amax: Tensor, dtype: str, grain: str) -> Tensor:
    """What to multiply by: max / amax, for rows rounded down to a power of two."""
    inverse = torch.where(amax == 0, 1.0, torch.full_like(amax, LIMIT[dtype]) / amax)  # a number over it rounds twice
    inverse = torch.where(torch.isinf(inverse), torch.finfo(torch.float32).max, inverse)  # of amax below 2**-120
    if grain == "row":
        inverse = torch.exp2(torch.floor(torch.log2(inverse)))
    return inverse


def spread(scale: Tensor, shape: torch.Size, grain: str) -> Tensor:
    """One scale for each element, or what broadcasts to that."""
    if grain in ("tensor", "row"):
        return scale
    if grain == "128x128":
        scale = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return scale.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """Values in fp32; the grain is known from the shapes."""
    return q.float() * spread(scale, q.shape, grain_of(q, scale))


def grain_of(q: Tensor, scale: Tensor) -> str:
    if scale.dim() == 0:
        return "tensor"
    if scale.shape == (q.shape[0], 1) and q.shape[1] > BLOCK:
        return "row"
    return "128x128" if scale.shape[0] != q.shape[0] else "1x128"


def mm8(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a`` [M, K] times the transpose of ``b`` [N, K] -> [M, N]."""
    rows = (tuple(scale_a.shape), tuple(scale_b.shape)) == ((len(a), 1), (len(b), 1))
    whole = scale_a.dim() == scale_b.dim() == 0
    if a.dtype != torch.int8 and a.numel() and b.numel():
        if rows or (whole and (a.dtype != b.dtype or not adds_one_by_one())):
            product: Tensor = torch.ops.aten._scaled_mm(a, b.t(), scale_a, scale_b.t(), out_dtype=dtype)
            return product
        if whole and a.numel() * len(b) <= IN_ORDER:
            return in_order(a.float(), scale_a, b.float(), scale_b).to(dtype)
    return (dequantise(a, scale_a) @ dequantise(b, scale_b).t()).to(dtype)


@functools.cache
def adds_one_by_one() -> bool:
    """Whether ``_scaled_mm`` has no kernel on this CPU for whole matrices of one dtype: told by a small product."""
    steps = torch.arange(140, dtype=torch.float32)
    a, b = (((steps * k) % 11 - 5.3).reshape(7, 20).to(torch.float8_e4m3fn) for k in (3, 7))
    scale = torch.tensor(0.37)
    product = torch.ops.aten._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.float32)
    return torch.equal(product, in_order(a.float(), scale, b.float(), scale))


def in_order(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """The sum of oneDNN's reference product, which ``_scaled_mm`` calls: term by term along the contraction."""
    total = a.new_zeros(len(a), len(b))
    for left, right in zip(a.t(), b.t().contiguous()):
        total.add_((left[:, None] * right).mul_(scale_a).mul_(scale_b))
    return total


def round_tf32(x: Tensor) -> Tensor:
    """fp32 with 10 bits of mantissa, to nearest, ties to even; what is not finite stays."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)
