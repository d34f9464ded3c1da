"""What ATen calls are in ONNX operators: a rule a row.  A rule gives the names of its results, or raises ``NoRule``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from dsc import ops
from dsc.debug.dump.onnx import TYPES, NoRule, Value, Values, Writer

Rule = Callable[[Writer, Node], Values]


def arg(n: Node, place: int, name: str, default: Any = None) -> Any:
    """An argument by place or by name."""
    return n.args[place] if len(n.args) > place else n.kwargs.get(name, default)


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
    return lambda w, n: str(w.op(kind, w.like(n.args[0], dtype(n)), **attributes))


def binary(kind: str) -> Rule:
    """Operands in the result's dtype; ``alpha`` scales the second."""

    def rule(w: Writer, n: Node) -> Values:
        second = w.like(n.args[1], dtype(n))
        if (alpha := arg(n, 2, "alpha", 1)) != 1:
            second = w.op("Mul", second, w.constant(alpha, dtype(n)))
        return str(w.op(kind, w.like(n.args[0], dtype(n)), second))

    return rule


def divide(w: Writer, n: Node) -> Values:
    if n.kwargs.get("rounding_mode") is not None:
        raise NoRule("rounds")
    return str(w.op("Div", w.like(n.args[0], dtype(n)), w.like(n.args[1], dtype(n))))


def compare(kind: str, negated: bool = False) -> Rule:
    """In the dtype that PyTorch promotes the operands to."""

    def rule(w: Writer, n: Node) -> Values:
        fakes = [ops.value(a) if isinstance(a, Node) else a for a in n.args[:2]]
        common = torch.result_type(*fakes)  # type: ignore[call-overload]
        if common is torch.bool:
            common = torch.int32
        made = w.op(kind, w.like(n.args[0], common), w.like(n.args[1], common))
        return str(w.op("Not", made) if negated else made)

    return rule


def boolean(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        if dtype(n) is not torch.bool:
            raise NoRule("bits of integers")
        return str(w.op(kind, *(w.like(a, torch.bool) for a in n.args)))

    return rule


def where(w: Writer, n: Node) -> Values:
    return str(w.op("Where", w.value(n.args[0]), w.like(n.args[1], dtype(n)), w.like(n.args[2], dtype(n))))


def masked_fill(w: Writer, n: Node) -> Values:
    return str(w.op("Where", w.value(n.args[1]), w.like(n.args[2], dtype(n)), w.like(n.args[0], dtype(n))))


def clamp(w: Writer, n: Node) -> Values:
    made = w.like(n.args[0], dtype(n))
    for place, name, kind in ((1, "min", "Max"), (2, "max", "Min")):
        if (bound := arg(n, place, name)) is not None:
            made = w.op(kind, made, w.like(bound, dtype(n)))
    return made


def gelu(w: Writer, n: Node) -> Values:
    return str(w.op("Gelu", w.value(n.args[0]), approximate=str(arg(n, 1, "approximate", "none"))))


def silu(w: Writer, n: Node) -> Values:
    x = w.value(n.args[0])
    return str(w.op("Mul", x, w.op("Sigmoid", x)))


def rsqrt(w: Writer, n: Node) -> Values:
    return str(w.op("Reciprocal", w.op("Sqrt", w.like(n.args[0], dtype(n)))))


def rsub(w: Writer, n: Node) -> Values:
    return str(w.op("Sub", w.like(n.args[1], dtype(n)), w.like(n.args[0], dtype(n))))


def cast(w: Writer, n: Node) -> Values:
    return str(w.op("Cast", w.value(n.args[0]), to=TYPES[dtype(n)]))


def identity(w: Writer, n: Node) -> Values:
    return str(w.op("Identity", w.value(n.args[0])))


def copy(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.like(n.args[1], dtype(n)), w.ints(*shape(ops.tensor(n)))))


# --- shapes


def reshape(w: Writer, n: Node) -> Values:
    return str(w.op("Reshape", w.value(n.args[0]), w.ints(*shape(ops.tensor(n))), allowzero=1))


def expand(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.value(n.args[0]), w.ints(*shape(ops.tensor(n)))))


def transpose(w: Writer, n: Node) -> Values:
    rank = ops.tensor(n).dim()
    order = list(range(rank))
    match ops.name_of(n):
        case "permute.default":
            order = [int(d) % rank for d in n.args[1]]  # type: ignore[union-attr,arg-type]
        case "transpose.int":
            a, b = (int(d) % rank for d in n.args[1:3])  # type: ignore[arg-type]
            order[a], order[b] = b, a
        case _:
            order.reverse()
    return str(w.op("Transpose", w.value(n.args[0]), perm=order))


def cut(w: Writer, name: str, dim: int, start: int, end: int, step: int = 1) -> str:
    return str(w.op("Slice", name, w.ints(start), w.ints(end), w.ints(dim), w.ints(step)))


def slice_(w: Writer, n: Node) -> Values:
    x = ops.tensor(ops.operand(n, 0))
    dim = int(arg(n, 1, "dim", 0)) % x.dim()
    start, end, step = arg(n, 2, "start") or 0, arg(n, 3, "end"), arg(n, 4, "step", 1)
    whole(start, x.shape[dim], step, *([] if end is None else [end]))
    return cut(w, w.value(n.args[0]), dim, start, min(x.shape[dim], 2**62 if end is None else end), step)


def select(w: Writer, n: Node) -> Values:
    rank = ops.tensor(ops.operand(n, 0)).dim()
    whole(n.args[2])
    return str(w.op("Gather", w.value(n.args[0]), w.constant(n.args[2], torch.int64), axis=int(n.args[1]) % rank))  # type: ignore[call-overload]


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
        out.append(cut(w, w.value(n.args[0]), dim, start, end))
        start = end
    return out


def unbind(w: Writer, n: Node) -> Values:
    x = ops.tensor(ops.operand(n, 0))
    dim = int(arg(n, 1, "dim", 0)) % x.dim()
    return [str(w.op("Gather", w.value(n.args[0]), w.constant(i, torch.int64), axis=dim)) for i in range(shape(x)[dim])]


def cat(w: Writer, n: Node) -> Values:
    parts = [a for a in n.args[0] if ops.tensor(a).shape != (0,)]  # type: ignore[union-attr,arg-type]
    dim = int(arg(n, 1, "dim", 0)) % ops.tensor(n).dim()
    return str(w.op("Concat", *(w.like(a, dtype(n)) for a in parts), axis=dim))


def stack(w: Writer, n: Node) -> Values:
    dim = int(arg(n, 1, "dim", 0)) % ops.tensor(n).dim()
    parts = [w.op("Unsqueeze", w.value(a), w.ints(dim)) for a in n.args[0]]  # type: ignore[union-attr]
    return str(w.op("Concat", *parts, axis=dim))


def pad(w: Writer, name: str, before: Sequence[int], after: Sequence[int], of: torch.dtype, fill: float = 0) -> str:
    return str(w.op("Pad", name, w.ints(*before, *after), w.constant(fill, of)))


def slice_backward(w: Writer, n: Node) -> Values:
    size, dim, start, _, step = n.args[1:6]
    whole(*size, start, step)  # type: ignore[misc]
    piece, full = shape(ops.tensor(ops.operand(n, 0))), shape(ops.tensor(n))
    d = int(dim) % len(full)  # type: ignore[call-overload]
    if step != 1:
        raise NoRule("steps")
    first = int(start) % full[d] if int(start) < 0 else int(start)  # type: ignore[call-overload]
    before = [first if i == d else 0 for i in range(len(full))]
    after = [full[i] - piece[i] - before[i] for i in range(len(full))]
    return pad(w, w.value(n.args[0]), before, after, dtype(n))


def select_backward(w: Writer, n: Node) -> Values:
    full = shape(ops.tensor(n))
    d, index = int(n.args[2]) % len(full), int(n.args[3]) % full[int(n.args[2])]  # type: ignore[call-overload]
    piece = w.op("Unsqueeze", w.value(n.args[0]), w.ints(d))
    before = [index if i == d else 0 for i in range(len(full))]
    after = [full[d] - 1 - index if i == d else 0 for i in range(len(full))]
    return pad(w, piece, before, after, dtype(n))


def constant_pad(w: Writer, n: Node) -> Values:
    sizes, rank = list(n.args[1]), ops.tensor(n).dim()  # type: ignore[arg-type]
    whole(*sizes)
    before, after = [0] * rank, [0] * rank
    for i in range(len(sizes) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = sizes[2 * i], sizes[2 * i + 1]
    return pad(w, w.value(n.args[0]), before, after, dtype(n), arg(n, 2, "value", 0))


def tril(upper: int) -> Rule:
    return lambda w, n: str(
        w.op("Trilu", w.value(n.args[0]), w.constant(arg(n, 1, "diagonal", 0), torch.int64), upper=upper)
    )


def full(fill: float | None) -> Rule:
    """A tensor of one number; ``fill`` None: it is an argument."""

    def rule(w: Writer, n: Node) -> Values:
        name = ops.name_of(n)
        value = (
            fill
            if fill is not None
            else n.args[0]
            if name == "scalar_tensor.default"
            else n.args[-1 if name.startswith("full") and len(n.args) < 3 else 1]
        )
        if not isinstance(value, bool | int | float):
            raise NoRule("a number that is a symbol")
        return str(w.op("Expand", w.constant(value, dtype(n)), w.ints(*shape(ops.tensor(n)))))

    return rule


def new_full(w: Writer, n: Node) -> Values:
    return str(w.op("Expand", w.constant(n.args[2], dtype(n)), w.ints(*shape(ops.tensor(n)))))


def arange(w: Writer, n: Node) -> Values:
    whole(*n.args)
    return str(w.op("Identity", w.constant(torch.arange(*n.args).tolist(), dtype(n))))  # type: ignore[call-overload]


# --- products


def matmul(w: Writer, n: Node) -> Values:
    return str(w.op("MatMul", w.value(n.args[0]), w.value(n.args[1])))


def addmm(w: Writer, n: Node) -> Values:
    product = w.op("MatMul", w.value(n.args[1]), w.value(n.args[2]))
    bias = w.value(n.args[0])
    if (alpha := n.kwargs.get("alpha", 1)) != 1:
        product = w.op("Mul", product, w.like(alpha, dtype(n)))
    if (beta := n.kwargs.get("beta", 1)) != 1:
        bias = w.op("Mul", bias, w.like(beta, dtype(n)))
    return str(w.op("Add", product, bias))


def convolution(w: Writer, n: Node) -> Values:
    x, weight, bias, stride, padding, dilation, transposed, more, groups = n.args
    given = [w.value(x), w.value(weight), *([w.value(bias)] if bias is not None else [])]
    kwargs = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "group": groups}  # type: ignore[misc]
    if transposed:
        return str(w.op("ConvTranspose", *given, output_padding=list(more), **kwargs))  # type: ignore[call-overload]
    return str(w.op("Conv", *given, **kwargs))


def convolution_backward(w: Writer, n: Node) -> Values:
    """Of the input a transposed convolution; of the weight a convolution with strides and dilations exchanged."""
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = n.args
    if transposed or (groups != 1 and wanted[1]):  # type: ignore[index]
        raise NoRule("grouped or transposed")
    s, p, d = (list(v) for v in (stride, padding, dilation))  # type: ignore[arg-type]
    xs, ws, gs = (shape(ops.tensor(a)) for a in (x, weight, g))  # type: ignore[arg-type]
    out: list[Value] = [None, None, None]
    rank = len(xs)
    pads = [*p, *p]
    if wanted[0]:  # type: ignore[index]
        rest = [xs[i + 2] - ((gs[i + 2] - 1) * s[i] - 2 * p[i] + d[i] * (ws[i + 2] - 1) + 1) for i in range(rank - 2)]
        kwargs = {"strides": s, "pads": pads, "dilations": d, "group": groups, "output_padding": rest}
        out[0] = w.op("ConvTranspose", w.value(g), w.value(weight), **kwargs)
    if wanted[1]:  # type: ignore[index]
        swap = [1, 0, *range(2, rank)]
        a, b = (w.op("Transpose", w.value(v), perm=swap) for v in (x, g))
        made = w.op("Conv", a, b, strides=d, dilations=s, pads=pads)
        made = w.op(
            "Slice",
            made,
            w.ints(*[0] * (rank - 2)),
            w.ints(*ws[2:]),
            w.ints(*range(2, rank)),
            w.ints(*[1] * (rank - 2)),
        )
        out[1] = w.op("Transpose", made, perm=swap)
    if wanted[2]:  # type: ignore[index]
        out[2] = w.op("ReduceSum", w.value(g), w.ints(0, *range(2, rank)), keepdims=0)
    return out


# --- reductions


def reduce(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        x = ops.operand(n, 0)
        place = {"sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "prod.dim_int"}
        kept = bool(arg(n, 2, "keepdim", False)) if ops.name_of(n) in place else False
        axes = ops.reduced_dims(n)
        given = w.like(x, dtype(n))
        if not axes:
            return str(w.op("Identity", given))
        return str(w.op(kind, given, w.ints(*axes), keepdims=int(kept)))

    return rule


def any_all(kind: str) -> Rule:
    def rule(w: Writer, n: Node) -> Values:
        axes = ops.reduced_dims(n)
        kept = bool(arg(n, 2, "keepdim", False)) if len(n.args) > 1 else False
        whole_ = w.cast(w.cast(w.value(n.args[0]), torch.bool), torch.int32)
        made = w.op(kind, whole_, w.ints(*axes), keepdims=int(kept)) if axes else whole_
        return w.cast(made, torch.bool)

    return rule


def softmax(kind: str) -> Rule:
    return lambda w, n: str(w.op(kind, w.like(n.args[0], dtype(n)), axis=int(n.args[1])))  # type: ignore[call-overload]


def layer_norm(w: Writer, n: Node) -> Values:
    x, normalized, weight, bias, epsilon = n.args
    results = ops.value(n)
    assert isinstance(results, (list, tuple))
    of = results[0].dtype
    sizes = [int(s) for s in normalized]  # type: ignore[union-attr,arg-type]
    scale = w.value(weight) if weight is not None else w.op("Expand", w.constant(1.0, of), w.ints(*sizes))
    given = [w.value(x), scale, *([w.value(bias)] if bias is not None else [])]
    return list(w.op("LayerNormalization", *given, outputs=3, axis=-len(sizes), epsilon=epsilon))


def batch_norm(w: Writer, n: Node) -> Values:
    """In training: the output, the batch's mean and inverse deviation, and the new running mean and variance."""
    x, weight, bias, running_mean, running_var, training, momentum, epsilon = n.args
    if not training:
        raise NoRule("running statistics")
    of, size = dtype(ops.operand(n, 0)), shape(ops.tensor(ops.operand(n, 0)))
    axes = [0, *range(2, len(size))]
    count, across = math.prod(size) / size[1], [1, size[1], *[1] * (len(size) - 2)]
    mean = w.op("ReduceMean", w.value(x), w.ints(*axes), keepdims=1)
    centred = w.op("Sub", w.value(x), mean)
    var = w.op("ReduceMean", w.op("Mul", centred, centred), w.ints(*axes), keepdims=1)
    inverse = w.op("Reciprocal", w.op("Sqrt", w.op("Add", var, w.constant(epsilon, of))))
    out = w.op("Mul", centred, inverse)
    if weight is not None:
        out = w.op("Mul", out, w.op("Reshape", w.value(weight), w.ints(*across)))
    if bias is not None:
        out = w.op("Add", out, w.op("Reshape", w.value(bias), w.ints(*across)))
    flat = [w.op("Reshape", v, w.ints(size[1])) for v in (mean, inverse, var)]
    unbiased = w.op("Mul", flat[2], w.constant(count / max(count - 1, 1), of))
    running = [
        w.op("Add", w.op("Mul", w.value(old), w.constant(1 - momentum, of)), w.op("Mul", new, w.constant(momentum, of)))  # type: ignore[operator]
        for old, new in ((running_mean, flat[0]), (running_var, unbiased))
    ]
    return [out, flat[0], flat[1], *running]


def cumsum(w: Writer, n: Node) -> Values:
    return str(w.op("CumSum", w.like(n.args[0], dtype(n)), w.constant(n.args[1], torch.int64)))


# --- attention


def scores(w: Writer, q: Node, k: Node, causal: object, mask: object, scale: object) -> str:
    """``q k^T / sqrt(width)`` with what is masked at minus infinity."""
    of = dtype(q)
    rank, width = ops.tensor(q).dim(), shape(ops.tensor(q))[-1]
    factor = float(scale) if isinstance(scale, float) else 1 / math.sqrt(width)
    across = [*range(rank - 2), rank - 1, rank - 2]
    made = w.op("MatMul", w.value(q), w.op("Transpose", w.value(k), perm=across))
    made = w.op("Mul", made, w.constant(factor, of))
    if causal:
        rows, columns = shape(ops.tensor(q))[-2], shape(ops.tensor(k))[-2]
        ones = w.op("Expand", w.constant(1, torch.int32), w.ints(rows, columns))
        seen = w.cast(w.op("Trilu", ones, upper=0), torch.bool)
        made = w.op("Where", seen, made, w.constant(float("-inf"), of))
    if mask is not None:
        made = w.op("Add", made, w.like(mask, of))
    return str(made)


def attention_arguments(n: Node) -> dict[str, Any]:
    """By the names of the schema, which differ between kernels."""
    assert isinstance(n.target, torch._ops.OpOverload)
    parameters = n.target._schema.arguments
    given = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given.update({p.name: a for p, a in zip(parameters, n.args)})
    given.update(n.kwargs)
    if given.get("dropout_p"):
        raise NoRule("random numbers")
    given["mask"] = given.get("attn_mask", given.get("attn_bias"))
    return given


def attention(w: Writer, n: Node) -> Values:
    """The output and the logarithm of the sums; what else the kernel hands to its backward is zero."""
    a = attention_arguments(n)
    results = ops.value(n)
    assert isinstance(results, (list, tuple))
    q, k, v = a["query"], a["key"], a["value"]
    made = scores(w, q, k, a["is_causal"], a["mask"], a.get("scale"))
    sums = w.op("ReduceLogSumExp", made, w.ints(-1), keepdims=1)
    out: list[Value] = [w.op("MatMul", w.op("Exp", w.op("Sub", made, sums)), w.value(v))]
    flat = w.op("Squeeze", w.cast(sums, results[1].dtype, dtype(q)), w.ints(-1))
    rows, kept = shape(ops.tensor(q))[-2], shape(results[1])
    if kept and kept[-1] > rows:
        zeros = [0] * len(kept)
        flat = pad(w, flat, zeros, [*zeros[:-1], kept[-1] - rows], results[1].dtype)
    out.append(flat)
    for t in results[2:]:
        filled = isinstance(t, torch.Tensor)
        out.append(w.op("Expand", w.constant(0, t.dtype), w.ints(*shape(t))) if filled else None)
    return out


def attention_backward(w: Writer, n: Node) -> Values:
    """``dS = P (dP - sum(dO O))``: Dao et al., "FlashAttention", 2022, section 3.1."""
    a = attention_arguments(n)
    g = a.get("grad_out", a.get("grad_out_"))
    q, k, v, o, sums = (a[name] for name in ("query", "key", "value", "out", "logsumexp"))
    of, rows = dtype(q), shape(ops.tensor(q))[-2]
    rank, width = ops.tensor(q).dim(), shape(ops.tensor(q))[-1]
    factor = float(a["scale"]) if a.get("scale") is not None else 1 / math.sqrt(width)
    across = [*range(rank - 2), rank - 1, rank - 2]
    sized = w.op("Unsqueeze", cut(w, w.value(sums), rank - 2, 0, rows), w.ints(-1))
    p = w.op("Exp", w.op("Sub", scores(w, q, k, a["is_causal"], a["mask"], a.get("scale")), w.cast(sized, of)))
    dv = w.op("MatMul", w.op("Transpose", p, perm=across), w.value(g))
    dp = w.op("MatMul", w.value(g), w.op("Transpose", w.value(v), perm=across))
    delta = w.op("ReduceSum", w.op("Mul", w.value(g), w.value(o)), w.ints(-1), keepdims=1)
    ds = w.op("Mul", w.op("Mul", p, w.op("Sub", dp, delta)), w.constant(factor, of))
    dq = w.op("MatMul", ds, w.value(k))
    dk = w.op("MatMul", w.op("Transpose", ds, perm=across), w.value(q))
    results = ops.value(n)
    assert isinstance(results, (list, tuple))
    return [dq, dk, dv, *([None] * (len(results) - 3))]


# --- indices


def embedding(w: Writer, n: Node) -> Values:
    return str(w.op("Gather", w.value(n.args[0]), w.value(n.args[1]), axis=0))


def embedding_backward(w: Writer, n: Node) -> Values:
    rows, padding = n.args[2], n.args[3]
    whole(rows)
    g, index = ops.operand(n, 0), ops.operand(n, 1)
    if padding != -1 or n.args[4]:
        raise NoRule("padding or scaled gradients")
    zeros = w.op("Expand", w.constant(0, dtype(n)), w.ints(*shape(ops.tensor(n))))
    where_ = w.op("Unsqueeze", w.cast(w.value(index), torch.int64, dtype(index)), w.ints(-1))
    return str(w.op("ScatterND", zeros, where_, w.value(g), reduction="add"))


def index_select(w: Writer, n: Node) -> Values:
    return str(w.op("Gather", w.value(n.args[0]), w.value(n.args[2]), axis=int(n.args[1])))  # type: ignore[call-overload]


def gather(w: Writer, n: Node) -> Values:
    return str(w.op("GatherElements", w.value(n.args[0]), w.value(n.args[2]), axis=int(n.args[1])))  # type: ignore[call-overload]


def scatter(w: Writer, n: Node) -> Values:
    x, dim, index, source = n.args[:4]
    whole(dim)
    if isinstance(source, Node):
        given = w.value(source)
    else:
        given = w.op("Expand", w.like(source, dtype(n)), w.ints(*shape(ops.tensor(index))))  # type: ignore[arg-type]
    kind = "add" if ops.name_of(n) == "scatter_add.default" else "none"
    return str(w.op("ScatterElements", w.value(x), w.value(index), given, axis=dim, reduction=kind))


def index(w: Writer, n: Node) -> Values:
    """One index along one dimension."""
    given = [(d, i) for d, i in enumerate(n.args[1]) if i is not None]  # type: ignore[arg-type,var-annotated]
    if len(given) != 1 or dtype(given[0][1]) is torch.bool:
        raise NoRule("several indices")
    return str(w.op("Gather", w.value(n.args[0]), w.value(given[0][1]), axis=given[0][0]))


def nll_forward(w: Writer, n: Node) -> Values:
    """Without weights and reduction: the losses of the rows; ignored ones are zero."""
    logp, target, weight, reduction, ignored = n.args
    if weight is not None or reduction != 0 or ops.tensor(ops.operand(n, 0)).dim() != 2:
        raise NoRule("weighted")
    of = dtype(ops.operand(n, 0))
    keep = w.op("Not", w.op("Equal", w.value(target), w.constant(ignored, torch.int64)))
    safe = w.op("Where", keep, w.value(target), w.constant(0, torch.int64))
    taken = w.op("GatherElements", w.value(logp), w.op("Unsqueeze", safe, w.ints(1)), axis=1)
    loss = w.op("Neg", w.op("Squeeze", taken, w.ints(1)))
    return [w.op("Where", keep, loss, w.constant(0.0, of)), w.constant(0.0, of)]


# --- pooling


def max_pool(w: Writer, n: Node) -> Values:
    x = ops.tensor(ops.operand(n, 0))
    window, stride = list(n.args[1]), list(arg(n, 2, "stride", []) or n.args[1])  # type: ignore[arg-type]
    padding, dilation = list(arg(n, 3, "padding", [0, 0])), list(arg(n, 4, "dilation", [1, 1]))
    if x.dim() != 4 or arg(n, 5, "ceil_mode", False):
        raise NoRule("no batch, or rounded up")
    two = [v * 2 if len(v) == 1 else v for v in (window, stride, padding, dilation)]
    kwargs = {"kernel_shape": two[0], "strides": two[1], "pads": [*two[2], *two[2]], "dilations": two[3]}
    made, where_ = w.op("MaxPool", w.value(n.args[0]), outputs=2, **kwargs)
    plane = math.prod(shape(x)[2:])  # ONNX counts through the whole tensor, PyTorch in each plane
    return [made, w.op("Mod", where_, w.constant(plane, torch.int64))]


def max_pool_backward(w: Writer, n: Node) -> Values:
    g, where_ = n.args[0], n.args[-1]
    to, of = shape(ops.tensor(n)), shape(ops.tensor(ops.operand(n, 0)))
    if len(to) != 4:
        raise NoRule("no batch")
    zeros = w.op("Expand", w.constant(0, dtype(n)), w.ints(*to[:2], to[2] * to[3]))
    flat = w.ints(*of[:2], of[2] * of[3])
    given = [w.op("Reshape", w.value(v), flat) for v in (where_, g)]
    made = w.op("ScatterElements", zeros, *given, axis=2, reduction="add")
    return str(w.op("Reshape", made, w.ints(*to)))


SAME = {"Add": "add", "Sub": "sub", "Mul": "mul"}
COMPARE = {"eq": ("Equal", False), "ne": ("Equal", True), "lt": ("Less", False), "le": ("LessOrEqual", False),
           "gt": ("Greater", False), "ge": ("GreaterOrEqual", False)}  # fmt: skip
UNARY = {
    "neg": "Neg", "abs": "Abs", "reciprocal": "Reciprocal", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "sin": "Sin",
    "cos": "Cos", "tanh": "Tanh", "erf": "Erf", "sigmoid": "Sigmoid", "floor": "Floor", "ceil": "Ceil", "round": "Round",
    "relu": "Relu",
}  # fmt: skip
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
}
RESHAPES = "view _unsafe_view reshape unsqueeze squeeze squeeze.dim squeeze.dims _reshape_alias flatten.using_ints"

RULES: Mapping[str, Rule] = {
    **{f"{a}.{o}": binary(kind) for kind, a in SAME.items() for o in ("Tensor", "Scalar")},
    **{f"div.{o}": divide for o in ("Tensor", "Scalar")},
    **{f"{a}.{o}": compare(*to) for a, to in COMPARE.items() for o in ("Tensor", "Scalar")},
    **{f"{a}.default": unary(kind) for a, kind in UNARY.items()},
    **{f"pow.{o}": binary("Pow") for o in ("Tensor_Scalar", "Tensor_Tensor")},
    "maximum.default": binary("Max"), "minimum.default": binary("Min"),
    "logical_and.default": boolean("And"), "logical_or.default": boolean("Or"), "logical_xor.default": boolean("Xor"),
    "bitwise_and.Tensor": boolean("And"), "bitwise_or.Tensor": boolean("Or"), "bitwise_xor.Tensor": boolean("Xor"),
    "logical_not.default": boolean("Not"), "bitwise_not.default": boolean("Not"),
    "where.self": where, "masked_fill.Scalar": masked_fill, "masked_fill.Tensor": masked_fill,
    "clamp.default": clamp, "gelu.default": gelu, "silu.default": silu, "rsqrt.default": rsqrt, "rsub.Scalar": rsub,
    "_to_copy.default": cast, "clone.default": identity, "detach.default": identity, "alias.default": identity,
    "contiguous.default": identity, "lift_fresh_copy.default": identity, "copy_.default": copy, "copy.default": copy,
    **{(o if "." in o else f"{o}.default"): reshape for o in RESHAPES.split()},
    "expand.default": expand, "permute.default": transpose, "transpose.int": transpose, "t.default": transpose,
    "slice.Tensor": slice_, "select.int": select, "unbind.int": unbind, "cat.default": cat, "stack.default": stack,
    "split.Tensor": pieces, "split_with_sizes.default": pieces, "chunk.default": pieces,
    "slice_backward.default": slice_backward, "select_backward.default": select_backward,
    "constant_pad_nd.default": constant_pad, "tril.default": tril(0), "triu.default": tril(1),
    "full.default": full(None), "full_like.default": full(None), "scalar_tensor.default": full(None),
    "zeros.default": full(0), "zeros_like.default": full(0), "new_zeros.default": full(0),
    "ones.default": full(1), "ones_like.default": full(1), "new_ones.default": full(1), "new_full.default": new_full,
    "arange.default": arange, "arange.start": arange, "arange.start_step": arange,
    "mm.default": matmul, "bmm.default": matmul, "addmm.default": addmm, "baddbmm.default": addmm,
    "convolution.default": convolution, "convolution_backward.default": convolution_backward,
    "sum.default": reduce("ReduceSum"), "sum.dim_IntList": reduce("ReduceSum"),
    "mean.default": reduce("ReduceMean"), "mean.dim": reduce("ReduceMean"),
    "amax.default": reduce("ReduceMax"), "amin.default": reduce("ReduceMin"),
    "max.default": reduce("ReduceMax"), "min.default": reduce("ReduceMin"),
    "any.default": any_all("ReduceMax"), "any.dim": any_all("ReduceMax"),
    "all.default": any_all("ReduceMin"), "all.dim": any_all("ReduceMin"),
    "_softmax.default": softmax("Softmax"), "_log_softmax.default": softmax("LogSoftmax"),
    "native_layer_norm.default": layer_norm, "_native_batch_norm_legit_functional.default": batch_norm, "cumsum.default": cumsum,
    **{f"{a}.default": attention for a in ATTENTION}, **{f"{a}_backward.default": attention_backward for a in ATTENTION},
    "embedding.default": embedding, "embedding_dense_backward.default": embedding_backward,
    "index_select.default": index_select, "gather.default": gather, "index.Tensor": index,
    "scatter.value": scatter, "scatter.src": scatter, "scatter_add.default": scatter,
    "nll_loss_forward.default": nll_forward,
    "max_pool2d_with_indices.default": max_pool, "max_pool2d_with_indices_backward.default": max_pool_backward,
}  # fmt: skip
"""ATen operator -> rule."""
