"""One pointwise operation in C++, on numbers or on vectors of 16: the prelude overloads every name for both."""

from __future__ import annotations

import math
import struct

from dsc.codegen.kernel import Attr

SCALAR = {"f32": "float", "f64": "double", "i64": "long", "b1": "bool"}
VECTOR = {"f32": "vf", "f64": "vd", "i64": "vl", "b1": "vi"}
STORAGE = {
    "f32": "float", "bf16": "bf16", "f16": "f16", "f64": "double",
    "i64": "long", "i32": "int", "i16": "short", "i8": "signed char", "u8": "unsigned char", "b1": "bool",
}  # fmt: skip

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
CALLS = {
    "abs": "Abs", "max": "Max", "min": "Min", "sqrt": "Sqrt", "exp": "Exp", "expm1": "Expm1", "exp2": "Exp2",
    "log": "Log", "log1p": "Log1p", "log2": "Log2", "sin": "Sin", "cos": "Cos", "tanh": "Tanh", "erf": "Erf",
    "sigmoid": "Sigmoid", "pow": "Pow", "floor": "Floor", "ceil": "Ceil", "trunc": "Trunc", "rint": "Rint",
    "atan2": "Atan2", "fma": "Fma",
}  # fmt: skip
HEAVY = frozenset({
    "exp", "expm1", "exp2", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "sigmoid", "pow", "atan2", "random",
})  # fmt: skip
"""Worth keeping rather than computing twice."""

IDENTITY = {
    ("sum", "f32"): "0.f", ("sum", "f64"): "0.", ("sum", "i64"): "0L",
    ("prod", "f32"): "1.f", ("prod", "f64"): "1.", ("prod", "i64"): "1L",
    ("max", "f32"): "-INF", ("max", "f64"): "-__builtin_inf()", ("max", "i64"): "(-9223372036854775807L - 1)",
    ("min", "f32"): "INF", ("min", "f64"): "__builtin_inf()", ("min", "i64"): "9223372036854775807L",
    ("any", "b1"): "false", ("all", "b1"): "true", ("any", "i64"): "0L", ("all", "i64"): "-1L",
}  # fmt: skip
FOLD = {
    "sum": "fold_sum",
    "prod": "fold_prod",
    "max": "fold_max",
    "min": "fold_min",
    "any": "fold_or",
    "all": "fold_and",
}


def combine(kind: str, a: str, b: str) -> str:
    """One step of a reduction."""
    match kind:
        case "sum":
            return f"{a} + {b}"
        case "prod":
            return f"{a} * {b}"
        case "max" | "min":
            return f"{kind.capitalize()}({a}, {b})"
        case "any":
            return f"{a} | {b}"
        case _:
            return f"{a} & {b}"


def const(value: Attr, dtype: str) -> str:
    """The number as a literal that reads back the same."""
    if value is None or isinstance(value, (str, tuple)):
        raise ValueError(f"not a constant: {value!r}")
    match dtype:
        case "b1":
            return "true" if value else "false"
        case "i64":
            number = int(value)
            if not -(2**63) < number < 2**63:
                number = (number + 2**63) % 2**64 - 2**63
            return (
                "(-9223372036854775807L - 1)" if number == -(2**63) else f"{number}L" if number >= 0 else f"({number}L)"
            )
        case "f64":
            return _float(float(value), repr(float(value)), "", "__builtin_inf()")
        case _:
            return _f32(float(value))


def _f32(value: float) -> str:
    try:
        single = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        single = math.copysign(math.inf, value)
    shortest = next((t for p in range(1, 10) if _reads_back(t := f"{single:.{p}g}", single)), repr(single))
    return _float(single, shortest, "f", "INF")


def _reads_back(digits: str, single: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", float(digits)))[0] == single)
    except OverflowError:
        return False


def _float(value: float, digits: str, suffix: str, inf: str) -> str:
    if math.isnan(value):
        return "QNAN" if suffix else '__builtin_nan("")'
    if math.isinf(value):
        return inf if value > 0 else f"(-{inf})"
    digits = digits if any(c in digits for c in ".e") else digits + "."
    out = digits + suffix
    return f"({out})" if math.copysign(1, value) < 0 else out


def apply(op: str, args: list[str], attr: Attr, dtype: str, of: str, vector: bool) -> str:
    """C++ of ``op`` on arguments of dtype ``of`` that are all vectors, or all numbers."""
    one = {"f32": "1.f", "f64": "1."}.get(dtype, "1")
    match op, args:
        case "neg", [a]:
            return f"-{a}"
        case "recip", [a]:
            return f"{one} / {a}"
        case "rsqrt", [a]:
            return f"{one} / Sqrt({a})"
        case "isnan", [a]:
            return _compare("!=", a, a, of, vector)
        case "not", [a]:
            return f"!{a}" if of == "b1" and not vector else f"~{a}"
        case "where", [m, a, b]:
            return f"select({m}, {a}, {b})"
        case "cast", [a]:
            return f"to_{dtype}({a})" if vector else f"{a} != 0" if dtype == "b1" else f"({SCALAR[dtype]}){a}"
        case "round", [a]:
            return a if attr in (dtype, "b1") else f"round_{attr}({a})"
        case _, [a, b] if op in INFIX:
            return f"{a} {INFIX[op]} {b}"
        case _, [a, b] if op in COMPARE:
            return _compare(COMPARE[op], a, b, of, vector)
        case _, [a, b] if op in BITWISE:
            return f"{a} {BITWISE[op]} {b}"
        case (("max" | "min"), [a, b]) if dtype == "b1":
            return f"{a} {'|' if op == 'max' else '&'} {b}"
        case _ if op in CALLS:
            return f"{CALLS[op]}({', '.join(args)})"
        case _:
            raise ValueError(f"no C++ for operation {op}")


def _compare(sign: str, a: str, b: str, of: str, vector: bool) -> str:
    if not vector or of in ("f32", "b1"):
        # False is 0 and true is -1 in a mask, so order flips.
        flipped = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign) if vector and of == "b1" else sign
        return f"{a} {flipped} {b}"
    return f"narrow({a} {sign} {b})"
