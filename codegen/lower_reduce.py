"""Reductions and what reduces inside: sums, means, variances, softmax, norms.  Forward and backward, a rule each.

Accumulation is in f32 or wider, whatever the storage dtype.  Variances take two passes over the row (which sits in
cache); softmax subtracts the row's maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sympy
from torch.fx import Node

from dsc import ops
from dsc.codegen.builder import Builder, Unlowerable
from dsc.codegen.elementwise import broadcast, on_cpu, out_dtype
from dsc.codegen.formulas import num
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.lower import Lowering, Rule, Value
from dsc.domain import Extent, product, shape


class Row:
    """A tensor with the dimensions of it that the kernel reduces."""

    def __init__(self, low: Lowering, n: Node, shape_of: Value) -> None:
        self.b: Builder = low.build
        self.shape = shape_of.shape
        self.dims = ops.reduced_dims(n)
        self.across = n in low.across
        self.count: Extent = product(self.shape[d] for d in self.dims)
        self.wide = COMPUTE[shape_of.dtype]

    def along(self, kept: Index) -> Index:
        """Full index: ``kept`` where a dimension stays, the reduce axes elsewhere."""
        outer = [i for d, i in enumerate(kept) if d not in self.dims]
        if self.b.off_row(tuple(outer), self.across):
            raise Unlowerable("a row's value is read off its row")
        reduces = self.b.reduced or self.dims
        inner = self.b.reduce_index([self.shape[d] for d in self.dims], self.across) if reduces else ()
        full = list(kept)
        for d, i in zip(self.dims, inner):
            full[d] = i
        return tuple(full)

    def total(self, kind: str, v: str) -> str:
        return self.b.collect(kind, v) if self.across else self.b.reduce(kind, v)

    def n(self) -> str:
        return self.b.index(self.count, self.wide)

    def mean(self, v: str) -> str:
        return self.b.let("div", (self.b.reduce("sum", v), self.n()))


def _keep(n: Node, place: int, default: bool = False) -> bool:
    given = n.kwargs.get("keepdim", n.args[place] if len(n.args) > place else default)
    return bool(given)


def unreduce(index: Index, dims: Sequence[int], rank: int) -> Index:
    """Puts zeros back where a reduction without keepdim dropped dimensions."""
    rest = iter(index)
    return tuple(0 if d in dims else next(rest) for d in range(rank))


def reduction(kind: str, *, keep: int | None = 2, mean: bool = False) -> Rule:
    def rule(low: Lowering, n: Node) -> Value:
        x, b, result = low.of(n.args[0]), low.build, out_dtype(n)
        row = Row(low, n, x)
        wide = COMPUTE[result]
        kept = keep is not None and _keep(n, keep)

        def at(index: Index) -> str:
            full = index if kept else unreduce(index, row.dims, len(x.shape))
            if n in low.peaks:
                return b.result(b.let("peak", (b.cast(x.at((*full[:-1], b.innermost)), wide),), kind), result)
            v = row.total(kind, b.cast(x.at(row.along(full)), wide))
            return b.result(b.let("div", (v, b.index(row.count, wide))) if mean else v, result)

        return Value(shape(ops.tensor(n)), result, at)

    return rule


def _spread(low: Lowering, n: Node, at_root: bool) -> tuple[Value, ...]:
    """Var or std, and the mean: corrected by ``correction``."""
    x, b = low.of(n.args[0]), low.build
    row = Row(low, n, x)
    correction = n.kwargs.get("correction")
    correction = 1 if correction is None else correction
    kept = _keep(n, 99)

    def moments(index: Index) -> tuple[str, str]:
        v = x.at(row.along(index if kept else unreduce(index, row.dims, len(x.shape))))
        mean = row.mean(v)
        away = b.let("sub", (v, mean))
        total = b.reduce("sum", b.let("mul", (away, away)))
        freedom = b.let("max", (b.let("sub", (row.n(), num(b, float(correction), v))), num(b, 0, v)))  # type: ignore[arg-type]
        return b.let("div", (total, freedom)), mean

    first = n.meta["val"][0] if isinstance(n.meta["val"], (tuple, list)) else ops.tensor(n)

    def spread(index: Index) -> str:
        v = moments(index)[0]
        return b.result(b.let("sqrt", (v,)) if at_root else v, x.dtype)

    out = shape(first)
    return Value(out, x.dtype, spread), Value(out, x.dtype, lambda i: b.result(moments(i)[1], x.dtype))


def var(low: Lowering, n: Node) -> Value:
    return _spread(low, n, False)[0]


def std(low: Lowering, n: Node) -> Value:
    return _spread(low, n, True)[0]


def var_mean(low: Lowering, n: Node) -> tuple[Value, ...]:
    return _spread(low, n, False)


def softmax(low: Lowering, n: Node) -> Value:
    x, b, result = low.of(n.args[0]), low.build, out_dtype(n)
    row = Row(low, n, x)

    def at(index: Index) -> str:
        v, r = x.at(index), x.at(row.along(index))
        top = b.reduce("max", r)
        total = b.reduce("sum", b.let("exp", (b.let("sub", (r, top)),)))
        return b.result(b.let("div", (b.let("exp", (b.let("sub", (v, top)),)), total)), result)

    return Value(x.shape, result, at)


def log_softmax(low: Lowering, n: Node) -> Value:
    x, b, result = low.of(n.args[0]), low.build, out_dtype(n)
    row = Row(low, n, x)
    last = max(row.dims, default=0) == len(x.shape) - 1

    def at(index: Index) -> str:
        v, r = x.at(index), x.at(row.along(index))
        top = b.reduce("max", r)
        total = b.reduce("sum", b.let("exp", (b.let("sub", (r, top)),)))
        # ATen's CPU kernel for the last dimension keeps the sum and its logarithm in the dtype of the tensor
        kept = b.result if last and on_cpu(n) else lambda v, _: v
        logarithm = kept(b.let("log", (kept(total, x.dtype),)), x.dtype)
        return b.result(b.let("sub", (b.let("sub", (v, top)), logarithm)), result)

    return Value(x.shape, result, at)


def softmax_backward(low: Lowering, n: Node) -> Value:
    g, y, b, result = low.of(n.args[0]), low.of(n.args[1]), low.build, out_dtype(n)
    row = Row(low, n, g)

    def at(index: Index) -> str:
        along = row.along(index)
        total = b.reduce("sum", b.let("mul", (g.at(along), y.at(along))))
        return b.result(b.let("mul", (b.let("sub", (g.at(index), total)), y.at(index))), result)

    return Value(g.shape, result, at)


def log_softmax_backward(low: Lowering, n: Node) -> Value:
    g, y, b, result = low.of(n.args[0]), low.of(n.args[1]), low.build, out_dtype(n)
    row = Row(low, n, g)

    def at(index: Index) -> str:
        total = b.reduce("sum", g.at(row.along(index)))
        return b.result(b.let("sub", (g.at(index), b.let("mul", (b.let("exp", (y.at(index),)), total)))), result)

    return Value(g.shape, result, at)


def nll_forward(low: Lowering, n: Node) -> tuple[Value, ...]:
    """Loss of each row: minus the target's log-probability, computed at that place alone; ignored rows are 0."""
    logp, target = low.of(n.args[0]), low.of(n.args[1])
    ignore, b = n.args[4], low.build
    classes = logp.shape[1]
    assert isinstance(ignore, int)

    def at(index: Index) -> str:
        t = target.at(index[:1])
        counted = b.let("ne", (t, b.const(ignore, "i64")), dtype="b1")
        wanted = b.let("check", (b.let("where", (counted, t, b.const(0, "i64"))),), sympy.sympify(classes), "i64")
        picked = logp.at((index[0], sympy.Symbol(wanted, integer=True)))
        return b.result(b.let("where", (counted, b.let("neg", (picked,)), num(b, 0, picked))), logp.dtype)

    zero = Value((), logp.dtype, lambda _: b.const(0, COMPUTE[logp.dtype]))
    return Value(logp.shape[:1], logp.dtype, at), zero


def layer_norm(low: Lowering, n: Node) -> tuple[Value, ...]:
    x = low.of(n.args[0])
    weight, bias = (None if a is None else low.of(a) for a in n.args[2:4])
    eps, b = float(n.args[4]), low.build  # type: ignore[arg-type]
    row = Row(low, n, x)
    dtypes = [ops.SHORT[v.dtype] for v in n.meta["val"]]

    def stats(index: Index) -> tuple[str, str]:
        v = x.at(row.along(index))
        mean = row.mean(v)
        away = b.let("sub", (v, mean))
        variance = row.mean(b.let("mul", (away, away)))
        return mean, b.let("rsqrt", (b.let("add", (variance, num(b, eps, variance))),))

    def y(index: Index) -> str:
        mean, rstd = stats(index)
        v = b.let("mul", (b.let("sub", (x.at(index), mean)), rstd))
        if weight is not None:
            v = b.let("mul", (v, weight.at(broadcast(index, weight.shape))))
        if bias is not None:
            v = b.let("add", (v, bias.at(broadcast(index, bias.shape))))
        return b.result(v, dtypes[0])

    shapes = [shape(v) for v in n.meta["val"]]
    return (
        Value(shapes[0], dtypes[0], y),
        Value(shapes[1], dtypes[1], lambda i: b.result(stats(i)[0], dtypes[1])),
        Value(shapes[2], dtypes[2], lambda i: b.result(stats(i)[1], dtypes[2])),
    )


def layer_norm_backward(low: Lowering, n: Node) -> tuple[Value, ...]:
    """Dx (reduces rows), or dweight and dbias (reduce over rows): ``canonicalize`` asks for one or the other."""
    g, x, mean, rstd = (low.of(n.args[i]) for i in (0, 1, 3, 4))
    weight = None if n.args[5] is None else low.of(n.args[5])
    b, row = low.build, Row(low, n, x)

    def normal(index: Index) -> str:
        at = broadcast(index, mean.shape)
        return b.let("mul", (b.let("sub", (x.at(index), mean.at(at))), rstd.at(at)))

    def scaled(index: Index) -> str:
        v = g.at(index)
        return v if weight is None else b.let("mul", (v, weight.at(broadcast(index, weight.shape))))

    def dx(index: Index) -> str:
        along = row.along(index)
        first = row.mean(scaled(along))
        second = row.mean(b.let("mul", (scaled(along), normal(along))))
        centred = b.let("sub", (b.let("sub", (scaled(index), first)), b.let("mul", (normal(index), second))))
        return b.result(b.let("mul", (rstd.at(broadcast(index, rstd.shape)), centred)), g.dtype)

    rank, inner = len(x.shape), len(n.args[2])  # type: ignore[arg-type]
    outer = (0,) * (rank - inner)

    def dweight(index: Index) -> str:
        along = row.along((*outer, *index))
        return b.result(row.total("sum", b.let("mul", (g.at(along), normal(along)))), g.dtype)

    def dbias(index: Index) -> str:
        return b.result(row.total("sum", g.at(row.along((*outer, *index)))), g.dtype)

    dtypes = [g.dtype if v is None else ops.SHORT[v.dtype] for v in n.meta["val"]]
    if any(d != g.dtype for d in dtypes):
        raise Unlowerable("gradients of several dtypes")
    return (
        Value(x.shape, g.dtype, dx),
        Value(x.shape[rank - inner :], g.dtype, dweight),
        Value(x.shape[rank - inner :], g.dtype, dbias),
    )


def batch_norm(low: Lowering, n: Node) -> tuple[Value, ...]:
    """Training-mode batch norm: output, mean, 1/std of the batch, and the new running statistics."""
    x = low.of(n.args[0])
    weight, bias, run_mean, run_var = (None if a is None else low.of(a) for a in n.args[1:5])
    momentum, eps = float(n.args[6]), float(n.args[7])  # type: ignore[arg-type]
    b, row = low.build, Row(low, n, x)

    def moments(channel: Extent) -> tuple[str, str]:
        v = x.at(row.along((0, channel, *(0,) * (len(x.shape) - 2))))
        mean = row.mean(v)
        away = b.let("sub", (v, mean))
        return mean, b.reduce("sum", b.let("mul", (away, away)))

    def inverse(channel: Extent) -> str:
        variance = b.let("div", (moments(channel)[1], row.n()))
        return b.let("rsqrt", (b.let("add", (variance, num(b, eps, variance))),))

    def y(index: Index) -> str:
        c = index[1]
        v = b.let("mul", (b.let("sub", (x.at(index), moments(c)[0])), inverse(c)))
        if weight is not None:
            v = b.let("mul", (v, weight.at((c,))))
        return b.result(v if bias is None else b.let("add", (v, bias.at((c,)))), x.dtype)

    def moved(old: Value, new: str, at: Index) -> str:
        kept = b.let("mul", (num(b, 1 - momentum, new), old.at(at)))
        return b.result(b.let("add", (b.let("mul", (num(b, momentum, new), new)), kept)), old.dtype)

    def unbiased(channel: Extent) -> str:
        total = moments(channel)[1]
        return b.let("div", (total, b.let("sub", (row.n(), num(b, 1, total)))))

    s = x.shape[1:2]
    out = [
        Value(x.shape, x.dtype, y),
        Value(s, x.dtype, lambda i: moments(i[0])[0]),
        Value(s, x.dtype, lambda i: inverse(i[0])),
    ]
    if run_mean is not None and run_var is not None:
        out.append(Value(s, run_mean.dtype, lambda i: moved(run_mean, moments(i[0])[0], i)))
        out.append(Value(s, run_var.dtype, lambda i: moved(run_var, unbiased(i[0]), i)))
    return tuple(out)


def batch_norm_backward(low: Lowering, n: Node) -> tuple[Value, ...]:
    g, x = low.of(n.args[0]), low.of(n.args[1])
    weight = None if n.args[2] is None else low.of(n.args[2])
    mean, inverse = low.of(n.args[5]), low.of(n.args[6])
    b, row = low.build, Row(low, n, g)

    def sums(channel: Extent) -> tuple[str, str]:
        along = row.along((0, channel, *(0,) * (len(x.shape) - 2)))
        away = b.let("sub", (x.at(along), mean.at((channel,))))
        return b.reduce("sum", g.at(along)), b.reduce("sum", b.let("mul", (g.at(along), away)))

    def dx(index: Index) -> str:
        c = index[1]
        total, dot = sums(c)
        inv = inverse.at((c,))
        away = b.let("sub", (x.at(index), mean.at((c,))))
        slope = b.let("mul", (b.let("mul", (b.let("div", (dot, row.n())), inv)), inv))
        centred = b.let(
            "sub", (b.let("sub", (g.at(index), b.let("mul", (away, slope)))), b.let("div", (total, row.n())))
        )
        v = b.let("mul", (centred, inv))
        return b.result(v if weight is None else b.let("mul", (v, weight.at((c,)))), x.dtype)

    s = x.shape[1:2]
    return (
        Value(x.shape, x.dtype, dx),
        Value(s, x.dtype, lambda i: b.let("mul", (sums(i[0])[1], inverse.at(i)))),
        Value(s, x.dtype, lambda i: sums(i[0])[0]),
    )


def mse(low: Lowering, n: Node) -> Value:
    x, y, b = low.of(n.args[0]), low.of(n.args[1]), low.build
    row, mean = Row(low, n, x), len(n.args) < 3 or n.args[2] == 1

    def at(_: Index) -> str:
        along = row.along((0,) * len(x.shape))
        away = b.let("sub", (x.at(along), y.at(along)))
        total = b.reduce("sum", b.let("mul", (away, away)))
        return b.result(b.let("div", (total, row.n())) if mean else total, x.dtype)

    return Value((), x.dtype, at)


def logsumexp(low: Lowering, n: Node) -> Value:
    x, b, result = low.of(n.args[0]), low.build, out_dtype(n)
    row, kept = Row(low, n, x), _keep(n, 2)

    def at(index: Index) -> str:
        v = x.at(row.along(index if kept else unreduce(index, row.dims, len(x.shape))))
        top = b.reduce("max", v)
        # an infinite maximum would make inf - inf of it
        finite = b.let(
            "where", (b.let("eq", (b.let("abs", (top,)), num(b, float("inf"), top)), dtype="b1"), num(b, 0, top), top)
        )
        # ATen composes it of five operators, each of which rounds
        power = b.result(b.let("exp", (b.result(b.let("sub", (v, finite)), result),)), result)
        total = b.result(b.reduce("sum", power), result)
        return b.result(b.let("add", (b.result(b.let("log", (total,)), result), finite)), result)

    return Value(shape(ops.tensor(n)), result, at)


RULES: Mapping[str, Rule] = {
    "sum.default": reduction("sum", keep=None),
    "sum.dim_IntList": reduction("sum"),
    "mean.default": reduction("sum", keep=None, mean=True),
    "mean.dim": reduction("sum", mean=True),
    "prod.default": reduction("prod", keep=None),
    "prod.dim_int": reduction("prod"),
    "amax.default": reduction("max"),
    "amin.default": reduction("min"),
    "max.default": reduction("max", keep=None),
    "min.default": reduction("min", keep=None),
    "any.default": reduction("any", keep=None),
    "any.dim": reduction("any"),
    "any.dims": reduction("any"),
    "all.default": reduction("all", keep=None),
    "all.dim": reduction("all"),
    "all.dims": reduction("all"),
    "var.correction": var,
    "std.correction": std,
    "var_mean.correction": var_mean,
    "mse_loss.default": mse,
    "logsumexp.default": logsumexp,
    "_softmax.default": softmax,
    "_log_softmax.default": log_softmax,
    "_softmax_backward_data.default": softmax_backward,
    "_log_softmax_backward_data.default": log_softmax_backward,
    "nll_loss_forward.default": nll_forward,
    "native_layer_norm.default": layer_norm,
    "native_layer_norm_backward.default": layer_norm_backward,
    "_native_batch_norm_legit_functional.default": batch_norm,
    "native_batch_norm_backward.default": batch_norm_backward,
}
