"""Iteration spaces: over which axes a node runs, and when two nodes can run in one loop nest.

A space is a row-major list of dimensions, each parallel or reduced.  Size-1 dimensions are left out, and two spaces
meet in their common refinement: ``[B*T, C]`` and ``[B, T, C]`` meet in ``[B, T, C]``, because splitting a dimension
into factors keeps row-major order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node

from dsc import ops
from dsc.torch_shim import is_one, sym_expr

Extent: TypeAlias = int | sympy.Expr


@dataclass(frozen=True, slots=True)
class Dim:
    extent: Extent
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    dims: tuple[Dim, ...]
    columns: bool = False
    """Whether sums over its parallel dimensions belong to it too, an element a column."""

    @property
    def extents(self) -> tuple[Extent, ...]:
        return tuple(d.extent for d in self.dims)

    @property
    def parallel(self) -> tuple[Extent, ...]:
        return tuple(d.extent for d in self.dims if not d.reduce)

    @property
    def reduces(self) -> bool:
        return any(d.reduce for d in self.dims)

    def __str__(self) -> str:
        dims = ", ".join(f"{d.extent}{'!' if d.reduce else ''}" for d in self.dims)
        return f"[{dims}]{' and its columns' if self.columns else ''}"


def shape(t: torch.Tensor) -> tuple[Extent, ...]:
    return tuple(extent(s) for s in t.shape)


def extent(size: int | torch.SymInt) -> Extent:
    """A plain int where the size is known, or is 1 by its guards, else its sympy expression."""
    e = sym_expr(size)
    if isinstance(e, int):
        return e
    return int(e) if e.is_number else 1 if is_one(size) else e


def product(extents: Iterable[Extent]) -> Extent:
    out: Extent = 1
    for e in extents:
        out = out * e
    return out


def same(a: Extent, b: Extent) -> bool:
    """Provably equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return a == b or sympy.expand(a - b) == 0


def divide(a: Extent, b: Extent) -> Extent | None:
    """``a / b`` if it is provably an integer."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b > 0 and a % b == 0 else None
    quotient = sympy.cancel(sympy.sympify(a) / b)
    if quotient.is_number:
        return int(quotient) if quotient.is_integer else None
    if not quotient.is_integer:
        return None
    return quotient


def refine(left: Sequence[Dim], right: Sequence[Dim], *, mixed: bool = False) -> tuple[Dim, ...] | None:
    """The coarsest row-major factorisation finer than both, or None.

    Reduced and parallel dimensions never meet, unless ``mixed``: then what ``left`` says of a dimension holds.
    """
    a, b = list(left), list(right)
    out: list[Dim] = []
    while a and b:
        x, y = a[0], b[0]
        if x.reduce != y.reduce and not mixed:
            return None
        if same(x.extent, y.extent):
            out.append(x)
            a.pop(0)
            b.pop(0)
        elif (rest := divide(y.extent, x.extent)) is not None:
            out.append(x)
            a.pop(0)
            b[0] = Dim(rest, y.reduce)
        elif (rest := divide(x.extent, y.extent)) is not None:
            out.append(Dim(y.extent, x.reduce))
            b.pop(0)
            a[0] = Dim(rest, x.reduce)
        else:
            return None
    return tuple(out) if not a and not b else None


def without_ones(dims: Iterable[Dim]) -> tuple[Dim, ...]:
    return tuple(d for d in dims if not (isinstance(d.extent, int) and d.extent == 1))


def of(node: Node) -> Space:
    """The space of a node that a kernel can compute (see ``ops.why_not_fused``)."""
    if ops.info(node).kind in ("reduction", "rowwise"):
        reduced = set(ops.reduced_dims(node))
        x = ops.tensor(ops.operand(node, 0))
        return Space(without_ones(Dim(e, i in reduced) for i, e in enumerate(shape(x))))
    v = node.meta["val"]
    dims = [Dim(e) for e in shape(v[0] if isinstance(v, (tuple, list)) else v)]
    if (hint := ops.split_of(node)) is not None:
        place, length = hint[0], extent(hint[1])
        blocks = divide(dims[place].extent, length)
        if blocks is not None:
            dims[place : place + 1] = [Dim(blocks), Dim(length)]
    return Space(without_ones(dims))


def plain(t: torch.Tensor) -> Space:
    """All dimensions of a tensor, none reduced."""
    return Space(without_ones(Dim(e) for e in shape(t)))


def meet(a: Space, b: Space) -> Space | None:
    """The space in which one kernel can compute what runs in ``a`` and what runs in ``b``, or None.

    1. Neither reduces, or both reduce the same dimensions: their common refinement.
    2. One reduces, the other does not: the other runs over everything, or over the parallel part (a row each).
    3. One has columns, the other runs over everything, over rows, over columns, or sums them: the first.
    4. Anything else does not meet.
    """
    if a.columns or b.columns:
        rows, other = (a, b) if a.columns else (b, a)
        return _meet_columns(rows, other)
    if a.reduces == b.reduces:
        dims = refine(a.dims, b.dims)
        return Space(dims) if dims is not None else None
    rows, flat = (a, b) if a.reduces else (b, a)
    whole = refine(rows.dims, flat.dims, mixed=True)
    if whole is not None:
        return Space(whole)
    return _refine_rows(rows, flat)


def cross(a: Space, b: Space) -> Space | None:
    """One nest for reductions of rows and sums of all rows: ``[N, C!]`` with ``[N!, C]``, of which the first is told."""
    if not (a.reduces and b.reduces):
        return None
    for rows, other in ((a, b), (b, a)):
        turned = [Dim(d.extent, not d.reduce) for d in other.dims]
        dims = refine(rows.dims, turned)
        kinds = [d.reduce for d in dims or ()]
        if dims is not None and kinds == sorted(kinds):  # parallel ones first: rows lie one after the other
            return Space(dims, True)
    return None


def _meet_columns(rows: Space, other: Space) -> Space | None:
    if other.reduces:
        dims = refine(rows.dims, other.dims)
        return Space(dims, True) if dims is not None else cross(Space(rows.dims), other)
    plain = meet(Space(rows.dims), other)
    if plain is not None:
        return Space(plain.dims, True)
    inner = refine([d for d in rows.dims if d.reduce], other.dims, mixed=True)  # an element a column
    return Space((*(d for d in rows.dims if not d.reduce), *inner), True) if inner is not None else None


SUMS_COLUMNS = frozenset("sum.dim_IntList native_layer_norm_backward.default".split())


def sums_columns(node: Node) -> bool:
    """Whether the node may sum over the rows of a nest that reduces rows."""
    return ops.name_of(node) in SUMS_COLUMNS


def across(node: Node, space: Space) -> bool:
    """Whether the node sums over the parallel dimensions of a space with columns."""
    if not space.columns or ops.info(node).kind not in ("reduction", "rowwise"):
        return False
    mine = of(node)
    return (
        refine(space.dims, mine.dims) is None
        and refine(space.dims, [Dim(d.extent, not d.reduce) for d in mine.dims]) is not None
    )


def follow(nodes: Iterable[Node], across: frozenset[Node]) -> frozenset[Node]:
    """Those of a group, in order, that sum over all rows or need such a sum, perhaps through views."""
    found: set[Node] = set(across)

    def needs(n: Node) -> bool:
        if n in found:
            return True
        through = ops.is_view(n) or ops.is_split(n) or ops.info(n).kind == "item"
        return n.op == "call_function" and through and needs(ops.operand(n, 0))

    for n in nodes:
        if any(needs(a) for a in n.all_input_nodes):
            found.add(n)
    return frozenset(found)


def _refine_rows(rows: Space, flat: Space) -> Space | None:
    """Refines the parallel dimensions of ``rows`` by ``flat``, leaving the reduced ones where they stand."""
    todo = list(flat.dims)
    out: list[Dim] = []
    for d in rows.dims:
        if d.reduce:
            out.append(d)
            continue
        left: Extent = d.extent
        while not (isinstance(left, int) and left == 1):
            if not todo:
                return None
            y = todo[0].extent
            if same(left, y):
                out.append(Dim(left))
                todo.pop(0)
                break
            if (rest := divide(left, y)) is not None:
                out.append(Dim(y))
                todo.pop(0)
                left = rest
            elif (rest := divide(y, left)) is not None:
                out.append(Dim(left))
                todo[0] = Dim(rest)
                break
            else:
                return None
    return Space(tuple(out)) if not todo else None


def runs_over(node_shape: Sequence[Extent], space: Space) -> bool | None:
    """True: one value an element of the space; False: one a row (parallel part); None: neither."""
    numel = product(node_shape)
    if same(numel, product(space.extents)):
        return True
    return False if same(numel, product(space.parallel)) else None
