"""Index expressions: sympy to Triton text, and how large one can get."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from sympy.printing.str import StrPrinter

from dsc.codegen.kernel import Index


def text(e: Index) -> str:
    """``e`` as a Triton expression over tiles and scalars; operands of a division are taken to be non-negative."""
    return str(_PRINTER.doprint(sympy.sympify(e)))


class _Printer(StrPrinter):  # type: ignore[misc]
    """One method for each function that an index may hold, those of ``torch.utils._sympy.functions`` by class name."""

    printmethod = "_no_method"  # some of them print themselves, otherwise

    def _atom(self, e: Index) -> str:
        out = self._print(e)
        return out if e.is_Symbol or (e.is_Integer and e.is_nonnegative) else f"({out})"

    def _divided(self, over: Index, by: Index, *, up: bool = False) -> str:
        if by == 1:
            return self._atom(over)
        return f"({self._atom(over)}{f' + {self._atom(by)} - 1)' if up else ''} // {self._atom(by)})"

    def _print_FloorDiv(self, e: Index) -> str:
        return self._divided(*e.args)

    _print_CleanDiv = _print_FloorDiv

    def _print_CeilDiv(self, e: Index) -> str:
        return "(" + self._divided(*e.args, up=True) if e.args[1] != 1 else self._atom(e.args[0])

    def _print_floor(self, e: Index) -> str:
        return self._divided(*sympy.fraction(sympy.together(e.args[0])))

    def _print_ceiling(self, e: Index) -> str:
        over, by = sympy.fraction(sympy.together(e.args[0]))
        return "(" + self._divided(over, by, up=True) if by != 1 else self._atom(over)

    def _print_Mod(self, e: Index) -> str:
        return f"({self._atom(e.args[0])} % {self._atom(e.args[1])})"

    _print_PythonMod = _print_Mod

    def _print_ModularIndexing(self, e: Index) -> str:
        over, by, size = e.args
        return f"({self._divided(over, by)} % {self._atom(size)})"

    def _print_Identity(self, e: Index) -> str:
        return self._atom(e.args[0])

    def _nested(self, function: str, e: Index) -> str:
        first, *rest = (self._print(a) for a in e.args)
        for other in rest:
            first = f"tl.{function}({first}, {other})"
        return str(first)

    def _print_Max(self, e: Index) -> str:
        return self._nested("maximum", e)

    def _print_Min(self, e: Index) -> str:
        return self._nested("minimum", e)

    def _print_Pow(self, e: Index, rational: bool = False) -> str:
        if not (e.exp.is_Integer and e.exp > 0):
            raise TypeError(f"not an integer index: {e}")
        return "*".join([self._atom(e.base)] * int(e.exp))

    def _print_Mul(self, e: Index) -> str:
        over, by = sympy.fraction(e)
        return str(super()._print_Mul(e)) if by == 1 else self._divided(over, by)


_PRINTER = _Printer()


def bound(e: Index, extents: Mapping[str, int]) -> int | None:
    """An upper bound of every intermediate result of ``e``, or None if a size in it is not known.

    Symbols that ``extents`` lacks are sizes; values of the kernel have to be in it, with extent 1.
    """
    if e.is_Integer:
        return abs(int(e))
    if e.is_Symbol:
        return extents[e.name] - 1 if e.name in extents else None
    parts = [bound(a, extents) for a in e.args]
    if any(p is None for p in parts):
        return None
    known = [p for p in parts if p is not None]
    match e:
        case sympy.Add():
            return sum(known)
        case sympy.Mul() | sympy.Pow():
            out = 1
            for p in known if isinstance(e, sympy.Mul) else [known[0]] * max(known[1], 1):
                out *= max(p, 1)
            return out
        case _:  # every other function of non-negative integers stays under its largest operand
            return max(known)
