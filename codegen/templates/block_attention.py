"""Triton kernels of attention over chosen blocks (``dsc.block_attention``): a program for each block of queries or keys.

Forward and the gradient of queries walk the listed blocks of keys (online softmax as in Dao et al., "FlashAttention");
the gradients of keys and values walk the blocks of queries that list them, which come sorted by block of keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from dsc.codegen.templates.attention_tiles import larger, seen, tile, total, wide


@triton.jit
def forward(
    q, k, v, index, out, sums, heads, shared, length, count, scale,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    LISTED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` and ``sums`` of one block of queries; ``shared`` heads of queries have one of keys."""
    program = tl.program_id(0)
    head, batch = (program // count % heads).to(tl.int64), (program // count // heads).to(tl.int64)
    i = program % count * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    queries = tile(q + batch * qb + head * qh, i, length, qt, d, WIDTH, True)
    keys, values = k + batch * kb + head // shared * kh, v + batch * vb + head // shared * vh
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    sum_ = tl.full((BLOCK,), 0.0, tl.float32)
    acc = tl.full((BLOCK, D), 0.0, tl.float32)
    for turn in range(LISTED):
        block = tl.load(index + program * LISTED + turn)
        j = tl.maximum(block, 0) * BLOCK + tl.arange(0, BLOCK)
        some = tile(keys, j, length, kt, d, WIDTH, block >= 0)
        scores = tl.dot(queries, tl.trans(some), input_precision=PRECISION) * scale
        scores = tl.where(seen(i, j, length, CAUSAL, block >= 0), scores, float("-inf"))
        new = tl.maximum(top, tl.reduce(scores, 1, larger))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(scores - shift[:, None])
        kept = tl.exp(top - shift)
        sum_ = sum_ * kept + tl.reduce(weights, 1, total)
        some = tile(values, j, length, vt, d, WIDTH, block >= 0)
        acc = acc * kept[:, None] + tl.dot(weights.to(some.dtype), some, input_precision=PRECISION)
        top = new
    rows = i < length
    sum_ = tl.where(rows, sum_, 1.0)
    at = out + batch * ob + head * oh + i[:, None] * wide(ot) + d[None, :]
    tl.store(at, (acc / sum_[:, None]).to(out.dtype.element_ty), mask=rows[:, None] & (d[None, :] < WIDTH))
    tl.store(sums + (batch * heads + head) * length + i, top + tl.log(sum_), mask=rows)


@triton.jit
def backward_queries(
    grad, q, k, v, index, sums, inner, dq, heads, shared, length, count, scale,
    gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot,
    LISTED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries.  ``inner`` [B, H, T]: the products of rows of ``grad`` and of the output."""
    program = tl.program_id(0)
    head, batch = (program // count % heads).to(tl.int64), (program // count // heads).to(tl.int64)
    i = program % count * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    queries = tile(q + batch * qb + head * qh, i, length, qt, d, WIDTH, True)
    given = tile(grad + batch * gb + head * gh, i, length, gt, d, WIDTH, True)
    keys, values = k + batch * kb + head // shared * kh, v + batch * vb + head // shared * vh
    rows = (batch * heads + head) * length + i
    sum_, product = tl.load(sums + rows, mask=i < length, other=0.0), tl.load(inner + rows, mask=i < length, other=0.0)
    acc = tl.full((BLOCK, D), 0.0, tl.float32)
    for turn in range(LISTED):
        block = tl.load(index + program * LISTED + turn)
        j = tl.maximum(block, 0) * BLOCK + tl.arange(0, BLOCK)
        some = tile(keys, j, length, kt, d, WIDTH, block >= 0)
        scores = tl.dot(queries, tl.trans(some), input_precision=PRECISION) * scale
        weights = tl.where(seen(i, j, length, CAUSAL, block >= 0), tl.exp(scores - sum_[:, None]), 0.0)
        worth = tl.dot(given, tl.trans(tile(values, j, length, vt, d, WIDTH, block >= 0)), input_precision=PRECISION)
        slope = weights * (worth - product[:, None]) * scale
        acc += tl.dot(slope.to(some.dtype), some, input_precision=PRECISION)
    at = dq + batch * ob + head * oh + i[:, None] * wide(ot) + d[None, :]
    tl.store(at, acc.to(dq.dtype.element_ty), mask=(i < length)[:, None] & (d[None, :] < WIDTH))


@triton.jit
def backward_keys(
    grad, q, k, v, start, reader, sums, inner, dk, dv, heads, shared, length, count, scale,
    gb, gh, gt, qb, qh, qt, kb, kh, kt, vb, vh, vt, db, dh, dt, eb, eh, et,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and of its values.

    ``reader``: blocks of queries of all heads and batches; those from ``start[program]`` to ``start[program + 1]`` list
    this block.
    """
    program = tl.program_id(0)
    kv_heads = heads // shared
    head, batch = (program // count % kv_heads).to(tl.int64), (program // count // kv_heads).to(tl.int64)
    j = program % count * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    keys = tile(k + batch * kb + head * kh, j, length, kt, d, WIDTH, True)
    values = tile(v + batch * vb + head * vh, j, length, vt, d, WIDTH, True)
    acc_k = tl.full((BLOCK, D), 0.0, tl.float32)
    acc_v = tl.full((BLOCK, D), 0.0, tl.float32)
    for at in range(tl.load(start + program), tl.load(start + program + 1)):
        one = tl.load(reader + at)
        own = (one // count % heads).to(tl.int64)
        i = one % count * BLOCK + tl.arange(0, BLOCK)
        queries = tile(q + batch * qb + own * qh, i, length, qt, d, WIDTH, True)
        given = tile(grad + batch * gb + own * gh, i, length, gt, d, WIDTH, True)
        rows = (batch * heads + own) * length + i
        sum_ = tl.load(sums + rows, mask=i < length, other=0.0)
        product = tl.load(inner + rows, mask=i < length, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        weights = tl.where(seen(i, j, length, CAUSAL, True), tl.exp(scores - sum_[:, None]), 0.0)
        acc_v += tl.dot(tl.trans(weights.to(given.dtype)), given, input_precision=PRECISION)
        worth = tl.dot(given, tl.trans(values), input_precision=PRECISION)
        slope = weights * (worth - product[:, None]) * scale
        acc_k += tl.dot(tl.trans(slope.to(queries.dtype)), queries, input_precision=PRECISION)
    mask = (j < length)[:, None] & (d[None, :] < WIDTH)
    tl.store(dk + batch * db + head * dh + j[:, None] * wide(dt) + d[None, :], acc_k.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + batch * eb + head * eh + j[:, None] * wide(et) + d[None, :], acc_v.to(dv.dtype.element_ty), mask=mask)
