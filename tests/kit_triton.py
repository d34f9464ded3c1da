"""Running emitted Triton in tests, and kernels that several tests emit."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch

from dsc.codegen.kernel import COMPUTE, POINTWISE, Kernel
from dsc.codegen.triton import Schedule, default_schedule, emit
from dsc.codegen.triton_run import interpreted, launch
from kit_kernels import DTYPES, Build

Tensor = torch.Tensor


def run(
    kernel: Kernel, *tensors: Tensor, sizes: Mapping[str, int] | None = None, schedule: Schedule | None = None
) -> None:
    schedule = schedule or default_schedule(kernel, interpreter=True)
    launch(kernel, schedule, interpreted(emit(kernel, schedule), kernel.name), tensors, sizes or {})


def apply(kernel: Kernel, *inputs: Tensor, schedule: Schedule | None = None) -> Tensor:
    """Of a kernel with one output, last, of the shape of its first input."""
    out = torch.empty(inputs[0].shape, dtype=DTYPES[kernel.buffers[-1].dtype])
    run(kernel, *inputs, out, schedule=schedule)
    return out


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    """Equal, NaN to NaN and the sign of zero counting."""
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    if a.is_floating_point():
        assert torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0))


def uniform_kernel() -> Kernel:
    b = Build("uniform", i=100)
    seed = b.load("seed", 0, "i64")
    offset = b.let("mul", b.let("index", attr=b["i"], dtype="i64"), b.const(2**31 + 1, "i64"))
    b.store("out", b["i"], b.let("random", seed, offset, attr="uniform", dtype="f32"))
    return b.kernel()


def softmax_kernel(rows: object, columns: object, dtype: str = "f32") -> Kernel:
    b = Build("softmax", "%softmax = aten._softmax(%x, 1, False)", i=rows, r_j=columns)  # type: ignore[arg-type]
    x = b.load("x", b["i"] * b.axes[1].extent + b["r_j"], dtype)
    e = b.let("exp", b.let("sub", x, b.reduce("max", x)))
    b.store("out", b["i"] * b.axes[1].extent + b["r_j"], b.let("div", e, b.reduce("sum", e)), dtype)
    return b.kernel()


def layernorm_kernel(rows: object, columns: object) -> Kernel:
    """With per-row statistics stored for the backward."""
    b = Build("layernorm", "%y, %mean, %rstd = aten.native_layer_norm(%x, ...)", i=rows, r_j=columns)  # type: ignore[arg-type]
    n = b.axes[1].extent
    at = b["i"] * n + b["r_j"]
    x, weight, bias = b.load("x", at, "bf16"), b.load("weight", b["r_j"]), b.load("bias", b["r_j"])
    count = b.let("cast", b.let("index", attr=n, dtype="i64"), dtype="f32")
    mean = b.let("div", b.reduce("sum", x), count)
    d = b.let("sub", x, mean)
    variance = b.let("div", b.reduce("sum", b.let("mul", d, d)), count)
    rstd = b.let("rsqrt", b.let("add", variance, b.const(1e-5)))
    b.store("y", at, b.let("fma", b.let("mul", d, rstd), weight, bias), "bf16")
    b.store("mean", b["i"], mean)
    b.store("rstd", b["i"], rstd)
    return b.kernel()


def column_sum(rows: object, columns: object, kind: str = "sum", dtype: str = "f32") -> Kernel:
    b = Build(f"column_{kind}", i=columns, r_j=rows)  # type: ignore[arg-type]
    x = b.load("x", b["r_j"] * b.axes[0].extent + b["i"], dtype)
    b.store("out", b["i"], b.reduce(kind, x), {"any": "b1", "all": "b1"}.get(kind, dtype))
    return b.kernel()


def in_place_kernel() -> Kernel:
    b = Build("in_place", i=3, r_j=100)
    at = b["i"] * 100 + b["r_j"]
    b.buffer("x", role="inout")
    x, first = b.load("x", at), b.load("x", b["i"] * 100)
    total = b.reduce("sum", b.let("exp", x))
    b.store("x", at, b.let("sub", x, b.let("log", total)))
    b.store("first", b["i"], b.let("sub", first, b.let("log", total)))
    return b.kernel()


def gather_kernel(rows: object) -> Kernel:
    b = Build("embedding", i=6, j=10)
    index = b.let("check", b.load("index", b["i"], "i32"), attr=sympy.sympify(rows))
    row = sympy.Symbol(index, integer=True)
    b.store("out", b["i"] * 10 + b["j"], b.load("table", row * 10 + b["j"]))
    return b.kernel()


def bag_kernel() -> Kernel:
    b = Build("bag", i=3, r_j=9)
    shifted = b.let("sub", b.load("index", b["i"] * 9 + b["r_j"], "i64"), b.const(1, "i64"))
    index = b.let("check", shifted, attr=sympy.Integer(5))
    b.store("out", b["i"], b.reduce("sum", b.load("table", sympy.Symbol(index, integer=True))))
    return b.kernel()


def everything(dtype: str) -> Kernel:
    """Every operation on ``dtype``, one after the other."""
    b = Build(f"every_{dtype}", i=1000, r_j=40)
    at = b["i"] * 40 + b["r_j"]
    x, y = b.load("x", at, dtype), b.load("y", at, dtype)
    ints = {"add", "sub", "mul", "neg", "abs", "max", "min"}
    bits = {"and", "or", "xor", "not"}
    compare = {"lt", "le", "gt", "ge", "eq", "ne"}
    skip = {"where", *(bits if dtype in ("f32", "f64") else ())}
    ops = {"b1": bits | compare, "i64": bits | compare | ints}.get(dtype, set(POINTWISE))
    for k, op in enumerate(sorted(ops - skip)):
        b.store(f"o{k}", at, b.let(op, *[x, y, x][: POINTWISE[op]]), "b1" if op in compare | {"isnan"} else dtype)
    b.store("where", at, b.let("where", b.let("eq", x, y), x, y), dtype)
    for kind in ("any", "all") if dtype == "b1" else ("sum", "prod", "max", "min"):
        b.store(kind, b["i"], b.reduce(kind, x), dtype)
    for k, storage in enumerate(DTYPES):
        value = b.let("cast", y, dtype=COMPUTE[storage])
        b.store(f"c{k}", at, b.let("round", value, attr=storage), storage)
    return b.kernel()


def transpose_kernel(batch: object, rows: object, columns: object) -> Kernel:
    b = Build("transpose_add", n=batch, i=rows, j=columns)  # type: ignore[arg-type]
    n, i, j = b["n"], b["i"], b["j"]
    rows, columns = b.axes[1].extent, b.axes[2].extent
    x = b.load("x", n * rows * columns + j * rows + i)
    b.store("out", n * rows * columns + i * columns + j, b.let("add", x, b.load("bias", j)))
    return b.kernel()
