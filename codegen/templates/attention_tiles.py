"""What the Triton kernels of attention share: tiles of matrices with bounds, who sees whom, reductions of rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def wide(stride):
    """A stride of 64 bits: rows of long sequences lie further apart than 2**31 elements."""
    return tl.cast(stride, tl.int64)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def total(a, b):
    return a + b


@triton.jit
def tile(base, row, rows, stride, columns, width: tl.constexpr, valid):
    """[block, D] of a matrix with ``rows`` rows, from ``row`` on; zeros outside."""
    return tl.load(
        base + row[:, None] * wide(stride) + columns[None, :], mask=(row[:, None] < rows) & (columns[None, :] < width) & valid,
        other=0.0,
    )  # fmt: skip


@triton.jit
def seen(i, j, length, causal: tl.constexpr, valid):
    """Which of the keys j the queries i look at."""
    allowed = (j[None, :] < length) & (i[:, None] < length) & valid
    if causal:
        allowed = allowed & (j[None, :] <= i[:, None])
    return allowed


@triton.jit
def part(base, row, rows, stride, d, WIDTH: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr):
    """As ``tile``; only with ``EDGE`` may rows lie outside, and a width without padding is not compared."""
    at = base + row[:, None] * stride + d[None, :]
    if EDGE:
        if WIDTH == D:
            found = tl.load(at, mask=row[:, None] < rows, other=0.0)
        else:
            found = tl.load(at, mask=(row[:, None] < rows) & (d[None, :] < WIDTH), other=0.0)
    else:
        if WIDTH == D:
            found = tl.load(at)
        else:
            found = tl.load(at, mask=d[None, :] < WIDTH, other=0.0)
    return found


@triton.jit
def masked(scores, bias, row, rows, rs, column, columns, cs, MASK: tl.constexpr):
    """Scores in powers of two under a mask in the same places: ``bool`` says who is seen, another one is added."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    given = tl.load(bias + row[:, None] * rs + column[None, :] * cs, mask=inside, other=0)
    if MASK == "bool":
        scores = tl.where(given != 0, scores, float("-inf"))
    else:
        scores += given.to(tl.float32) * LOG2E
    return scores


@triton.jit
def banded(allowed, last, j, span, UPPER: tl.constexpr, LOWER: tl.constexpr):
    """Of the places ``allowed``, those of keys j up to the ``last`` that a query sees, and no more than ``span`` before it."""
    if UPPER:
        allowed = allowed & (j <= last)
    if LOWER:
        allowed = allowed & (j >= last - span)
    return allowed
