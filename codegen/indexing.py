"""Index arithmetic: what a view does to an index, simplified by what is known of the axes' ranges.

An index is a tuple of integers or sympy expressions over axis symbols, one a dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy

from dsc.domain import Dim, Extent, divide, product, refine, same
from dsc.torch_shim import FloorDiv, Mod

Index = tuple[Extent, ...]
Ranges = Mapping[sympy.Symbol, Extent]
"""Axis symbol -> its extent: the symbol lies in [0, extent)."""

QUOTIENTS = ("Mod", "PythonMod", "FloorDiv", "ModularIndexing")
"""Names of the functions of an index that divide; the first argument is what they divide."""


def linear(index: Sequence[Extent], strides: Sequence[Extent], offset: Extent = 0) -> Extent:
    """Element offset of ``index`` in a buffer with these strides."""
    out: Extent = offset
    for i, s in zip(index, strides, strict=True):
        out = out + i * s
    return out


def row_major(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    strides: list[Extent] = []
    step: Extent = 1
    for e in reversed(shape):
        strides.append(step)
        step = step * e
    return tuple(reversed(strides))


def _terms(e: Extent) -> tuple[Extent, ...]:
    return (e,) if isinstance(e, int) else sympy.Add.make_args(sympy.expand(e))


def _below(e: Extent, bound: Extent, ranges: Ranges) -> bool:
    """Provably ``0 <= e < bound`` (a sum of non-negative multiples of axes and constants)."""
    largest: Extent = 0
    for t in _terms(e):
        if isinstance(t, int) or t.is_number:
            if t < 0:
                return False
            largest = largest + t
            continue
        axes = [s for s in t.free_symbols if s in ranges]
        if len(axes) != 1:
            return False
        factor = sympy.cancel(t / axes[0])
        if axes[0] in factor.free_symbols or factor.is_nonnegative is not True:
            return False
        largest = largest + factor * (ranges[axes[0]] - 1)
    room = sympy.expand(sympy.sympify(bound) - 1 - largest)
    return room.is_nonnegative is True


def floor_div(e: Extent, d: Extent, ranges: Ranges) -> Extent:
    """``e // d`` for ``e >= 0``."""
    whole, rest = _split(e, d)
    if _below(rest, d, ranges):
        return whole
    return whole + FloorDiv(rest, d)


def modulo(e: Extent, d: Extent, ranges: Ranges) -> Extent:
    """``e % d`` for ``e >= 0``."""
    _, rest = _split(e, d)
    return rest if _below(rest, d, ranges) else Mod(rest, d)


def _split(e: Extent, d: Extent) -> tuple[Extent, Extent]:
    """(a, b) with ``e = a*d + b``, the terms that d divides in a."""
    if isinstance(e, int) and isinstance(d, int):
        return divmod(e, d)
    whole: Extent = 0
    rest: Extent = 0
    for t in _terms(e):
        quotient = _quotient(t, d)
        if quotient is None:
            rest = rest + t
        else:
            whole = whole + quotient
    return whole, rest


def _quotient(term: Extent, d: Extent) -> Extent | None:
    if isinstance(term, int) or term.is_number:
        return divide(int(term), d) if isinstance(d, int) else (0 if term == 0 else None)
    coefficient, rest = term.as_coeff_Mul()
    if isinstance(d, int):
        return (coefficient / d) * rest if (coefficient / d).is_integer else None
    return divide(term, d)


def reshape(index: Index, new: Sequence[Extent], old: Sequence[Extent], ranges: Ranges) -> Index:
    """Index into shape ``old`` of the element that has ``index`` in shape ``new`` (row-major, same number)."""
    if len(new) == len(old) and all(same(a, b) for a, b in zip(new, old)):
        return index
    new_kept = [i for i, e in enumerate(new) if not _is_one(e)]
    old_kept = [i for i, e in enumerate(old) if not _is_one(e)]
    inner = _reshape_without_ones(
        tuple(index[i] for i in new_kept), [new[i] for i in new_kept], [old[i] for i in old_kept], ranges
    )
    out: list[Extent] = [0] * len(old)
    for i, e in zip(old_kept, inner):
        out[i] = e
    return tuple(out)


def _is_one(e: Extent) -> bool:
    return isinstance(e, int) and e == 1


def _reshape_without_ones(index: Index, new: Sequence[Extent], old: Sequence[Extent], ranges: Ranges) -> Index:
    fine = refine([Dim(e) for e in new], [Dim(e) for e in old])
    if fine is None:
        return unravel(linear(index, row_major(new)), old, ranges)
    factors = [d.extent for d in fine]
    return join(split(index, new, factors, ranges), factors, old)


def split(index: Index, shape: Sequence[Extent], factors: Sequence[Extent], ranges: Ranges) -> Index:
    """Splits each entry of ``index`` into coordinates of the factors of its dimension."""
    out: list[Extent] = []
    todo = list(factors)
    for i, e in zip(index, shape):
        mine = _take(todo, e)
        out.extend((i,) if len(mine) == 1 else unravel(i, mine, ranges))
    return tuple(out)


def join(index: Index, factors: Sequence[Extent], shape: Sequence[Extent]) -> Index:
    """The inverse of ``split``."""
    out: list[Extent] = []
    todo = list(factors)
    place = 0
    for e in shape:
        mine = _take(todo, e)
        out.append(linear(index[place : place + len(mine)], row_major(mine)))
        place += len(mine)
    return tuple(out)


def _take(todo: list[Extent], extent: Extent) -> list[Extent]:
    mine: list[Extent] = []
    while not same(product(mine), extent):
        mine.append(todo.pop(0))
    return mine


def unravel(e: Extent, shape: Sequence[Extent], ranges: Ranges) -> Index:
    """Coordinates in ``shape`` of the linear index ``e``."""
    out: list[Extent] = []
    for place, d in reversed(list(enumerate(shape))):
        if place == 0:
            out.append(e)
        else:
            out.append(modulo(e, d, ranges))
            e = floor_div(e, d, ranges)
    return tuple(reversed(out))


def may_be_negative(e: Extent, ranges: Ranges) -> bool:
    """Whether nothing here proves ``e >= 0``: each axis that counts down is at its end, each quotient at its largest."""
    e = sympy.expand(e)
    inner = {x: sympy.Dummy(integer=True, nonnegative=True) for x in e.atoms(sympy.Function)}
    least, largest = e.xreplace(inner), {**ranges, **{inner[x]: _largest(x, ranges) for x in inner}}
    for s, extent in largest.items():
        falls = least.coeff(s, 1)
        if extent is not None and falls.is_number and falls < 0:
            least = sympy.expand(least.subs(s, extent - 1))
    free = {s: 0 for s in largest if least.coeff(s, 1).is_nonnegative}
    return any(t.could_extract_minus_sign() for t in sympy.Add.make_args(sympy.expand(least.xreplace(free))))


def _largest(x: sympy.Expr, ranges: Ranges) -> Extent | None:
    """One more than the largest value of a quotient or a remainder, if that is known."""
    if type(x).__name__ in ("Mod", "PythonMod"):
        return x.args[1]
    if type(x).__name__ != "FloorDiv" or not x.args[1].is_Integer:
        return None
    top = sympy.expand(x.args[0])
    for s, extent in ranges.items():
        if (rises := top.coeff(s, 1)).is_number:
            top = sympy.expand(top.subs(s, extent - 1 if rises > 0 else 0))
    return int(top) // int(x.args[1]) + 1 if top.is_Integer else None
