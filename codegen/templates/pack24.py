"""Triton that masks and packs a weight for sparse tensor cores: read once, written in one orientation or in both.

The form is that of ``dsc.packed``.  The source is written here, since it tries the 90 patterns of a tile one by one.
"""

from __future__ import annotations

from itertools import combinations, product

ROWS, COLUMNS = 32, 64
"""Of the weight, by program: whole tiles in both orientations, and 4 x 4 a thread."""
WARPS = 4

HEAD = '''import triton
import triton.language as tl


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def kept(bits, w0, w1, w2, w3, dtype: tl.constexpr):
    """The two weights that ``bits`` keeps of four, 16 bits each in one word, and their places in four bits."""
    k0, k1, k2, k3 = (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0
    first = tl.where(k0, w0, tl.where(k1, w1, w2))
    second = tl.where(k3, w3, tl.where(k2, w2, w1))
    place = tl.where(k0, 0, tl.where(k1, 1, 2)) | tl.where(k3, 12, tl.where(k2, 8, 4))
    low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    high = second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
    return low | high << 16, place


@triton.jit
def rows_of(a, b, c, d):
    """Four [S, T] with rows 0, 1, 2, 3 of each four -> [4 S, T]."""
    both = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tl.permute(both, (0, 2, 3, 1)), (4 * a.shape[0], a.shape[1]))


@triton.jit
def store(values, meta, words, places, row, group, tiles, N: tl.constexpr, G: tl.constexpr):
    """Words and places of N rows of G groups, from ``row`` and ``group`` on, to where lanes look for them."""
    strips: tl.constexpr = N // 16
    across: tl.constexpr = G // 8
    lanes = tl.reshape(words, (strips, 2, 8, across, 2, 4))
    lanes = tl.reshape(tl.permute(lanes, (0, 3, 2, 5, 4, 1)), (strips, across * 128))
    at = (row // 16 + tl.arange(0, strips))[:, None] * tiles + group // 8
    tl.store(values + at * 128 + tl.arange(0, across * 128)[None, :], lanes)
    shift = tl.arange(0, G)[None, :] % 4 * 4 + tl.arange(0, N)[:, None] // 8 % 2 * 16
    parts = tl.reshape(places << shift, (strips, 2, 8, across, 2, 4))
    bits = tl.permute(tl.reduce(tl.reduce(parts, 5, either), 1, either), (0, 2, 1, 3))
    tl.store(meta + at * 16 + tl.arange(0, across * 16)[None, :], tl.reshape(bits, (strips, across * 16)))


@triton.jit
def four(at):
    """[..., 4] from memory, one by one."""
    w = tl.load(at)
    even, odd = tl.split(tl.reshape(w, (w.shape[0], w.shape[1], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def two_of(w0, w1, w2, w3):
    """Bits of the two largest of four; of equal ones the earlier."""
    a, b, c, d = tl.abs(w0), tl.abs(w1), tl.abs(w2), tl.abs(w3)
    ra = (b > a).to(tl.int32) + (c > a) + (d > a)
    rb = (a >= b).to(tl.int32) + (c > b) + (d > b)
    rc = (a >= c).to(tl.int32) + (b >= c) + (d > c)
    rd = (a >= d).to(tl.int32) + (b >= d) + (c >= d)
    return tl.where(ra < 2, 1, 0) | tl.where(rb < 2, 2, 0) | tl.where(rc < 2, 4, 0) | tl.where(rd < 2, 8, 0)
'''

ONE = '''

@triton.jit
def pack24(w, values, meta, n, k, dtype: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Keep the two largest of every four along the rows of w [n, k], and pack them."""
    across = k // C
    row, column = tl.program_id(0) // across * R, tl.program_id(0) % across * C
    i, g = row + tl.arange(0, R), tl.arange(0, C // 4)
    at = w + i[:, None, None] * k + (column + g * 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    a, b, c, d = four(at)
    words, places = kept(two_of(a, b, c, d), a, b, c, d, dtype)
    store(values, meta, words, places, row, column // 4, k // 32, R, C // 4)
'''

BOTH = '''

@triton.jit
def pack24(w, values, meta, values_t, meta_t, n, k, dtype: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Keep two of four along rows and columns of w [n, k], the largest sum of each 4 x 4; pack w and its transpose."""
    across = k // C
    row, column = tl.program_id(0) // across * R, tl.program_id(0) % across * C
    i, g = row + tl.arange(0, R // 4) * 4, tl.arange(0, C // 4)
    at = w + i[:, None, None] * k + (column + g * 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
{loads}
    code = best_of({names})
{rows}
    words, places = rows_of(v0, v1, v2, v3), rows_of(p0, p1, p2, p3)
    store(values, meta, words, places, row, column // 4, k // 32, R, C // 4)
{columns}
    words = rows_of(tl.trans(v0), tl.trans(v1), tl.trans(v2), tl.trans(v3))
    places = rows_of(tl.trans(p0), tl.trans(p1), tl.trans(p2), tl.trans(p3))
    store(values_t, meta_t, words, places, column, row // 4, n // 32, C, R // 4)
'''

PAIRS = tuple(combinations(range(4), 2))


def source(transposable: bool) -> str:
    """The text of the kernel ``pack24``, in both orientations if ``transposable``."""
    if not transposable:
        return HEAD + ONE
    loads = "\n".join(f"    {', '.join(f'w{i}{j}' for j in range(4))} = four(at + {i} * k)" for i in range(4))
    rows = "\n".join(_kept(i, f"code >> {4 * i} & 15", [f"w{i}{j}" for j in range(4)]) for i in range(4))
    columns = "\n".join(_kept(j, _column(j), [f"w{i}{j}" for i in range(4)]) for j in range(4))
    names = ", ".join(f"w{i}{j}" for i, j in product(range(4), repeat=2))
    return HEAD + _best() + BOTH.format(loads=loads, names=names, rows=rows, columns=columns)


def _kept(i: int, bits: str, weights: list[str]) -> str:
    return f"    v{i}, p{i} = kept({bits}, {', '.join(weights)}, dtype)"


def _column(j: int) -> str:
    return " | ".join(f"(code >> {4 * i + j} & 1) << {i}" for i in range(4))


def _best() -> str:
    """A function that compares the sums of all patterns of a tile: pairs of rows are added once."""
    names = ", ".join(f"w{i}{j}" for i, j in product(range(4), repeat=2))
    lines = ["", "", "@triton.jit", f"def best_of({names}):"]
    lines.append('    """The pattern of the largest sum, bit 4 i + j for row i and column j, of each tile."""')
    for i in range(4):
        lines += [f"    a{i}{j} = tl.abs(w{i}{j}).to(tl.float32)" for j in range(4)]
        lines += [f"    r{i}_{a}{b} = a{i}{a} + a{i}{b}" for a, b in PAIRS]
    for top in (0, 2):
        for p, q in product(PAIRS, repeat=2):
            lines.append(f"    t{top}_{_name(p, q)} = r{top}_{p[0]}{p[1]} + r{top + 1}_{q[0]}{q[1]}")
    first = True
    for p, q, r, s in product(PAIRS, repeat=4):
        if any(sum(j in row for row in (p, q, r, s)) != 2 for j in range(4)):
            continue
        code = sum(1 << (4 * i + j) for i, row in enumerate((p, q, r, s)) for j in row)
        total = f"t0_{_name(p, q)} + t2_{_name(r, s)}"
        if first:
            lines += [f"    best = {total}", f"    code = tl.full(best.shape, {code}, tl.int32)"]
            first = False
            continue
        lines += [f"    total = {total}", f"    code = tl.where(total > best, {code}, code)"]
        lines.append("    best = tl.maximum(total, best)")
    return "\n".join([*lines, "    return code", ""])


def _name(p: tuple[int, int], q: tuple[int, int]) -> str:
    return f"{p[0]}{p[1]}{q[0]}{q[1]}"
