"""Index expressions: their C text, and how they move along an axis."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import mul

import sympy

from dsc.codegen.kernel import Index

Names = Mapping[str, str]


def text(e: Index | int, names: Names) -> str:
    """``e`` in C on longs; symbols print as ``names`` says.  Operands of divisions are non-negative, so C rounds right."""
    return _sum(sympy.sympify(e), names)


def stride(e: Index, axis: str) -> Index | None:
    """How much ``e`` grows when ``axis`` grows by one; None when that differs from place to place."""
    if not any(s.name == axis for s in e.free_symbols):
        return sympy.S.Zero
    if e.is_Symbol:
        return sympy.S.One
    if e.is_Add:
        parts = [stride(a, axis) for a in e.args]
        return None if any(p is None for p in parts) else sympy.Add(*[p for p in parts if p is not None])
    if e.is_Mul:
        moving = [a for a in e.args if any(s.name == axis for s in a.free_symbols)]
        inner = stride(moving[0], axis) if len(moving) == 1 else None
        return None if inner is None else sympy.Mul(inner, *[a for a in e.args if a is not moving[0]])
    return None


def mentions(e: Index, names: frozenset[str]) -> bool:
    return any(s.name in names for s in e.free_symbols)


def substitute(e: Index, values: Mapping[str, Index]) -> Index:
    """Symbols by name, whatever they assume."""
    return e.xreplace({s: values[s.name] for s in e.free_symbols if s.name in values})


def product(sizes: list[Index]) -> Index:
    return sympy.sympify(reduce(mul, sizes, sympy.S.One))


def known(e: Index | int) -> int | None:
    """The number, where it is one."""
    e = sympy.sympify(e)
    return int(e) if e.is_Integer else None


def _sum(e: Index, names: Names) -> str:
    if not e.is_Add:
        return _product(e, names)
    # Constants last and larger terms first: row * 768 + column + 16.
    terms = sorted(
        e.args, key=lambda a: (a.could_extract_minus_sign(), a.is_Integer, not a.is_Mul, sympy.default_sort_key(a))
    )
    out = _product(terms[0], names)
    for t in terms[1:]:
        negative = t.could_extract_minus_sign()
        out += (" - " if negative else " + ") + _product(-t if negative else t, names)
    return out


def _product(e: Index, names: Names) -> str:
    if not e.is_Mul:
        return _atom(e, names)
    if any(a.is_Rational and not a.is_Integer for a in e.args):
        raise ValueError(f"index is not a whole number everywhere: {e}")
    factors = sorted(e.args, key=lambda a: (a.is_Integer, not a.is_Symbol, sympy.default_sort_key(a)))
    return " * ".join(_atom(a, names) for a in factors)


def _atom(e: Index, names: Names) -> str:
    if e.is_Integer:
        number = int(e)
        plain = str(number) if abs(number) < 2**31 else f"{number}L"
        return plain if number >= 0 else f"({plain})"
    if e.is_Symbol:
        return names[e.name]
    if e.is_Add or e.is_Mul:
        return f"({_sum(e, names)})"
    if e.is_Pow and e.exp.is_Integer and 0 < int(e.exp) < 8:
        return "(" + " * ".join([_atom(e.base, names)] * int(e.exp)) + ")"
    args = [_atom(a, names) for a in e.args]
    match type(e).__name__, args:
        case (("FloorDiv" | "CleanDiv" | "IntTrueDiv" | "TruncDiv"), [a, b]):
            return f"({a} / {b})"
        case (("Mod" | "PythonMod"), [a, b]):
            return f"({a} % {b})"
        case "ModularIndexing", [a, b, c]:
            return f"({a} % {c})" if b == "1" else f"({a} / {b} % {c})"
        case "CeilDiv", [a, b]:
            return f"(({a} + {b} - 1) / {b})"
        case "CeilToInt" | "FloorToInt" | "Identity" | "ToInt", [a]:
            return a
        case (("floor" | "ceiling"), [_]) if (whole := _fraction(e, names)) is not None:
            return whole
        case "Max", _:
            return reduce(lambda x, y: f"imax({x}, {y})", args)
        case "Min" | "Upto", _:
            return reduce(lambda x, y: f"imin({x}, {y})", args)
        case _:
            raise ValueError(f"no C for index {e}")


def _fraction(e: Index, names: Names) -> str | None:
    """floor(x / n) and ceiling(x / n), as sympy's own division writes them."""
    top, bottom = sympy.fraction(sympy.together(e.args[0]))
    up = f" + {_atom(bottom, names)} - 1" if type(e).__name__ == "ceiling" else ""
    return f"(({_sum(top, names)}{up}) / {_atom(bottom, names)})"


class FloorDiv(sympy.Function):  # type: ignore[misc]
    """Quotient of non-negative numbers; prints like torch's."""


class Upto(sympy.Function):  # type: ignore[misc]
    """``Upto(n, rest)``: n, or what is left.  Opaque, so that sympy does not reason about it."""


def bound(e: Index | int) -> int | None:
    """The number that an extent does not exceed, where known."""
    e = sympy.sympify(e)
    return known(e.args[0] if isinstance(e, Upto) else e)


def ceil_div(a: Index, b: int) -> Index:
    return sympy.Integer(-(-int(a) // b)) if a.is_Integer else FloorDiv(a + (b - 1), sympy.Integer(b))
