"""Emitted Triton: its text, its values in the interpreter, and what it costs on sm_80 and sm_90."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import sympy
import torch
from kit_kernels import Build, pointwise
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, ModularIndexing, PythonMod

from dsc.codegen.kernel import COMPUTE, POINTWISE, Kernel

triton = pytest.importorskip("triton")

from dsc.codegen.triton import Schedule, default_schedule, emit, grid  # noqa: E402
from dsc.codegen.triton_index import bound, text  # noqa: E402
from dsc.codegen.triton_run import CheckFailed, cross_compile, interpreted, launch  # noqa: E402

Tensor = torch.Tensor
DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b1": torch.bool,
}  # fmt: skip
NAN, INF = math.nan, math.inf


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


# -- pointwise operations


def magnitudes(low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Numbers of both signs whose sizes are spread evenly over the exponents."""
    x = torch.logspace(math.log10(low), math.log10(high), 500, dtype=torch.float64)
    return torch.cat([x, -x]).to(dtype)


UNARY: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "exp": (torch.exp, 1e-30, 80), "expm1": (torch.expm1, 1e-30, 80), "exp2": (torch.exp2, 1e-30, 120),
    "log": (torch.log, 1e-30, 1e30), "log1p": (torch.log1p, 1e-30, 1e30), "log2": (torch.log2, 1e-30, 1e30),
    "sin": (torch.sin, 1e-30, 30), "cos": (torch.cos, 1e-30, 30), "tanh": (torch.tanh, 1e-30, 100),
    "erf": (torch.erf, 1e-30, 10), "sigmoid": (torch.sigmoid, 1e-30, 80), "sqrt": (torch.sqrt, 1e-30, 1e30),
    "rsqrt": (torch.rsqrt, 1e-30, 1e30), "recip": (torch.reciprocal, 1e-30, 1e30), "floor": (torch.floor, 1e-3, 1e9),
    "ceil": (torch.ceil, 1e-3, 1e9), "trunc": (torch.trunc, 1e-3, 1e9), "rint": (torch.round, 1e-3, 1e9),
    "neg": (torch.neg, 1e-30, 1e30), "abs": (torch.abs, 1e-30, 1e30),
}  # fmt: skip
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, INF, -INF, NAN]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", UNARY)
def test_unary(op: str, dtype: str) -> None:
    f, low, high = UNARY[op]
    x = magnitudes(low, high, DTYPES[dtype])
    kernel = pointwise(op, len(x), [dtype], dtype)
    true = f(x.double())
    error = ((apply(kernel, x).double() - true) / true).abs()[true.isfinite() & (true != 0)]
    limit = {"f32": 4e-6, "f64": 1e-12}[dtype]
    near_zero = 8 if op in ("sin", "cos") else 1  # of the function: relative error is not the measure there
    assert error.quantile(0.98) <= limit, error.max()
    assert error.max() <= limit * near_zero
    special = torch.tensor(SPECIAL, dtype=DTYPES[dtype])
    out, expected = apply(pointwise(op, len(special), [dtype], dtype), special), f(special)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=2 * limit, atol=1e-15)
    if op not in ("sin", "cos", "erf", "expm1"):
        assert torch.equal(out.signbit()[out == 0], expected.signbit()[expected == 0])


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", ["pow", "atan2", "div", "max", "min", "add", "sub", "mul"])
def test_binary(op: str, dtype: str) -> None:
    f = {"max": torch.maximum, "min": torch.minimum}.get(op) or getattr(torch, op)
    values = [*SPECIAL, 3.0, -3.0, 1.9, 40.0, 1e-3, -7.25, 1e10, -2.0]
    x, y = (t.flatten() for t in torch.meshgrid(*[torch.tensor(values, dtype=DTYPES[dtype])] * 2, indexing="ij"))
    x, y = torch.cat([x, randn(500).to(x).abs() * 3]), torch.cat([y, randn(500, seed=1).to(x) * 20])
    out = apply(pointwise(op, len(x), [dtype, dtype], dtype), x, y)
    expected = f(x.double(), y.double()).to(x) if op in ("pow", "atan2") else f(x, y)
    if op in ("pow", "atan2"):
        torch.testing.assert_close(out, expected, rtol={"f32": 4e-6, "f64": 1e-12}[dtype], atol=0, equal_nan=True)
    else:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_fma_rounds_once() -> None:
    a = torch.tensor([1 + 2**-12], dtype=torch.float32)
    c = torch.tensor([-(1 + 2**-11)], dtype=torch.float32)
    assert apply(pointwise("fma", 1, ["f32"] * 3, "f32"), a, a, c).item() == 2**-24


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "b1"])
@pytest.mark.parametrize("op", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparison(op: str, dtype: str) -> None:
    x = torch.tensor([0, 1, 0, 1, 0], dtype=DTYPES[dtype])
    y = torch.tensor([0, 0, 1, 1, 1], dtype=DTYPES[dtype])
    if x.is_floating_point():
        x[4] = NAN
    same(apply(pointwise(op, 5, [dtype, dtype], "b1"), x, y), getattr(torch, op)(x, y))


@pytest.mark.parametrize("dtype", ["b1", "i64", "u8", "i32"])
@pytest.mark.parametrize("op", ["and", "or", "xor", "not"])
def test_bitwise(op: str, dtype: str) -> None:
    x = torch.tensor([0, 1, 0, 1, 7], dtype=DTYPES[dtype])
    y = torch.tensor([0, 0, 1, 1, 2], dtype=DTYPES[dtype])
    args = (x,) if op == "not" else (x, y)
    same(apply(pointwise(op, 5, [dtype] * len(args), dtype), *args), getattr(torch, f"bitwise_{op}")(*args))


def test_integers_wrap() -> None:
    x = torch.tensor([2**63 - 1, -(2**63), 2**62, -5, 3], dtype=torch.int64)
    y = torch.tensor([1, 1, 4, 7, -2], dtype=torch.int64)
    for op in ("add", "sub", "mul"):
        same(apply(pointwise(op, 5, ["i64", "i64"], "i64"), x, y), getattr(torch, op)(x, y))
    for op in ("neg", "abs"):
        same(apply(pointwise(op, 5, ["i64"], "i64"), x), getattr(torch, op)(x))
    same(apply(pointwise("max", 5, ["i64", "i64"], "i64"), x, y), torch.maximum(x, y))


def test_isnan() -> None:
    x = torch.tensor(SPECIAL)
    same(apply(pointwise("isnan", len(x), ["f32"], "b1"), x), x.isnan())


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast(source: str, target: str) -> None:
    """A load widens, ``cast`` changes the compute dtype, a store narrows: together, what ``x.to(dtype)`` does."""
    x = torch.tensor([0, 1, 3, 100, 127, 65, 2.5, 0.0625]).to(DTYPES[source])
    same(apply(pointwise("cast", len(x), [source], target, dtype=COMPUTE[target]), x), x.to(DTYPES[target]))


@pytest.mark.parametrize("through", ["bf16", "f16"])
def test_round_to_nearest_even(through: str) -> None:
    x = torch.cat([randn(2000) * 100, randn(500) * 1e-6, torch.tensor([*SPECIAL, 1e-41, 65519.0, 65520.0, 3.4e38])])
    x = torch.cat([x, (torch.arange(2**12) * 2**11 + 0x3F800000 + 2**15).int().view(torch.float32)])  # ties
    same(apply(pointwise("round", len(x), ["f32"], "f32", attr=through), x), x.to(DTYPES[through]).float())
    same(apply(pointwise("cast", len(x), ["f32"], through, dtype="f32"), x), x.to(DTYPES[through]))


@pytest.mark.parametrize("through", ["i32", "i16", "i8", "u8", "i64"])
def test_round_wraps_integers(through: str) -> None:
    x = torch.tensor([0, 127, 128, 255, 256, -1, -129, 2**31, 2**40 + 5, -(2**63)])
    same(apply(pointwise("round", len(x), ["i64"], "i64", attr=through), x), x.to(DTYPES[through]).long())
    same(apply(pointwise("abs", len(x), ["i64"], through), x), x.abs().to(DTYPES[through]))


def test_constants_have_their_type(golden: Callable[..., None]) -> None:
    b = Build("constants", i=4)
    i = b["i"]
    x, n, d = b.load("x", i), b.load("n", i, "i64"), b.load("d", i, "f64")
    b.store("a", i, b.let("max", b.const(0.1, "f64"), d), "f64")
    b.store("b", i, b.let("add", b.const(0.1, "f64"), d), "f64")
    b.store("c", i, b.let("mul", n, b.const(2**40 + 1, "i64")), "i64")
    b.store("e", i, b.let("where", b.let("lt", x, b.const(-0.5)), b.const(-INF), b.const(NAN)))
    b.store("f", i, b.let("where", b.const(True, "b1"), x, b.const(-1.5)))
    b.store("g", i, b.let("add", b.const(1.0), b.const(2.0)))
    b.store("h", i, b.const(0.1, "f64"), "f64")
    b.store("k", i, b.const(True, "b1"), "b1")
    b.store("l", i, b.let("where", b.let("gt", x, b.const(0.0)), d, b.const(0.1, "f64")), "f64")
    kernel = b.kernel()
    golden(emit(kernel))
    tensors = {u.name: torch.zeros(4, dtype=DTYPES[u.dtype]) for u in kernel.buffers}
    tensors["x"] += torch.tensor([-1.0, 0.0, 1.0, -2.0])
    tensors["n"] += torch.tensor([1, 2, -3, 2**30])
    tensors["d"] += torch.tensor([0.3, -0.3, 0.1, 1e300], dtype=torch.float64)
    run(kernel, *tensors.values())
    x, n, d = tensors["x"], tensors["n"], tensors["d"]
    same(tensors["a"], d.clamp(min=0.1))
    same(tensors["b"], d + 0.1)
    same(tensors["c"], n * (2**40 + 1))
    same(tensors["e"], torch.where(x < -0.5, -INF, NAN))
    same(tensors["f"], x)
    same(tensors["g"], torch.full((4,), 3.0))
    same(tensors["h"], torch.full((4,), 0.1, dtype=torch.float64))
    assert tensors["k"].all()
    same(tensors["l"], torch.where(x > 0, d, torch.tensor(0.1, dtype=torch.float64)))
    cross_compile(kernel, None, 80)


# -- random numbers


def philox(seed: int, offset: int) -> float:
    k, c = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[0] >> 8) * 2.0**-24


def random_kernel() -> Kernel:
    b = Build("uniform", i=100)
    seed = b.load("seed", 0, "i64")
    offset = b.let("mul", b.let("index", attr=b["i"], dtype="i64"), b.const(2**31 + 1, "i64"))
    b.store("out", b["i"], b.let("random", seed, offset, attr="uniform", dtype="f32"))
    return b.kernel()


@pytest.mark.parametrize("seed", [0, 42, 2**40 + 3, -7])
def test_random_is_philox(seed: int) -> None:
    out = torch.empty(100)
    run(random_kernel(), torch.tensor(seed), out)
    same(out, torch.tensor([philox(seed, i * (2**31 + 1)) for i in range(100)]))


# -- reductions


def softmax_kernel(rows: object, columns: object, dtype: str = "f32") -> Kernel:
    b = Build("softmax", "%softmax = aten._softmax(%x, 1, False)", i=rows, r_j=columns)  # type: ignore[arg-type]
    x = b.load("x", b["i"] * b.axes[1].extent + b["r_j"], dtype)
    e = b.let("exp", b.let("sub", x, b.reduce("max", x)))
    b.store("out", b["i"] * b.axes[1].extent + b["r_j"], b.let("div", e, b.reduce("sum", e)), dtype)
    return b.kernel()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("schedule", [None, Schedule(4, 64), Schedule(1, 512)], ids=["wide", "looped", "row"])
def test_softmax(dtype: str, schedule: Schedule | None, golden: Callable[..., None]) -> None:
    kernel = softmax_kernel(7, 300, dtype)
    golden(emit(kernel, schedule))
    x = randn(7, 300, dtype=DTYPES[dtype]) * 3
    torch.testing.assert_close(apply(kernel, x, schedule=schedule), x.softmax(1))


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


@pytest.mark.parametrize("sizes", [(5, 100), (3, 1), (1, 257), (6, 64)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_layernorm(sizes: tuple[int, int], symbolic: bool, golden: Callable[..., None]) -> None:
    rows, columns = sizes
    kernel = layernorm_kernel("m", "n") if symbolic else layernorm_kernel(rows, columns)
    schedule = Schedule(2, 64) if symbolic else None
    if not symbolic or sizes == (5, 100):
        golden(emit(kernel, schedule))
    x, weight, bias = randn(rows, columns, dtype=torch.bfloat16), randn(columns), randn(columns, seed=1)
    y, mean, rstd = torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    bound_sizes = {"m": rows, "n": columns} if symbolic else {}
    run(kernel, x, weight, bias, y, mean, rstd, sizes=bound_sizes, schedule=schedule)
    expected = torch.native_layer_norm(x.float(), (columns,), weight, bias, 1e-5)
    torch.testing.assert_close(y, expected[0].bfloat16())
    torch.testing.assert_close(mean, expected[1].flatten())
    torch.testing.assert_close(rstd, expected[2].flatten())


def column_sum(rows: object, columns: object, kind: str = "sum", dtype: str = "f32") -> Kernel:
    b = Build(f"column_{kind}", i=columns, r_j=rows)  # type: ignore[arg-type]
    x = b.load("x", b["r_j"] * b.axes[0].extent + b["i"], dtype)
    b.store("out", b["i"], b.reduce(kind, x), {"any": "b1", "all": "b1"}.get(kind, dtype))
    return b.kernel()


@pytest.mark.parametrize("schedule", [None, Schedule(16, 32)], ids=["default", "looped"])
def test_outer_reduction_keeps_the_columns_contiguous(schedule: Schedule | None, golden: Callable[..., None]) -> None:
    kernel = column_sum(100, 70)
    source = emit(kernel, schedule)
    golden(source)
    x, out = randn(100, 70), torch.empty(70)
    run(kernel, x, out, schedule=schedule)
    torch.testing.assert_close(out, x.sum(0))


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min", "any", "all"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "b1"])
def test_reductions(kind: str, dtype: str, looped: bool) -> None:
    if (dtype == "b1") != (kind in ("any", "all")):
        pytest.skip("not in the IR")
    x = (randn(3, 50) * 2).to(DTYPES[dtype]) if dtype != "b1" else randn(3, 50) > 1.5
    x[2] = 1 if dtype == "b1" else x[2]
    b = Build("k", i=3, r_j=50)
    b.store("out", b["i"], b.reduce(kind, b.load("x", b["i"] * 50 + b["r_j"], dtype)), dtype)
    out = torch.empty(3, dtype=x.dtype)
    run(b.kernel(), x, out, schedule=Schedule(2, 16 if looped else 64))
    expected = {"max": torch.amax, "min": torch.amin}.get(kind) or getattr(torch, kind)
    torch.testing.assert_close(out, expected(x, 1))


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_max_and_min_keep_nan(kind: str, looped: bool) -> None:
    x = randn(64, 5)
    x[13, 2] = NAN
    x[:, 3] = -INF if kind == "max" else INF
    out = torch.empty(5)
    run(column_sum(64, 5, kind), x, out, schedule=Schedule(4, 16 if looped else 64))
    same(out, x.amax(0) if kind == "max" else x.amin(0))


def test_sum_of_all(golden: Callable[..., None]) -> None:
    """No parallel axis, and more elements than a tile holds."""
    b = Build("total", r_i=40, r_j=600)
    b.store("out", 0, b.reduce("sum", b.load("x", b["r_i"] * 600 + b["r_j"])))
    golden(emit(b.kernel()))
    x, out = randn(40, 600), torch.empty(())
    run(b.kernel(), x, out)
    torch.testing.assert_close(out, x.sum())
    run(b.kernel(), x, out, schedule=Schedule(1, 32768))
    torch.testing.assert_close(out, x.sum())


def test_early_store_spares_a_pass(golden: Callable[..., None]) -> None:
    b = Build("add_and_sum", i=3, r_j=100)
    at = b["i"] * 100 + b["r_j"]
    y = b.let("add", b.load("x", at), b.load("bias", b["r_j"]))
    b.store("y", at, y)
    b.store("total", b["i"], b.reduce("sum", y))
    source = emit(b.kernel(), Schedule(1, 32))
    golden(source)
    assert source.count("for r0") == 1
    x, bias, y, total = randn(3, 100), randn(100), torch.empty(3, 100), torch.empty(3)
    run(b.kernel(), x, bias, y, total, schedule=Schedule(1, 32))
    same(y, x + bias)
    torch.testing.assert_close(total, (x + bias).sum(1))


def in_place_kernel() -> Kernel:
    b = Build("in_place", i=3, r_j=100)
    at = b["i"] * 100 + b["r_j"]
    b.buffer("x", role="inout")
    x, first = b.load("x", at), b.load("x", b["i"] * 100)
    total = b.reduce("sum", b.let("exp", x))
    b.store("x", at, b.let("sub", x, b.let("log", total)))
    b.store("first", b["i"], b.let("sub", first, b.let("log", total)))
    return b.kernel()


@pytest.mark.parametrize("schedule", [Schedule(2, 128), Schedule(2, 32)], ids=["persistent", "looped"])
def test_in_place(schedule: Schedule, golden: Callable[..., None]) -> None:
    """``x`` becomes its log softmax, and the first column is read from it too: loads come before the stores."""
    golden(emit(in_place_kernel(), schedule))
    x, first = randn(3, 100), torch.empty(3)
    expected = x.log_softmax(1)
    run(in_place_kernel(), x, first, schedule=schedule)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(first, expected[:, 0])


# -- shapes, indices


def test_symbolic_sizes(golden: Callable[..., None]) -> None:
    kernel = softmax_kernel("m", "n")
    schedule = Schedule(2, 16)
    source = emit(kernel, schedule)
    golden(source)
    fn = interpreted(source, kernel.name)
    for m, n in [(3, 40), (1, 1), (5, 16), (0, 4)]:
        x, out = randn(m, n), torch.empty(m, n)
        launch(kernel, schedule, fn, [x, out], {"m": m, "n": n})
        torch.testing.assert_close(out, x.softmax(1))


def test_transpose_and_broadcast(golden: Callable[..., None]) -> None:
    b = Build("transpose_add", i=5, j=33)
    i, j = b["i"], b["j"]
    b.store("out", i * 33 + j, b.let("add", b.load("x", j * 5 + i), b.load("bias", j)))
    golden(emit(b.kernel()))
    x, bias, out = randn(33, 5), randn(33), torch.empty(5, 33)
    run(b.kernel(), x, bias, out, schedule=Schedule(32))
    same(out, x.t() + bias)


def test_zero_d_and_unit_axes(golden: Callable[..., None]) -> None:
    b = Build("unit", i=1, j=1, r_k=1)
    x = b.load("x", b["i"] * 7 + b["j"] + b["r_k"])
    b.store("out", b["i"], b.let("add", b.reduce("sum", x), b.const(1.0)))
    golden(emit(b.kernel()))
    out = torch.empty(1)
    run(b.kernel(), torch.tensor(2.0), out)
    assert out.item() == 3
    b = Build("scalar")
    b.store("out", 0, b.let("mul", b.load("x", 0, "bf16"), b.load("n", 0, "bf16")), "bf16")
    golden(emit(b.kernel()), "scalar")
    x, out = torch.tensor(1.7).bfloat16(), torch.empty((), dtype=torch.bfloat16)
    run(b.kernel(), x, x, out)
    same(out, x * x)
    for capability in (80, 90):
        cross_compile(b.kernel(), None, capability)


def test_fill_of_a_broadcast_row() -> None:
    """Values that vary along fewer axes than they are stored along, or reduced over."""
    b = Build("fill", i=4, r_j=8)
    at = b["i"] * 8 + b["r_j"]
    row = b.load("row", b["i"])
    b.store("a", at, row)
    b.store("b", at, b.const(2.5))
    b.store("c", b["i"], b.reduce("sum", row))
    b.store("d", b["i"], b.reduce("sum", b.const(1, "i64")), "i64")
    b.store("e", at, b.reduce("max", b.load("column", b["r_j"])))
    row, column = randn(4), randn(8)
    for schedule in (Schedule(4, 8), Schedule(2, 16), Schedule(2, 4), Schedule(8, 2)):
        outs = [
            torch.zeros(4, 8),
            torch.zeros(4, 8),
            torch.zeros(4),
            torch.zeros(4, dtype=torch.long),
            torch.zeros(4, 8),
        ]
        run(b.kernel(), row, *outs[:4], column, outs[4], schedule=schedule)
        same(outs[0], row[:, None].expand(4, 8))
        same(outs[1], torch.full((4, 8), 2.5))
        torch.testing.assert_close(outs[2], row * 8)
        assert outs[3].tolist() == [8] * 4
        same(outs[4], column.max().expand(4, 8))


def gather_kernel(rows: object) -> Kernel:
    b = Build("embedding", i=6, j=10)
    index = b.let("check", b.load("index", b["i"], "i32"), attr=sympy.sympify(rows))
    row = sympy.Symbol(index, integer=True)
    b.store("out", b["i"] * 10 + b["j"], b.load("table", row * 10 + b["j"]))
    return b.kernel()


def test_indirect(golden: Callable[..., None]) -> None:
    kernel = gather_kernel(20)
    golden(emit(kernel))
    index, table, out = torch.tensor([0, 19, 3, 3, 7, 1], dtype=torch.int32), randn(20, 10), torch.empty(6, 10)
    run(kernel, index, table, out, schedule=Schedule(16))
    same(out, table[index])
    for bad in (20, -1, 2**31 - 1):
        index[4] = bad
        with pytest.raises(CheckFailed, match="embedding: index out of range"):
            run(kernel, index, table, out)
        same(out[:4], table[index[:4]])
    fail = torch.zeros(1, dtype=torch.int32)
    schedule = default_schedule(kernel)
    launch(kernel, schedule, interpreted(emit(kernel), kernel.name), [index, table, out], {}, fail)
    assert fail.item() == 1


def test_indirect_into_nothing() -> None:
    n = sympy.Symbol("n", integer=True)
    with pytest.raises(CheckFailed):
        run(gather_kernel(n), torch.zeros(6, dtype=torch.int32), torch.empty(0, 10), torch.empty(6, 10), sizes={"n": 0})


def bag_kernel() -> Kernel:
    b = Build("bag", i=3, r_j=9)
    shifted = b.let("sub", b.load("index", b["i"] * 9 + b["r_j"], "i64"), b.const(1, "i64"))
    index = b.let("check", shifted, attr=sympy.Integer(5))
    b.store("out", b["i"], b.reduce("sum", b.load("table", sympy.Symbol(index, integer=True))))
    return b.kernel()


@pytest.mark.parametrize("schedule", [Schedule(2, 16), Schedule(2, 4)], ids=["persistent", "looped"])
def test_indirect_in_a_reduction(schedule: Schedule) -> None:
    """Tail lanes load nothing and may not fail a check."""
    index, table, out = torch.randint(1, 6, (3, 9)), randn(5), torch.empty(3)
    run(bag_kernel(), index, table, out, schedule=schedule)
    torch.testing.assert_close(out, table[index - 1].sum(1))
    index[1, 8] = 0
    with pytest.raises(CheckFailed):
        run(bag_kernel(), index, table, out, schedule=schedule)


def test_index_functions() -> None:
    i, n = sympy.symbols("i n", integer=True, nonnegative=True)
    cases = {
        FloorDiv(i, 3): "(i // 3)",
        Mod(i, n): "(i % n)",
        PythonMod(i, 4): "(i % 4)",
        sympy.Mod(i, 4): "(i % 4)",
        ModularIndexing(i, 3, 4): "((i // 3) % 4)",
        ModularIndexing(i, 1, 4): "(i % 4)",
        CeilDiv(i, 4): "((i + 3) // 4)",
        Min(i, n): "tl.minimum(i, n)",
        Max(i, n): "tl.maximum(i, n)",
        sympy.floor(i / 3): "(i // 3)",
        sympy.floor((i + 1) / n): "((i + 1) // n)",
        i**2 * n: "i*i*n",
        i * (i + 1) / 2: "((i*(i + 1)) // 2)",
    }
    for e, expected in cases.items():
        assert text(e) == expected
        value = eval(text(e), {"i": 17, "n": 5, "tl": _Python})
        assert value == int(e.subs({i: 17, n: 5}))
    with pytest.raises(TypeError, match="not an integer index"):
        text(sympy.sqrt(n))


class _Python:
    minimum, maximum = min, max


def test_index_bound_and_width() -> None:
    i, j = sympy.symbols("i j", integer=True, nonnegative=True)
    extents = {"i": 100, "j": 50}
    assert bound(i * 50 + j, extents) == 99 * 50 + 49
    assert bound(Mod(i, 7) + 3, extents) == 102
    assert bound(sympy.Symbol("n") * i, extents) is None
    assert "int64" not in emit(pointwise("exp", 1000, ["f32"], "f32"))
    assert "tl.program_id(0).to(tl.int64)" in emit(pointwise("exp", 2**31, ["f32"], "f32"))
    b = Build("wide_reduction", i=4, r_j=2**16)
    b.store("out", b["i"], b.reduce("sum", b.load("x", b["r_j"] * 2**16 + b["i"])))
    assert "tl.arange(0, RB).to(tl.int64)" in emit(b.kernel())


def test_view_of_a_view() -> None:
    b = Build("view", i=24)
    i = b["i"]
    b.store("out", i, b.load("x", ModularIndexing(i, 1, 4) * 6 + FloorDiv(i, 4)))
    x, out = randn(24), torch.empty(24)
    run(b.kernel(), x, out)
    same(out, x.view(4, 6).t().reshape(-1))


def test_names_do_not_collide() -> None:
    b = Build("x", xm=40, r_r=10)
    b.store("rm", b["xm"], b.reduce("sum", b.load("r", b["xm"] * 10 + b["r_r"])))
    x, out = randn(40, 10), torch.empty(40)
    run(b.kernel(), x, out, schedule=Schedule(32, 4))
    torch.testing.assert_close(out, x.sum(1))


def test_only_what_is_used_is_written() -> None:
    b = Build("dead", i=4)
    b.let("tanh", b.load("y", b["i"]))
    b.store("out", b["i"], b.load("x", b["i"]))
    assert "tanh" not in emit(b.kernel())
    assert emit(b.kernel()) == emit(b.kernel())


# -- schedules


def test_grid_and_default_schedule() -> None:
    kernel = softmax_kernel("m", 300)
    assert grid(kernel, Schedule(4, 512), {"m": 9}) == 3
    assert default_schedule(kernel) == Schedule(4, 512, 4)
    assert default_schedule(softmax_kernel(8, 16384)) == Schedule(1, 16384, 16)
    assert default_schedule(softmax_kernel(8, 16385)) == Schedule(1, 2048, 4)
    assert default_schedule(softmax_kernel(8, "n")) == Schedule(1, 2048, 4)
    assert default_schedule(pointwise("exp", 10, ["f32"], "f32")) == Schedule(16, 1, 1)
    assert default_schedule(column_sum(100, 70)) == Schedule(32, 128, 8)
    assert default_schedule(column_sum(10000, 70)) == Schedule(32, 64, 4)


# -- the interpreter leaves nothing behind; compiling needs no GPU


def test_interpreter_leaves_nothing_patched() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    def state() -> list[object]:
        places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, interpreter, interpreter.InterpreterBuilder)
        grid_state = ("grid_idx", "grid_dim")
        own = {k: v for k, v in vars(interpreter.interpreter_builder).items() if k not in grid_state}
        return [dict(vars(p)) for p in places] + [own]

    before = state()
    x = randn(3, 40, dtype=torch.bfloat16)
    apply(softmax_kernel(3, 40, "bf16"), x)
    assert state() == before
    source = emit(pointwise("exp", 4, ["f32"], "f32")).replace("tl.exp(v0)", "tl.static_assert(False, 'intended')")
    with pytest.raises(AssertionError, match="intended"):
        interpreted(source, "exp_f32")(1, [randn(4), randn(4)], {"XB": 4}, Schedule(4))
    assert state() == before


COMPILED: dict[str, tuple[Kernel, Schedule | None]] = {
    "gelu": (pointwise("tanh", 4096 * 768, ["bf16"], "bf16"), None),
    "softmax": (softmax_kernel(4096, 1000, "bf16"), None),
    "softmax_looped": (softmax_kernel("m", "n"), None),
    "layernorm": (layernorm_kernel(4096, 768), None),
    "column_sum": (column_sum(4096, 768), None),
    "column_any": (column_sum(64, 768, "any", "b1"), None),
    "embedding": (gather_kernel(50000), None),
    "uniform": (random_kernel(), None),
    "pow": (pointwise("pow", 10000, ["f32", "f32"], "f32"), None),
    "atan2": (pointwise("atan2", 10000, ["f64", "f64"], "f64"), None),
    "expm1": (pointwise("expm1", 10000, ["f16"], "f16"), None),
    "max64": (pointwise("max", 10000, ["f64", "f64"], "f64"), None),
    "u8": (pointwise("add", 10000, ["u8", "i8"], "u8"), None),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", COMPILED)
def test_cross_compile(name: str, capability: int) -> None:
    kernel, schedule = COMPILED[name]
    info = cross_compile(kernel, schedule, capability)
    assert info.spills == 0
    assert 0 < info.regs <= 160
    assert f"sm_{capability}" in info.ptx
    if name in ("gelu", "layernorm", "column_sum"):  # 16 bytes a load, whichever axis is contiguous
        assert "ld.global.v4.b32" in info.ptx


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


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "b1"])
def test_cross_compile_of_every_operation(dtype: str, looped: bool) -> None:
    info = cross_compile(everything(dtype), Schedule(2, 16 if looped else 64), 80)
    assert info.spills == 0
    if dtype == "f32":
        assert "div.rn.f32" in info.ptx
        assert "sqrt.rn.f32" in info.ptx
        assert "div.full.f32" in info.ptx  # inside of helpers, where an error of two units is accounted for


@pytest.mark.parametrize("schedule", [Schedule(2, 128), Schedule(2, 32)], ids=["persistent", "looped"])
def test_cross_compile_with_barrier_and_checks(schedule: Schedule) -> None:
    assert "bar.sync" in cross_compile(in_place_kernel(), schedule, 90).ptx
    info = cross_compile(bag_kernel(), schedule, 90)
    assert info.spills == 0
    assert cross_compile(layernorm_kernel("m", "n"), schedule, 80).spills == 0
