"""Axes as Triton likes them: kernels in, equal kernels out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import sympy

from dsc.codegen.kernel import Axis, Index, Kernel
from dsc.torch_shim import FloorDiv, Mod, ModularIndexing


def without_units(kernel: Kernel) -> Kernel:
    """No axes of extent 1."""
    units = {a.name for a in kernel.axes if a.extent == 1}
    if not units:
        return kernel
    gone = {s: sympy.S.Zero for e in kernel.expressions() for s in e.free_symbols if s.name in units}
    return _rewritten(kernel, tuple(a for a in kernel.axes if a.name not in units), gone, {})


def unfolded(kernel: Kernel) -> Kernel:
    """An axis that is read modulo ``m`` (a half of a head, say) -> two axes, the inner one of ``m`` points.

    Triton follows ``x % m``, and not ``(x % n) % m``, of which it would load one element at a time.
    """
    for axis in kernel.axes:
        m = _modulus(kernel, axis)
        if m is None:
            continue
        taken = {a.name for a in kernel.axes} | {v.name for v in kernel.lets} | set(kernel.sizes)
        outer = axis.name + "o"
        while outer in taken:
            outer += "_"
        high, low = Axis(outer, axis.extent // m, axis.reduce), replace(axis, extent=sympy.Integer(m))
        return unfolded(_split(kernel, axis, high, low, m))
    return kernel


def _modulus(kernel: Kernel, axis: Axis) -> int | None:
    """The one number by which ``axis`` is divided in all indices, if it divides the extent too."""
    extent = sympy.sympify(axis.extent)
    found = {
        e.args[1] if isinstance(e, (Mod, FloorDiv)) else e.args[2] if e.args[1] == 1 else e.args[1]
        for index in kernel.expressions()
        for e in index.atoms(Mod, FloorDiv, ModularIndexing)
        if e.args[0].is_Symbol and e.args[0].name == axis.name
    }
    if len(found) != 1:
        return None
    (m,) = found
    if not (m.is_Integer and extent.is_Integer and 1 < m < extent and extent % m == 0):
        return None
    return int(m)


def _split(kernel: Kernel, axis: Axis, high: Axis, low: Axis, m: int) -> Kernel:
    inner = sympy.Symbol(low.name, integer=True, nonnegative=True)
    outer = sympy.Symbol(high.name, integer=True, nonnegative=True)
    whole: dict[Index, Index] = {}
    atoms: dict[Index, Index] = {}
    for index in kernel.expressions():
        for s in index.free_symbols:
            if s.name == axis.name:
                whole[s] = outer * m + inner
        for e in index.atoms(Mod, FloorDiv, ModularIndexing):
            if not (e.args[0].is_Symbol and e.args[0].name == axis.name):
                continue
            match e:
                case Mod():
                    atoms[e] = inner
                case FloorDiv():
                    atoms[e] = outer
                case _ if e.args[1] == 1:
                    atoms[e] = inner
                case _:
                    atoms[e] = ModularIndexing(outer, 1, e.args[2])
    # first what is divided, under names that the second step does not touch
    kept = {e: sympy.Dummy(integer=True, nonnegative=True) for e in atoms}
    back = {dummy: atoms[e] for e, dummy in kept.items()}
    axes = tuple(x for a in kernel.axes for x in ((high, low) if a == axis else (a,)))
    made = _rewritten(_rewritten(kernel, axes, kept, {}), axes, whole, {axis.name: high.name})
    return _rewritten(made, axes, back, {})


def _rewritten(
    kernel: Kernel, axes: tuple[Axis, ...], values: Mapping[Index, Index], grown: Mapping[str, str]
) -> Kernel:
    """``kernel`` with ``values`` in its indices; what varies with an axis of ``grown`` varies with another too."""

    def fix(e: object) -> Index:
        return sympy.expand(sympy.sympify(e).xreplace(values))

    names = {a.name for a in axes}
    lets = []
    for v in kernel.lets:
        along = frozenset(v.axes | {grown[a] for a in v.axes if a in grown}) & names
        match v.attr:
            case (buffer, index):
                lets.append(replace(v, attr=(buffer, fix(index)), axes=along))
            case sympy.Expr() if v.op in ("index", "check"):
                lets.append(replace(v, attr=fix(v.attr), axes=along))
            case _:
                lets.append(replace(v, axes=along))
    stores = tuple(replace(s, index=fix(s.index)) for s in kernel.stores)
    return replace(kernel, axes=axes, lets=tuple(lets), stores=stores)
