"""What ATen calls are in ONNX operators: a rule a row.  A rule gives the names of its results, or raises ``NoRule``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from dsc import ops
from dsc.debug.dump.onnx import TYPES, NoRule, Value, Values, Writer

Rule = Callable[[Writer, Node], Values]


def given(n: Node) -> tuple[Any, ...]:
    """The arguments by place, whose types the operator's schema promises."""
    return n.args


def arg(n: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by place or by name."""
    return given(n)[place] if len(given(n)) > place else n.kwargs.get(name, default)


def shape(t: torch.Tensor) -> list[int]:
    """Sizes as numbers; symbols have no rule."""
    if any(not isinstance(s, int) for s in t.shape):
        raise NoRule("a size is a symbol")
    return list(t.shape)


def whole(*values: object) -> None:
    if any(not isinstance(v, int) for v in values):
        raise NoRule("a size is a symbol")


def dtype(n: Node) -> torch.dtype:
    return ops.tensor(n).dtype


# --- pointwise


def unary(kind: str, **attributes: Any) -> Rule:
    return lambda w, n: str(w.op(kind, w.like(given(n)[0], dtype(n)), **attributes))


def binary(kind: str) -> Rule:
    """Operands in the result's dtype; ``alpha`` scales the second."""

    def rule(w: Writer, n: Node) -> Values:
        second = w.like(given(n)[1], dtype(n))
        if (alpha := arg(n, 2, "alpha", 1)) != 1:
            second = w.op("Mul", second, w.constant(alpha, dtype(n)))
        return str(w.op(kind, w.like(given(n)[0], dtype(n)), second))

    return rule


def divide(w: Writer, n: Node) -> Values:
    if n.kwargs.get("rounding_mode") is not None:
        raise NoRule("rounds")
    return str(w.op("Div", w.like(given(n)[0], dtype(n)), w.like(given(n)[1], dtype(n))))


def compare(kind: str, negated: bool = False) -> Rule:
    """In the dtype that PyTorch promotes the operands to."""

    def rule(w: Writer, n: Node) -> Values:
        fakes: list[Any] = [ops.value(a) if isinstance(a, Node) else a for a in given(n)[:2]]
        common = torch.result_type(fakes[0], fakes[1])
        if common is torch.bool:
            common = torch.int32
        made = w.op(kind, w.like(given(n)[0], common), w.like(given(n)[1], common))
        return str(w.op("Not", made) if negated else made)

    return rule


def boolean(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        if dtype(n) is not torch.bool:
            raise NoRule("bits of integers")
        return str(w.op(kind, *(w.like(a, torch.bool) for a in given(n))))

    return rule


def where(w: Writer, n: Node) -> Values:
    return str(w.op("Where", w.value(given(n)[0]), w.like(given(n)[1], dtype(n)), w.like(given(n)[2], dtype(n))))


def masked_fill(w: Writer, n: Node) -> Values:
    return str(w.op("Where", w.value(given(n)[1]), w.like(given(n)[2], dtype(n)), w.like(given(n)[0], dtype(n))))


def clamp(w: Writer, n: Node) -> Values:
    made = w.like(given(n)[0], dtype(n))
    for place, name, kind in ((1, "min", "Max"), (2, "max", "Min")):
        if (bound := arg(n, place, name)) is not None:
            made = w.op(kind, made, w.like(bound, dtype(n)))
    return made


def gelu(w: Writer, n: Node) -> Values:
    return str(w.op("Gelu", w.value(given(n)[0]), approximate=str(arg(n, 1, "approximate", "none"))))


def silu(w: Writer, n: Node) -> Values:
    x = w.value(given(n)[0])
    return str(w.op("Mul", x, w.op("Sigmoid", x)))


def rsqrt(w: Writer, n: Node) -> Values:
    return str(w.op("Reciprocal", w.op("Sqrt", w.like(given(n)[0], dtype(n)))))


def rsub(w: Writer, n: Node) -> Values:
    return str(w.op("Sub", w.like(given(n)[1], dtype(n)), w.like(given(n)[0], dtype(n))))


def cast(w: Writer, n: Node) -> Values:
    return str(w.op("Cast", w.value(given(n)[0]), to=TYPES[dtype(n)]))


def identity(w: Writer, n: Node) -> Values:
    return str(w.op("Identity", w.value(given(n)[0])))


def copy(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.like(given(n)[1], dtype(n)), w.ints(*shape(ops.tensor(n)))))


# --- shapes


def reshape(w: Writer, n: Node) -> Values:
    return str(w.op("Reshape", w.value(given(n)[0]), w.ints(*shape(ops.tensor(n))), allowzero=1))


def expand(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.value(given(n)[0]), w.ints(*shape(ops.tensor(n)))))


def transpose(w: Writer, n: Node) -> Values:
    rank = ops.tensor(n).dim()
    order = list(range(rank))
    match ops.name_of(n):
        case "permute.default":
            order = [int(d) % rank for d in given(n)[1]]
        case "transpose.int":
            a, b = (int(d) % rank for d in given(n)[1:3])
            order[a], order[b] = b, a
        case _:
            order.reverse()
    return str(w.op("Transpose", w.value(given(n)[0]), perm=order))


def cut(w: Writer, name: str, dim: int, start: int, end: int, step: int = 1) -> str:
    return str(w.op("Slice", name, w.ints(start), w.ints(end), w.ints(dim), w.ints(step)))


def slice_(w: Writer, n: Node) -> Values:
    x = ops.tensor(ops.operand(n, 0))
    dim = int(arg(n, 1, "dim", 0)) % x.dim()
    start, end, step = arg(n, 2, "start") or 0, arg(n, 3, "end"), arg(n, 4, "step", 1)
    whole(start, x.shape[dim], step, *([] if end is None else [end]))
    return cut(w, w.value(given(n)[0]), dim, start, min(x.shape[dim], 2**62 if end is None else end), step)


def select(w: Writer, n: Node) -> Values:
    rank = ops.tensor(ops.operand(n, 0)).dim()
    whole(given(n)[2])
    return str(w.op("Gather", w.value(given(n)[0]), w.constant(given(n)[2], torch.int64), axis=int(given(n)[1]) % rank))


def pieces(w: Writer, n: Node) -> Values:
    """Split and chunk: a slice a piece."""
    results = ops.value(n)
    assert isinstance(results, (list, tuple))
    rank = results[0].dim()
    dim = int(arg(n, 2, "dim", 0)) % rank
    out: list[Value] = []
    start = 0
    for t in results:
        end = start + shape(t)[dim]
        out.append(cut(w, w.value(given(n)[0]), dim, start, end))
        start = end
    return out


def unbind(w: Writer, n: Node) -> Values:
    x = ops.tensor(ops.operand(n, 0))
    dim = int(arg(n, 1, "dim", 0)) % x.dim()
    return [
        str(w.op("Gather", w.value(given(n)[0]), w.constant(i, torch.int64), axis=dim)) for i in range(shape(x)[dim])
    ]


def cat(w: Writer, n: Node) -> Values:
    parts = [a for a in given(n)[0] if ops.tensor(a).shape != (0,)]
    dim = int(arg(n, 1, "dim", 0)) % ops.tensor(n).dim()
    return str(w.op("Concat", *(w.like(a, dtype(n)) for a in parts), axis=dim))


def stack(w: Writer, n: Node) -> Values:
    dim = int(arg(n, 1, "dim", 0)) % ops.tensor(n).dim()
    parts = [w.op("Unsqueeze", w.value(a), w.ints(dim)) for a in given(n)[0]]
    return str(w.op("Concat", *parts, axis=dim))


def pad(w: Writer, name: str, before: Sequence[int], after: Sequence[int], of: torch.dtype, fill: float = 0) -> str:
    return str(w.op("Pad", name, w.ints(*before, *after), w.constant(fill, of)))


def slice_backward(w: Writer, n: Node) -> Values:
    size, dim, start, _, step = given(n)[1:6]
    whole(*size, start, step)
    piece, full = shape(ops.tensor(ops.operand(n, 0))), shape(ops.tensor(n))
    d = int(dim) % len(full)
    if step != 1:
        raise NoRule("steps")
    first = int(start) % full[d] if int(start) < 0 else int(start)
    before = [first if i == d else 0 for i in range(len(full))]
    after = [full[i] - piece[i] - before[i] for i in range(len(full))]
    return pad(w, w.value(given(n)[0]), before, after, dtype(n))


def select_backward(w: Writer, n: Node) -> Values:
    full = shape(ops.tensor(n))
    d, index = int(given(n)[2]) % len(full), int(given(n)[3]) % full[int(given(n)[2])]
    piece = w.op("Unsqueeze", w.value(given(n)[0]), w.ints(d))
    before = [index if i == d else 0 for i in range(len(full))]
    after = [full[d] - 1 - index if i == d else 0 for i in range(len(full))]
    return pad(w, piece, before, after, dtype(n))


def constant_pad(w: Writer, n: Node) -> Values:
    sizes, rank = list(given(n)[1]), ops.tensor(n).dim()
    whole(*sizes)
    before, after = [0] * rank, [0] * rank
    for i in range(len(sizes) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = sizes[2 * i], sizes[2 * i + 1]
    return pad(w, w.value(given(n)[0]), before, after, dtype(n), arg(n, 2, "value", 0))


def tril(upper: int) -> Rule:
    return lambda w, n: str(
        w.op("Trilu", w.value(given(n)[0]), w.constant(arg(n, 1, "diagonal", 0), torch.int64), upper=upper)
    )


def full(fill: float | None) -> Rule:
    """A tensor of one number; ``fill`` None: it is an argument."""

    def rule(w: Writer, n: Node) -> Values:
        name = ops.name_of(n)
        value = (
            fill
            if fill is not None
            else given(n)[0]
            if name == "scalar_tensor.default"
            else given(n)[-1 if name.startswith("full") and len(given(n)) < 3 else 1]
        )
        if not isinstance(value, bool | int | float):
            raise NoRule("a number that is a symbol")
        return str(w.op("Expand", w.constant(value, dtype(n)), w.ints(*shape(ops.tensor(n)))))

    return rule


def new_full(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.constant(given(n)[2], dtype(n)), w.ints(*shape(ops.tensor(n)))))


def arange(w: Writer, n: Node) -> Values:
    whole(*given(n))
    return str(w.op("Identity", w.constant(torch.arange(*given(n)).tolist(), dtype(n))))


# --- reductions


def reduce(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        x = ops.operand(n, 0)
        place = {"sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "prod.dim_int"}
        kept = bool(arg(n, 2, "keepdim", False)) if ops.name_of(n) in place else False
        axes = ops.reduced_dims(n)
        passed = w.like(x, dtype(n))
        if not axes:
            return str(w.op("Identity", passed))
        return str(w.op(kind, passed, w.ints(*axes), keepdims=int(kept)))

    return rule


def any_all(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        axes = ops.reduced_dims(n)
        kept = bool(arg(n, 2, "keepdim", False)) if len(given(n)) > 1 else False
        whole_ = w.cast(w.cast(w.value(given(n)[0]), torch.bool), torch.int32)
        made = w.op(kind, whole_, w.ints(*axes), keepdims=int(kept)) if axes else whole_
        return w.cast(made, torch.bool)

    return rule
