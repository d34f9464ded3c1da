"""Emitted C++ kernels against torch eager: ``python benchmarks/kernels.py [name ...]``.

Medians of interleaved runs (and the best ones: on a shared machine threads that wait for a core spoil medians), with outputs preallocated on our side (a planned program has them) and torch's own allocation
on the other; ratios above one are ours being faster.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from dsc.codegen.kernel import Kernel
from kit_cpp import Make, make, sym, unit

i, j, r = sym("i j r")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    kernel: Kernel
    data: Tensors
    eager: Callable[[], object]
    """With what our kernel computes first in what it returns, where the two are compared."""
    compare: str | None = "y"
    fresh: str | None = None
    """A buffer overwritten in place, to be restored for the comparison."""


def inner_tanh(k: Make, x: str) -> tuple[str, str]:
    square = k.let("mul", x, x)
    u = k.let(
        "mul", k.const(0.7978845608028654), k.let("add", x, k.let("mul", k.const(0.044715), k.let("mul", square, x)))
    )
    return k.let("tanh", u), square


def gelu() -> Case:
    n = 1024 * 1536
    k = make("gelu", i=n)
    x = k.load("x", "f32", i)
    t, _ = inner_tanh(k, x)
    k.out("y", "f32", i, k.let("mul", k.let("mul", k.const(0.5), x), k.let("add", k.const(1.0), t)))
    d = {"x": torch.randn(1024, 1536), "y": torch.empty(1024, 1536)}
    return Case(k.done(), d, lambda: F.gelu(d["x"], approximate="tanh"))


def gelu_backward() -> Case:
    n = 1024 * 1536
    k = make("gelu_backward", i=n)
    g, x = k.load("g", "f32", i), k.load("x", "f32", i)
    t, square = inner_tanh(k, x)
    one, half = k.const(1.0), k.const(0.5)
    left = k.let("mul", half, k.let("add", one, t))
    slope = k.let("mul", k.const(0.7978845608028654), k.let("add", one, k.let("mul", k.const(0.134145), square)))
    right = k.let("mul", k.let("mul", half, x), k.let("mul", k.let("sub", one, k.let("mul", t, t)), slope))
    k.out("y", "f32", i, k.let("mul", g, k.let("add", left, right)))
    d = {"g": torch.randn(1024, 1536), "x": torch.randn(1024, 1536), "y": torch.empty(1024, 1536)}
    return Case(k.done(), d, lambda: torch.ops.aten.gelu_backward(d["g"], d["x"], approximate="tanh"))


def gelu_erf() -> Case:
    k = make("gelu_erf", i=1024 * 1536)
    x = k.load("x", "f32", i)
    t = k.let("erf", k.let("mul", x, k.const(0.7071067811865476)))
    k.out("y", "f32", i, k.let("mul", k.let("mul", x, k.const(0.5)), k.let("add", t, k.const(1.0))))
    d = {"x": torch.randn(1024, 1536), "y": torch.empty(1024, 1536)}
    return Case(k.done(), d, lambda: F.gelu(d["x"]))


def layer_norm() -> Case:
    n, m = 1024, 384
    k = make("layer_norm", i=n, r=("reduce", m))
    x = k.load("x", "f32", i * m + r)
    scale = k.const(1 / m)
    mean = k.let("mul", k.reduce("sum", x), scale)
    d0 = k.let("sub", x, mean)
    var = k.let("mul", k.reduce("sum", k.let("mul", d0, d0)), scale)
    s = k.let("rsqrt", k.let("add", var, k.const(1e-5)))
    y = k.let("add", k.let("mul", k.let("mul", d0, s), k.load("w", "f32", r)), k.load("b", "f32", r))
    k.out("y", "f32", i * m + r, y)
    k.out("mean", "f32", i, mean)
    k.out("rstd", "f32", i, s)
    d = {"x": torch.randn(n, m), "w": torch.randn(m), "b": torch.randn(m), "y": torch.empty(n, m)}
    d |= {"mean": torch.empty(n), "rstd": torch.empty(n)}
    return Case(k.done(), d, lambda: F.layer_norm(d["x"], (m,), d["w"], d["b"]))


def softmax() -> Case:
    n, m = 1024, 1024
    k = make("softmax", i=n, r=("reduce", m))
    x = k.load("x", "f32", i * m + r)
    e = k.let("exp", k.let("sub", x, k.reduce("max", x)))
    k.out("y", "f32", i * m + r, k.let("div", e, k.reduce("sum", e)))
    d = {"x": torch.randn(n, m), "y": torch.empty(n, m)}
    return Case(k.done(), d, lambda: d["x"].softmax(-1))


def column_sum(n: int, m: int) -> Case:
    k = make(f"column_sum_{m}", j=m, r=("reduce", n))
    k.out("y", "f32", j, k.reduce("sum", k.load("x", "f32", m * r + j)))
    d = {"x": torch.randn(n, m), "y": torch.empty(m)}
    return Case(k.done(), d, lambda: d["x"].sum(0))


def norm_weight_gradient() -> Case:
    n, m = 1024, 384
    k = make("norm_weight_grad", j=m, r=("reduce", n))
    g = k.load("g", "f32", m * r + j)
    xhat = k.let("mul", k.let("sub", k.load("x", "f32", m * r + j), k.load("mean", "f32", r)), k.load("rstd", "f32", r))
    k.out("y", "f32", j, k.reduce("sum", k.let("mul", g, xhat)))
    k.out("db", "f32", j, k.reduce("sum", g))
    d = {"g": torch.randn(n, m), "x": torch.randn(n, m), "mean": torch.randn(n), "rstd": torch.rand(n)}
    d |= {"y": torch.empty(m), "db": torch.empty(m)}
    return Case(
        k.done(), d, lambda: ((d["g"] * ((d["x"] - d["mean"][:, None]) * d["rstd"][:, None])).sum(0), d["g"].sum(0))
    )


def transpose_add() -> Case:
    n = 1024
    k = make("transpose_add", i=n, j=n)
    k.out("y", "f32", i * n + j, k.let("add", k.load("x", "f32", j * n + i), k.load("z", "f32", i * n + j)))
    d = {"x": torch.randn(n, n), "z": torch.randn(n, n), "y": torch.empty(n, n)}
    return Case(k.done(), d, lambda: d["x"].t() + d["z"])


def permute() -> Case:
    """[B, T, H, D] to [B, H, T, D]: contiguous both ways."""
    b, t, h, e = sym("b t h e")
    k = make("permute", b=8, h=6, t=256, e=64)
    k.out("y", "f32", ((b * 6 + h) * 256 + t) * 64 + e, k.load("x", "f32", ((b * 256 + t) * 6 + h) * 64 + e))
    d = {"x": torch.randn(8, 256, 6, 64), "y": torch.empty(8, 6, 256, 64)}
    return Case(k.done(), d, lambda: d["x"].transpose(1, 2).contiguous())


def cross_entropy() -> Case:
    n, m = 1024, 8192
    k = make("cross_entropy", i=n, r=("reduce", m))
    target = k.let("check", k.load("t", "i64", i), attr=m)
    x = k.load("x", "f32", i * m + r, role="inout")
    top = k.reduce("max", x)
    e = k.let("exp", k.let("sub", x, top))
    total = k.reduce("sum", e)
    here = k.let("eq", k.index(r), target)
    picked = k.reduce("sum", k.let("where", here, x, k.const(0.0)))
    k.out("y", "f32", i, k.let("sub", k.let("add", k.let("log", total), top), picked))
    one = k.let("where", here, k.const(1.0), k.const(0.0))
    k.out("x", "f32", i * m + r, k.let("sub", k.let("div", e, total), one))
    d = {"t": torch.randint(0, m, (n,)), "x": torch.randn(n, m), "y": torch.empty(n)}
    logits = d["x"].clone()

    def eager() -> object:
        p = logits.log_softmax(-1)
        loss = F.nll_loss(p, d["t"], reduction="none")
        g = torch.ops.aten.nll_loss_backward(torch.ones(n), p, d["t"], None, 0, -100, torch.tensor(float(n)))
        return loss, torch.ops.aten._log_softmax_backward_data(g, p, -1, torch.float32)

    return Case(k.done(), d, eager, fresh="x")


def swiglu_bf16() -> Case:
    n = 1024 * 1536
    k = make("swiglu_bf16", i=n)
    a, b = k.load("a", "bf16", i), k.load("b", "bf16", i)
    k.out("y", "bf16", i, k.let("mul", k.let("mul", a, k.let("sigmoid", a)), b))
    d = {n_: torch.randn(1024, 1536).bfloat16() for n_ in ("a", "b", "y")}
    return Case(k.done(), d, lambda: F.silu(d["a"]) * d["b"], compare=None)


def dropout() -> Case:
    n = 1024 * 384
    k = make("dropout", i=n)
    u = k.let("random", k.load("seed", "i64", 0), k.index(i), attr="uniform", dtype="f32")
    kept = k.let("ge", u, k.const(0.1))
    k.out("mask", "b1", i, kept)
    k.out("y", "f32", i, k.let("mul", k.let("where", kept, k.load("x", "f32", i), k.const(0.0)), k.const(1 / 0.9)))
    d = {"seed": torch.tensor([3]), "x": torch.randn(n), "mask": torch.empty(n, dtype=torch.bool), "y": torch.empty(n)}
    return Case(k.done(), d, lambda: torch.native_dropout(d["x"], 0.1, True), compare=None)


def full_sum() -> Case:
    n = 1 << 22
    k = make("full_sum", r=("reduce", n))
    k.out("y", "f32", 0, k.reduce("sum", k.load("x", "f32", r)))
    d = {"x": torch.randn(n), "y": torch.empty(1)}
    return Case(k.done(), d, lambda: d["x"].sum().reshape(1), compare=None)


def batch_norm() -> Case:
    n, c, s = 16, 64, 1024
    q = sym("q")[0]
    k = make("batch_norm", j=c, r=("reduce", n), q=("reduce", s))
    at = (r * c + j) * s + q
    x = k.load("x", "f32", at)
    scale = k.const(1 / (n * s))
    mean = k.let("mul", k.reduce("sum", x), scale)
    d0 = k.let("sub", x, mean)
    var = k.let("mul", k.reduce("sum", k.let("mul", d0, d0)), scale)
    k.out("y", "f32", at, k.let("mul", d0, k.let("rsqrt", k.let("add", var, k.const(1e-5)))))
    d = {"x": torch.randn(n, c, 32, 32), "y": torch.empty(n, c, 32, 32)}
    return Case(k.done(), d, lambda: F.batch_norm(d["x"], None, None, training=True))


def causal_softmax() -> Case:
    b, t = 48, 256
    p = sym("p")[0]
    k = make("causal_softmax", p=b, i=t, r=("reduce", t))
    x = k.let(
        "where", k.let("le", k.index(r), k.index(i)), k.load("x", "f32", (p * t + i) * t + r), k.const(float("-inf"))
    )
    e = k.let("exp", k.let("sub", x, k.reduce("max", x)))
    k.out("y", "f32", (p * t + i) * t + r, k.let("div", e, k.reduce("sum", e)))
    d = {"x": torch.randn(b, t, t), "y": torch.empty(b, t, t)}
    mask = torch.ones(t, t, dtype=torch.bool).tril()
    return Case(k.done(), d, lambda: d["x"].masked_fill(~mask, float("-inf")).softmax(-1))


CASES: dict[str, Callable[[], Case]] = {
    "gelu": gelu, "gelu_backward": gelu_backward, "gelu_erf": gelu_erf, "layer_norm": layer_norm, "softmax": softmax,
    "column_sum_1536": lambda: column_sum(1024, 1536), "column_sum_384": lambda: column_sum(1024, 384),
    "column_sum_64": lambda: column_sum(100_000, 64), "norm_weight_grad": norm_weight_gradient,
    "transpose_add": transpose_add, "permute": permute, "cross_entropy": cross_entropy, "swiglu_bf16": swiglu_bf16,
    "dropout": dropout, "full_sum": full_sum, "batch_norm": batch_norm, "causal_softmax": causal_softmax,
}  # fmt: skip


def measure(ours: Callable[[], object], eager: Callable[[], object], seconds: float = 0.4) -> tuple[float, ...]:
    """Microseconds: ours and eager, medians then best."""
    times: tuple[list[float], list[float]] = ([], [])
    for f in (ours, eager) * 3:
        f()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 7:
        for f, out in zip((ours, eager), times, strict=True):
            start = time.perf_counter()
            f()
            out.append(time.perf_counter() - start)
    return tuple(f(t) * 1e6 for f in (statistics.median, min) for t in times)


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    torch.manual_seed(0)
    cases = {n: CASES[n]() for n in names}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        u = unit([c.kernel for c in cases.values()], Path(folder))
        print(f"{len(cases)} kernels built in {time.perf_counter() - start:.2f} s")
        print(
            f"{'kernel':18} {'threads':>7} {'ours us':>10} {'eager us':>10} {'ratio':>7} {'best us':>10} {'eager us':>10} {'ratio':>7}"
        )
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, c in cases.items():
                pointers = (ctypes.c_void_p * len(c.kernel.buffers))(
                    *(c.data[b.name].data_ptr() for b in c.kernel.buffers)
                )
                function, sizes = u.functions[c.kernel.name], (ctypes.c_long * 1)()
                saved = c.data[c.fresh].clone() if c.fresh else None
                function(pointers, sizes)  # type: ignore[operator]
                if c.compare:
                    want = c.eager()
                    want = want[0] if isinstance(want, tuple) else want
                    torch.testing.assert_close(c.data[c.compare], want, rtol=1e-4, atol=1e-4)
                if c.fresh:
                    c.data[c.fresh].copy_(saved)
                ours, eager, best, eager_best = measure(lambda f=function, p=pointers, s=sizes: f(p, s), c.eager)
                if c.fresh:
                    c.data[c.fresh].copy_(saved)
                print(
                    f"{name:18} {threads:7} {ours:10.1f} {eager:10.1f} {eager / ours:7.2f} "
                    f"{best:10.1f} {eager_best:10.1f} {eager_best / best:7.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
