"""Triton of products of groups (``dsc.grouped``): one launch, which reads the groups' ends on the device.

``grouped_rows``: a program finds the group of its tile by the numbers of tiles that all groups before it have; there are
as many programs as there may be tiles, and those that are left over end at once.  ``grouped_sums``: a program for a tile
of a group's matrix, which walks the group's part of the contraction.  Sums are fp32, rounded once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def before(ends, group):
    """The end of the group before, or 0."""
    return tl.load(ends + group - 1, mask=group > 0, other=0)


@triton.jit
def grouped_rows(
    a, b, out, ends, n, k, groups, a0, a1, b0, b1, b2, o0, o1,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out [S, n] = a [S, k] times b [groups, k, n]; ``WHOLE``: n and k are multiples of N and K."""
    across = (n + N - 1) // N
    tile = tl.program_id(0) // across
    e = tl.arange(0, E)
    inside = e < groups
    end = tl.load(ends + e, mask=inside, other=0)
    start = tl.load(ends + e - 1, mask=inside & (e > 0), other=0)
    tiles = tl.where(inside, (end - start + M - 1) // M, 0)
    upto = tl.reduce(tl.where(e[None, :] <= e[:, None], tiles[None, :], 0), 1, add)
    group = tl.reduce(((upto <= tile) & inside).to(tl.int32), 0, add)
    if group < groups:
        first = tile - tl.reduce(tl.where(e == group - 1, upto, 0), 0, add)
        begin, stop = before(ends, group), tl.load(ends + group)
        i = begin + first * M + tl.arange(0, M)
        j = tl.program_id(0) % across * N + tl.arange(0, N)
        rows, columns = i < stop, j < n
        total = tl.full([M, N], 0.0, tl.float32)
        mine = b + group.to(tl.int64) * b0
        for l0 in range(0, k, K):
            at = l0 + tl.arange(0, K)
            if WHOLE:
                x = tl.load(a + i.to(tl.int64)[:, None] * a0 + at[None, :] * a1, mask=rows[:, None], other=0.0)
                y = tl.load(mine + at[:, None] * b1 + j[None, :] * b2)
            else:
                terms = at < k
                x = tl.load(
                    a + i.to(tl.int64)[:, None] * a0 + at[None, :] * a1, mask=rows[:, None] & terms[None, :], other=0.0
                )
                y = tl.load(
                    mine + at[:, None] * b1 + j[None, :] * b2, mask=terms[:, None] & columns[None, :], other=0.0
                )
            total = tl.dot(x, y, total)
        where = out + i.to(tl.int64)[:, None] * o0 + j[None, :] * o1
        tl.store(where, total.to(out.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit
def grouped_sums(
    a, b, out, ends, m, n, a0, a1, b0, b1,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out [groups, m, n] = a [m, S] times b [S, n], each group's part of S; ``WHOLE``: m, n are multiples of M, N."""
    down, across = (m + M - 1) // M, (n + N - 1) // N
    group = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    i = tile // across * M + tl.arange(0, M)
    j = tile % across * N + tl.arange(0, N)
    rows, columns = i < m, j < n
    begin, stop = before(ends, group), tl.load(ends + group)
    total = tl.full([M, N], 0.0, tl.float32)
    for l0 in range(begin, stop, K):
        at = l0 + tl.arange(0, K)
        terms = at < stop
        left, right = terms[None, :], terms[:, None]
        if not WHOLE:
            left, right = left & rows[:, None], right & columns[None, :]
        x = tl.load(a + i[:, None] * a0 + at.to(tl.int64)[None, :] * a1, mask=left, other=0.0)
        y = tl.load(b + at.to(tl.int64)[:, None] * b0 + j[None, :] * b1, mask=right, other=0.0)
        total = tl.dot(x, y, total)
    where = out + group.to(tl.int64) * m * n + i[:, None] * n + j[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=rows[:, None] & columns[None, :])
