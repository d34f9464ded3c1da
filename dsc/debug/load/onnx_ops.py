"""ONNX operators as torch functions: a row each, with the places of operands that must be known beforehand.

A function takes the operator's inputs in order (None for one that is left out) and its attributes by name.  Sizes, axes
and indices, at the places in ``known``, come as lists of integers or numbers.  Reference: onnx/docs/Operators.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""``TensorProto.DataType`` -> dtype."""


@dataclass(frozen=True)
class Row:
    function: Callable[..., Any]
    known: frozenset[int] = frozenset()


def divide(a: Any, b: Any) -> Any:
    """Whole numbers stay whole, rounded towards zero."""
    whole = all(not x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, int) for x in (a, b))
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc") if whole else a / b


def modulo(a: Any, b: Any, fmod: int = 0) -> Any:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


def folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Any number of operands, two by two."""

    def all_of(first: Any, *rest: Any) -> Tensor:
        out = torch.as_tensor(first)
        for x in rest:
            out = function(out, torch.as_tensor(x, dtype=out.dtype))
        return out

    return all_of


def gemm(
    a: Tensor, b: Tensor, c: Any = None, alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0
) -> Tensor:
    a, b = a.t() if transA else a, b.t() if transB else b
    if isinstance(c, Tensor) and alpha == beta == 1.0:
        return torch.addmm(c, a, b)
    product = alpha * (a @ b)
    return product if c is None else product + beta * c


def conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, kernel_shape: Sequence[int] = (), pads: Sequence[int] = (),
    strides: Sequence[int] = (), dilations: Sequence[int] = (), group: int = 1, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    n = w.dim() - 2
    strides, dilations = list(strides) or [1] * n, list(dilations) or [1] * n
    x, pads = padded(x, w.shape[2:], pads, strides, dilations, auto_pad, 0.0)
    return (F.conv1d, F.conv2d, F.conv3d)[n - 1](x, w, b, strides, pads, dilations, group)


def padded(
    x: Tensor, kernel: Sequence[int], pads: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    auto_pad: str, fill: float,
) -> tuple[Tensor, list[int]]:  # fmt: skip
    """The input, padded where the sides differ, and the padding that is left to the operator."""
    n = len(kernel)
    begin, end = (list(pads[:n]), list(pads[n:])) if pads else ([0] * n, [0] * n)
    if auto_pad.startswith("SAME"):
        for i, (size, k, s, d) in enumerate(zip(x.shape[2:], kernel, strides, dilations)):
            whole = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            small, large = whole // 2, whole - whole // 2
            begin[i], end[i] = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    if begin == end:
        return x, begin
    sides = [p for b, e in zip(reversed(begin), reversed(end)) for p in (b, e)]
    return F.pad(x, sides, value=fill), [0] * n


def max_pool(
    x: Tensor, kernel_shape: Sequence[int], pads: Sequence[int] = (), strides: Sequence[int] = (),
    dilations: Sequence[int] = (), ceil_mode: int = 0, auto_pad: str = "NOTSET", storage_order: int = 0,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides, dilations = list(strides) or [1] * n, list(dilations) or [1] * n
    x, pads = padded(x, kernel_shape, pads, strides, dilations, auto_pad, float("-inf"))
    pool: Callable[..., Tensor] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    return pool(x, list(kernel_shape), strides, pads, dilations, bool(ceil_mode))


def average_pool(
    x: Tensor, kernel_shape: Sequence[int], pads: Sequence[int] = (), strides: Sequence[int] = (), ceil_mode: int = 0,
    count_include_pad: int = 0, auto_pad: str = "NOTSET",
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides = list(strides) or [1] * n
    x, pads = padded(x, kernel_shape, pads, strides, [1] * n, auto_pad, 0.0)
    pool: Callable[..., Tensor] = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    return pool(x, list(kernel_shape), strides, pads, bool(ceil_mode), bool(count_include_pad))


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float = 1e-5, momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:  # fmt: skip
    return F.batch_norm(x, mean.detach(), var.detach(), scale, bias, False, 1 - momentum, epsilon)


def layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def reshape(x: Tensor, shape: Sequence[int], allowzero: int = 0) -> Tensor:
    return x.reshape([x.shape[i] if n == 0 and not allowzero else n for i, n in enumerate(shape)])


def squeeze(x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    rank = x.dim() + len(axes)
    for a in sorted(a % rank for a in axes):
        x = x.unsqueeze(a)
    return x


def split(x: Tensor, sizes: Sequence[int] | None = None, axis: int = 0, num_outputs: int = 0) -> list[Tensor]:
    if sizes is None:
        sizes = [-(-x.shape[axis] // max(num_outputs, 1))] * max(num_outputs, 1)
        sizes[-1] = x.shape[axis] - sum(sizes[:-1])
    return list(torch.split(x, list(sizes), axis))


def slice_(
    x: Tensor, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    for i, (start, end) in enumerate(zip(starts, ends)):
        axis, step = axes[i] if axes is not None else i, steps[i] if steps is not None else 1
        if step > 0:
            index: list[slice] = [slice(None)] * x.dim()
            index[axis] = slice(start, end, step)
            x = x[tuple(index)]
        else:
            places = range(x.shape[axis])[slice(start, end if end >= -x.shape[axis] else None, step)]
            x = x.index_select(axis, torch.tensor(list(places)))
    return x


def gather(x: Tensor, index: Any, axis: int = 0) -> Tensor:
    """An index of any shape; negative ones count from the end."""
    if isinstance(index, int):
        return x.select(axis, index)
    index = torch.as_tensor(index)
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return F.embedding(torch.where(index < 0, index + x.shape[0], index), x)
    axis %= x.dim()
    return x[(*[slice(None)] * axis, index)]


def expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    rank = max(x.dim(), len(shape))
    have, want = [1] * (rank - x.dim()) + list(x.shape), [1] * (rank - len(shape)) + list(shape)
    return x.expand([h if w == 1 else w for h, w in zip(have, want)])


def cast(x: Any, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    return torch.as_tensor(x).to(DTYPES[to])


def reduction(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Over the axes of an input, or of an attribute in older files; over all where there are none."""

    def reduce(x: Tensor, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        axes = list(axes) if axes is not None else []
        if not axes and noop_with_empty_axes:
            return x
        out: Tensor = function(x, tuple(axes) or tuple(range(x.dim())), bool(keepdims))
        return out

    return reduce


def argmax(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    return x.argmax(axis, bool(keepdims))


def pad(
    x: Tensor,
    pads: Sequence[int],
    value: float | None = None,
    axes: Sequence[int] | None = None,
    mode: str = "constant",
) -> Tensor:
    n = len(pads) // 2
    places = [a % x.dim() for a in axes] if axes is not None else list(range(n))
    sides = {a: (pads[i], pads[n + i]) for i, a in enumerate(places)}
    flat = [p for a in reversed(range(min(places), x.dim())) for p in sides.get(a, (0, 0))]
    if mode != "constant":
        return F.pad(x, flat, {"edge": "replicate", "wrap": "circular"}.get(mode, mode))
    return F.pad(x, flat, value=value or 0.0)


def trilu(x: Tensor, k: int | None = None, upper: int = 1) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, k or 0)


def cumsum(x: Tensor, axis: int, exclusive: int = 0, reverse: int = 0) -> Tensor:
    x = x.flip(axis) if reverse else x
    out = x.cumsum(axis) - x if exclusive else x.cumsum(axis)
    return out.flip(axis) if reverse else out


def constant_of_shape(shape: Sequence[int], value: Tensor | None = None) -> Tensor:
    return torch.zeros(list(shape)) if value is None else value.reshape(()).expand(list(shape)).clone()


def clip(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def with_axis(function: Callable[..., Tensor], default: int) -> Callable[..., Tensor]:
    def apply(x: Tensor, axis: int = default) -> Tensor:
        return function(x, axis)

    return apply


SIZES = frozenset({1})
"""The second operand is a list of sizes or axes."""

PLAIN: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": divide, "Pow": operator.pow,
    "Mod": modulo, "MatMul": torch.matmul, "Neg": operator.neg, "Abs": torch.abs, "Sign": torch.sign,
    "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Erf": torch.erf,
    "Sin": torch.sin, "Cos": torch.cos, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Relu": torch.relu,
    "Softplus": F.softplus, "Floor": torch.floor, "Ceil": torch.ceil, "Round": torch.round,
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge, "And": torch.logical_and, "Or": torch.logical_or, "Not": torch.logical_not,
    "IsNaN": torch.isnan, "Where": torch.where, "Min": folded(torch.minimum), "Max": folded(torch.maximum),
    "Sum": folded(torch.add), "Identity": lambda x: x,
    "Gemm": gemm, "Conv": conv, "MaxPool": max_pool, "AveragePool": average_pool,
    "BatchNormalization": batch_norm, "LayerNormalization": layer_norm, "ArgMax": argmax, "Cast": cast,
    "Dropout": lambda x, *_, **__: x,
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1),
    "HardSwish": F.hardswish, "Mish": F.mish,
    "Softmax": with_axis(torch.softmax, -1), "LogSoftmax": with_axis(torch.log_softmax, -1),
    "Flatten": lambda x, axis=1: x.reshape(int(torch.Size(x.shape[:axis]).numel()), -1),
    "Transpose": lambda x, perm=None: x.permute(perm or tuple(reversed(range(x.dim())))),
    "Concat": lambda *xs, axis: torch.cat([torch.as_tensor(x) for x in xs], axis),
    "GatherElements": lambda x, index, axis=0: x.gather(axis, index),
    "Einsum": lambda *xs, equation: torch.einsum(equation, *xs),
}  # fmt: skip
"""All of whose operands may be tensors."""

OPS: Mapping[str, Row] = {
    **{name: Row(function) for name, function in PLAIN.items()},
    "Reshape": Row(reshape, SIZES), "Squeeze": Row(squeeze, SIZES), "Unsqueeze": Row(unsqueeze, SIZES),
    "Split": Row(split, SIZES), "Slice": Row(slice_, frozenset({1, 2, 3, 4})), "Gather": Row(gather),
    "Expand": Row(expand, SIZES), "Tile": Row(lambda x, repeats: x.repeat(repeats), SIZES),
    "Pad": Row(pad, frozenset({1, 2, 3})), "Trilu": Row(trilu, SIZES), "Clip": Row(clip, frozenset({1, 2})),
    "CumSum": Row(cumsum, SIZES),
    "ReduceMean": Row(reduction(torch.mean), SIZES), "ReduceSum": Row(reduction(torch.sum), SIZES),
    "ReduceMax": Row(reduction(torch.amax), SIZES), "ReduceMin": Row(reduction(torch.amin), SIZES),
    "ReduceL2": Row(reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep)), SIZES),
    "ConstantOfShape": Row(constant_of_shape, frozenset({0})),
    "Range": Row(lambda start, limit, delta: torch.arange(start, limit, delta), frozenset({0, 1, 2})),
}  # fmt: skip
