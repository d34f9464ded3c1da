"""Triton kernel of dense attention: a program for a tile of queries, which walks the keys with an online softmax.

Dao, "FlashAttention-2", 2023 (arXiv:2307.08691).  Scores and sums are fp32; weights are rounded to the dtype of the
values for the second product.  Masks and dropout are read from memory in any strides, so that broadcasts cost little.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

from dsc.codegen.templates.attention_tiles import LOG2E, banded, larger, masked, part, total, wide

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def walk(
    queries, keys, values, bias, kept, i, last, span, d, top, sum_, acc, start, stop, rows, columns, steep, grow, kt, vt,
    mt, ms, dt, UPPER: tl.constexpr, LOWER: tl.constexpr, BLIND: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr,
    EDGE: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys from ``start`` to ``stop``; with ``EDGE`` some of them are not seen by all rows, with ``BLIND`` by none."""
    for first in range(start, stop, N):
        j = first + tl.arange(0, N)
        some = part(keys, j, columns, kt, d, WIDTH, D, EDGE)
        scores = tl.dot(queries, tl.trans(some), input_precision=PRECISION) * steep
        if MASK != "none":
            scores = masked(scores, bias, i, rows, mt, j, columns, ms, MASK)
        if EDGE:
            allowed = banded(j[None, :] < columns, last[:, None], j[None, :], span, UPPER, LOWER)
            scores = tl.where(allowed, scores, float("-inf"))
        new = tl.maximum(top, tl.reduce(scores, 1, larger))
        if BLIND:
            shift = tl.where(new == float("-inf"), 0.0, new)
        else:
            shift = new
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        sum_ = sum_ * shrink + tl.reduce(weights, 1, total)
        if DROP:
            inside = (i[:, None] < rows) & (j[None, :] < columns)
            stays = tl.load(kept + i[:, None] * dt + j[None, :], mask=inside, other=0)
            weights = tl.where(stays != 0, weights * grow, 0.0)
        some = part(values, j, columns, vt, d, WIDTH, D, EDGE)
        acc = tl.dot(weights.to(some.dtype), some, acc * shrink[:, None], input_precision=PRECISION)
        top = new
    return top, sum_, acc


@triton.jit
def forward(
    q, k, v, mask, keep, out, sums, heads, shared, rows, columns, scale, grow,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, ob, oh, ot, mb, mh, mt, ms, db, dh, dt,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, DROP: tl.constexpr, SAFE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out`` and ``sums`` (logarithms of rows' sums) of M queries; ``shared`` heads of queries have one of keys.

    A row that sees nothing is NaN, as in a softmax; with ``SAFE`` it is 0.  ``RAGGED``: the tiles do not divide the
    lengths.
    """
    count = (rows + M - 1) // M
    program = tl.program_id(0)
    head, batch = program // count % heads, (program // count // heads).to(tl.int64)
    block = count - 1 - program % count  # those with the most keys first, if causal
    i = block * M + tl.arange(0, M)
    d = tl.arange(0, D)
    qt, kt, vt, ot, mt, dt = wide(qt), wide(kt), wide(vt), wide(ot), wide(mt), wide(dt)
    qh, oh, mh, dh = wide(qh), wide(oh), wide(mh), wide(dh)
    # those of keys' heads have 32, or the tiles for heads of 256 would spill: the launch sees to it
    queries = part(q + batch * qb + head * qh, i, rows, qt, d, WIDTH, D, True)
    keys, values = k + batch * kb + head // shared * kh, v + batch * vb + head // shared * vh
    bias, kept = mask + batch * mb + head * mh, keep + batch * db + head * dh
    top = tl.full((M,), float("-inf"), tl.float32)
    sum_ = tl.full((M,), 0.0, tl.float32)
    acc = tl.full((M, D), 0.0, tl.float32)
    stop = columns
    whole = columns // N * N
    if CAUSAL:
        stop = tl.minimum(columns, block * M + M)
        whole = tl.minimum(columns, block * M) // N * N
    steep = scale * LOG2E
    top, sum_, acc = walk(
        queries, keys, values, bias, kept, i, i, 0, d, top, sum_, acc, 0, whole, rows, columns, steep, grow, kt, vt,
        mt, ms, dt, CAUSAL, False, MASK != "none", MASK, DROP, False, N, D, WIDTH, PRECISION,
    )  # fmt: skip
    if CAUSAL or RAGGED:
        top, sum_, acc = walk(
            queries, keys, values, bias, kept, i, i, 0, d, top, sum_, acc, whole, stop, rows, columns, steep, grow, kt, vt,
            mt, ms, dt, CAUSAL, False, MASK != "none", MASK, DROP, True, N, D, WIDTH, PRECISION,
        )  # fmt: skip
    found = (top + tl.log2(sum_)) * LN2
    if SAFE:
        found = tl.where(sum_ == 0.0, float("inf"), found)
        sum_ = tl.where(sum_ == 0.0, 1.0, sum_)
    at = out + batch * ob + head * oh + i[:, None] * ot + d[None, :]
    tl.store(at, (acc / sum_[:, None]).to(out.dtype.element_ty), mask=(i < rows)[:, None] & (d[None, :] < WIDTH))
    tl.store(sums + (batch * heads + head) * rows + i, found, mask=i < rows)
