"""Every operation of the kernel IR in Triton's interpreter, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from dsc.codegen.cubin import inspect
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.triton import emit
from kit_kernels import DTYPES, Build, pointwise
from kit_triton import apply, randn, run, same, uniform_kernel

Tensor = torch.Tensor
NAN, INF = math.nan, math.inf


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
    inspect(kernel, None, 80)


# -- random numbers


def philox(seed: int, offset: int) -> float:
    k, c = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], [offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[0] >> 8) * 2.0**-24


@pytest.mark.parametrize("seed", [0, 42, 2**40 + 3, -7])
def test_random_is_philox(seed: int) -> None:
    out = torch.empty(100)
    run(uniform_kernel(), torch.tensor(seed), out)
    same(out, torch.tensor([philox(seed, i * (2**31 + 1)) for i in range(100)]))
