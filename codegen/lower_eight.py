"""8-bit floats, kept in integers, as ``dsc.narrow`` says: by arithmetic alone, which every target has."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.fx import Node

from dsc import narrow
from dsc.codegen.builder import Builder
from dsc.codegen.elementwise import elementwise
from dsc.codegen.formulas import num
from dsc.codegen.lower import Lowering, Rule, Value

FLOAT_MAX = torch.finfo(torch.float32).max


def narrow8(low: Lowering, n: Node) -> Value:
    """8-bit floats as ``dsc.narrow`` says, by arithmetic alone: the exponent is that of the magnitude or the lowest one,
    and the mantissa, rounded, carries over into it by itself.
    """
    f = narrow.EIGHT[str(n.args[2])]

    def formula(b: Builder, x: str, amax: str) -> str:
        inverse = b.let("min", (b.let("div", (num(b, f.limit, x), amax)), num(b, FLOAT_MAX, x)))
        is_zero = b.let("eq", (amax, num(b, 0, amax)), dtype="b1")
        y = b.let("mul", (x, b.let("where", (is_zero, num(b, 0, x), inverse))))
        size = b.let("min", (b.let("abs", (y,)), num(b, f.limit, y)))
        exponent = b.let("max", (b.let("floor", (b.let("log2", (size,)),)), num(b, f.lowest, y)))
        scale = b.let("exp2", (b.let("sub", (num(b, f.mantissa, y), exponent)),))
        mantissa = b.let("rint", (b.let("mul", (size, scale)),))
        above = b.let("mul", (b.let("sub", (exponent, num(b, f.lowest, y))), num(b, 1 << f.mantissa, y)))
        sign = b.let("where", (b.let("lt", (y, num(b, 0, y)), dtype="b1"), num(b, 128, y), num(b, 0, y)))
        code = b.let("add", (b.let("add", (above, mantissa)), sign))
        nan = b.let("isnan", (y,), dtype="b1")
        return b.cast(b.let("where", (nan, num(b, narrow.NOT_A_NUMBER, y), code)), "i64")

    return elementwise(low, n, n.args[:2], formula, inner="f32")


def widen8(low: Lowering, n: Node) -> Value:
    """The numbers of ``narrow8``: a code with no exponent bits has the lowest exponent and no leading one."""
    f = narrow.EIGHT[str(n.args[2])]
    one = 1 << f.mantissa

    def formula(b: Builder, q: str, amax: str) -> str:
        negative = b.let("ge", (q, num(b, 128, q)), dtype="b1")
        code = b.let("sub", (q, b.let("where", (negative, num(b, 128, q), num(b, 0, q)))))
        above = b.let("floor", (b.let("mul", (code, num(b, 1 / one, q))),))
        rest = b.let("sub", (code, b.let("mul", (above, num(b, one, q)))))
        leading = b.let("where", (b.let("gt", (above, num(b, 0, q)), dtype="b1"), num(b, one, q), num(b, 0, q)))
        exponent = b.let("add", (b.let("max", (above, num(b, 1, q))), num(b, f.lowest - 1 - f.mantissa, q)))
        size = b.let("mul", (b.let("add", (leading, rest)), b.let("exp2", (exponent,))))
        nan = b.let("eq", (code, num(b, narrow.NOT_A_NUMBER, q)), dtype="b1")
        size = b.let("where", (nan, num(b, math.nan, q), size))
        value = b.let("where", (negative, b.let("neg", (size,)), size))
        return b.let("mul", (value, b.let("mul", (amax, num(b, 1 / f.limit, q)))))

    return elementwise(low, n, n.args[:2], formula, inner="f32")


RULES: Mapping[str, Rule] = {"dsc.narrow8.default": narrow8, "dsc.widen8.default": widen8}
