"""Views inside a kernel, and the ops that only move elements: each maps an index of the result to one of the operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sympy
from torch.fx import Node

from dsc import ops
from dsc.codegen import indexing
from dsc.codegen.builder import Unlowerable
from dsc.codegen.elementwise import broadcast, out_dtype
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.lower import Lowering, Rule, Value, size
from dsc.domain import Extent, divide, same, shape
from dsc.torch_shim import Max, Min

Move = Callable[[Index], Index]


def moved(make: Callable[[Lowering, Node, Value], Move]) -> Rule:
    def rule(low: Lowering, n: Node) -> Value:
        x = low.of(n.args[0])
        move = make(low, n, x)
        return Value(shape(ops.tensor(n)), x.dtype, lambda i: x.at(move(i)))

    return rule


def reshape(low: Lowering, n: Node, x: Value) -> Move:
    new = shape(ops.tensor(n))
    return lambda i: indexing.reshape(i, new, x.shape, low.build.ranges)


def expand(low: Lowering, n: Node, x: Value) -> Move:
    return lambda i: broadcast(i, x.shape)


def permute(low: Lowering, n: Node, x: Value) -> Move:
    rank = len(x.shape)
    order = ops.axes(n, rank)

    def move(i: Index) -> Index:
        out: list[Extent] = [0] * rank
        for place, d in enumerate(order):
            out[d] = i[place]
        return tuple(out)

    return move


def _dim(n: Node, x: Value, place: int = 1) -> int:
    d = n.args[place] if len(n.args) > place else 0
    assert isinstance(d, int)
    return d % len(x.shape)


def _shift(d: int, start: Extent, step: Extent = 1) -> Move:
    return lambda i: tuple(e * step + start if k == d else e for k, e in enumerate(i))


def _start(given: object, length: Extent) -> Extent:
    """A slice's start as ATen reads it: negative from the end, clamped."""
    if given is None:
        return 0
    start = size(given)
    if isinstance(start, int) and isinstance(length, int):
        return max(0, start + length) if start < 0 else min(start, length)
    if isinstance(start, int) and start >= 0:
        return start
    raise Unlowerable("slice with a symbolic start")


def slice_(low: Lowering, n: Node, x: Value) -> Move:
    d = _dim(n, x)
    start = _start(n.args[2] if len(n.args) > 2 else None, x.shape[d])
    return _shift(d, start, size(n.args[4]) if len(n.args) > 4 else 1)


def select(low: Lowering, n: Node, x: Value) -> Move:
    d, place = _dim(n, x), size(n.args[2])
    if isinstance(place, int) and place < 0:
        place = place + x.shape[d]
    return lambda i: (*i[:d], place, *i[d:])


def piece(low: Lowering, n: Node) -> Value:
    """One piece of a split that this kernel computes the whole of."""
    parent, which = ops.operand(n, 0), n.args[1]
    x = low.of(parent.args[0])
    assert isinstance(which, int)
    d = parent.args[2] if len(parent.args) > 2 else 0
    assert isinstance(d, int)
    d %= len(x.shape)
    if ops.name_of(parent) == "unbind.int":
        d = int(parent.args[1]) % len(x.shape) if len(parent.args) > 1 else 0  # type: ignore[arg-type]
        return Value(shape(ops.tensor(n)), x.dtype, lambda i: x.at((*i[:d], which, *i[d:])))
    start: Extent = 0
    for earlier in parent.meta["val"][:which]:
        start = start + shape(earlier)[d]
    move = _shift(d, start)
    return Value(shape(ops.tensor(n)), x.dtype, lambda i: x.at(move(i)))


def flip(low: Lowering, n: Node, x: Value) -> Move:
    rank = max(len(x.shape), 1)  # one number may be flipped along dimension 0
    dims = {int(d) % rank for d in n.args[1]}  # type: ignore[union-attr,arg-type]
    return lambda i: tuple(x.shape[k] - 1 - e if k in dims else e for k, e in enumerate(i))


def triangle(keep_lower: bool) -> Rule:
    def rule(low: Lowering, n: Node) -> Value:
        x, b, result = low.of(n.args[0]), low.build, out_dtype(n)
        diagonal = size(n.args[1]) if len(n.args) > 1 else 0

        def at(i: Index) -> str:
            compare = "le" if keep_lower else "ge"
            kept = b.let(compare, (b.index(i[-1]), b.index(i[-2] + diagonal)), dtype="b1")
            return b.let("where", (kept, x.at(i), b.const(0, COMPUTE[result])))

        return Value(x.shape, result, at)

    return rule


def cat(low: Lowering, n: Node) -> Value:
    """Pieces of one length: the joined dimension is (piece, place), so that no piece is read outside itself."""
    parts = [low.of(a) for a in n.args[0]]  # type: ignore[union-attr]
    d = n.args[1] if len(n.args) > 1 else 0
    assert isinstance(d, int)
    d %= len(parts[0].shape)
    length, b, result = parts[0].shape[d], low.build, out_dtype(n)

    def at(i: Index) -> str:
        which = indexing.floor_div(i[d], length, b.ranges)
        inner = (*i[:d], indexing.modulo(i[d], length, b.ranges), *i[d + 1 :])
        return pick(low, parts, which, inner, result)

    return Value(shape(ops.tensor(n)), result, at)


def stack(low: Lowering, n: Node) -> Value:
    parts = [low.of(a) for a in n.args[0]]  # type: ignore[union-attr]
    d = n.args[1] if len(n.args) > 1 else 0
    assert isinstance(d, int)
    d %= len(parts[0].shape) + 1
    result = out_dtype(n)
    return Value(shape(ops.tensor(n)), result, lambda i: pick(low, parts, i[d], (*i[:d], *i[d + 1 :]), result))


def pick(low: Lowering, parts: list[Value], which: Extent, index: Index, dtype: str) -> str:
    b = low.build
    if isinstance(which, int) or which.is_number:
        return b.rounded(parts[int(which)].at(index), dtype)
    out = b.rounded(parts[-1].at(index), dtype)
    for k in reversed(range(len(parts) - 1)):
        mine = b.let("lt", (b.index(which), b.const(k + 1, "i64")), dtype="b1")
        out = b.let("where", (mine, b.rounded(parts[k].at(index), dtype), out))
    return out


def slice_backward(low: Lowering, n: Node) -> Value:
    """The gradient inside the slice, zero around it."""
    g, b, result = low.of(n.args[0]), low.build, out_dtype(n)
    whole = shape(ops.tensor(n))
    d = int(n.args[2]) % len(whole)  # type: ignore[arg-type]
    start = _start(n.args[3], whole[d])
    length = g.shape[d]
    blocks, first = divide(whole[d], length), divide(start, length)

    def at(i: Index) -> str:
        zero = b.const(0, COMPUTE[result])
        if blocks is not None and first is not None:
            which = indexing.floor_div(i[d], length, b.ranges)
            inner = (*i[:d], indexing.modulo(i[d], length, b.ranges), *i[d + 1 :])
            return b.let("where", (b.let("eq", (b.index(which), b.index(first)), dtype="b1"), g.at(inner), zero))
        return inside(low, g, i, d, start, zero)

    return Value(whole, result, at)


def inside(low: Lowering, x: Value, i: Index, d: int, start: Extent, outside: str) -> str:
    """``x`` where ``start <= i[d] < start + length``, read at a clamped place elsewhere and dropped."""
    b, place = low.build, i[d] - start
    above = Max(sympy.sympify(place), sympy.Integer(0))  # type: ignore[no-untyped-call]
    clamped = Min(above, sympy.sympify(x.shape[d]) - 1)  # type: ignore[no-untyped-call]
    ge = b.let("ge", (b.index(place), b.const(0, "i64")), dtype="b1")
    lt = b.let("lt", (b.index(place), b.index(x.shape[d])), dtype="b1")
    return b.let("where", (b.let("and", (ge, lt)), x.at((*i[:d], clamped, *i[d + 1 :])), outside))


def select_backward(low: Lowering, n: Node) -> Value:
    g, b, result = low.of(n.args[0]), low.build, out_dtype(n)
    whole = shape(ops.tensor(n))
    d, place = int(n.args[2]) % len(whole), size(n.args[3])  # type: ignore[arg-type]
    if isinstance(place, int) and place < 0:
        place = place + whole[d]

    def at(i: Index) -> str:
        here = b.let("eq", (b.index(i[d]), b.index(place)), dtype="b1")
        return b.let("where", (here, g.at((*i[:d], *i[d + 1 :])), b.const(0, COMPUTE[result])))

    return Value(whole, result, at)


def splits_evenly(n: Node) -> bool:
    """Whether a cat joins pieces of one length."""
    d = n.args[1] if len(n.args) > 1 else 0
    lengths = [shape(ops.tensor(a))[d] for a in n.args[0]]  # type: ignore[union-attr,index,arg-type]
    return all(same(e, lengths[0]) for e in lengths)


_RESHAPES = "view _unsafe_view reshape unsqueeze detach alias _reshape_alias squeeze".split()

RULES: Mapping[str, Rule] = {
    **{f"{r}.default": moved(reshape) for r in _RESHAPES},
    "squeeze.dim": moved(reshape),
    "squeeze.dims": moved(reshape),
    "expand.default": moved(expand),
    "permute.default": moved(permute),
    "transpose.int": moved(permute),
    "t.default": moved(permute),
    "slice.Tensor": moved(slice_),
    "select.int": moved(select),
    "getitem": piece,
    "flip.default": moved(flip),
    "tril.default": triangle(True),
    "triu.default": triangle(False),
    "cat.default": cat,
    "stack.default": stack,
    "slice_backward.default": slice_backward,
    "select_backward.default": select_backward,
}
