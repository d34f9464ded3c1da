"""Functions that Triton lacks, as Triton source: an emitted kernel carries the ones that it calls.

libdevice has them all, but Triton's interpreter cannot call it, and what ships must be what the tests ran.
``f32`` results are within 4e-6 (relative) of the true value, ``f64`` within 1e-12.
"""

from __future__ import annotations

from collections.abc import Iterable

COMBINE = {"sum": "_sum", "prod": "_prod", "max": "_max", "min": "_min", "any": "_or", "all": "_and"}
"""Reduction -> the helper that combines two partial results."""

_SUM = """
@triton.jit
def _sum(a, b):
    return a + b
"""

_PROD = """
@triton.jit
def _prod(a, b):
    return a * b
"""

_MAX = """
@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""

_MIN = """
@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
"""

_OR = """
@triton.jit
def _or(a, b):
    return a | b
"""

_AND = """
@triton.jit
def _and(a, b):
    return a & b
"""

_SIGMOID = """
@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
"""

_EXPM1 = """
@triton.jit
def _expm1(x):
    # exp(x) - 1 cancels near 0; (u - 1) / log(u) is smooth there, whatever the error of u (Kahan).
    u = tl.exp(x)
    y = (u - 1.0) * x / tl.log(u)
    y = tl.where((u == 1.0) | (x != x), x, y)
    return tl.where((u == float("inf")) | (u - 1.0 == -1.0), u - 1.0, y)
"""

_LOG1P = """
@triton.jit
def _log1p(x):
    # The rounding error of 1 + x is undone by x / (u - 1) (Kahan).
    u = 1.0 + x
    y = tl.log(u) * (x / (u - 1.0))
    return tl.where((u == 1.0) | (u == float("inf")), x, y)
"""

_TANH = """
@triton.jit
def _tanh(x):
    a = tl.abs(x)
    s = x * x
    p = 0.0023735160939395428
    p = p * s - 0.008412554860115051
    p = p * s + 0.021789107471704483
    p = p * s - 0.053961653262376785
    p = p * s + 0.13333313167095184
    p = p * s - 0.3333333432674408
    t = 1.0 - 2.0 / (tl.exp(2.0 * a) + 1.0)
    return tl.where(a < 0.6, x * (s * p + 1.0), tl.where(x < 0.0, -t, t))
"""

_TANH64 = """
@triton.jit
def _tanh64(x):
    a = tl.abs(x)
    t = _expm1(2.0 * tl.where(a > 20.0, 20.0, a))
    t = t / (t + 2.0)
    return tl.where(x == 0.0, x, tl.where(x < 0.0, -t, t))
"""

_TRUNC = """
@triton.jit
def _trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
"""

# Adding and taking away the number whose unit in the last place is 1 rounds half to even, as the hardware does.
_RINT = """
@triton.jit
def _rint(x):
    a = tl.abs(x)
    r = (a + 8388608.0) - 8388608.0
    return tl.where((a < 8388608.0) & (x != 0.0), tl.where(x < 0.0, r * -1.0, r), x)
"""

_RINT64 = """
@triton.jit
def _rint64(x):
    a = tl.abs(x)
    r = (a + 4503599627370496.0) - 4503599627370496.0
    return tl.where((a < 4503599627370496.0) & (x != 0.0), tl.where(x < 0.0, r * -1.0, r), x)
"""

_POW64 = """
@triton.jit
def _pow64(x, y):
    a = tl.abs(x)
    p = tl.exp2(y * tl.log2(a))
    p = tl.where((y == 0.0) | (x == 1.0) | ((a == 1.0) & (y == y)), 1.0, p)
    negative = x.to(tl.int64, bitcast=True) < 0
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    p = tl.where((x < 0.0) & (a != float("inf")) & (whole == 0), float("nan"), p)
    return tl.where(negative & odd, p * -1.0, p)
"""

# The error of a f32 logarithm grows with the exponent: one f64 logarithm costs less than making up for it.
_POW = """
@triton.jit
def _pow(x, y):
    return _pow64(x.to(tl.float64), y.to(tl.float64)).to(tl.float32)
"""

_ATAN = """
@triton.jit
def _atan(t):
    # 0 <= t <= 1
    far = t > 0.4142135623730950
    z = tl.where(far, (t - 1.0) / (t + 1.0), t)
    w = z * z
    p = ((0.0805374449538 * w - 0.138776856032) * w + 0.199777106478) * w - 0.333329491539
    return tl.where(far, 0.7853981633974483, 0.0) + (p * w * z + z)
"""

_ATAN64 = """
@triton.jit
def _atan64(t):
    # 0 <= t <= 1
    far = t > 0.66
    z = tl.where(far, (t - 1.0) / (t + 1.0), t)
    w = z * z
    p = (-0.8750608600031904 * w - 16.157537187333652) * w - 75.00855792314705
    p = (p * w - 122.88666844901361) * w - 64.85021904942025
    q = ((w + 24.858464901423062) * w + 165.02700983169885) * w + 432.88106049129027
    q = (q * w + 485.3903996359137) * w + 194.5506571482614
    quarter = tl.full([], 0.7853981633974483, tl.float64)
    return tl.where(far, quarter, 0.0) + (p / q * w * z + z)
"""

_ATAN2 = """
@triton.jit
def _atan2{n}(y, x):
    ax = tl.abs(x)
    ay = tl.abs(y)
    big = tl.where(ax > ay, ax, ay)
    small = tl.where(ax > ay, ay, ax)
    t = tl.where(big == 0.0, 0.0, tl.where(big == small, 1.0, small / big))
    a = _atan{n}(t)
    half = tl.full([], 1.5707963267948966, {dtype})
    whole = tl.full([], 3.141592653589793, {dtype})
    a = tl.where(ay > ax, half - a, a)
    a = tl.where(x.to({bits}, bitcast=True) < 0, whole - a, a)
    a = tl.where(y.to({bits}, bitcast=True) < 0, a * -1.0, a)
    return tl.where((x != x) | (y != y), x + y, a)
"""

_UNIFORM = """
@triton.jit
def _uniform(seed, offset):
    # Philox 4x32-10: key = seed, counter = (offset, 0, 0); the top 24 bits of the first word.
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = offset.to(tl.uint32)
    c1 = c0 * 0
    if offset.dtype == tl.int64:
        c1 = (offset >> 32).to(tl.uint32)
    c2 = c0 * 0
    c3 = c0 * 0
    for _ in tl.static_range(10):
        a = c0
        b = c2
        c0 = tl.umulhi(b, 0xCD9E8D57) ^ c1 ^ k0
        c2 = tl.umulhi(a, 0xD2511F53) ^ c3 ^ k1
        c1 = tl.mul(b, 0xCD9E8D57, sanitize_overflow=False)
        c3 = tl.mul(a, 0xD2511F53, sanitize_overflow=False)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return (c0 >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
"""

_TILE = """
@triton.jit
def _tile(program, down, across):
    # Row and column of a program's tile: 8 rows of tiles are walked together, so that operands are found in the cache.
    first = program // (8 * across) * 8
    height = tl.minimum(down - first, 8)
    inside = program % (8 * across)
    return first + inside % height, inside // height
"""

HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "_sum": (_SUM, ()),
    "_prod": (_PROD, ()),
    "_max": (_MAX, ()),
    "_min": (_MIN, ()),
    "_or": (_OR, ()),
    "_and": (_AND, ()),
    "_sigmoid": (_SIGMOID, ()),
    "_expm1": (_EXPM1, ()),
    "_log1p": (_LOG1P, ()),
    "_tanh": (_TANH, ()),
    "_tanh64": (_TANH64, ("_expm1",)),
    "_trunc": (_TRUNC, ()),
    "_rint": (_RINT, ()),
    "_rint64": (_RINT64, ()),
    "_pow64": (_POW64, ()),
    "_pow": (_POW, ("_pow64",)),
    "_atan": (_ATAN, ()),
    "_atan64": (_ATAN64, ()),
    "_atan2": (_ATAN2.format(n="", dtype="tl.float32", bits="tl.int32"), ("_atan",)),
    "_atan264": (_ATAN2.format(n="64", dtype="tl.float64", bits="tl.int64"), ("_atan64",)),
    "_uniform": (_UNIFORM, ()),
    "_tile": (_TILE, ()),
}
"""Name -> (source, helpers that it calls), in the order in which they are written out."""

_CALLS = {
    "exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log", "log2": "tl.log2", "sin": "tl.sin", "cos": "tl.cos",
    "erf": "tl.erf", "floor": "tl.floor", "ceil": "tl.ceil", "abs": "tl.abs", "fma": "tl.fma", "where": "tl.where",
    "sigmoid": "_sigmoid", "expm1": "_expm1", "log1p": "_log1p", "tanh": "_tanh", "trunc": "_trunc", "rint": "_rint",
    "pow": "_pow", "atan2": "_atan2", "max": "_max", "min": "_min", "sqrt": "tl.sqrt_rn", "rsqrt": "tl.rsqrt",
    "div": "tl.div_rn", "random": "_uniform",
}  # fmt: skip


def call(op: str, dtype: str) -> str | None:
    """The function that computes ``op`` on ``dtype``; None where Triton has an operator for it."""
    if dtype == "f64" and op in ("div", "rsqrt"):  # f64 division is IEEE already
        return None
    if dtype == "f64" and op == "sqrt":
        return "tl.sqrt"
    if dtype == "f64" and op in ("tanh", "rint", "pow", "atan2"):
        return f"_{op}64"
    return _CALLS.get(op)


def helpers(used: Iterable[str]) -> list[str]:
    """Sources of the ``used`` helpers and of those that they call, callees first."""
    names = set(used)
    for name in list(names):
        names.update(HELPERS[name][1])
    return [source for name, (source, _) in HELPERS.items() if name in names]
