"""What the larger ATen calls are in ONNX operators: products, convolutions, norms, attention, indices, pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from dsc import ops
from dsc.debug.dump.onnx import NoRule, Value, Values, Writer
from dsc.debug.dump.onnx_rules import Rule, arg, cut, dtype, given, pad, shape, whole

# --- products


def matmul(w: Writer, n: Node) -> Values:
    return str(w.op("MatMul", w.value(given(n)[0]), w.value(given(n)[1])))


def addmm(w: Writer, n: Node) -> Values:
    product = w.op("MatMul", w.value(given(n)[1]), w.value(given(n)[2]))
    bias = w.value(given(n)[0])
    if (alpha := n.kwargs.get("alpha", 1)) != 1:
        product = w.op("Mul", product, w.like(alpha, dtype(n)))
    if (beta := n.kwargs.get("beta", 1)) != 1:
        bias = w.op("Mul", bias, w.like(beta, dtype(n)))
    return str(w.op("Add", product, bias))


def convolution(w: Writer, n: Node) -> Values:
    x, weight, bias, stride, padding, dilation, transposed, more, groups = given(n)
    passed = [w.value(x), w.value(weight), *([w.value(bias)] if bias is not None else [])]
    kwargs: dict[str, Any] = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "group": groups}
    if transposed:
        return str(w.op("ConvTranspose", *passed, output_padding=list(more), **kwargs))
    return str(w.op("Conv", *passed, **kwargs))


def convolution_backward(w: Writer, n: Node) -> Values:
    """Of the input a transposed convolution; of the weight a convolution with strides and dilations exchanged."""
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = given(n)
    if transposed or (groups != 1 and wanted[1]):
        raise NoRule("grouped or transposed")
    s, p, d = (list(v) for v in (stride, padding, dilation))
    xs, ws, gs = (shape(ops.tensor(a)) for a in (x, weight, g))
    out: list[Value] = [None, None, None]
    rank = len(xs)
    pads = [*p, *p]
    if wanted[0]:
        rest = [xs[i + 2] - ((gs[i + 2] - 1) * s[i] - 2 * p[i] + d[i] * (ws[i + 2] - 1) + 1) for i in range(rank - 2)]
        kwargs: dict[str, Any] = {"strides": s, "pads": pads, "dilations": d, "group": groups, "output_padding": rest}
        out[0] = w.op("ConvTranspose", w.value(g), w.value(weight), **kwargs)
    if wanted[1]:
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
    if wanted[2]:
        out[2] = w.op("ReduceSum", w.value(g), w.ints(0, *range(2, rank)), keepdims=0)
    return out


# --- norms


def softmax(kind: str) -> Rule:
    return lambda w, n: str(w.op(kind, w.like(given(n)[0], dtype(n)), axis=int(given(n)[1])))


def layer_norm(w: Writer, n: Node) -> Values:
    x, normalized, weight, bias, epsilon = given(n)
    results = ops.value(n)
    assert isinstance(results, (list, tuple))
    of = results[0].dtype
    sizes = [int(s) for s in normalized]
    scale = w.value(weight) if weight is not None else w.op("Expand", w.constant(1.0, of), w.ints(*sizes))
    passed = [w.value(x), scale, *([w.value(bias)] if bias is not None else [])]
    return list(w.op("LayerNormalization", *passed, outputs=3, axis=-len(sizes), epsilon=epsilon))


def batch_norm(w: Writer, n: Node) -> Values:
    """In training: the output, the batch's mean and inverse deviation, and the new running mean and variance."""
    x, weight, bias, running_mean, running_var, training, momentum, epsilon = given(n)
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
        w.op("Add", w.op("Mul", w.value(old), w.constant(1 - momentum, of)), w.op("Mul", new, w.constant(momentum, of)))
        for old, new in ((running_mean, flat[0]), (running_var, unbiased))
    ]
    return [out, flat[0], flat[1], *running]


def cumsum(w: Writer, n: Node) -> Values:
    return str(w.op("CumSum", w.like(given(n)[0], dtype(n)), w.constant(given(n)[1], torch.int64)))


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
    passed = {p.name: p.default_value for p in parameters if p.has_default_value()}
    passed.update({p.name: a for p, a in zip(parameters, given(n))})
    passed.update(n.kwargs)
    if passed.get("dropout_p"):
        raise NoRule("random numbers")
    passed["mask"] = passed.get("attn_mask", passed.get("attn_bias"))
    return passed


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
    return str(w.op("Gather", w.value(given(n)[0]), w.value(given(n)[1]), axis=0))


def embedding_backward(w: Writer, n: Node) -> Values:
    rows, padding = given(n)[2], given(n)[3]
    whole(rows)
    g, index = ops.operand(n, 0), ops.operand(n, 1)
    if padding != -1 or given(n)[4]:
        raise NoRule("padding or scaled gradients")
    zeros = w.op("Expand", w.constant(0, dtype(n)), w.ints(*shape(ops.tensor(n))))
    where_ = w.op("Unsqueeze", w.cast(w.value(index), torch.int64, dtype(index)), w.ints(-1))
    return str(w.op("ScatterND", zeros, where_, w.value(g), reduction="add"))


def index_select(w: Writer, n: Node) -> Values:
    return str(w.op("Gather", w.value(given(n)[0]), w.value(given(n)[2]), axis=int(given(n)[1])))


def gather(w: Writer, n: Node) -> Values:
    return str(w.op("GatherElements", w.value(given(n)[0]), w.value(given(n)[2]), axis=int(given(n)[1])))


def scatter(w: Writer, n: Node) -> Values:
    x, dim, index, source = given(n)[:4]
    whole(dim)
    if isinstance(source, Node):
        passed = w.value(source)
    else:
        passed = w.op("Expand", w.like(source, dtype(n)), w.ints(*shape(ops.tensor(index))))
    kind = "add" if ops.name_of(n) == "scatter_add.default" else "none"
    return str(w.op("ScatterElements", w.value(x), w.value(index), passed, axis=dim, reduction=kind))


def index(w: Writer, n: Node) -> Values:
    """One index along one dimension."""
    passed = [(d, i) for d, i in enumerate(given(n)[1]) if i is not None]
    if len(passed) != 1 or dtype(passed[0][1]) is torch.bool:
        raise NoRule("several indices")
    return str(w.op("Gather", w.value(given(n)[0]), w.value(passed[0][1]), axis=passed[0][0]))


def nll_forward(w: Writer, n: Node) -> Values:
    """Without weights and reduction: the losses of the rows; ignored ones are zero."""
    logp, target, weight, reduction, ignored = given(n)
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
    window, stride = list(given(n)[1]), list(arg(n, 2, "stride", []) or given(n)[1])
    padding, dilation = list(arg(n, 3, "padding", [0, 0])), list(arg(n, 4, "dilation", [1, 1]))
    if x.dim() != 4 or arg(n, 5, "ceil_mode", False):
        raise NoRule("no batch, or rounded up")
    two = [v * 2 if len(v) == 1 else v for v in (window, stride, padding, dilation)]
    kwargs: dict[str, Any] = {
        "kernel_shape": two[0],
        "strides": two[1],
        "pads": [*two[2], *two[2]],
        "dilations": two[3],
    }
    made, where_ = w.op("MaxPool", w.value(given(n)[0]), outputs=2, **kwargs)
    plane = math.prod(shape(x)[2:])  # ONNX counts through the whole tensor, PyTorch in each plane
    return [made, w.op("Mod", where_, w.constant(plane, torch.int64))]


def max_pool_backward(w: Writer, n: Node) -> Values:
    g, where_ = given(n)[0], given(n)[-1]
    to, of = shape(ops.tensor(n)), shape(ops.tensor(ops.operand(n, 0)))
    if len(to) != 4:
        raise NoRule("no batch")
    zeros = w.op("Expand", w.constant(0, dtype(n)), w.ints(*to[:2], to[2] * to[3]))
    flat = w.ints(*of[:2], of[2] * of[3])
    passed = [w.op("Reshape", w.value(v), flat) for v in (where_, g)]
    made = w.op("ScatterElements", zeros, *passed, axis=2, reduction="add")
    return str(w.op("Reshape", made, w.ints(*to)))
