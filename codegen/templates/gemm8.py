"""Triton that multiplies matrices of 8 bits with their scales: fp8 on sm_90, int8 on sm_80 and sm_90; and tf32.

    mm8     c [m, n] = a [m, k] times the transpose of b [n, k]
    mm_tf32 c [m, n] = a [m, k] times b [k, n], by strides

Scales: one (``tensor``), one a row (``row``), one for 128 of a row (``1x128``), one a tile (``128x128``); see
``dsc.precision.emulate``.  Sums of 128 products leave the tensor core's short accumulator for fp32: by default Triton
never lets fp8 do so on sm_90, and with ``max_num_imprecise_acc=0``, or tiles of fewer than 64 rows, it computes in fp16.
"""

from __future__ import annotations

from collections.abc import Mapping

BLOCK = 128
"""Of each side of a tile, and of what is summed before it is scaled."""
WARPS, STAGES = 8, 3
GROUP = 8
"""Rows of tiles that are walked together, so that they find each other's operands in the cache."""

SOURCE = '''import triton
import triton.language as tl


@triton.jit
def ceil(n, side):
    return (n + side - 1) // side


@triton.jit
def place(m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The tile of a program: columns of GROUP tiles, one after the other."""
    down, across = ceil(m, BM), ceil(n, BN)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    inside = tl.program_id(0) % (GROUP * across)
    return group * GROUP + inside % height, inside // height


@triton.jit
def scales(s, at, block, across, GRAIN: tl.constexpr):
    """Of the rows ``at``, for one block of the contraction; ``across`` blocks in all."""
    if GRAIN == "1x128":
        return tl.load(s + at * across + block)
    return tl.load(s + at // 128 * across + block)


@triton.jit
def mm8(
    a, sa, b, sb, c, m, n, k,
    GA: tl.constexpr, GB: tl.constexpr, INTEGER: tl.constexpr, WHOLE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    row, column = place(m, n, BM, BN, GROUP)
    i, j, l = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    ia, jb = i % m, j % n
    across = ceil(k, BK)
    BLOCKS: tl.constexpr = GA == "1x128" or GA == "128x128"
    total = tl.full((BM, BN), 0, tl.int32 if INTEGER and not BLOCKS else tl.float32)
    for block in range(0, across):
        at = block * BK + l
        if WHOLE:
            x = tl.load(a + ia[:, None] * k + at[None, :])
            y = tl.load(b + jb[None, :] * k + at[:, None])
        else:
            x = tl.load(a + ia[:, None] * k + at[None, :], mask=at[None, :] < k, other=0.0)
            y = tl.load(b + jb[None, :] * k + at[:, None], mask=at[:, None] < k, other=0.0)
        if BLOCKS:
            if INTEGER:
                part = tl.dot(x, y, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(x, y, max_num_imprecise_acc=BK)
            left = scales(sa, ia, block, across, GA)
            if GB == "128x128":
                total += part * (left * tl.load(sb + column * BN // 128 * across + block))[:, None]
            else:
                total += part * left[:, None] * scales(sb, jb, block, across, GB)[None, :]
        elif INTEGER:
            total = tl.dot(x, y, total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, y, total, max_num_imprecise_acc=BK)
    if not BLOCKS:
        total = total.to(tl.float32)
        if GA == "row":
            total *= tl.load(sa + ia)[:, None] * tl.load(sb + jb)[None, :]
        else:
            total *= tl.load(sa) * tl.load(sb)
    tl.store(c + i[:, None] * n + j[None, :], total, mask=(i < m)[:, None] & (j < n)[None, :])


@triton.jit
def mm_tf32(
    a, b, c, m, n, k, a0, a1, b0, b1,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):
    row, column = place(m, n, BM, BN, GROUP)
    i, j, l = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN), tl.arange(0, BK)
    ia, jb = i % m, j % n
    total = tl.full((BM, BN), 0.0, tl.float32)
    for block in range(0, ceil(k, BK)):
        at = block * BK + l
        x = tl.load(a + ia[:, None] * a0 + at[None, :] * a1, mask=at[None, :] < k, other=0.0)
        y = tl.load(b + at[:, None] * b0 + jb[None, :] * b1, mask=at[:, None] < k, other=0.0)
        total = tl.dot(x, y, total, input_precision="tf32")
    tl.store(c + i[:, None] * n + j[None, :], total, mask=(i < m)[:, None] & (j < n)[None, :])
'''

TF32: Mapping[str, int] = {"BM": 128, "BN": 128, "BK": 32, "GROUP": GROUP}


def constants(grain_a: str, grain_b: str, integer: bool, k: int) -> dict[str, object]:
    """Of ``mm8`` for operands of these grains with ``k`` elements along the contraction."""
    return {
        "GA": grain_a, "GB": grain_b, "INTEGER": integer, "WHOLE": k % BLOCK == 0,
        "BM": BLOCK, "BN": BLOCK, "BK": BLOCK, "GROUP": GROUP,
    }  # fmt: skip


def programs(m: int, n: int, side: int = BLOCK) -> int:
    return -(-m // side) * -(-n // side)
