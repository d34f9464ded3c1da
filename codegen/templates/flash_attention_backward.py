"""Triton kernels of the gradients of ``flash_attention``: weights are computed again from the sums of their rows.

Three launches, none of which adds in memory, so that the gradients are the same in every run: the products of rows of
the output and of its gradient; keys and values, a program a tile of keys; queries, a program a tile of queries.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from dsc.codegen.templates.attention_tiles import LOG2E, banded, masked, part, total, wide


@triton.jit
def products(
    grad, out, inner, heads, rows, gb, gh, gt, ob, oh, ot, M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    """``inner`` [B, H, T] fp32: the sums of rows of ``grad * out``."""
    count = (rows + M - 1) // M
    program = tl.program_id(0)
    head, batch = (program // count % heads).to(tl.int64), (program // count // heads).to(tl.int64)
    i = program % count * M + tl.arange(0, M)
    d = tl.arange(0, D)
    gt, ot = wide(gt), wide(ot)
    given = part(grad + batch * gb + head * gh, i, rows, gt, d, WIDTH, D, True).to(tl.float32)
    made = part(out + batch * ob + head * oh, i, rows, ot, d, WIDTH, D, True).to(tl.float32)
    tl.store(inner + (batch * heads + head) * rows + i, tl.reduce(given * made, 1, total), mask=i < rows)


@triton.jit
def weights_of(scores, sum_, bias, row, rows, rs, column, columns, cs, MASK: tl.constexpr):
    """exp(scores - sum_) in powers of two; ``bias`` has a mask in the same places."""
    if MASK != "none":
        scores = masked(scores, bias, row, rows, rs, column, columns, cs, MASK)
    return tl.exp2(scores - sum_)


@triton.jit
def readers(
    keys, values, q, grad, sums, inner, bias, kept, j, d, acc_k, acc_v, start, stop, shift, span, rows, columns, steep,
    grow, qt, gt, mt, ms, dt, UPPER: tl.constexpr, LOWER: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    EDGE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """What the queries from ``start`` to ``stop`` of one head give; all tiles stand turned, [keys, queries].

    The last key that query i sees is ``i + shift``.
    """
    for first in range(start, stop, M):
        i = first + tl.arange(0, M)
        queries = part(q, i, rows, qt, d, WIDTH, D, EDGE)
        sum_ = tl.load(sums + i, mask=i < rows, other=float("inf")) * LOG2E  # rows beyond the end weigh nothing
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * steep
        weights = weights_of(scores, sum_[None, :], bias, j, columns, ms, i, rows, mt, MASK)
        if EDGE and UPPER:
            last = i[None, :] + shift
            weights = tl.where(banded(j[:, None] <= last, last, j[:, None], span, False, LOWER), weights, 0.0)
        given = part(grad, i, rows, gt, d, WIDTH, D, EDGE)
        if DROP:
            inside = (i[None, :] < rows) & (j[:, None] < columns)
            stays = tl.load(kept + i[None, :] * dt + j[:, None], mask=inside, other=0)
        if VALUES:
            used = weights
            if DROP:
                used = tl.where(stays != 0, weights * grow, 0.0)
            acc_v = tl.dot(used.to(given.dtype), given, acc_v, input_precision=PRECISION)
        if KEYS:
            worth = tl.dot(values, tl.trans(given), input_precision=PRECISION)
            if DROP:
                worth = tl.where(stays != 0, worth * grow, 0.0)
            slope = weights * (worth - tl.load(inner + i, mask=i < rows, other=0.0)[None, :])
            acc_k = tl.dot(slope.to(queries.dtype), queries, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit
def backward_keys(
    grad, q, k, v, mask, keep, sums, inner, dk, dv, heads, shared, rows, columns, scale, grow,
    gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, xb, xh, xt, yb, yh, yt, mb, mh, mt, ms, db, dh, dt,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """The gradients of N ``KEYS``, of their ``VALUES``, or both: sums over the ``shared`` heads that read them."""
    count = (columns + N - 1) // N
    program = tl.program_id(0)
    kv_heads = heads // shared
    own, batch = (program // count % kv_heads).to(tl.int64), (program // count // kv_heads).to(tl.int64)
    j = program % count * N + tl.arange(0, N)
    d = tl.arange(0, D)
    gt, qt, kt, vt, xt, yt, mt, dt = wide(gt), wide(qt), wide(kt), wide(vt), wide(xt), wide(yt), wide(mt), wide(dt)
    keys = part(k + batch * kb + own * kh, j, columns, kt, d, WIDTH, D, True)
    values = part(v + batch * vb + own * vh, j, columns, vt, d, WIDTH, D, True)
    acc_k = tl.full((N, D), 0.0, tl.float32)
    acc_v = tl.full((N, D), 0.0, tl.float32)
    start = 0
    if CAUSAL:
        start = program % count * N // M * M
    steep = scale * LOG2E
    for turn in range(shared):
        head = own * shared + turn
        line = (batch * heads + head) * rows
        queries, given = q + batch * qb + head * qh, grad + batch * gb + head * gh
        bias, kept = mask + batch * mb + head * mh, keep + batch * db + head * dh
        acc_k, acc_v = readers(
            keys, values, queries, given, sums + line, inner + line, bias, kept, j, d, acc_k, acc_v, start, rows, 0, 0,
            rows, columns, steep, grow, qt, gt, mt, ms, dt, CAUSAL, False, MASK, DROP, CAUSAL or RAGGED, M, D, WIDTH,
            PRECISION, KEYS, VALUES,
        )  # fmt: skip
    stored = (j < columns)[:, None] & (d[None, :] < WIDTH)
    if KEYS:
        at = dk + batch * xb + own * xh + j[:, None] * xt + d[None, :]
        tl.store(at, (acc_k * scale).to(dk.dtype.element_ty), mask=stored)
    if VALUES:
        at = dv + batch * yb + own * yh + j[:, None] * yt + d[None, :]
        tl.store(at, acc_v.to(dv.dtype.element_ty), mask=stored)


@triton.jit
def looked_at(
    queries, given, sum_, product, keys, values, bias, kept, i, last, span, d, acc, start, stop, rows, columns, steep,
    grow, kt, vt, mt, ms, dt, UPPER: tl.constexpr, LOWER: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    EDGE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the keys from ``start`` to ``stop`` give to a tile of queries."""
    for first in range(start, stop, N):
        j = first + tl.arange(0, N)
        some = part(keys, j, columns, kt, d, WIDTH, D, EDGE)
        scores = tl.dot(queries, tl.trans(some), input_precision=PRECISION) * steep
        weights = weights_of(scores, sum_[:, None], bias, i, rows, mt, j, columns, ms, MASK)
        if EDGE:
            allowed = banded(j[None, :] < columns, last[:, None], j[None, :], span, UPPER, LOWER)
            weights = tl.where(allowed, weights, 0.0)
        worth = tl.dot(given, tl.trans(part(values, j, columns, vt, d, WIDTH, D, EDGE)), input_precision=PRECISION)
        if DROP:
            inside = (i[:, None] < rows) & (j[None, :] < columns)
            stays = tl.load(kept + i[:, None] * dt + j[None, :], mask=inside, other=0)
            worth = tl.where(stays != 0, worth * grow, 0.0)
        slope = weights * (worth - product[:, None])
        acc = tl.dot(slope.to(some.dtype), some, acc, input_precision=PRECISION)
    return acc


@triton.jit
def backward_queries(
    grad, q, k, v, mask, keep, sums, inner, dq, heads, shared, rows, columns, scale, grow,
    gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, mb, mh, mt, ms, db, dh, dt,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of M queries."""
    count = (rows + M - 1) // M
    program = tl.program_id(0)
    head, batch = (program // count % heads).to(tl.int64), (program // count // heads).to(tl.int64)
    block = count - 1 - program % count
    i = block * M + tl.arange(0, M)
    d = tl.arange(0, D)
    gt, qt, kt, vt, ot, mt, dt = wide(gt), wide(qt), wide(kt), wide(vt), wide(ot), wide(mt), wide(dt)
    queries = part(q + batch * qb + head * qh, i, rows, qt, d, WIDTH, D, True)
    given = part(grad + batch * gb + head * gh, i, rows, gt, d, WIDTH, D, True)
    keys, values = k + batch * kb + head // shared * kh, v + batch * vb + head // shared * vh
    bias, kept = mask + batch * mb + head * mh, keep + batch * db + head * dh
    line = (batch * heads + head) * rows
    sum_ = tl.load(sums + line + i, mask=i < rows, other=float("inf")) * LOG2E
    product = tl.load(inner + line + i, mask=i < rows, other=0.0)
    acc = tl.full((M, D), 0.0, tl.float32)
    stop = columns
    whole = columns // N * N
    if CAUSAL:
        stop = tl.minimum(columns, block * M + M)
        whole = tl.minimum(columns, block * M) // N * N
    steep = scale * LOG2E
    acc = looked_at(
        queries, given, sum_, product, keys, values, bias, kept, i, i, 0, d, acc, 0, whole, rows, columns, steep, grow, kt,
        vt, mt, ms, dt, CAUSAL, False, MASK, DROP, False, N, D, WIDTH, PRECISION,
    )  # fmt: skip
    if CAUSAL or RAGGED:
        acc = looked_at(
            queries, given, sum_, product, keys, values, bias, kept, i, i, 0, d, acc, whole, stop, rows, columns, steep,
            grow, kt, vt, mt, ms, dt, CAUSAL, False, MASK, DROP, True, N, D, WIDTH, PRECISION,
        )  # fmt: skip
    at = dq + batch * ob + head * oh + i[:, None] * ot + d[None, :]
    tl.store(at, (acc * scale).to(dq.dtype.element_ty), mask=(i < rows)[:, None] & (d[None, :] < WIDTH))
