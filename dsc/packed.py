"""2:4 weights as sparse tensor cores read them: the packed form, its operators, and what they compute.

A packed weight [N, K] is two tensors: ``values`` [N/16, K/32, 32, 8] of 16 bits, the operand of each of 32 lanes of
``mma.sp.m16n8k32`` (PTX ISA 8.x, "Matrix fragments for sparse mma.m16n8k32"), and ``meta`` [N/16, K/32, 8, 2] int32,
the places of the kept two of every four, for a sparsity selector of 0.  Together 1.125 bytes a weight.
Importing this module registers the operators, with the CPU's; kernels for GPUs are in ``dsc.codegen.templates``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsc import nm

ROWS, COLUMNS = 16, 32
"""Of the weight's tile that one instruction multiplies by."""
LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "pack24(Tensor weight, bool transposable, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "sparse_mm24(Tensor x, Tensor values, Tensor meta, Tensor weight, Tensor keep, bool turned) -> Tensor",
    "cslt_compress(Tensor weight) -> Tensor",
    "cslt_mm(Tensor x, Tensor compressed, Tensor weight, Tensor keep, bool turned) -> Tensor",
):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def pack(weight: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``weight`` [N, K] where ``mask`` keeps 2 of 4 along K, packed; N a multiple of 16, K of 32."""
    rows, columns = weight.shape
    groups = mask.view(rows, columns // 4, 4)
    place = torch.argsort((~groups).to(torch.int8), dim=-1, stable=True)[..., :2].sort(-1).values
    kept = weight.to(dtype).view(rows, columns // 4, 4).gather(-1, place)
    tiles = kept.view(
        rows // 16, 2, 8, columns // 32, 2, 4, 2
    )  # strip, upper half, row, tile, upper half, group, value
    values = tiles.permute(0, 3, 2, 5, 4, 1, 6).reshape(rows // 16, columns // 32, 32, 8)
    codes = (place[..., 0] | place[..., 1] << 2).view(rows // 16, 2, 8, columns // 32, 2, 4)
    shift = 4 * torch.arange(4) + 16 * torch.arange(2).view(2, 1, 1, 1, 1)
    words = (codes << shift.to(codes.device)).sum((1, 5)).permute(0, 2, 1, 3).contiguous()
    return values.contiguous(), torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack(values: Tensor, meta: Tensor) -> Tensor:
    """The weight [N, K] with its zeros."""
    strips, tiles = values.shape[:2]
    kept = values.view(strips, tiles, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6).reshape(strips * 16, tiles * 8, 2)
    words = meta.long().view(strips, tiles, 8, 2)
    shift = 4 * torch.arange(4, device=meta.device) + 16 * torch.arange(2, device=meta.device).view(2, 1, 1, 1, 1)
    codes = words.permute(0, 2, 1, 3)[:, None, ..., None] >> shift & 15
    codes = codes.reshape(strips * 16, tiles * 8)
    place = torch.stack([codes & 3, codes >> 2], -1)
    out = values.new_zeros(strips * 16, tiles * 8, 4).scatter_(-1, place, kept)
    return out.view(strips * 16, tiles * 32)


def pack24(weight: Tensor, transposable: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep 2 of 4 by magnitude and pack: values and meta of ``weight`` [N, K], and, if ``transposable``, of its transpose.

    What is not asked for is empty.  N and K are multiples of 32.
    """
    mask = nm.nm_mask(weight.abs(), torch.tensor(2), 4, transposable)
    values, meta = pack(weight, mask, dtype)
    if not transposable:
        return values, meta, values.new_empty(0), meta.new_empty(0)
    return values, meta, *pack(weight.T.contiguous(), mask.T.contiguous(), dtype)


def sparse_mm24(x: Tensor, values: Tensor, meta: Tensor, weight: Tensor, keep: Tensor, turned: bool) -> Tensor:
    """``x @ w.T`` for the packed w; where ``keep`` says that all of 4 stay, for ``weight`` (``turned``: its transpose)."""
    if int(keep) >= 4:
        return dense_mm(x, weight, turned)
    return x @ unpack(values, meta).T


def dense_mm(x: Tensor, weight: Tensor, turned: bool) -> Tensor:
    """``x @ weight.T``, or ``x @ weight`` if it is ``turned``."""
    weight = weight.to(x.dtype)
    return x @ (weight if turned else weight.T)


def cslt_compress(weight: Tensor) -> Tensor:
    """A 2:4 weight [N, K] in the form of cuSPARSELt, as bytes; only it knows which."""
    return torch._cslt_compress(weight)


def cslt_mm(x: Tensor, compressed: Tensor, weight: Tensor, keep: Tensor, turned: bool) -> Tensor:
    """As ``sparse_mm24``, by cuSPARSELt: x [M, K] -> [M, N]."""
    if int(keep) >= 4:
        return dense_mm(x, weight, turned)
    rows = x.shape[0]
    padding = -rows % 16  # the dense side comes in multiples of 8 or 16
    whole = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x
    # it computes compressed @ x.T; the transposed result is [M, N], row by row
    return torch._cslt_sparse_mm(compressed, whole.T, transpose_result=True)[:rows]


def bytes_of_compressed(weight: Tensor) -> int | torch.SymInt:
    """Of cuSPARSELt's form: values and 2 bits for each of 4 weights, 9/16 of 16-bit weights."""
    return weight.numel() * weight.element_size() * 9 // 16


def _pack_fake(weight: Tensor, transposable: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, columns = weight.shape
    out = []
    for n, k in ((rows, columns), (columns, rows))[: 1 + transposable]:
        out += [weight.new_empty(n // 16, k // 32, 32, 8, dtype=dtype)]
        out += [weight.new_empty(n // 16, k // 32, 8, 2, dtype=torch.int32)]
    if not transposable:
        out += [weight.new_empty(0, dtype=dtype), weight.new_empty(0, dtype=torch.int32)]
    return tuple(out)


for _name, _cpu, _fake in (
    ("pack24", pack24, _pack_fake),
    ("sparse_mm24", sparse_mm24, lambda x, values, *_: x.new_empty(x.shape[0], values.shape[0] * 16)),
):
    LIBRARY.impl(_name, _cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"dsc::{_name}", _fake, lib=LIBRARY)
LIBRARY.impl("cslt_compress", cslt_compress, "CUDA")  # type: ignore[no-untyped-call]
LIBRARY.impl("cslt_mm", cslt_mm, "CUDA")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::cslt_compress", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _compress_fake(weight: Tensor) -> Tensor:
    return weight.new_empty(bytes_of_compressed(weight) // weight.element_size())


@torch.library.register_fake("dsc::cslt_mm", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _cslt_fake(x: Tensor, compressed: Tensor, weight: Tensor, keep: Tensor, turned: bool) -> Tensor:
    columns = weight.shape[1] if turned else weight.shape[0]
    return x.new_empty(x.shape[0], columns)
