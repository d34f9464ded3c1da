"""What each pointwise operator computes at one index.  A new op is a new row.

As in ATen's CPU kernels, a low-precision op computes in f32 and rounds once at its end; scalars of mul and div stay in the
wider dtype, those of other ops are rounded first.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch.fx import Node

from dsc import domain, ops
from dsc.codegen import formulas
from dsc.codegen.builder import Builder
from dsc.codegen.elementwise import broadcast, elementwise, on_cpu, out_dtype
from dsc.codegen.formulas import Formula, num, op
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPARISONS
from dsc.codegen.lower import Lowering, Rule, Value, size
from dsc.domain import shape


def simple(formula: Formula, count: int | None = None) -> Rule:
    return lambda low, n: elementwise(low, n, n.args[:count], formula)


def scaled(formula: Formula) -> Rule:
    """Mul and div: ATen's CPU kernels take their second operand in f32 if it is a scalar, its CUDA kernels either."""

    def rule(low: Lowering, n: Node) -> Value:
        return elementwise(low, n, n.args[:2], formula, opmath=(1,) if on_cpu(n) else (0, 1))

    return rule


def unary(name: str) -> Rule:
    return simple(op(name), 1)


def add(name: str, *, swap: bool = False) -> Rule:
    """``x + alpha*y`` and its kin."""

    def rule(low: Lowering, n: Node) -> Value:
        alpha = n.kwargs.get("alpha", n.args[2] if len(n.args) > 2 else 1)

        def formula(b: Builder, x: str, y: str) -> str:
            x, y = (y, x) if swap else (x, y)
            if alpha != 1:
                factor = _scalar(b, alpha, y)
                y = b.let("mul", (y, b.rounded(factor, out_dtype(n)) if on_cpu(n) else factor))
            return b.let(name, (x, y))

        # ATen's CPU kernels take the scalar of a sum in the tensors' dtype, its CUDA kernels in f32
        return elementwise(low, n, n.args[:2], formula, opmath=() if on_cpu(n) else (0, 1))

    return rule


def _scalar(b: Builder, x: object, like: str) -> str:
    if isinstance(x, Node):
        return b.index(size(x), b.by_name[like].dtype)
    assert isinstance(x, (int, float))
    return num(b, x, like)


def with_value(formula: Formula) -> Rule:
    """Addcmul and addcdiv: a keyword ``value``."""

    def rule(low: Lowering, n: Node) -> Value:
        value = n.kwargs.get("value", 1)
        return elementwise(low, n, n.args[:3], lambda b, x, y, z: formula(b, x, y, z, _scalar(b, value, x)))

    return rule


def gelu(low: Lowering, n: Node) -> Value:
    return elementwise(low, n, n.args[:1], formulas.gelu(str(n.kwargs.get("approximate", "none"))))


def gelu_backward(low: Lowering, n: Node) -> Value:
    return elementwise(low, n, n.args[:2], formulas.gelu_backward(str(n.kwargs.get("approximate", "none"))))


def power(low: Lowering, n: Node) -> Value:
    special = formulas.power(n.args[1], out_dtype(n), on_cpu(n))
    if special is not None:
        return elementwise(low, n, n.args[:1], special)
    return elementwise(low, n, n.args[:2], op("pow"), inner=out_dtype(n))


def clamp(low: Lowering, n: Node) -> Value:
    bounds = [*n.args[1:], *(None for _ in range(3 - len(n.args)))]
    least, most = n.kwargs.get("min", bounds[0]), n.kwargs.get("max", bounds[1])
    given = [("max", least), ("min", most)]
    used = [(name, v) for name, v in given if v is not None]

    def formula(b: Builder, x: str, *limits: str) -> str:
        for (name, _), limit in zip(used, limits):
            x = b.let(name, (x, limit))
        return x

    return elementwise(low, n, [n.args[0], *(v for _, v in used)], formula, inner=out_dtype(n))


def bound(name: str) -> Rule:
    return lambda low, n: elementwise(low, n, n.args[:2], op(name), inner=out_dtype(n))


def logical(name: str) -> Rule:
    return lambda low, n: elementwise(low, n, n.args, op(name), inner="b1")


def where(low: Lowering, n: Node) -> Value:
    b, (condition, x, y) = low.build, (low.of(a) for a in n.args)
    result = out_dtype(n)

    def at(index: Index) -> str:
        c = b.cast(condition.at(broadcast(index, condition.shape)), "b1")
        p, q = (b.rounded(v.at(broadcast(index, v.shape)), result) for v in (x, y))
        return b.result(b.let("where", (c, p, q)), result)

    return Value(shape(ops.tensor(n)), result, at)


def masked_fill(low: Lowering, n: Node) -> Value:
    x, mask, fill = (low.of(a) for a in n.args)
    b, result = low.build, out_dtype(n)

    def at(index: Index) -> str:
        c = mask.at(broadcast(index, mask.shape))
        p, q = (b.rounded(v.at(broadcast(index, v.shape)), result) for v in (fill, x))
        return b.result(b.let("where", (c, p, q)), result)

    return Value(shape(ops.tensor(n)), result, at)


def copy(low: Lowering, n: Node) -> Value:
    """clone, _to_copy: the same number in the result's dtype.  An explicit cast always rounds."""
    b, x, result = low.build, low.of(n.args[0]), out_dtype(n)
    explicit = x.dtype != result
    return Value(x.shape, result, lambda i: b.rounded(x.at(i), result) if explicit else b.result(x.at(i), result))


def copy_into(low: Lowering, n: Node) -> Value:
    """``copy(dst, src)``: src broadcast to dst's shape and dtype."""
    b, x, result = low.build, low.of(n.args[1]), out_dtype(n)
    return Value(shape(ops.tensor(n)), result, lambda i: b.rounded(x.at(broadcast(i, x.shape)), result))


def sigmoid_backward(low: Lowering, n: Node) -> Value:
    """ATen's CPU kernel rounds every step in f16, and none in bf16."""
    stepwise = out_dtype(n) == "f16" and on_cpu(n)

    def formula(b: Builder, g: str, y: str) -> str:
        return formulas.sigmoid_backward(b, g, y, (lambda v: b.result(v, "f16")) if stepwise else lambda v: v)

    return elementwise(low, n, n.args[:2], formula)


def native_dropout_backward(low: Lowering, n: Node) -> Value:
    scale = n.args[2]

    def formula(b: Builder, g: str, mask: str) -> str:
        return b.let("mul", (b.let("mul", (g, mask)), _scalar(b, scale, g)))

    return elementwise(low, n, n.args[:2], formula, inner=out_dtype(n))


def mse_backward(low: Lowering, n: Node) -> Value:
    x = ops.tensor(ops.operand(n, 1))
    mean = n.args[3] == 1

    def formula(b: Builder, g: str, p: str, q: str) -> str:
        norm = num(b, 2, g)
        if mean:
            norm = b.let("div", (norm, b.index(domain.product(shape(x)), b.by_name[g].dtype)))
        return b.let("mul", (b.let("mul", (norm, b.let("sub", (p, q)))), g))

    return elementwise(low, n, n.args[:3], formula)


def nll_backward(low: Lowering, n: Node) -> Value:
    """``-grad`` at the target's class, 0 elsewhere; ignored rows are 0.  Divided by the weight if the loss was a mean."""
    grad, target, weight = low.of(n.args[0]), low.of(n.args[2]), low.of(n.args[6])
    reduction, ignore = n.args[4], n.args[5]
    b, result = low.build, out_dtype(n)

    def at(index: Index) -> str:
        t = target.at(index[:1])
        counted = b.let("ne", (t, b.const(int(ignore), "i64")), dtype="b1")  # type: ignore[arg-type]
        here = b.let("eq", (b.index(index[1]), t), dtype="b1")
        g = b.let("neg", (grad.at(index[:1] if reduction == 0 else ()),))
        if reduction == 1:
            g = b.let("div", (g, weight.at(())))
        return b.result(b.let("where", (b.let("and", (counted, here)), g, num(b, 0, g))), result)

    return Value(shape(ops.tensor(n)), result, at)


def embedding(low: Lowering, n: Node) -> Value:
    """Row ``index`` of the table, after proving that there is one."""
    table, rows = low.of(n.args[0]), low.of(n.args[1])
    b = low.build

    def at(index: Index) -> str:
        row = b.let("check", (rows.at(index[:-1]),), sympy.sympify(table.shape[0]), "i64")
        return table.at((sympy.Symbol(row, integer=True), index[-1]))

    return Value(shape(ops.tensor(n)), table.dtype, at)


_ALIASES = {"reciprocal": "recip", "round": "rint"}
_UNARY = (
    "neg abs reciprocal sqrt rsqrt exp expm1 exp2 log log1p log2 sin cos tanh erf sigmoid floor ceil trunc round isnan"
)

RULES: Mapping[str, Rule] = {
    **{f"{u}.default": unary(_ALIASES.get(u, u)) for u in _UNARY.split()},
    **{f"{c}.{o}": simple(op(c), 2) for c in sorted(COMPARISONS) for o in ("Tensor", "Scalar")},
    **{f"bitwise_{c}.{o}": simple(op(c), 2) for c in ("and", "or", "xor") for o in ("Tensor", "Scalar")},
    **{f"logical_{c}.default": logical(c) for c in ("and", "or", "xor", "not")},
    "bitwise_not.default": simple(op("not"), 1),
    "isinf.default": simple(formulas.isinf, 1),
    "relu.default": simple(formulas.relu, 1),
    "silu.default": simple(formulas.silu, 1),
    "gelu.default": gelu,
    "gelu_backward.default": gelu_backward,
    "silu_backward.default": simple(formulas.silu_backward, 2),
    "sigmoid_backward.default": sigmoid_backward,
    "tanh_backward.default": simple(formulas.tanh_backward, 2),
    "threshold_backward.default": simple(formulas.threshold_backward, 3),
    "add.Tensor": add("add"),
    "add.Scalar": add("add"),
    "sub.Tensor": add("sub"),
    "sub.Scalar": add("sub"),
    "rsub.Scalar": add("sub", swap=True),
    "mul.Tensor": scaled(op("mul")),
    "mul.Scalar": scaled(op("mul")),
    "div.Tensor": scaled(op("div")),
    "div.Scalar": scaled(op("div")),
    "maximum.default": simple(op("max"), 2),
    "minimum.default": simple(op("min"), 2),
    "atan2.default": simple(op("atan2"), 2),
    "pow.Tensor_Scalar": power,
    "pow.Tensor_Tensor": simple(op("pow"), 2),
    "where.self": where,
    "masked_fill.Scalar": masked_fill,
    "masked_fill.Tensor": masked_fill,
    "clamp.default": clamp,
    "clamp.Tensor": clamp,
    "clamp_min.default": bound("max"),
    "clamp_max.default": bound("min"),
    "clamp_min.Tensor": bound("max"),
    "clamp_max.Tensor": bound("min"),
    "addcmul.default": with_value(formulas.addcmul),
    "addcdiv.default": with_value(formulas.addcdiv),
    "lerp.Scalar": lambda low, n: elementwise(low, n, n.args[:3], formulas.lerp, opmath=(2,)),
    "lerp.Tensor": simple(formulas.lerp, 3),
    "clone.default": copy,
    "_to_copy.default": copy,
    "copy.default": copy_into,
    "native_dropout_backward.default": native_dropout_backward,
    "mse_loss_backward.default": mse_backward,
    "nll_loss_backward.default": nll_backward,
    "embedding.default": embedding,
}
