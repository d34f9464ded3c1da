"""Formulas of pointwise operators: builder, operands in the compute dtype -> let.

They follow ATen's CPU kernels step by step, so that results agree to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dsc.codegen.builder import Builder
from dsc.codegen.kernel import COMPARISONS

Formula = Callable[..., str]


def op(name: str) -> Formula:
    dtype = "b1" if name in COMPARISONS or name == "isnan" else ""
    return lambda b, *a: b.let(name, a, dtype=dtype)


def num(b: Builder, x: float, like: str) -> str:
    return b.const(x, b.by_name[like].dtype)


def relu(b: Builder, x: str) -> str:
    return b.let("max", (x, num(b, 0, x)))


def silu(b: Builder, x: str) -> str:
    return b.let("div", (x, b.let("add", (num(b, 1, x), b.let("exp", (b.let("neg", (x,)),))))))


def gelu(approximate: str) -> Formula:
    return gelu_tanh if approximate == "tanh" else gelu_erf


def gelu_erf(b: Builder, x: str) -> str:
    cdf = b.let("add", (num(b, 1, x), b.let("erf", (b.let("mul", (x, num(b, math.sqrt(0.5), x))),))))
    return b.let("mul", (b.let("mul", (x, num(b, 0.5, x))), cdf))


def tanh_inner(b: Builder, x: str) -> str:
    cube = b.let("mul", (b.let("mul", (x, x)), x))
    poly = b.let("add", (x, b.let("mul", (num(b, 0.044715, x), cube))))
    return b.let("tanh", (b.let("mul", (num(b, math.sqrt(2 / math.pi), x), poly)),))


def gelu_tanh(b: Builder, x: str) -> str:
    half = b.let("mul", (num(b, 0.5, x), x))
    return b.let("mul", (half, b.let("add", (num(b, 1, x), tanh_inner(b, x)))))


def gelu_backward(approximate: str) -> Formula:
    return gelu_tanh_backward if approximate == "tanh" else gelu_erf_backward


def gelu_erf_backward(b: Builder, g: str, x: str) -> str:
    one, half = num(b, 1, x), num(b, 0.5, x)
    cdf = b.let("mul", (half, b.let("add", (one, b.let("erf", (b.let("mul", (x, num(b, math.sqrt(0.5), x))),))))))
    square = b.let("mul", (x, x))
    density = b.let("exp", (b.let("mul", (square, num(b, -0.5, x))),))
    pdf = b.let("mul", (b.let("mul", (x, density)), num(b, 1 / math.sqrt(2 * math.pi), x)))
    return b.let("mul", (g, b.let("add", (cdf, pdf))))


def gelu_tanh_backward(b: Builder, g: str, x: str) -> str:
    one, half = num(b, 1, x), num(b, 0.5, x)
    t = tanh_inner(b, x)
    left = b.let("mul", (half, x))
    right = b.let("add", (one, t))
    left_d = b.let("mul", (half, right))
    t_d = b.let("sub", (one, b.let("mul", (t, t))))
    square = b.let("mul", (x, x))
    beta = num(b, math.sqrt(2 / math.pi), x)
    inner_d = b.let("mul", (beta, b.let("add", (one, b.let("mul", (num(b, 3 * 0.044715, x), square))))))
    right_d = b.let("mul", (b.let("mul", (left, t_d)), inner_d))
    return b.let("mul", (g, b.let("add", (left_d, right_d))))


def silu_backward(b: Builder, g: str, x: str) -> str:
    one = num(b, 1, x)
    s = b.let("div", (one, b.let("add", (one, b.let("exp", (b.let("neg", (x,)),))))))
    slope = b.let("add", (one, b.let("mul", (x, b.let("sub", (one, s))))))
    return b.let("mul", (b.let("mul", (g, s)), slope))


def sigmoid_backward(b: Builder, g: str, y: str, step: Callable[[str], str] = lambda v: v) -> str:
    return b.let("mul", (step(b.let("mul", (g, step(b.let("sub", (num(b, 1, y), y)))))), y))


def tanh_backward(b: Builder, g: str, y: str) -> str:
    return b.let("mul", (g, b.let("sub", (num(b, 1, y), b.let("mul", (y, y))))))


def square(b: Builder, x: str) -> str:
    return b.let("mul", (x, x))


def where(b: Builder, c: str, x: str, y: str) -> str:
    return b.let("where", (b.cast(c, "b1"), x, y))


def threshold_backward(b: Builder, g: str, x: str, t: str) -> str:
    return b.let("where", (b.let("le", (x, t), dtype="b1"), num(b, 0, g), g))


def isinf(b: Builder, x: str) -> str:
    return b.let("eq", (b.let("abs", (x,)), num(b, math.inf, x)), dtype="b1")


def addcmul(b: Builder, x: str, y: str, z: str, value: str) -> str:
    return b.let("add", (x, b.let("mul", (b.let("mul", (value, y)), z))))


def addcdiv(b: Builder, x: str, y: str, z: str, value: str) -> str:
    return b.let("add", (x, b.let("div", (b.let("mul", (value, y)), z))))


def lerp(b: Builder, x: str, y: str, w: str) -> str:
    span, one = b.let("sub", (y, x)), num(b, 1, x)
    low = b.let("add", (x, b.let("mul", (w, span))))
    high = b.let("sub", (y, b.let("mul", (span, b.let("sub", (one, w))))))
    return b.let("where", (b.let("lt", (b.let("abs", (w,)), num(b, 0.5, x)), dtype="b1"), low, high))


def power(exponent: object, dtype: str, cpu: bool) -> Formula | None:
    """ATen's special cases of ``pow(tensor, number)``; f16 has none of its own on CPUs, bf16 rounds its products."""
    if dtype == "f16" and cpu and exponent in (0.5, -0.5):
        return None

    def stored(b: Builder, x: str) -> str:
        return square(b, x) if dtype == "f16" and cpu else b.result(square(b, x), dtype)

    table: dict[float, Formula] = {
        1.0: lambda b, x: x,
        0.5: op("sqrt"),
        2.0: square,
        3.0: lambda b, x: b.let("mul", (stored(b, x), x)),
        -0.5: op("rsqrt"),
        -1.0: op("recip"),
        -2.0: lambda b, x: b.let("recip", (stored(b, x),)),
    }
    return table.get(float(exponent)) if isinstance(exponent, (int, float)) else None
