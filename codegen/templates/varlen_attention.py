"""Triton kernels of attention over sequences of any length that lie one after the other, forward and backward.

They walk keys and queries as the dense kernels do (``flash_attention``, ``flash_attention_backward``); what differs is
where a tile lies.  Sequence b gets its tiles from number ``ends[b] // M + b`` on: sum of floors, so that a sequence has
at least as many numbers as tiles, and no one counts them.  A program finds its sequence by bisection of ``ends``.

A query i of a sequence of ``rows`` queries and ``columns`` keys sees the keys up to ``i + shift``, no more than ``span``
before that: with ``FROM_END`` the last query sees the last key, as in Dao, "FlashAttention-2" (arXiv:2307.08691).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from dsc.codegen.templates.attention_tiles import LOG2E, part, wide
from dsc.codegen.templates.flash_attention import LN2, walk
from dsc.codegen.templates.flash_attention_backward import looked_at, readers


@triton.jit
def located(tile, ends, count, steps, M: tl.constexpr):
    """The sequence that has a tile of M, which of its tiles that is, where it starts, and its length."""
    found = 0
    step = 1 << steps
    for _ in range(steps):
        step = step // 2
        other = found + step
        first = tl.load(ends + other, mask=other < count, other=0)
        found = tl.where((other < count) & (first // M + other <= tile), other, found)
    first = tl.load(ends + found)
    return found, tile - (first // M + found), first, tl.load(ends + found + 1) - first


@triton.jit
def bounds(row, shift, span, columns, M: tl.constexpr, N: tl.constexpr, UPPER: tl.constexpr, LOWER: tl.constexpr):
    """For M queries from ``row`` on: the first key that is seen, the first that not all see, the first that none sees."""
    start = 0
    stop = columns
    whole = columns // N * N
    if UPPER:
        stop = tl.maximum(tl.minimum(columns, row + M + shift), 0)
        whole = tl.maximum(tl.minimum(columns, row + 1 + shift), 0) // N * N
    if LOWER:
        start = tl.maximum(row + shift - span, 0) // N * N
        whole = start
    return start, whole, stop


@triton.jit
def forward(
    q, k, v, out, sums, q_ends, k_ends, heads, shared, total, count, steps, tiles, right, span, scale,
    qh, qt, kh, kt, vh, vt, oh, ot,
    UPPER: tl.constexpr, LOWER: tl.constexpr, FROM_END: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` and ``sums`` [H, total] of M queries; a query that sees nothing gives 0, and infinity."""
    program = tl.program_id(0)
    head = (program // tiles).to(tl.int64)
    which, block, first, rows = located(tiles - 1 - program % tiles, q_ends, count, steps, M)
    row = block * M
    if (row < 0) | (row >= rows):
        return
    begin = tl.load(k_ends + which)
    columns = tl.load(k_ends + which + 1) - begin
    shift = right
    if FROM_END:
        shift += columns - rows
    qt, kt, vt, ot = wide(qt), wide(kt), wide(vt), wide(ot)
    i = row + tl.arange(0, M)
    d = tl.arange(0, D)
    queries = part(q + first * qt + head * qh, i, rows, qt, d, WIDTH, D, True)
    keys = k + begin * kt + head // shared * kh
    values = v + begin * vt + head // shared * vh
    top = tl.full((M,), float("-inf"), tl.float32)
    sum_ = tl.full((M,), 0.0, tl.float32)
    acc = tl.full((M, D), 0.0, tl.float32)
    start, whole, stop = bounds(row, shift, span, columns, M, N, UPPER, LOWER)
    last = i + shift
    steep = scale * LOG2E
    if not LOWER:
        top, sum_, acc = walk(
            queries, keys, values, q, q, i, last, span, d, top, sum_, acc, start, whole, rows, columns, steep, 1.0, kt, vt,
            0, 0, 0, UPPER, LOWER, True, "none", False, False, N, D, WIDTH, PRECISION,
        )  # fmt: skip
    top, sum_, acc = walk(
        queries, keys, values, q, q, i, last, span, d, top, sum_, acc, whole, stop, rows, columns, steep, 1.0, kt, vt,
        0, 0, 0, UPPER, LOWER, True, "none", False, True, N, D, WIDTH, PRECISION,
    )  # fmt: skip
    found = tl.where(sum_ == 0.0, float("inf"), (top + tl.log2(sum_)) * LN2)
    sum_ = tl.where(sum_ == 0.0, 1.0, sum_)
    at = out + first * ot + head * oh + i[:, None] * ot + d[None, :]
    tl.store(at, (acc / sum_[:, None]).to(out.dtype.element_ty), mask=(i < rows)[:, None] & (d[None, :] < WIDTH))
    tl.store(sums + head * total + first + i, found, mask=i < rows)


@triton.jit
def backward_keys(
    grad, q, k, v, sums, inner, dk, dv, q_ends, k_ends, heads, shared, total, count, steps, tiles, right, span, scale,
    gh, gt, qh, qt, kh, kt, vh, vt, xh, xt, yh, yt,
    UPPER: tl.constexpr, LOWER: tl.constexpr, FROM_END: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The gradients of N ``KEYS``, of their ``VALUES``, or both: sums over the ``shared`` heads that read them."""
    program = tl.program_id(0)
    own = (program // tiles).to(tl.int64)
    which, block, begin, columns = located(program % tiles, k_ends, count, steps, N)
    column = block * N
    if (column < 0) | (column >= columns):
        return
    first = tl.load(q_ends + which)
    rows = tl.load(q_ends + which + 1) - first
    shift = right
    if FROM_END:
        shift += columns - rows
    gt, qt, kt, vt, xt, yt = wide(gt), wide(qt), wide(kt), wide(vt), wide(xt), wide(yt)
    j = column + tl.arange(0, N)
    d = tl.arange(0, D)
    keys = part(k + begin * kt + own * kh, j, columns, kt, d, WIDTH, D, True)
    values = part(v + begin * vt + own * vh, j, columns, vt, d, WIDTH, D, True)
    acc_k = tl.full((N, D), 0.0, tl.float32)
    acc_v = tl.full((N, D), 0.0, tl.float32)
    start = 0
    stop = rows
    if UPPER:
        start = tl.maximum(column - shift, 0) // M * M
    if LOWER:
        stop = tl.minimum(rows, column + N - shift + span)
    steep = scale * LOG2E
    for turn in range(shared):
        head = own * shared + turn
        line = head * total + first
        acc_k, acc_v = readers(
            keys, values, q + first * qt + head * qh, grad + first * gt + head * gh, sums + line, inner + line, q, q, j, d,
            acc_k, acc_v, start, stop, shift, span, rows, columns, steep, 1.0, qt, gt, 0, 0, 0, UPPER, LOWER, "none",
            False, True, M, D, WIDTH, PRECISION, KEYS, VALUES,
        )  # fmt: skip
    stored = (j < columns)[:, None] & (d[None, :] < WIDTH)
    if KEYS:
        at = dk + begin * xt + own * xh + j[:, None] * xt + d[None, :]
        tl.store(at, (acc_k * scale).to(dk.dtype.element_ty), mask=stored)
    if VALUES:
        at = dv + begin * yt + own * yh + j[:, None] * yt + d[None, :]
        tl.store(at, acc_v.to(dv.dtype.element_ty), mask=stored)


@triton.jit
def backward_queries(
    grad, q, k, v, sums, inner, dq, q_ends, k_ends, heads, shared, total, count, steps, tiles, right, span, scale,
    gh, gt, qh, qt, kh, kt, vh, vt, oh, ot,
    UPPER: tl.constexpr, LOWER: tl.constexpr, FROM_END: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of M queries."""
    program = tl.program_id(0)
    head = (program // tiles).to(tl.int64)
    which, block, first, rows = located(tiles - 1 - program % tiles, q_ends, count, steps, M)
    row = block * M
    if (row < 0) | (row >= rows):
        return
    begin = tl.load(k_ends + which)
    columns = tl.load(k_ends + which + 1) - begin
    shift = right
    if FROM_END:
        shift += columns - rows
    i = row + tl.arange(0, M)
    d = tl.arange(0, D)
    gt, qt, kt, vt, ot = wide(gt), wide(qt), wide(kt), wide(vt), wide(ot)
    queries = part(q + first * qt + head * qh, i, rows, qt, d, WIDTH, D, True)
    given = part(grad + first * gt + head * gh, i, rows, gt, d, WIDTH, D, True)
    keys = k + begin * kt + head // shared * kh
    values = v + begin * vt + head // shared * vh
    line = head * total + first
    sum_ = tl.load(sums + line + i, mask=i < rows, other=float("inf")) * LOG2E
    product = tl.load(inner + line + i, mask=i < rows, other=0.0)
    acc = tl.full((M, D), 0.0, tl.float32)
    start, whole, stop = bounds(row, shift, span, columns, M, N, UPPER, LOWER)
    last = i + shift
    steep = scale * LOG2E
    if not LOWER:
        acc = looked_at(
            queries, given, sum_, product, keys, values, q, q, i, last, span, d, acc, start, whole, rows, columns, steep,
            1.0, kt, vt, 0, 0, 0, UPPER, LOWER, "none", False, False, N, D, WIDTH, PRECISION,
        )  # fmt: skip
    acc = looked_at(
        queries, given, sum_, product, keys, values, q, q, i, last, span, d, acc, whole, stop, rows, columns, steep, 1.0,
        kt, vt, 0, 0, 0, UPPER, LOWER, "none", False, True, N, D, WIDTH, PRECISION,
    )  # fmt: skip
    at = dq + first * ot + head * oh + i[:, None] * ot + d[None, :]
    tl.store(at, (acc * scale).to(dq.dtype.element_ty), mask=(i < rows)[:, None] & (d[None, :] < WIDTH))
