"""Every operator that kernels compute, against eager: all dtypes, values at the edges, sizes, strides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsc import bind, ops
from kit import Function, difference, tensors, together

aten: Any = torch.ops.aten
INF, NAN = math.inf, math.nan
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
LAYOUTS = ("plain", "transposed", "sliced", "expanded")
SIZES = (1, 2, 7, 33)


class Operands:
    """Tensors of one dtype, size and layout, picked out of the graph's inputs."""

    def __init__(self, xs: tuple[torch.Tensor, ...]) -> None:
        self.x, self.y, self.z, self.f, self.g, self.row, self.one, self.m, self.rows, self.classes, self.wide = xs
        self.dtype = self.x.dtype
        self.n = self.x.shape[1]
        self.k = self.x.shape[0]


def data(dtype: torch.dtype, shape: tuple[int, ...], seed: int, edges: bool) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype.is_floating_point:
        big = min(torch.finfo(dtype).max, 1e30)
        special = [
            0.0,
            -0.0,
            INF,
            -INF,
            NAN,
            1.0,
            -1.0,
            0.5,
            -2.5,
            2.5,
            big,
            -big,
            1e-5,
            torch.finfo(dtype).tiny,
            88.0,
            -104.0,
        ]
        values = torch.randn(count, generator=gen, dtype=torch.float64) * 2
    elif dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=gen).bool()
    else:
        info = torch.iinfo(dtype)
        special = [0, 1, info.max, info.min, info.max - 1, 2, 3, 5]
        values = torch.randint(max(info.min, -9), 9, (count,), generator=gen)
    out = values.to(dtype)
    if edges:
        order = torch.randperm(count, generator=gen)
        for i, v in zip(order[: count // 2].tolist(), itertools.cycle(special)):
            out[i] = v
    return out.reshape(shape)


def laid(t: torch.Tensor, layout: str) -> torch.Tensor:
    match layout:
        case "transposed":
            return t.t().contiguous().t()
        case "sliced":
            whole = torch.zeros(2 * t.shape[0], 2 * t.shape[1] + 1, dtype=t.dtype)
            whole[::2, 1::2] = t
            return whole[::2, 1::2]
        case "expanded":
            return t[:1].contiguous().expand(t.shape)
        case _:
            return t


def operands(dtype: torch.dtype, n: int, layout: str) -> tuple[torch.Tensor, ...]:
    k, seed = 4, n * 10 + LAYOUTS.index(layout)
    made = [laid(data(dtype, (k, n), seed + i, edges=i < 3), layout) for i in range(5)]
    index = torch.Generator().manual_seed(seed)
    return (
        *made,
        data(dtype, (n,), seed + 6, False),
        data(dtype, (), seed + 7, False),
        laid(data(torch.bool, (k, n), seed + 8, False), layout),
        torch.randint(0, k, (3, n), generator=index),
        torch.where(torch.arange(k) == 1, -100, torch.randint(0, n, (k,), generator=index)),
        data(torch.float64 if dtype == torch.float64 else torch.float32, (), seed + 9, False),
    )


Row = Callable[[Operands], Any]
U = "neg abs reciprocal sqrt rsqrt exp expm1 exp2 log log1p log2 sin cos tanh erf sigmoid floor ceil trunc round relu silu isnan logical_not bitwise_not isinf"
COMPARE = "lt le gt ge eq ne"


def kept(t: torch.Tensor) -> torch.Tensor:
    """What ATen does as well alone goes into a kernel with a neighbour."""
    return aten.where.self(aten.eq.Tensor(t, t), t, t)


def finite(t: torch.Tensor) -> torch.Tensor:
    """Vectorised kernels of ATen answer nan for gelu(inf), the others inf."""
    return aten.where.self(aten.isinf.default(t), aten.ones_like.default(t), t)


def norm(o: Operands) -> Any:
    return aten.native_layer_norm.default(o.f, [o.n], o.row, o.row, 1e-5)


def norm_backward(o: Operands, mask: list[bool]) -> Any:
    _, mean, rstd = norm(o)
    return aten.native_layer_norm_backward.default(o.g, o.f, [o.n], mean, rstd, o.row, o.row, mask)


def batch(o: Operands, affine: bool) -> Any:
    w = o.row if affine else None
    return aten._native_batch_norm_legit_functional.default(
        o.f, w, w, aten.abs(o.row), aten.abs(o.row), True, 0.1, 1e-5
    )


def batch_backward(o: Operands) -> Any:
    _, mean, inv, *_ = batch(o, True)
    return aten.native_batch_norm_backward.default(
        o.g, o.f, o.row, o.row, o.row, mean, inv, True, 1e-5, [True, True, True]
    )


def nll(o: Operands, reduction: int) -> Any:
    return aten.nll_loss_forward.default(o.f, o.classes, None, reduction, -100)


ROWS: dict[str, tuple[Row, ...]] = {
    **{f"{u}.default": (lambda o, f=getattr(aten, u): f.default(o.x), lambda o, f=getattr(aten, u): f.default(o.one)) for u in U.split()},
    **{f"{c}.Tensor": (lambda o, f=getattr(aten, c): f.Tensor(o.x, o.y), lambda o, f=getattr(aten, c): f.Tensor(o.row, o.z)) for c in COMPARE.split()},
    **{f"{c}.Scalar": (lambda o, f=getattr(aten, c): f.Scalar(o.x, 1), lambda o, f=getattr(aten, c): f.Scalar(o.x, 0.3)) for c in COMPARE.split()},
    **{f"bitwise_{c}.Tensor": (lambda o, f=getattr(aten, f"bitwise_{c}"): f.Tensor(o.x, o.y),) for c in ("and", "or", "xor")},
    **{f"bitwise_{c}.Scalar": (lambda o, f=getattr(aten, f"bitwise_{c}"): f.Scalar(o.x, 5),) for c in ("and", "or", "xor")},
    **{f"logical_{c}.default": (lambda o, f=getattr(aten, f"logical_{c}"): f.default(o.x, o.y), lambda o, f=getattr(aten, f"logical_{c}"): f.default(o.x, o.m)) for c in ("and", "or", "xor")},
    "add.Tensor": (lambda o: aten.add.Tensor(o.x, o.y), lambda o: aten.add.Tensor(o.x, o.y, alpha=3), lambda o: aten.add.Tensor(o.x, o.wide), lambda o: aten.add.Tensor(o.wide, o.x), lambda o: aten.add.Tensor(o.x, o.m), lambda o: aten.add.Tensor(o.x, 2.7)),
    "add.Scalar": (lambda o: aten.add.Scalar(o.x, 3), lambda o: aten.add.Scalar(o.x, 2.7), lambda o: aten.add.Scalar(o.one, 2.7)),
    "sub.Tensor": (lambda o: aten.sub.Tensor(o.x, o.row), lambda o: aten.sub.Tensor(o.x, o.y, alpha=2), lambda o: aten.sub.Tensor(o.wide, o.x)),
    "sub.Scalar": (lambda o: aten.sub.Scalar(o.x, 3), lambda o: aten.sub.Scalar(o.x, 0.1)),
    "rsub.Scalar": (lambda o: aten.rsub.Scalar(o.x, 1), lambda o: aten.rsub.Scalar(o.x, 0.1, 2)),
    "mul.Tensor": (lambda o: aten.mul.Tensor(o.x, o.y), lambda o: aten.mul.Tensor(o.x, o.wide), lambda o: aten.mul.Tensor(o.wide, o.x), lambda o: aten.mul.Tensor(o.x, o.m), lambda o: aten.mul.Tensor(o.x, 2.7), lambda o: aten.mul.Tensor(o.one, 2.7), lambda o: aten.mul.Tensor(o.x, o.one)),
    "mul.Scalar": (lambda o: aten.mul.Scalar(o.x, 3), lambda o: aten.mul.Scalar(o.x, 0.1), lambda o: aten.mul.Scalar(o.one, 0.1)),
    "div.Tensor": (lambda o: aten.div.Tensor(o.x, o.y), lambda o: aten.div.Tensor(o.x, o.wide), lambda o: aten.div.Tensor(o.wide, o.x), lambda o: aten.div.Tensor(o.x, 2.7)),
    "div.Scalar": (lambda o: aten.div.Scalar(o.x, 3), lambda o: aten.div.Scalar(o.x, 0.1)),
    "maximum.default": (lambda o: aten.maximum.default(o.x, o.y), lambda o: aten.maximum.default(o.x, o.one)),
    "minimum.default": (lambda o: aten.minimum.default(o.x, o.y), lambda o: aten.minimum.default(o.x, o.wide)),
    "atan2.default": (lambda o: aten.atan2.default(o.x, o.y),),
    "pow.Tensor_Scalar": tuple((lambda o, e=e: aten.pow.Tensor_Scalar(o.x, e)) for e in (0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.7, 4)),
    "pow.Tensor_Tensor": (lambda o: aten.pow.Tensor_Tensor(o.x, o.y), lambda o: aten.pow.Tensor_Tensor(o.f, o.wide)),
    "where.self": (lambda o: aten.where.self(o.m, o.x, o.y), lambda o: aten.where.self(o.m, o.row, o.wide)),
    "masked_fill.Scalar": (lambda o: aten.masked_fill.Scalar(o.x, o.m, 2.7), lambda o: aten.masked_fill.Scalar(o.x, o.m, 0)),
    "masked_fill.Tensor": (lambda o: aten.masked_fill.Tensor(o.x, o.m, o.one),),
    "clamp.default": (lambda o: aten.clamp.default(o.x, -1, 1), lambda o: aten.clamp.default(o.x, None, 0.3), lambda o: aten.clamp.default(o.x, 2, 1)),
    "clamp.Tensor": (lambda o: aten.clamp.Tensor(o.x, o.y, o.z), lambda o: aten.clamp.Tensor(o.x, None, o.one)),
    "clamp_min.default": (lambda o: aten.clamp_min.default(o.x, 0), lambda o: aten.clamp_min.default(o.x, 0.1)),
    "clamp_max.default": (lambda o: aten.clamp_max.default(o.x, 0), lambda o: aten.clamp_max.default(o.x, 0.1)),
    "clamp_min.Tensor": (lambda o: aten.clamp_min.Tensor(o.x, o.y),),
    "clamp_max.Tensor": (lambda o: aten.clamp_max.Tensor(o.x, o.y),),
    "addcmul.default": (lambda o: aten.addcmul.default(o.f, o.g, o.y), lambda o: aten.addcmul.default(o.f, o.g, o.row, value=0.1)),
    "addcdiv.default": (lambda o: aten.addcdiv.default(o.f, o.g, o.y), lambda o: aten.addcdiv.default(o.f, o.g, o.row, value=0.1)),
    "lerp.Scalar": (lambda o: aten.lerp.Scalar(o.f, o.g, 0.4), lambda o: aten.lerp.Scalar(o.x, o.y, 0.6)),
    "lerp.Tensor": (lambda o: aten.lerp.Tensor(o.f, o.g, o.x), lambda o: aten.lerp.Tensor(o.f, o.g, o.one)),
    "_to_copy.default": tuple((lambda o, d=d: aten._to_copy.default(o.x if o.dtype.is_floating_point == d.is_floating_point else o.f, dtype=d)) for d in DTYPES),
    "clone.default": (lambda o: kept(aten.clone.default(o.x)), lambda o: kept(aten.clone.default(o.x, memory_format=torch.contiguous_format))),
    "copy.default": (lambda o: aten.copy.default(o.x, o.row), lambda o: aten.copy.default(o.x, o.wide)),
    "native_dropout_backward.default": (lambda o: aten.native_dropout_backward.default(o.x, o.m, 1.25),),
    "gelu.default": (lambda o: aten.gelu.default(finite(o.x)), lambda o: aten.gelu.default(o.x, approximate="tanh")),
    "gelu_backward.default": (lambda o: aten.gelu_backward.default(o.f, finite(o.x)), lambda o: aten.gelu_backward.default(o.f, o.g, approximate="tanh")),
    "silu_backward.default": (lambda o: aten.silu_backward.default(o.f, o.g),),
    "sigmoid_backward.default": (lambda o: aten.sigmoid_backward.default(o.x, o.y),),
    "tanh_backward.default": (lambda o: aten.tanh_backward.default(o.x, o.y),),
    "threshold_backward.default": (lambda o: aten.threshold_backward.default(o.x, o.y, 0), lambda o: aten.threshold_backward.default(o.x, o.y, 0.1)),
    "mse_loss.default": (lambda o: aten.mse_loss.default(o.f, o.g), lambda o: aten.mse_loss.default(o.f, o.g, 2)),
    "mse_loss_backward.default": (lambda o: aten.mse_loss_backward.default(o.one, o.f, o.g, 1), lambda o: aten.mse_loss_backward.default(o.one, o.f, o.g, 2)),
    "nll_loss_forward.default": (lambda o: nll(o, 0), lambda o: nll(o, 0)[0], lambda o: nll(o, 1), lambda o: nll(o, 2)),
    "nll_loss_backward.default": tuple((lambda o, r=r: aten.nll_loss_backward.default(o.one if r else o.row[:1].expand(o.k), o.f, o.classes, None, r, -100, nll(o, r)[1])) for r in (0, 1, 2)),
    "embedding.default": (lambda o: aten.embedding.default(o.x, o.rows),),
    "cat.default": (lambda o: kept(aten.cat.default([o.x, o.y], 1)), lambda o: kept(aten.cat.default([o.x, o.y, o.z])), lambda o: kept(aten.cat.default([o.x, o.m], -1))),
    "stack.default": (lambda o: kept(aten.stack.default([o.x, o.y], -1)), lambda o: kept(aten.stack.default([o.x, o.y, o.z], 1))),
    "slice_backward.default": (lambda o: aten.slice_backward.default(o.x, [o.k, 4 * o.n], 1, o.n, 2 * o.n, 1), lambda o: aten.slice_backward.default(o.x, [o.k + 3, o.n], 0, 2, o.k + 2, 1), lambda o: aten.slice_backward.default(o.x, [o.k, 2 * o.n], 1, -o.n, 9223372036854775807, 1)),
    "select_backward.default": (lambda o: aten.select_backward.default(o.row, [3, o.n], 0, 1), lambda o: aten.select_backward.default(o.x, [o.k, o.n, 2], 2, -1)),
    "tril.default": (lambda o: aten.tril.default(o.x), lambda o: aten.tril.default(o.x, -1)),
    "triu.default": (lambda o: aten.triu.default(o.x, 2),),
    "flip.default": (lambda o: kept(aten.flip.default(o.x, [0])), lambda o: kept(aten.flip.default(o.x, [0, -1])), lambda o: kept(aten.flip.default(o.one, [0]))),
    "full.default": (lambda o: aten.add.Tensor(o.x, aten.full.default([o.k, o.n], 3, dtype=o.dtype)),),
    "full_like.default": (lambda o: aten.mul.Tensor(o.x, aten.full_like.default(o.x, 2)), lambda o: aten.mul.Tensor(o.x, aten.full_like.default(o.x, 2.7))),
    "zeros.default": (lambda o: aten.add.Tensor(o.x, aten.zeros.default([o.n], dtype=o.dtype)),),
    "zeros_like.default": (lambda o: aten.add.Tensor(o.x, aten.zeros_like.default(o.x)),),
    "ones.default": (lambda o: aten.mul.Tensor(o.x, aten.ones.default([o.n], dtype=o.dtype)),),
    "ones_like.default": (lambda o: aten.mul.Tensor(o.x, aten.ones_like.default(o.x)),),
    "new_full.default": (lambda o: aten.add.Tensor(o.x, aten.new_full.default(o.x, [o.n], 3)),),
    "new_zeros.default": (lambda o: aten.add.Tensor(o.x, aten.new_zeros.default(o.x, [o.n])),),
    "new_ones.default": (lambda o: aten.add.Tensor(o.x, aten.new_ones.default(o.x, [o.n])),),
    "scalar_tensor.default": (lambda o: aten.mul.Tensor(o.x, aten.scalar_tensor.default(2.7, dtype=o.dtype)), lambda o: aten.mul.Tensor(o.f, aten.scalar_tensor.default(2.7, dtype=torch.float32)),),
    "arange.default": (lambda o: aten.add.Tensor(o.x, aten.arange.default(o.n)),),
    "arange.start": (lambda o: aten.add.Tensor(o.x, aten.arange.start(2, o.n + 2)),),
    "arange.start_step": (lambda o: aten.add.Tensor(o.x, aten.arange.start_step(o.n, -o.n, -2)),),
    "sum.default": (lambda o: aten.sum.default(o.f), lambda o: aten.sum.default(o.x), lambda o: aten.sum.default(o.m)),
    "sum.dim_IntList": (lambda o: aten.sum.dim_IntList(o.f, [1]), lambda o: aten.sum.dim_IntList(o.x, [0], True), lambda o: aten.sum.dim_IntList(o.f, None), lambda o: aten.sum.dim_IntList(o.f, [-1], False, dtype=torch.float32), lambda o: aten.sum.dim_IntList(o.m, [0])),
    "mean.default": (lambda o: aten.mean.default(o.f),),
    "mean.dim": (lambda o: aten.mean.dim(o.f, [1]), lambda o: aten.mean.dim(o.x, [0], True), lambda o: aten.mean.dim(o.f, [-1], dtype=torch.float32)),
    "prod.default": (lambda o: aten.prod.default(o.f),),
    "prod.dim_int": (lambda o: aten.prod.dim_int(o.f, 0), lambda o: aten.prod.dim_int(o.g, 1, True)),
    "amax.default": (lambda o: aten.amax.default(o.x, [1]), lambda o: aten.amax.default(o.f, [0], True), lambda o: aten.amax.default(o.x)),
    "amin.default": (lambda o: aten.amin.default(o.x, [1]), lambda o: aten.amin.default(o.f, [0, 1])),
    "max.default": (lambda o: aten.max.default(o.f), lambda o: aten.max.default(o.x)),
    "min.default": (lambda o: aten.min.default(o.f), lambda o: aten.min.default(o.x)),
    "any.default": (lambda o: aten.any.default(o.x), lambda o: aten.any.default(o.m)),
    "any.dim": (lambda o: aten.any.dim(o.x, 1), lambda o: aten.any.dim(o.m, 0, True)),
    "any.dims": (lambda o: aten.any.dims(o.m, [0, 1]), lambda o: aten.any.dims(o.x, None)),
    "all.default": (lambda o: aten.all.default(o.x), lambda o: aten.all.default(o.m)),
    "all.dim": (lambda o: aten.all.dim(o.x, 1), lambda o: aten.all.dim(o.m, 0, True)),
    "all.dims": (lambda o: aten.all.dims(o.m, [1]),),
    "var.correction": (lambda o: aten.var.correction(o.f, [1]), lambda o: aten.var.correction(o.f, None, correction=0), lambda o: aten.var.correction(o.x, [0], correction=1.5, keepdim=True)),
    "std.correction": (lambda o: aten.std.correction(o.f, [1]), lambda o: aten.std.correction(o.f, [0], correction=0, keepdim=True)),
    "var_mean.correction": (lambda o: aten.var_mean.correction(o.f, [1], correction=0)[0], lambda o: aten.var_mean.correction(o.f, [0], keepdim=True)[0]),
    "_softmax.default": (lambda o: aten._softmax.default(o.f, -1, False), lambda o: aten._softmax.default(o.x, 0, False)),
    "_log_softmax.default": (lambda o: aten._log_softmax.default(o.f, 1, False), lambda o: aten._log_softmax.default(o.x, 0, False), lambda o: aten._log_softmax.default(o.x, 1, False)),
    "_softmax_backward_data.default": (lambda o: aten._softmax_backward_data.default(o.g, aten._softmax.default(o.f, 1, False), 1, o.dtype), lambda o: aten._softmax_backward_data.default(o.g, aten._softmax.default(o.f, 0, False), 0, o.dtype)),
    "_log_softmax_backward_data.default": (lambda o: aten._log_softmax_backward_data.default(o.g, aten._log_softmax.default(o.f, 1, False), 1, o.dtype), lambda o: aten._log_softmax_backward_data.default(o.g, aten._log_softmax.default(o.f, 0, False), 0, o.dtype)),
    "logsumexp.default": (lambda o: aten.logsumexp.default(o.f, [1]), lambda o: aten.logsumexp.default(o.x, [0], True)),
    "native_layer_norm.default": (lambda o: norm(o), lambda o: aten.native_layer_norm.default(o.f, [o.k, o.n], None, None, 1e-5)),
    "native_layer_norm_backward.default": (lambda o: norm_backward(o, [True, False, False]), lambda o: norm_backward(o, [False, True, True]), lambda o: norm_backward(o, [True, True, True])),
    "_native_batch_norm_legit_functional.default": (lambda o: batch(o, True), lambda o: batch(o, False)),
    "native_batch_norm_backward.default": (batch_backward,),
}  # fmt: skip


def possible(row: Row, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether eager takes these dtypes."""
    try:
        row(Operands(inputs))
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return False
    return True


def cases(
    dtype: torch.dtype, layouts: tuple[tuple[str, int], ...]
) -> tuple[list[torch.Tensor], list[tuple[str, Function]]]:
    inputs: list[torch.Tensor] = []
    fns: list[tuple[str, Function]] = []
    for layout, n in layouts:
        mine = operands(dtype, n, layout)
        start = len(inputs)
        inputs += mine
        for name, rows in ROWS.items():
            for i, row in enumerate(rows):
                if possible(row, mine):

                    def fn(*xs: torch.Tensor, row: Row = row, start: int = start) -> Any:
                        return row(Operands(xs[start : start + 11]))

                    fns.append((f"{name}[{i}] {layout} {n}", fn))
    return inputs, fns


LOOSE = (
    "prod.",
    "native_layer_norm_backward.",
    "gelu_backward.",
    "_softmax_backward_data.",
    "_log_softmax_backward_data.",
)
"""ATen accumulates these in 16 bits, in an order that depends on its threads, or they cancel: kernels must come as close
to the truth as ATen does."""


def wrong(name: str, got: object, fn: Function, inputs: list[torch.Tensor]) -> str | None:
    want = fn(*inputs)
    found = difference(got, want)
    if found is None or not name.startswith(LOOSE):
        return found
    exact = tensors(fn(*(t.double() if t.dtype.is_floating_point else t for t in inputs)))
    triples = zip(tensors(got), tensors(want), exact)
    slack = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(tensors(want)[0].dtype, 1e-6)
    closer = all(float((g - e).norm()) <= float((w - e).norm()) + slack * float(e.norm()) for g, w, e in triples)
    return None if closer else found


def compare(dtype: torch.dtype, layouts: tuple[tuple[str, int], ...], **options: object) -> set[str]:
    """Raises with every row that differs; gives the operators that kernels computed."""
    inputs, fns = cases(dtype, layouts)
    got, covered = together([f for _, f in fns], inputs, **options)
    bad = [f"{name}: {found}" for (name, fn), g in zip(fns, got) if (found := wrong(name, g, fn, inputs)) is not None]
    assert not bad, f"{len(bad)} of {len(fns)} differ\n" + "\n".join(bad)
    return covered


TURNS = {d: tuple((layout, SIZES[(i + k) % 4]) for k, layout in enumerate(LAYOUTS)) for i, d in enumerate(DTYPES)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: ops.SHORT[d])
def test_cpp_gives_eagers_answers(dtype: torch.dtype) -> None:
    compare(dtype, TURNS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=lambda d: ops.SHORT[d])
def test_triton_gives_eagers_answers(dtype: torch.dtype) -> None:
    compare(dtype, (("sliced", 7),), emit="triton")


def test_every_row_is_computed_by_a_kernel() -> None:
    """For some dtype: a row that ATen answers tests nothing."""
    computed = {n for n in bind.RULES if ops.table()[n].kind not in ("view", "item") and not n.startswith("dsc.")}
    covered = (
        compare(torch.float32, (("plain", 7),))
        | compare(torch.int32, (("plain", 7),))
        | compare(torch.bool, (("plain", 7),))
    )
    assert sorted(computed - covered) == []


def test_every_rule_has_a_row() -> None:
    computed = {n for n in bind.RULES if ops.table()[n].kind not in ("view", "item") and not n.startswith("dsc.")}
    assert sorted(computed - set(ROWS)) == []
