"""What each pointwise and creating operator computes at one index.  A new op is a new row.

Formulas follow ATen's CPU kernels, so that results agree to the last bits: a low-precision op computes in f32 and rounds
once at its end; scalars of mul and div stay in the wider dtype, those of other ops are rounded first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import sympy
import torch
from torch.fx import Node

from dsc import domain, narrow, ops
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPARISONS, COMPUTE
from dsc.codegen.lower import Builder, Lowering, Rule, Unlowerable, Value, size
from dsc.domain import Extent, shape

Formula = Callable[..., str]
Places = Collection[int]
FLOAT_MAX = torch.finfo(torch.float32).max


def broadcast(index: Index, s: Sequence[Extent]) -> Index:
    """Index of the element of a tensor of shape ``s`` that broadcasting puts at ``index``."""
    tail = index[len(index) - len(s) :] if s else ()
    return tuple(0 if isinstance(e, int) and e == 1 else i for i, e in zip(tail, s))


def out_dtype(n: Node) -> str:
    return ops.SHORT[ops.tensor(n).dtype]


def common_dtype(n: Node, args: Sequence[object]) -> str:
    """The dtype to which eager promotes the operands before it computes."""
    found: torch.dtype | None = None
    values = [ops.tensor(a) if isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor) else a for a in args]
    values = [(1 if isinstance(v, Node) else v) for v in values]
    first: object = values[0]
    if len(values) == 1:
        found = first.dtype if isinstance(first, torch.Tensor) else None
    for other in values[1:]:
        found = torch.result_type(first, other)  # type: ignore[call-overload]
        dims = max((v.dim() for v in (first, other) if isinstance(v, torch.Tensor)), default=0)
        first = torch.empty((1,) * dims, dtype=found, device="meta")
    if found is None or found not in ops.SHORT:
        raise Unlowerable(f"dtype {found}")
    return ops.SHORT[found]


def elementwise(
    low: Lowering, n: Node, args: Sequence[object], formula: Formula, *, inner: str = "", opmath: Places = ()
) -> Value:
    """``formula`` of the operands at the same (broadcast) index, in compute dtype ``inner``.

    0-dim operands at places ``opmath`` are taken in the wider compute dtype, all others first in the promoted one.
    """
    b = low.build
    values = [low.of(a) for a in args]
    common = inner or common_dtype(n, args)
    result = out_dtype(n)

    def at(index: Index) -> str:
        taken = []
        for place, v in enumerate(values):
            x = v.at(broadcast(index, v.shape))
            if (place in opmath and not v.shape) or v.dtype == common:
                taken.append(b.cast(x, COMPUTE[common]))
            else:
                taken.append(b.rounded(x, common))
        return b.result(formula(b, *taken), result)

    return Value(shape(ops.tensor(n)), result, at)


# --- formulas: builder, operands in the compute dtype -> let -------------------------------------------------------


def op(name: str) -> Formula:
    dtype = "b1" if name in COMPARISONS or name == "isnan" else ""
    return lambda b, *a: b.let(name, a, dtype=dtype)


def num(b: Builder, x: float, like: str) -> str:
    return b.const(x, b.by_name[like].dtype)


def _relu(b: Builder, x: str) -> str:
    return b.let("max", (x, num(b, 0, x)))


def _silu(b: Builder, x: str) -> str:
    return b.let("div", (x, b.let("add", (num(b, 1, x), b.let("exp", (b.let("neg", (x,)),))))))


def _gelu(approximate: str) -> Formula:
    return _gelu_tanh if approximate == "tanh" else _gelu_erf


def _gelu_erf(b: Builder, x: str) -> str:
    cdf = b.let("add", (num(b, 1, x), b.let("erf", (b.let("mul", (x, num(b, math.sqrt(0.5), x))),))))
    return b.let("mul", (b.let("mul", (x, num(b, 0.5, x))), cdf))


def _tanh_inner(b: Builder, x: str) -> str:
    cube = b.let("mul", (b.let("mul", (x, x)), x))
    poly = b.let("add", (x, b.let("mul", (num(b, 0.044715, x), cube))))
    return b.let("tanh", (b.let("mul", (num(b, math.sqrt(2 / math.pi), x), poly)),))


def _gelu_tanh(b: Builder, x: str) -> str:
    half = b.let("mul", (num(b, 0.5, x), x))
    return b.let("mul", (half, b.let("add", (num(b, 1, x), _tanh_inner(b, x)))))


def _gelu_backward(approximate: str) -> Formula:
    return _gelu_tanh_backward if approximate == "tanh" else _gelu_erf_backward


def _gelu_erf_backward(b: Builder, g: str, x: str) -> str:
    one, half = num(b, 1, x), num(b, 0.5, x)
    cdf = b.let("mul", (half, b.let("add", (one, b.let("erf", (b.let("mul", (x, num(b, math.sqrt(0.5), x))),))))))
    square = b.let("mul", (x, x))
    density = b.let("exp", (b.let("mul", (square, num(b, -0.5, x))),))
    pdf = b.let("mul", (b.let("mul", (x, density)), num(b, 1 / math.sqrt(2 * math.pi), x)))
    return b.let("mul", (g, b.let("add", (cdf, pdf))))


def _gelu_tanh_backward(b: Builder, g: str, x: str) -> str:
    one, half = num(b, 1, x), num(b, 0.5, x)
    t = _tanh_inner(b, x)
    left = b.let("mul", (half, x))
    right = b.let("add", (one, t))
    left_d = b.let("mul", (half, right))
    t_d = b.let("sub", (one, b.let("mul", (t, t))))
    square = b.let("mul", (x, x))
    beta = num(b, math.sqrt(2 / math.pi), x)
    inner_d = b.let("mul", (beta, b.let("add", (one, b.let("mul", (num(b, 3 * 0.044715, x), square))))))
    right_d = b.let("mul", (b.let("mul", (left, t_d)), inner_d))
    return b.let("mul", (g, b.let("add", (left_d, right_d))))


def _silu_backward(b: Builder, g: str, x: str) -> str:
    one = num(b, 1, x)
    s = b.let("div", (one, b.let("add", (one, b.let("exp", (b.let("neg", (x,)),))))))
    slope = b.let("add", (one, b.let("mul", (x, b.let("sub", (one, s))))))
    return b.let("mul", (b.let("mul", (g, s)), slope))


def _sigmoid_backward(b: Builder, g: str, y: str, step: Callable[[str], str] = lambda v: v) -> str:
    return b.let("mul", (step(b.let("mul", (g, step(b.let("sub", (num(b, 1, y), y)))))), y))


def _tanh_backward(b: Builder, g: str, y: str) -> str:
    return b.let("mul", (g, b.let("sub", (num(b, 1, y), b.let("mul", (y, y))))))


def _square(b: Builder, x: str) -> str:
    return b.let("mul", (x, x))


def _where(b: Builder, c: str, x: str, y: str) -> str:
    return b.let("where", (b.cast(c, "b1"), x, y))


def _threshold_backward(b: Builder, g: str, x: str, t: str) -> str:
    return b.let("where", (b.let("le", (x, t), dtype="b1"), num(b, 0, g), g))


def _isinf(b: Builder, x: str) -> str:
    return b.let("eq", (b.let("abs", (x,)), num(b, math.inf, x)), dtype="b1")


def _addcmul(b: Builder, x: str, y: str, z: str, value: str) -> str:
    return b.let("add", (x, b.let("mul", (b.let("mul", (value, y)), z))))


def _addcdiv(b: Builder, x: str, y: str, z: str, value: str) -> str:
    return b.let("add", (x, b.let("div", (b.let("mul", (value, y)), z))))


def _lerp(b: Builder, x: str, y: str, w: str) -> str:
    span, one = b.let("sub", (y, x)), num(b, 1, x)
    low = b.let("add", (x, b.let("mul", (w, span))))
    high = b.let("sub", (y, b.let("mul", (span, b.let("sub", (one, w))))))
    return b.let("where", (b.let("lt", (b.let("abs", (w,)), num(b, 0.5, x)), dtype="b1"), low, high))


def _power(exponent: object, dtype: str, cpu: bool) -> Formula | None:
    """ATen's special cases of ``pow(tensor, number)``; f16 has none of its own on CPUs, bf16 rounds its products."""
    if dtype == "f16" and cpu and exponent in (0.5, -0.5):
        return None

    def square(b: Builder, x: str) -> str:
        return _square(b, x) if dtype == "f16" and cpu else b.result(_square(b, x), dtype)

    table: dict[float, Formula] = {
        1.0: lambda b, x: x,
        0.5: op("sqrt"),
        2.0: _square,
        3.0: lambda b, x: b.let("mul", (square(b, x), x)),
        -0.5: op("rsqrt"),
        -1.0: op("recip"),
        -2.0: lambda b, x: b.let("recip", (square(b, x),)),
    }
    return table.get(float(exponent)) if isinstance(exponent, (int, float)) else None


# --- rules -----------------------------------------------------------------------------------------------------------


def simple(formula: Formula, count: int | None = None) -> Rule:
    return lambda low, n: elementwise(low, n, n.args[:count], formula)


def scaled(formula: Formula) -> Rule:
    """Mul and div: ATen's CPU kernels take their second operand in f32 if it is a scalar, its CUDA kernels either."""

    def rule(low: Lowering, n: Node) -> Value:
        return elementwise(low, n, n.args[:2], formula, opmath=(1,) if on_cpu(n) else (0, 1))

    return rule


def on_cpu(n: Node) -> bool:
    return ops.tensor(n).device.type == "cpu"


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
    return elementwise(low, n, n.args[:1], _gelu(str(n.kwargs.get("approximate", "none"))))


def gelu_backward(low: Lowering, n: Node) -> Value:
    return elementwise(low, n, n.args[:2], _gelu_backward(str(n.kwargs.get("approximate", "none"))))


def power(low: Lowering, n: Node) -> Value:
    special = _power(n.args[1], out_dtype(n), on_cpu(n))
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
        return _sigmoid_backward(b, g, y, (lambda v: b.result(v, "f16")) if stepwise else lambda v: v)

    return elementwise(low, n, n.args[:2], formula)


def native_dropout_backward(low: Lowering, n: Node) -> Value:
    scale = n.args[2]

    def formula(b: Builder, g: str, mask: str) -> str:
        return b.let("mul", (b.let("mul", (g, mask)), _scalar(b, scale, g)))

    return elementwise(low, n, n.args[:2], formula, inner=out_dtype(n))


def narrow8(low: Lowering, n: Node) -> Value:
    """8-bit floats as ``dsc.narrow`` says, by arithmetic alone: the exponent is that of the magnitude or the lowest one,
    and the mantissa, rounded, carries over into it by itself.
    """
    f = narrow.EIGHT[str(n.args[2])]

    def formula(b: Builder, x: str, amax: str) -> str:
        inverse = b.let("min", (b.let("div", (num(b, f.limit, x), amax)), num(b, FLOAT_MAX, x)))
        is_zero = b.let("eq", (amax, num(b, 0, amax)), dtype="b1")
        y = b.let("mul", (x, b.let("where", (is_zero, num(b, 0, x), inverse))))
        size = b.let("min", (b.let("abs", (y,)), num(b, f.limit, y)))
        exponent = b.let("max", (b.let("floor", (b.let("log2", (size,)),)), num(b, f.lowest, y)))
        scale = b.let("exp2", (b.let("sub", (num(b, f.mantissa, y), exponent)),))
        mantissa = b.let("rint", (b.let("mul", (size, scale)),))
        above = b.let("mul", (b.let("sub", (exponent, num(b, f.lowest, y))), num(b, 1 << f.mantissa, y)))
        sign = b.let("where", (b.let("lt", (y, num(b, 0, y)), dtype="b1"), num(b, 128, y), num(b, 0, y)))
        code = b.let("add", (b.let("add", (above, mantissa)), sign))
        nan = b.let("isnan", (y,), dtype="b1")
        return b.cast(b.let("where", (nan, num(b, narrow.NOT_A_NUMBER, y), code)), "i64")

    return elementwise(low, n, n.args[:2], formula, inner="f32")


def widen8(low: Lowering, n: Node) -> Value:
    """The numbers of ``narrow8``: a code with no exponent bits has the lowest exponent and no leading one."""
    f = narrow.EIGHT[str(n.args[2])]
    one = 1 << f.mantissa

    def formula(b: Builder, q: str, amax: str) -> str:
        negative = b.let("ge", (q, num(b, 128, q)), dtype="b1")
        code = b.let("sub", (q, b.let("where", (negative, num(b, 128, q), num(b, 0, q)))))
        above = b.let("floor", (b.let("mul", (code, num(b, 1 / one, q))),))
        rest = b.let("sub", (code, b.let("mul", (above, num(b, one, q)))))
        leading = b.let("where", (b.let("gt", (above, num(b, 0, q)), dtype="b1"), num(b, one, q), num(b, 0, q)))
        exponent = b.let("add", (b.let("max", (above, num(b, 1, q))), num(b, f.lowest - 1 - f.mantissa, q)))
        size = b.let("mul", (b.let("add", (leading, rest)), b.let("exp2", (exponent,))))
        nan = b.let("eq", (code, num(b, narrow.NOT_A_NUMBER, q)), dtype="b1")
        size = b.let("where", (nan, num(b, math.nan, q), size))
        value = b.let("where", (negative, b.let("neg", (size,)), size))
        return b.let("mul", (value, b.let("mul", (amax, num(b, 1 / f.limit, q)))))

    return elementwise(low, n, n.args[:2], formula, inner="f32")


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


def fill(low: Lowering, n: Node) -> Value:
    """full, zeros, ones and their ``like`` and ``new`` forms."""
    name, dtype = ops.name_of(n), out_dtype(n)
    if name.startswith(("zeros", "new_zeros")):
        number: object = 0
    elif name.startswith(("ones", "new_ones")):
        number = 1
    else:
        number = (
            n.args[0] if name == "scalar_tensor.default" else n.args[2] if name == "new_full.default" else n.args[1]
        )
    b = low.build
    if not isinstance(number, (int, float)):
        e = size(number)
        return Value(shape(ops.tensor(n)), dtype, lambda _: b.rounded(b.index(e), dtype))
    return Value(shape(ops.tensor(n)), dtype, lambda _: b.rounded(b.const(number, COMPUTE[dtype]), dtype))


def arange(low: Lowering, n: Node) -> Value:
    start = size(n.args[0]) if len(n.args) > 1 else 0
    step = size(n.args[2]) if len(n.args) > 2 else 1
    b, dtype = low.build, out_dtype(n)
    return Value(shape(ops.tensor(n)), dtype, lambda i: b.rounded(b.index(start + i[0] * step), dtype))


def keep(low: Lowering, n: Node) -> Value:
    """The mask of a dropout: each element drawn at its place in row-major order (``dsc.keep``)."""
    b, seed, extents, p = low.build, low.of(n.args[0]), shape(ops.tensor(n)), n.args[2]
    assert isinstance(p, float)

    def at(index: Index) -> str:
        place: Extent = 0
        for i, e in zip(index, extents):
            place = place * e + i
        u = b.let("random", (seed.at(()), b.index(place)), "uniform", "f32")
        return b.let("lt", (u, b.const(p, "f32")), dtype="b1")

    return Value(extents, "b1", at)


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
    "isinf.default": simple(_isinf, 1),
    "relu.default": simple(_relu, 1),
    "silu.default": simple(_silu, 1),
    "gelu.default": gelu,
    "gelu_backward.default": gelu_backward,
    "silu_backward.default": simple(_silu_backward, 2),
    "sigmoid_backward.default": sigmoid_backward,
    "tanh_backward.default": simple(_tanh_backward, 2),
    "threshold_backward.default": simple(_threshold_backward, 3),
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
    "addcmul.default": with_value(_addcmul),
    "addcdiv.default": with_value(_addcdiv),
    "lerp.Scalar": lambda low, n: elementwise(low, n, n.args[:3], _lerp, opmath=(2,)),
    "lerp.Tensor": simple(_lerp, 3),
    "clone.default": copy,
    "_to_copy.default": copy,
    "copy.default": copy_into,
    "native_dropout_backward.default": native_dropout_backward,
    "dsc.narrow8.default": narrow8,
    "dsc.widen8.default": widen8,
    "mse_loss_backward.default": mse_backward,
    "nll_loss_backward.default": nll_backward,
    "embedding.default": embedding,
    "full.default": fill,
    "full_like.default": fill,
    "zeros.default": fill,
    "zeros_like.default": fill,
    "ones.default": fill,
    "ones_like.default": fill,
    "new_full.default": fill,
    "new_zeros.default": fill,
    "new_ones.default": fill,
    "scalar_tensor.default": fill,
    "dsc.keep.default": keep,
    "arange.default": arange,
    "arange.start": arange,
    "arange.start_step": arange,
}
