"""Triton that rounds a matrix to 8 bits: read once, written along its rows, along its columns, or both.

A program takes a tile of 128 x 128, so that it knows the maxima of all blocks in both directions.  Where a scale spans
more than a tile (``row``, ``tensor``) it is given.  ``PRODUCER`` computes the value first, so that it is never in memory.
"""

from __future__ import annotations

from collections.abc import Mapping

SIDE = 128
WARPS = 8

SOURCE = '''import triton
import triton.language as tl


@triton.jit
def ceil(n, side):
    return (n + side - 1) // side


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def inverse(largest, LIMIT: tl.constexpr):
    """What to multiply by: LIMIT / largest, 1 where that is 0."""
    found = tl.where(largest == 0.0, 1.0, tl.div_rn(tl.full(largest.shape, LIMIT, tl.float32), largest))
    return tl.where(found > 3.4028234e38, 3.4028234e38, found)


@triton.jit
def rounded(x, LIMIT: tl.constexpr, INTEGER: tl.constexpr):
    """To nearest, ties to even: adding 1.5 * 2**23 leaves no room for fractions."""
    x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    if INTEGER:
        x = tl.where(x == x, x, 0.0)
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit
def bad(x, AXIS: tl.constexpr):
    """NaN where a value is not finite, else 0: a maximum does not say so."""
    return tl.reduce(x * 0.0, AXIS, add)


@triton.jit
def produced(v, w, PRODUCER: tl.constexpr):
    """What ``dsc.precision.ops.PRODUCERS`` names."""
    if PRODUCER == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    elif PRODUCER == "gelu_tanh":
        inner = 0.7978845608028654 * (v + 0.044715 * v * v * v)
        v = v / (1.0 + tl.exp(-2.0 * inner))
    elif PRODUCER == "relu":
        v = tl.where(v < 0.0, 0.0, v)
    elif PRODUCER == "silu_mul":
        v = (v / (1.0 + tl.exp(-v))) * w
    elif PRODUCER == "add":
        v = v + w
    return v


@triton.jit
def quantise(
    x, y, q, s, qt, st, inverses, inverses_t, rows, columns, x0, x1,
    GRAIN: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, LIMIT: tl.constexpr, INTEGER: tl.constexpr,
    PRODUCER: tl.constexpr, SIDE: tl.constexpr,
):
    """x -> q [rows, columns] if ALONG, and qt [columns, rows] if ACROSS, with their scales."""
    across, down = ceil(columns, SIDE), ceil(rows, SIDE)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    i, j = row * SIDE + tl.arange(0, SIDE), column * SIDE + tl.arange(0, SIDE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    v = tl.load(x + i[:, None] * x0 + j[None, :] * x1, mask=inside, other=0.0).to(tl.float32)
    if PRODUCER != "":
        w = v
        if PRODUCER == "silu_mul" or PRODUCER == "add":
            w = tl.load(y + i[:, None] * x0 + j[None, :] * x1, mask=inside, other=0.0).to(tl.float32)
        v = produced(v, w, PRODUCER).to(x.dtype.element_ty).to(tl.float32)
    size = tl.abs(v)
    if GRAIN == "128x128":
        tile = tl.reduce(tl.reduce(size, 1, larger), 0, larger) + tl.reduce(bad(v, 1), 0, add)
        by = inverse(tile, LIMIT)
        value = rounded(v * by, LIMIT, INTEGER).to(q.dtype.element_ty)
        if ALONG:
            tl.store(q + i[:, None] * columns + j[None, :], value, mask=inside)
            tl.store(s + row * across + column, tl.div_rn(1.0, by))
        if ACROSS:
            tl.store(qt + j[:, None] * rows + i[None, :], tl.trans(value), mask=tl.trans(inside))
            tl.store(st + column * down + row, tl.div_rn(1.0, by))
    else:
        if ALONG:
            if GRAIN == "1x128":
                by = inverse(tl.reduce(size, 1, larger) + bad(v, 1), LIMIT)
                tl.store(s + i * across + column, tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by), mask=i < rows)
            elif GRAIN == "row":
                by = tl.load(inverses + i, mask=i < rows, other=1.0)
            else:
                by = tl.load(inverses) + i * 0.0
            value = rounded(v * by[:, None], LIMIT, INTEGER).to(q.dtype.element_ty)
            tl.store(q + i[:, None] * columns + j[None, :], value, mask=inside)
        if ACROSS:
            if GRAIN == "1x128":
                by = inverse(tl.reduce(size, 0, larger) + bad(v, 0), LIMIT)
                tl.store(st + j * down + row, tl.div_rn(tl.full(by.shape, 1.0, tl.float32), by), mask=j < columns)
            elif GRAIN == "row":
                by = tl.load(inverses_t + j, mask=j < columns, other=1.0)
            else:
                by = tl.load(inverses_t) + j * 0.0
            value = rounded(v * by[None, :], LIMIT, INTEGER).to(qt.dtype.element_ty)
            tl.store(qt + j[:, None] * rows + i[None, :], tl.trans(value), mask=tl.trans(inside))
'''


def constants(
    grain: str, along: bool, across: bool, limit: float, integer: bool, producer: str = ""
) -> Mapping[str, object]:
    return {
        "GRAIN": grain, "ALONG": along, "ACROSS": across, "LIMIT": limit, "INTEGER": integer,
        "PRODUCER": producer, "SIDE": SIDE,
    }  # fmt: skip


def programs(rows: int, columns: int) -> int:
    return -(-rows // SIDE) * -(-columns // SIDE)
