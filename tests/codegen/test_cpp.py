from __future__ import annotations

import ctypes
import math
import random
from pathlib import Path

import pytest
import sympy
import torch
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Mod, ModularIndexing

from dsc.codegen.build import CacheUnusable, CompileFailed, build, build_many, find_compiler
from dsc.codegen.cpp import Call, emit, emit_unit
from dsc.codegen.cpp_axes import tidy
from dsc.codegen.kernel import COMPUTE, POINTWISE, Kernel, show
from kit_cpp import TORCH, Unit, evaluate, make, sym, unit, verify

i, j, k, r, q, N, M, K = sym("i j k r q N M K")
FLOAT_OPS = ("sqrt", "rsqrt", "recip", "exp", "expm1", "exp2", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "sigmoid",
             "floor", "ceil", "trunc", "rint", "neg", "abs")  # fmt: skip
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    1e-38,
    3.4e38,
    -3.4e38,
    88.7,
    -88.7,
    -103.9,
    0.5,
    2.5,
    1.5,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


# Mathematics


def _map(op: str, dtype: str = "f32") -> Kernel:
    m = make(f"{op}_{dtype}", i=N)
    args = [m.load(f"x{a}", dtype, i) for a in range(POINTWISE[op])]
    v = m.let(op, *args)
    m.out("y", "b1" if m.lets[-1].dtype == "b1" else dtype, i, v)
    return m.done()


@pytest.fixture(scope="module")
def maps(folder: Path) -> Unit:
    two = ("add", "sub", "mul", "div", "max", "min", "pow", "atan2", "lt", "le", "gt", "ge", "eq", "ne")
    ks = [_map(op, d) for op in (*FLOAT_OPS, *two, "fma", "isnan") for d in ("f32", "f64")]
    ks += [
        _map(op, "i64")
        for op in (
            "add",
            "sub",
            "mul",
            "neg",
            "abs",
            "max",
            "min",
            "lt",
            "le",
            "gt",
            "ge",
            "eq",
            "ne",
            "and",
            "or",
            "xor",
            "not",
        )
    ]
    ks += [_map(op, "b1") for op in ("and", "or", "xor", "not", "eq", "ne", "lt", "ge")]
    return unit(ks, folder)


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    want = exact.float()
    size = torch.maximum(want.abs(), torch.tensor(2.0**-126))
    ulp = torch.exp2(torch.floor(torch.log2(size.double())) - 23)
    error = (got.double() - exact).abs() / ulp
    same = (got == want) | (got.isnan() & exact.isnan())
    return torch.where(same, torch.zeros(()).double(), error)


@pytest.mark.parametrize("op", ["exp", "expm1", "exp2", "log", "log1p", "log2", "sin", "cos", "tanh", "erf", "sigmoid"])
def test_two_ulp_everywhere(maps: Unit, op: str) -> None:
    bits = torch.arange(0, 2**32, 1499, dtype=torch.int64)
    every = torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)
    near = torch.cat([torch.linspace(-s, s, 200003) for s in (1e-3, 0.1, 1.0, 4.0, 20.0, 110.0)])
    x = torch.cat([every, near, torch.tensor(SPECIAL)])
    y = torch.empty_like(x)
    maps(f"{op}_f32", {"x0": x, "y": y}, {"N": len(x)})
    d = x.double()
    exact = torch.special.expm1(d) if op == "expm1" else getattr(torch, op)(d)
    error = ulps(y, exact)
    worst = error.nan_to_num(nan=math.inf).argmax()
    assert error[worst] <= 2, f"{op}({x[worst]!r}) = {y[worst]!r}, off by {error[worst]} ulp"


def test_exact_limits(maps: Unit) -> None:
    for op, at, want in [("tanh", math.inf, 1.0), ("tanh", -math.inf, -1.0), ("exp", -math.inf, 0.0), ("log", 0.0, -math.inf),
                         ("log", -1.0, math.nan), ("erf", math.inf, 1.0), ("sigmoid", -math.inf, 0.0), ("sigmoid", math.inf, 1.0),
                         ("log1p", -1.0, -math.inf), ("expm1", -math.inf, -1.0), ("exp", math.inf, math.inf), ("log1p", -0.0, -0.0),
                         ("expm1", -0.0, -0.0), ("tanh", -0.0, -0.0), ("erf", -0.0, -0.0)]:  # fmt: skip
        x, y = torch.full((19,), at), torch.empty(19)
        maps(f"{op}_f32", {"x0": x, "y": y}, {"N": 19})
        torch.testing.assert_close(y, torch.full((19,), want), rtol=0, atol=0, equal_nan=True)
        assert (
            (torch.signbit(y) == math.copysign(1, want) * 1.0).all()
            or math.isnan(want)
            or (torch.signbit(y) == (math.copysign(1, want) < 0)).all()
        )


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_pointwise_floats(maps: Unit, dtype: str) -> None:
    t = TORCH[dtype]
    special = torch.tensor(SPECIAL, dtype=t)
    x = torch.cat([special.repeat(len(special)), torch.randn(37, dtype=t) * 3])
    y = torch.cat([special.repeat_interleave(len(special)), torch.randn(37, dtype=t) * 3])
    z = torch.randn(len(x), dtype=t)
    for u in maps.kernels:
        if u.buffers[0].dtype != dtype:
            continue
        out = u.buffers[-1].dtype
        data = {"x0": x, "x1": y, "x2": z, "y": torch.empty(len(x), dtype=TORCH[out])}
        verify(maps, u.name, {b.name: data[b.name] for b in u.buffers}, {"N": len(x)}, tol=3e-7)


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 31, 32, 33])
def test_pointwise_integers(maps: Unit, n: int) -> None:
    edge = torch.tensor([2**63 - 1, -(2**63), 0, -1, 2**31, -(2**31), 5])
    x, y = edge.repeat(7)[:n], edge.repeat_interleave(7)[:n]
    bx, by = torch.randint(0, 2, (n,)).bool(), torch.randint(0, 2, (n,)).bool()
    for u in maps.kernels:
        match u.buffers[0].dtype:
            case "i64":
                data = {"x0": x, "x1": y, "y": torch.empty(n, dtype=TORCH[u.buffers[-1].dtype])}
            case "b1":
                data = {"x0": bx, "x1": by, "y": torch.empty(n, dtype=torch.bool)}
            case _:
                continue
        verify(maps, u.name, {b.name: data[b.name] for b in u.buffers}, {"N": n})


def test_no_contraction(folder: Path) -> None:
    m = make("product_sum", i=1024)
    m.out(
        "y", "f32", i, m.let("add", m.let("mul", m.load("a", "f32", i), m.load("b", "f32", i)), m.load("c", "f32", i))
    )
    a, b, c = torch.randn(3, 1024)
    y = torch.empty(1024)
    unit([m.done()], folder)("product_sum", {"a": a, "b": b, "c": c, "y": y})
    assert torch.equal(y, a * b + c)


# Dtypes


def test_dtypes(folder: Path) -> None:
    ks = []
    for d in TORCH:
        m = make(f"copy_{d}", i=N)
        m.out("y", d, i, m.load("x", d, i))
        ks.append(m.done())
        m = make(f"strided_{d}", i=N)  # gathered and scattered
        m.out("y", d, 2 * i, m.load("x", d, 3 * i))
        ks.append(m.done())
        m = make(f"reverse_{d}", i=N)
        m.out("y", d, i, m.load("x", d, N - 1 - i))
        ks.append(m.done())
    for source in ("f32", "f64", "i64", "b1"):
        for target in ("f32", "f64", "i64", "b1"):
            m = make(f"cast_{source}_{target}", i=N)
            m.out("y", target, i, m.cast(m.load("x", source, i), target))
            ks.append(m.done())
    for compute, targets in (
        ("f32", ("bf16", "f16", "f32")),
        ("f64", ("bf16", "f16", "f32", "f64")),
        ("i64", ("i32", "i16", "i8", "u8", "i64")),
    ):
        for target in targets:
            m = make(f"round_{compute}_{target}", i=N)
            m.out("y", compute, i, m.let("round", m.load("x", compute, i), attr=target))
            ks.append(m.done())
    u = unit(ks, folder)
    for n in (0, 1, 16, 33):
        for d, t in TORCH.items():
            x = _values(t, 3 * n)
            verify(u, f"copy_{d}", {"x": x[:n], "y": torch.zeros(n, dtype=t)}, {"N": n}, tol=0)
            verify(u, f"strided_{d}", {"x": x, "y": torch.zeros(2 * n, dtype=t)}, {"N": n}, tol=0)
            verify(u, f"reverse_{d}", {"x": x[:n], "y": torch.zeros(n, dtype=t)}, {"N": n}, tol=0)
        for c in u.kernels:
            if c.name.startswith("cast"):
                x = _values(TORCH[c.buffers[0].dtype], n, finite=c.name.endswith("i64"))
                verify(u, c.name, {"x": x, "y": torch.zeros(n, dtype=TORCH[c.buffers[1].dtype])}, {"N": n}, tol=0)
            if c.name.startswith("round"):
                x = _values(TORCH[c.buffers[0].dtype], n)
                verify(u, c.name, {"x": x, "y": torch.zeros_like(x)}, {"N": n}, tol=0)


def _values(t: torch.dtype, n: int, finite: bool = False) -> torch.Tensor:
    if t == torch.bool:
        return torch.randint(0, 2, (n,)).bool()
    if t.is_floating_point:
        x = torch.randn(n, dtype=torch.float64) * torch.tensor([1e-6, 1e-3, 1.0, 100.0])[torch.arange(n) % 4]
        special = torch.tensor([] if finite else SPECIAL, dtype=torch.float64)
        x[: len(special)] = special[:n]
        return x.to(t)
    return torch.randint(-(2**62), 2**62, (n,)).to(t)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_every_half_and_every_rounding(folder: Path, dtype: str) -> None:
    m = make("widen", i=N)
    m.out("y", "f32", i, m.load("x", dtype, i))
    s = make("shrink", i=N)
    s.out("y", dtype, i, s.load("x", "f32", i))
    one = make("shrink_one", r=("reduce", 1))
    one.out("y", dtype, 0, one.reduce("sum", one.load("x", "f32", r)))
    u = unit([m.done(), s.done(), one.done()], folder)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(TORCH[dtype])
    wide = torch.empty(2**16)
    u("widen", {"x": every, "y": wide}, {"N": 2**16})
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    finite = wide[wide.isfinite()].sort().values
    between = (finite[1:].double() + finite[:-1].double()) / 2  # ties, and their neighbours
    x = torch.cat(
        [
            between.float(),
            torch.nextafter(between.float(), torch.tensor(math.inf)),
            torch.tensor(SPECIAL),
            torch.randn(999),
        ]
    )
    y = torch.empty(len(x), dtype=TORCH[dtype])
    u("shrink", {"x": x, "y": y}, {"N": len(x)})
    torch.testing.assert_close(y, x.to(TORCH[dtype]), rtol=0, atol=0, equal_nan=True)
    for value in SPECIAL:
        y1 = torch.empty(1, dtype=TORCH[dtype])
        u("shrink_one", {"x": torch.tensor([value]), "y": y1})
        torch.testing.assert_close(y1, torch.tensor([value]).to(TORCH[dtype]), rtol=0, atol=0, equal_nan=True)


# Reductions

KINDS = {
    "f32": ("sum", "prod", "max", "min"),
    "f64": ("sum", "prod", "max", "min"),
    "i64": ("sum", "prod", "max", "min"),
    "b1": ("any", "all"),
}
SHAPES = [(1, 1), (3, 0), (0, 5), (2, 15), (3, 16), (1, 17), (5, 33), (2, 64), (3, 100), (17, 7), (2, 257)]


@pytest.fixture(scope="module")
def reductions(folder: Path) -> Unit:
    ks = []
    for d, kinds in KINDS.items():
        for kind in kinds:
            m = make(f"row_{kind}_{d}", i=N, r=("reduce", M))
            m.out("y", d, i, m.reduce(kind, m.load("x", d, M * i + r)))
            ks.append(m.done())
            m = make(f"column_{kind}_{d}", j=M, r=("reduce", N))
            m.out("y", d, j, m.reduce(kind, m.load("x", d, M * r + j)))
            ks.append(m.done())
    m = make("full_sum", r=("reduce", N), q=("reduce", M))
    m.out("y", "f32", 0, m.reduce("sum", m.load("x", "f32", M * r + q)))
    ks.append(m.done())
    m = make("batch", j=M, r=("reduce", N), q=("reduce", K))
    x = m.load("x", "f32", (r * M + j) * K + q)
    mean = m.let("div", m.reduce("sum", x), m.cast(m.index(N * K), "f32"))
    d = m.let("sub", x, mean)
    m.out("var", "f32", j, m.reduce("sum", m.let("mul", d, d)))
    m.out("y", "f32", (r * M + j) * K + q, d)
    ks.append(m.done())
    m = make("count", i=N, r=("reduce", M))  # terms that do not vary
    m.out("y", "f32", i, m.reduce("sum", m.const(1.0)))
    ks.append(m.done())
    return unit(ks, folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_reductions(reductions: Unit, shape: tuple[int, int]) -> None:
    n, m = shape
    for d, kinds in KINDS.items():
        x = _values(TORCH[d], n * m, finite=True).reshape(n, m)
        for kind in kinds:
            t = TORCH[d]
            data = 1 + x.clone().sin() / 4 if kind == "prod" and TORCH[d].is_floating_point else x.clone()
            if t.is_floating_point and kind in ("max", "min") and n * m:
                data.reshape(-1)[n * m // 2] = math.nan
            verify(reductions, f"row_{kind}_{d}", {"x": data, "y": torch.zeros(n, dtype=t)}, {"N": n, "M": m}, tol=1e-5)
            verify(
                reductions, f"column_{kind}_{d}", {"x": data, "y": torch.zeros(m, dtype=t)}, {"N": n, "M": m}, tol=1e-5
            )
    verify(reductions, "full_sum", {"x": torch.randn(n, m), "y": torch.zeros(1)}, {"N": n, "M": m}, tol=1e-5)
    verify(reductions, "count", {"y": torch.zeros(n)}, {"N": n, "M": m})
    for c in (1, 3, 20):
        x = torch.randn(n, c, m)
        if x.numel():
            verify(
                reductions,
                "batch",
                {"x": x, "var": torch.zeros(c), "y": torch.zeros_like(x)},
                {"N": n, "M": c, "K": m},
                tol=1e-4,
            )


def test_infinite_sums(reductions: Unit) -> None:
    for value, want in ((math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)):
        x = torch.randn(3, 100000)
        x[1, 77777] = value
        y = torch.empty(3)
        reductions("row_sum_f32", {"x": x, "y": y}, {"N": 3, "M": 100000})
        torch.testing.assert_close(y[1], torch.tensor(want), equal_nan=True)


def test_long_sums_are_accurate(reductions: Unit) -> None:
    x = torch.rand(1 << 20)
    exact = x.double().sum()
    for name, sizes in (
        ("row_sum_f32", (1, 1 << 20)),
        ("column_sum_f32", (1 << 20, 1)),
        ("full_sum", (1 << 10, 1 << 10)),
    ):
        y = torch.empty(1)
        reductions(name, {"x": x, "y": y}, {"N": sizes[0], "M": sizes[1]})
        assert abs(y.double() - exact) <= 2e-7 * exact


# Whole kernels


def softmax(name: str, n: object, m: object, dtype: str = "f32") -> Kernel:
    b = make(name, i=n, r=("reduce", m))
    x = b.load("x", dtype, i * m + r)
    e = b.let("exp", b.let("sub", x, b.reduce("max", x)))
    b.out("y", dtype, i * m + r, b.let("div", e, b.reduce("sum", e)))
    return b.done()


def layer_norm(name: str, n: object, m: object) -> Kernel:
    b = make(name, i=n, r=("reduce", m))
    x = b.load("x", "f32", i * m + r)
    size = b.cast(b.index(sympy.sympify(m)), "f32")
    mean = b.let("div", b.reduce("sum", x), size)
    d = b.let("sub", x, mean)
    var = b.let("div", b.reduce("sum", b.let("mul", d, d)), size)
    scale = b.let("rsqrt", b.let("add", var, b.const(1e-5)))
    y = b.let("add", b.let("mul", b.let("mul", d, scale), b.load("w", "f32", r)), b.load("b", "f32", r))
    b.out("y", "f32", i * m + r, y)
    b.out("mean", "f32", i, mean)
    b.out("rstd", "f32", i, scale)
    return b.done()


def cross_entropy_in_place(name: str, n: object, m: object) -> Kernel:
    """Loss of a row and the gradient over the logits: the loss loads what the gradient overwrites."""
    b = make(name, i=n, r=("reduce", m))
    target = b.let("check", b.load("t", "i64", i), attr=sympy.sympify(m))
    x = b.load("x", "f32", i * m + r, role="inout")
    top = b.reduce("max", x)
    e = b.let("exp", b.let("sub", x, top))
    total = b.reduce("sum", e)
    here = b.let("eq", b.index(r), target)
    picked = b.reduce("sum", b.let("where", here, x, b.const(0.0)))
    b.out("loss", "f32", i, b.let("sub", b.let("add", b.let("log", total), top), picked))
    one = b.let("where", here, b.const(1.0), b.const(0.0))
    b.out("x", "f32", i * m + r, b.let("sub", b.let("div", e, total), one))
    return b.done()


def embedding(name: str, dtype: str) -> Kernel:
    b = make(name, i=N, j=M)
    row = b.let("check", b.load("ids", "i64", i), attr=K)
    b.out("y", dtype, M * i + j, b.load("w", dtype, M * sympy.Symbol(row) + j))
    return b.done()


def lookup(name: str) -> Kernel:
    b = make(name, i=N)
    row = b.let("check", b.load("ids", "i64", i), attr=K)
    b.out("y", "f32", i, b.load("w", "f32", sympy.Symbol(row)))
    return b.done()


def scatter(name: str) -> Kernel:
    b = make(name, i=N)
    at = b.load("ids", "i64", i)
    b.out("y", "f32", sympy.Symbol(at), b.load("x", "f32", i))
    return b.done()


def permuted(name: str) -> Kernel:
    b = make(name, i=N, j=M, k=K)
    y = b.let("add", b.load("x", "f32", (k * M + j) * N + i), b.load("z", "f32", (i * M + j) * K + k))
    b.out("y", "f32", (i * M + j) * K + k, y)
    return b.done()


def transposed(name: str, n: object, m: object, dtype: str) -> Kernel:
    """One load and one store against the grain, so that both kinds of tiles occur."""
    b = make(name, i=n, j=m)
    y = b.let("mul", b.load("x", dtype, n * j + i), b.load("z", dtype, m * i + j))
    b.out("y", dtype, m * i + j, y)
    b.out("w", dtype, n * j + i, b.let("add", y, b.load("z", dtype, m * i + j)))
    return b.done()


def views(name: str) -> Kernel:
    b = make(name, i=N)
    x = b.load("x", "f32", FloorDiv(i, 3) + ModularIndexing(i, 2, 5) + CeilDiv(i, 2))
    b.out("y", "f32", i, b.let("add", x, b.cast(b.index(sympy.Max(i, 3) + sympy.Min(i, 7)), "f32")))
    return b.done()


def column_softmax(name: str, n: object, m: object) -> Kernel:
    b = make(name, j=m, r=("reduce", n))
    x = b.load("x", "f32", m * r + j)
    e = b.let("exp", b.let("sub", x, b.reduce("max", x)))
    b.out("y", "f32", m * r + j, b.let("div", e, b.reduce("sum", e)))
    return b.done()


def weight_gradient(name: str, n: object, m: object) -> Kernel:
    b = make(name, j=m, r=("reduce", n))
    g = b.load("g", "f32", m * r + j)
    xhat = b.let("mul", b.let("sub", b.load("x", "f32", m * r + j), b.load("mean", "f32", r)), b.load("rstd", "f32", r))
    b.out("dw", "f32", j, b.reduce("sum", b.let("mul", g, xhat)))
    b.out("db", "f32", j, b.reduce("sum", g))
    return b.done()


def nothing(name: str) -> Kernel:
    b = make(name)
    b.out("y", "f32", 0, b.let("add", b.load("x", "f32", 0, role="inout"), b.const(1.0)))
    b.out("x", "f32", 0, b.load("x", "f32", 0))
    return b.done()


@pytest.fixture(scope="module")
def whole(folder: Path) -> Unit:
    ks = [
        softmax("softmax", N, M),
        softmax("softmax_100", 7, 100),
        softmax("softmax_bf16", 5, 64, "bf16"),
        softmax("softmax_1", 6, 1),
    ]
    ks += [softmax("softmax_long", 2, 70000), layer_norm("norm", N, M), layer_norm("norm_96", 9, 96)]
    ks += [cross_entropy_in_place("loss", N, M), cross_entropy_in_place("loss_50", 6, 50)]
    ks += [
        embedding("embed", "f32"),
        embedding("embed_bf16", "bf16"),
        embedding("embed_f64", "f64"),
        lookup("lookup"),
        scatter("scatter"),
    ]
    ks += [
        permuted("permuted"),
        views("views"),
        nothing("nothing"),
        weight_gradient("dw", N, M),
        weight_gradient("dw_300", 300, 80),
    ]
    ks += [column_softmax("column_softmax", N, M), column_softmax("column_softmax_33", 33, 33)]
    ks += [transposed(f"turn_{d}", N, M, d) for d in ("f32", "bf16", "f64")] + [transposed("turn_fixed", 48, 37, "f32")]
    b = make("broadcast", i=N, j=M)
    b.out("y", "f32", M * i + j, b.let("add", b.load("x", "f32", M * i + j), b.load("bias", "f32", j)))
    b.out("z", "f32", M * i + j, b.load("s", "f32", i))
    ks.append(b.done())
    b = make("causal", i=N, j=M)
    b.out(
        "y",
        "f32",
        M * i + j,
        b.let("where", b.let("le", b.index(j), b.index(i)), b.load("x", "f32", M * i + j), b.const(-math.inf)),
    )
    ks.append(b.done())
    return unit(ks, folder)


SIZES = [(1, 1), (0, 3), (3, 0), (2, 13), (5, 16), (3, 31), (33, 17), (16, 64), (7, 101), (64, 300)]


@pytest.mark.parametrize("shape", SIZES)
def test_whole_kernels_of_any_size(whole: Unit, shape: tuple[int, int]) -> None:
    n, m = shape
    s = {"N": n, "M": m}
    x = torch.randn(n, m)
    verify(whole, "softmax", {"x": x, "y": torch.zeros_like(x)}, s)
    verify(whole, "column_softmax", {"x": x, "y": torch.zeros_like(x)}, s)
    if m:
        row = {"mean": torch.zeros(n), "rstd": torch.zeros(n)}
        verify(
            whole,
            "norm",
            {"x": x, "w": torch.randn(m), "b": torch.randn(m), "y": torch.zeros_like(x), **row},
            s,
            tol=2e-5,
        )
        verify(whole, "loss", {"x": x, "t": torch.randint(0, m, (n,)), "loss": torch.zeros(n)}, s, tol=1e-5)
    verify(
        whole,
        "dw",
        {"g": x, "x": x + 1, "mean": torch.randn(n), "rstd": torch.rand(n), "dw": torch.zeros(m), "db": torch.zeros(m)},
        s,
        tol=1e-4,
    )
    verify(whole, "broadcast", {"x": x, "bias": torch.randn(m), "y": x * 0, "s": torch.randn(n), "z": x * 0}, s)
    verify(whole, "causal", {"x": x, "y": torch.zeros_like(x)}, s)
    for d in ("f32", "bf16", "f64"):
        t = TORCH[d]
        data = {
            "x": torch.randn(m, n).to(t),
            "z": x.to(t),
            "y": torch.zeros(n, m, dtype=t),
            "w": torch.zeros(m, n, dtype=t),
        }
        verify(whole, f"turn_{d}", data, s)
    for c in (1, 4, 19):
        z = torch.randn(n, m, c)
        verify(whole, "permuted", {"x": torch.randn(c, m, n), "z": z, "y": z * 0}, {**s, "K": c})


def test_whole_kernels_of_known_size(whole: Unit) -> None:
    for name, n, m, dtype in (
        ("softmax_100", 7, 100, "f32"),
        ("softmax_bf16", 5, 64, "bf16"),
        ("softmax_1", 6, 1, "f32"),
        ("softmax_long", 2, 70000, "f32"),
    ):
        x = torch.randn(n, m).to(TORCH[dtype])
        verify(whole, name, {"x": x, "y": torch.zeros_like(x)})
    x = torch.randn(9, 96)
    verify(
        whole,
        "norm_96",
        {"x": x, "w": x[0].clone(), "b": x[1].clone(), "y": x * 0, "mean": torch.zeros(9), "rstd": torch.zeros(9)},
        tol=2e-5,
    )
    verify(
        whole, "loss_50", {"x": torch.randn(6, 50), "t": torch.randint(0, 50, (6,)), "loss": torch.zeros(6)}, tol=1e-5
    )
    g = torch.randn(300, 80)
    verify(
        whole,
        "dw_300",
        {
            "g": g,
            "x": g + 1,
            "mean": torch.randn(300),
            "rstd": torch.rand(300),
            "dw": torch.zeros(80),
            "db": torch.zeros(80),
        },
        tol=1e-4,
    )
    x = torch.randn(33, 33)
    verify(whole, "column_softmax_33", {"x": x, "y": x * 0})
    verify(
        whole,
        "turn_fixed",
        {"x": torch.randn(37, 48), "z": torch.randn(48, 37), "y": torch.zeros(48, 37), "w": torch.zeros(37, 48)},
    )
    verify(whole, "nothing", {"x": torch.randn(1), "y": torch.zeros(1)})


@pytest.mark.parametrize("n", [0, 1, 7, 16, 40])
def test_indirect(whole: Unit, n: int) -> None:
    ids = torch.randint(0, 50, (n,))
    for d in ("f32", "bf16", "f64"):
        w = torch.randn(50, 24).to(TORCH[d])
        verify(
            whole,
            f"embed{'' if d == 'f32' else '_' + d}",
            {"ids": ids, "w": w, "y": torch.zeros(n, 24, dtype=w.dtype)},
            {"N": n, "M": 24, "K": 50},
        )
    verify(whole, "lookup", {"ids": ids, "w": torch.randn(50), "y": torch.zeros(n)}, {"N": n, "K": 50})
    verify(whole, "scatter", {"ids": torch.randperm(n), "x": torch.randn(n), "y": torch.zeros(n)}, {"N": n})
    verify(whole, "views", {"x": torch.randn(100), "y": torch.zeros(n)}, {"N": n})


@pytest.mark.parametrize("bad", [-1, 50, 2**32, -(2**63)])
def test_check_fails_and_reads_nothing_outside(whole: Unit, bad: int) -> None:
    ids = torch.arange(20)
    ids[17] = bad
    y = torch.zeros(20)
    w = torch.randn(50)
    assert whole("lookup", {"ids": ids, "w": w, "y": y}, {"N": 20, "K": 50}) == 1
    assert y[17] == w[0]
    assert whole("lookup", {"ids": ids, "w": w, "y": y}, {"N": 17, "K": 50}) == 0, (
        "lanes that do not count are not checked"
    )
    table = torch.randn(50, 3)
    assert whole("embed", {"ids": ids, "w": table, "y": torch.zeros(20, 3)}, {"N": 20, "M": 3, "K": 50}) == 1


# Random numbers


def philox(seed: int, offset: int) -> float:
    c, key = [offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ key[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ key[1], p & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (c[0] >> 8) * 2.0**-24


def test_philox_known_answer() -> None:
    assert philox(0, 0) == (0x6627E8D5 >> 8) * 2.0**-24  # Random123, kat_vectors: philox4x32 10 of zeros


def test_random(folder: Path) -> None:
    b = make("noise", i=N)
    seed = b.load("seed", "i64", 0)
    offset = b.let("add", b.load("base", "i64", 0), b.index(i))
    b.out("y", "f32", i, b.let("random", seed, offset, attr="uniform", dtype="f32"))
    one = make("one")
    one.out(
        "y",
        "f32",
        0,
        one.let("random", one.load("seed", "i64", 0), one.load("base", "i64", 0), attr="uniform", dtype="f32"),
    )
    u = unit([b.done(), one.done()], folder)
    for s, base in ((0, 0), (123456789012345, 2**32 - 5), (-7, 2**40)):
        y = torch.empty(37)
        u("noise", {"seed": torch.tensor([s]), "base": torch.tensor([base]), "y": y}, {"N": 37})
        assert y.tolist() == [philox(s, base + n) for n in range(37)]
        u("one", {"seed": torch.tensor([s]), "base": torch.tensor([base]), "y": y})
        assert y[0] == philox(s, base)


# Text and sequences


def test_sequence_stops_at_the_first_failure(folder: Path, compiler: str) -> None:
    ks = [softmax("soft", N, M), lookup("look")]
    source = emit_unit(
        ks, [[Call("soft", (0, 1), (1, 0)), Call("look", (2, 3, 4), (2, 0)), Call("soft", (1, 0), (1, 0))]]
    )
    f = build(source, folder, compiler).function("run_0")
    x = torch.randn(4, 8)
    before = x.clone()
    y, ids, w, out = torch.zeros(4, 8), torch.tensor([1, 2, 3, 9]), torch.randn(6), torch.zeros(4)
    order = sorted(("ids", "w", "y"), key=[b.name for b in ks[1].buffers].index)
    data = {"ids": ids, "w": w, "y": out}
    tensors = [x, y, *(data[n] for n in order)]
    pointers = (ctypes.c_void_p * 5)(*(t.data_ptr() for t in tensors))
    sizes = (ctypes.c_long * 3)(4, 8, 6)
    assert (ks[0].sizes, ks[1].sizes) == (("M", "N"), ("K", "N"))
    assert f(pointers, sizes) == 2
    torch.testing.assert_close(y, before.softmax(-1))
    assert torch.equal(x, before), "the third call must not run"
    ids[3] = 5
    assert f(pointers, sizes) == 0
    torch.testing.assert_close(out, w[ids])


def test_names_that_c_has_taken(folder: Path) -> None:
    b = make("long", load=40)
    v = b.load("double", "f32", sympy.Symbol("load"))
    b.lets[0] = type(b.lets[0])("float", "load", (), b.lets[0].attr, "f32", b.lets[0].axes)
    assert v == "v0"
    b.out("Exp", "f32", sympy.Symbol("load"), b.let("exp", "float"))
    x, y = torch.randn(40), torch.zeros(40)
    u = unit([b.done()], folder)
    u("long", {"double": x, "Exp": y})
    torch.testing.assert_close(y, x.exp())


def test_two_kernels_of_one_name() -> None:
    with pytest.raises(ValueError, match="two kernels named s"):
        emit_unit([softmax("s", 2, 3), softmax("s", 2, 4)], [])


def test_tidy_merges_and_drops() -> None:
    b = make("flat", i=4, j=1, k=6)
    b.out("y", "f32", 6 * (i + j) + k, b.load("x", "f32", 6 * i + k))
    assert [(a.name, int(a.extent)) for a in tidy(b.done()).axes] == [("i_k", 24)]


def halves(name: str, rows: object, columns: int, half: int, other: int | None = None) -> Kernel:
    """Rotary halves: every element reads both halves of its row, and says in which of them it stands."""
    b = make(name, i=rows, k=columns)
    first, second = (b.load("x", "f32", columns * i + Mod(k, half) + s) for s in (0, columns - half))
    left = b.let("lt", b.index(FloorDiv(k, other or half)), b.const(1, "i64"))
    b.out("y", "f32", columns * i + k, b.let("where", left, b.let("sub", first, second), b.let("add", first, second)))
    return b.done()


def test_tidy_takes_blocks_apart(folder: Path) -> None:
    k = halves("halves", N, 64, 32)
    assert [(a.name, a.extent) for a in tidy(k).axes] == [("i", N), ("k_block", 2), ("k", 32)]
    assert "lanes<" not in emit(k)  # nothing is gathered
    x, y = torch.randn(5, 64), torch.empty(5, 64)
    verify(unit([k], folder), "halves", {"x": x, "y": y}, {"N": 5})


@pytest.mark.parametrize(("columns", "half", "other"), [(16, 8, None), (60, 24, None), (64, 32, 16), (32, 32, None)])
def test_tidy_leaves_other_walks(columns: int, half: int, other: int | None) -> None:
    """Blocks shorter than a vector, that do not divide the axis, of two lengths, and of the axis' own length."""
    axes = tidy(halves("halves", N, columns, half, other)).axes
    assert [(a.name, a.extent) for a in axes] == [("i", N), ("k", columns)]


def test_no_include() -> None:
    assert "\n#include" not in emit_unit([softmax("s", N, M)], [])


def test_text(golden) -> None:
    golden(emit(softmax("softmax", 8, 96)), "softmax")
    golden(emit(weight_gradient("weight_gradient", N, 128)), "columns")
    golden(emit(transposed("transposed", 64, N, "f32")), "tiles")
    golden(emit(embedding("embedding", "bf16")), "embedding")


def test_evaluate_agrees_with_text() -> None:
    assert COMPUTE["bf16"] == "f32"
    assert evaluate(FloorDiv(i, 3), {"i": torch.tensor(7)}) == 2


# Threads


def large_kernels() -> list[Kernel]:
    ks = [softmax("one_row", 1, 200_003), column_softmax("tall_softmax", 20_011, 40), weight_gradient("tall", 5003, 70)]
    ks += [
        weight_gradient("tall_batch", N, 64),
        softmax("one_row_batch", 2, M),
        cross_entropy_in_place("one_loss", 1, 100_000),
    ]
    b = make("sum_all", r=("reduce", N), q=("reduce", M))
    x = b.load("x", "f32", M * r + q)
    b.out("total", "f32", 0, b.reduce("sum", x))
    b.out("top", "f32", 0, b.reduce("max", x))
    b.out("any", "b1", 0, b.reduce("any", b.let("gt", x, b.const(3.0))))
    ks.append(b.done())
    b = make("few_channels", j=3, r=("reduce", N), q=("reduce", 1000))
    x = b.load("x", "f32", (r * 3 + j) * 1000 + q)
    mean = b.let("div", b.reduce("sum", x), b.cast(b.index(N * 1000), "f32"))
    d = b.let("sub", x, mean)
    b.out("y", "f32", (r * 3 + j) * 1000 + q, d)
    b.out("var", "f32", j, b.reduce("sum", b.let("mul", d, d)))
    ks.append(b.done())
    b = make("count_ids", r=("reduce", N))
    b.out("y", "i64", 0, b.reduce("sum", b.load("x", "i32", r)))
    ks.append(b.done())
    return ks


def test_reductions_shared_by_threads(folder: Path) -> None:
    u = unit(large_kernels(), folder)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            out = []
            x = torch.randn(1, 200_003)
            out.append(verify(u, "one_row", {"x": x, "y": x * 0}))
            x = torch.randn(20_011, 40)
            out.append(verify(u, "tall_softmax", {"x": x, "y": x * 0}))
            for name, n, m, s in (
                ("tall", 5003, 70, {}),
                ("tall_batch", 4001, 64, {"N": 4001}),
                ("tall_batch", 0, 64, {"N": 0}),
                ("tall_batch", 1, 64, {"N": 1}),
            ):
                g = torch.randn(n, m)
                data = {
                    "g": g,
                    "x": g + 1,
                    "mean": torch.randn(n),
                    "rstd": torch.rand(n),
                    "dw": torch.zeros(m),
                    "db": torch.zeros(m),
                }
                out.append(verify(u, name, data, s, tol=2e-4))
            for m in (1, 16, 16385, 99_991):
                x = torch.randn(2, m)
                out.append(verify(u, "one_row_batch", {"x": x, "y": x * 0}, {"M": m}))
            x = torch.randn(1, 100_000)
            out.append(verify(u, "one_loss", {"x": x, "t": torch.tensor([77_777]), "loss": torch.zeros(1)}, tol=1e-5))
            for n, m in ((300, 1001), (1, 5), (0, 4), (70_001, 3)):
                x = torch.randn(n, m)
                data = {"x": x, "total": torch.zeros(1), "top": torch.zeros(1), "any": torch.zeros(1, dtype=torch.bool)}
                out.append(verify(u, "sum_all", data, {"N": n, "M": m}, tol=1e-4))
            for n in (1, 50, 333):
                x = torch.randn(n, 3, 1000) + 5
                out.append(verify(u, "few_channels", {"x": x, "y": x * 0, "var": torch.zeros(3)}, {"N": n}, tol=1e-4))
            x = torch.randint(-(2**31), 2**31, (123_457,)).int()
            out.append(verify(u, "count_ids", {"x": x, "y": torch.zeros(1, dtype=torch.int64)}, {"N": 123_457}))
            results.append([t for tensors in out for t in tensors.values()])
        for a, b in zip(*results):
            assert torch.equal(a, b), "one thread and two must agree to the bit"
    finally:
        torch.set_num_threads(before)


# Building


SOURCE = 'extern "C" int run_0(void** buffers, const long* sizes) { return (int)sizes[0] + 1; }\n'


@pytest.fixture
def compiler() -> str:
    found = find_compiler()
    assert found is not None
    return found


def test_torch_governs_our_threads(folder: Path, compiler: str) -> None:
    library = build(emit_unit([softmax("many", 512, 512)], [[Call("many", (0, 1))]]), folder, compiler)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert library.handle.omp_get_max_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_build_twice_compiles_once(tmp_path: Path, compiler: str) -> None:
    one = build(SOURCE, tmp_path, compiler)
    file = one.path.stat().st_ino  # its time is that of its last use
    assert build(SOURCE, tmp_path, compiler).path.stat().st_ino == file
    assert one.function("run_0")(None, (ctypes.c_long * 1)(41)) == 42
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".cpp", ".so"], "no temporary files stay"


def test_build_many_and_racing_processes(tmp_path: Path, compiler: str) -> None:
    sources = [SOURCE.replace("+ 1", f"+ {n}") for n in range(4)]
    libraries = build_many([*sources, *sources], tmp_path, compiler, jobs=4)
    assert [x.function("run_0")(None, (ctypes.c_long * 1)(0)) for x in libraries] == [0, 1, 2, 3] * 2
    assert build_many([], tmp_path, compiler) == []


def test_compile_failure_tells_the_first_errors(tmp_path: Path, compiler: str) -> None:
    with pytest.raises(CompileFailed, match="nonsense"):
        build("nonsense f();", tmp_path, compiler)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_others_can_write_are_refused(tmp_path: Path, compiler: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CacheUnusable, match="others can write"):
        build(SOURCE, shared, compiler)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CacheUnusable):
        build(SOURCE, file, compiler)
    link = tmp_path / "link"
    link.symlink_to(shared)
    with pytest.raises(CacheUnusable, match="others can write"):
        build(SOURCE, link, compiler)


def test_a_library_that_others_could_change_is_built_anew(tmp_path: Path, compiler: str) -> None:
    path = build(SOURCE, tmp_path, compiler).path
    path.unlink()
    path.write_bytes(b"not a library")
    path.chmod(0o666)
    assert build(SOURCE, tmp_path, compiler).function("run_0")(None, (ctypes.c_long * 1)(1)) == 2


def test_find_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "my-c++"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o700)
    assert find_compiler(str(mine)) == str(mine)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None


# Random kernels


def random_kernel(name: str, rng: random.Random) -> tuple[Kernel, list[dict[str, int]]]:
    """Axes, layouts, values and stages by chance, and the sizes to run it at."""
    extents = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 64, 70]
    symbols = dict(zip("NMK", sym("N M K")))
    axes: dict[str, object] = {}
    for a in "ijkr"[: rng.randint(1, 4)]:
        size = rng.choice(list(symbols.values())) if rng.random() < 0.4 else rng.choice(extents)
        axes[a] = ("reduce", size) if rng.random() < 0.45 else size
    while (
        math.prod(s if isinstance(s := (e[1] if isinstance(e, tuple) else e), int) else 8 for e in axes.values())
        > 60_000
    ):
        axes.popitem()
    m = make(name, **axes)
    extent = {a: e[1] if isinstance(e, tuple) else e for a, e in axes.items()}
    parallel = [a for a, e in axes.items() if not isinstance(e, tuple)]

    def layout(names: list[str]) -> sympy.Expr:
        index, step = sympy.S.Zero, rng.choice([1, 1, 1, 1, 2])
        for a in rng.sample(names, len(names)) if rng.random() < 0.5 else names[::-1]:
            index, step = index + step * sympy.Symbol(a, integer=True), step * extent[a]
        return index + rng.choice([0, 0, 0, 5])

    values: list[str] = []
    for n in range(rng.randint(1, 3)):
        names = [a for a in axes if rng.random() < 0.8]
        dtype = rng.choice(["f32", "f32", "f32", "bf16", "f16", "i64", "u8", "b1", "f64"])
        v = m.load(f"x{n}", dtype, layout(names))
        values.append(v if COMPUTE[dtype] == "f32" else m.cast(v, "f32"))
    values.append(m.cast(m.index(layout(list(axes)[:2])), "f32"))
    values.append(m.const(0.75))
    for _ in range(rng.randint(2, 10)):
        a, b = rng.choice(values), rng.choice(values)
        match rng.randint(0, 8):
            case 0:
                v = m.let(rng.choice(["tanh", "sigmoid", "erf", "abs", "neg"]), a)
            case 1:
                v = m.let("exp", m.let("tanh", a))
            case 2:
                v = m.let("where", m.let(rng.choice(["lt", "ge"]), a, b), b, a)
            case 3 if len(axes) and any(isinstance(e, tuple) for e in axes.values()):
                v = m.reduce(rng.choice(["sum", "max", "min"]), m.let("tanh", a))
            case 4 if any(isinstance(e, tuple) for e in axes.values()):
                v = m.let("sub", a, m.reduce("sum", m.let("sigmoid", b)))
            case 5:
                v = m.let(
                    "where",
                    m.let(rng.choice(["lt", "eq", "ge"]), m.index(layout(list(axes)[:1])), m.index(rng.randint(0, 20))),
                    a,
                    b,
                )
            case _:
                v = m.let(rng.choice(["add", "sub", "max", "min"]), a, b)
        values.append(v)
    last = values[-rng.randint(1, 2) :]
    of = {v.name: v for v in m.lets}
    for n, v in enumerate(last):
        full = any(a not in parallel for a in of[v].axes) or rng.random() < 0.3
        names = list(axes) if full else parallel
        m.out(f"y{n}", rng.choice(["f32", "f32", "f32", "bf16"]), layout(names), v)
    sizes = [
        {"N": rng.choice([1, 2, 5, 16, 33]), "M": rng.choice([1, 3, 17, 40]), "K": rng.choice([1, 4, 19])}
        for _ in range(2)
    ]
    return m.done(), [*sizes, {"N": rng.choice([0, 7]), "M": 1, "K": 2}]


@pytest.mark.parametrize("seed", range(4))
def test_random_kernels(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    cases = [random_kernel(f"random_{n}", rng) for n in range(25)]
    u = unit([k for k, _ in cases], folder)
    for kernel, sizes in cases:
        for s in sizes:
            env = {n: torch.tensor(v) for n, v in s.items()}
            total = math.prod(max(1, int(evaluate(a.extent, env))) for a in kernel.axes)
            empty = any(a.reduce and int(evaluate(a.extent, env)) == 0 for a in kernel.axes)
            data = {}
            for b in kernel.buffers:
                t = TORCH[b.dtype]
                x = torch.rand(2 * total + 6) if t.is_floating_point else torch.randint(0, 2, (2 * total + 6,))
                data[b.name] = x.to(t) if b.role == "in" else torch.zeros(2 * total + 6, dtype=t)
            if not empty:
                try:
                    verify(u, kernel.name, data, {n: s[n] for n in kernel.sizes}, tol=2e-4)
                except Exception:
                    print(show(kernel), s)
                    print(emit(kernel))
                    raise
