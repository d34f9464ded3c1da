"""Launches of a kernel: whole or in chunks; and axes that Triton could not follow as they came."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from dsc.codegen.cubin import inspect
from dsc.codegen.kernel import Kernel
from dsc.codegen.triton import emit, grid
from dsc.codegen.triton_axes import unfolded
from dsc.codegen.triton_nest import default_schedule
from dsc.codegen.triton_plan import PROGRAMS, plan
from dsc.codegen.triton_run import prepare_plan
from dsc.torch_shim import FloorDiv, Mod
from kit_kernels import Build
from kit_triton import column_sum, in_place_kernel, layernorm_kernel, randn, run, softmax_kernel

Tensor = torch.Tensor


def launch(kernel: Kernel, *tensors: Tensor) -> int:
    """In the interpreter; the number of launches."""
    made = plan(kernel, interpreter=True)
    prepare_plan(made)(tensors, {}, None)
    return len(made.parts)


def scaled_column_sums(rows: int, columns: int) -> Kernel:
    """Sums of columns, once as they are and once squared, and the scaled matrix itself."""
    b = Build("scaled", i=columns, r_j=rows)
    at = b["r_j"] * columns + b["i"]
    x = b.let("mul", b.load("x", at, "bf16"), b.load("scale", b["r_j"]))
    b.store("out", at, x, "bf16")
    b.store("sums", b["i"], b.let("add", b.reduce("sum", x), b.const(1.0)))
    b.store("squares", b["i"], b.reduce("sum", b.let("mul", x, x)), "bf16")
    return b.kernel()


def test_column_sums_in_chunks() -> None:
    rows, columns = 1000, 256
    kernel = scaled_column_sums(rows, columns)
    x, scale = randn(rows, columns, dtype=torch.bfloat16), randn(rows, seed=1)
    out, sums, squares = torch.empty_like(x), torch.empty(columns), torch.empty(columns, dtype=torch.bfloat16)
    assert launch(kernel, x, scale, out, sums, squares) == 2
    y = x.double() * scale.double()[:, None]
    torch.testing.assert_close(out.double(), y, rtol=4e-3, atol=0)
    torch.testing.assert_close(sums.double(), y.sum(0) + 1, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares.double(), y.square().sum(0), rtol=4e-3, atol=0)


def test_chunks_fill_the_gpu_and_read_whole_lines() -> None:
    kernel = scaled_column_sums(8192, 768)
    whole = grid(kernel, default_schedule(kernel), {})
    chunks, join = plan(kernel).parts
    assert whole < PROGRAMS <= grid(chunks.kernel, chunks.schedule, {}) <= 8 * PROGRAMS
    assert [b.name for b in chunks.kernel.buffers if b.role == "in"] == ["x", "scale"]
    facts = inspect(chunks.kernel, chunks.schedule, 80)
    assert {a.width for a in facts.accesses if a.buffer in ("x", "out")} == {16}
    assert facts.spilled == 0
    assert inspect(join.kernel, join.schedule, 80).spilled == 0


def test_one_sum_of_everything() -> None:
    kernel = Build("total", r_i=512, r_j=600)
    x = kernel.load("x", kernel["r_i"] * 600 + kernel["r_j"])
    kernel.store("out", 0, kernel.reduce("sum", x))
    value, out = randn(512, 600), torch.empty(())
    assert launch(kernel.kernel(), value, out) == 2
    torch.testing.assert_close(out.double(), value.double().sum(), rtol=1e-5, atol=1e-3)


def test_maxima_in_chunks_keep_nan() -> None:
    x = randn(4096, 64)
    x[17, 3] = float("nan")
    out = torch.empty(64)
    assert launch(column_sum(4096, 64, "max"), x, out) == 2
    assert torch.equal(out.isnan().nonzero(), torch.tensor([[3]]))
    assert torch.equal(out[4:], x[:, 4:].amax(0))


@pytest.mark.parametrize(
    "kernel",
    [
        column_sum(64, 64),  # small
        column_sum(4096, 16384),  # programs enough
        column_sum("m", 64),  # of unknown length
        column_sum(65537, 8),  # a prime number of rows
        layernorm_kernel(4, 65536),  # needs its sums along the rows
        softmax_kernel(2, 65536),
        in_place_kernel(),
    ],
    ids=lambda k: k.name,
)
def test_one_launch_does_better(kernel: Kernel) -> None:
    made = plan(kernel)
    assert len(made.parts) == 1
    assert made.parts[0].kernel is kernel
    assert not made.temporaries


def rope_kernel() -> Kernel:
    """[5 tokens, 6 heads, 2 halves of 32]: one half turned against the other."""
    b = Build("rope", t=5, h=6, d=64)
    t, h, d = b["t"], b["h"], b["d"]
    place = 384 * t + 64 * h
    first, second = b.load("x", place + Mod(d, 32)), b.load("x", place + Mod(d, 32) + 32)
    cos, sin = b.load("cos", 32 * t + Mod(d, 32)), b.load("sin", 32 * t + Mod(d, 32))
    low = b.let("lt", b.let("index", attr=FloorDiv(d, 32), dtype="i64"), b.const(1, "i64"))
    turned = b.let("sub", b.let("mul", first, cos), b.let("mul", second, sin))
    other = b.let("add", b.let("mul", second, cos), b.let("mul", first, sin))
    b.store("out", place + d, b.let("where", low, turned, other))
    return b.kernel()


def test_halves_of_an_axis_become_axes() -> None:
    kernel = rope_kernel()
    assert [(a.name, int(a.extent)) for a in unfolded(kernel).axes] == [("t", 5), ("h", 6), ("do", 2), ("d", 32)]
    x, cos, sin = randn(5, 6, 64), randn(5, 32, seed=1), randn(5, 32, seed=2)
    out = torch.empty_like(x)
    run(kernel, x, cos, sin, out)
    a, b = x[..., :32], x[..., 32:]
    c, s = cos[:, None], sin[:, None]
    torch.testing.assert_close(out, torch.cat((a * c - b * s, b * c + a * s), -1), rtol=1e-6, atol=1e-6)
    facts = inspect(kernel, None, 80)
    assert {a.width for a in facts.accesses} == {16}


def test_odd_extents_walked_as_one() -> None:
    """[4, 7, 9] contiguous, times a number a plane: the axes stay apart, and the loads whole."""
    b = Build("planes", i=40, j=9)
    i, j = b["i"], b["j"]
    x, scale = b.load("image", 9 * i + j), b.load("scale", i)
    b.store("out", 9 * i + j, b.let("mul", x, scale))
    kernel = b.kernel()
    assert "tl.load(image + x, " in emit(kernel)
    widths = {a.buffer: a.width for a in inspect(kernel, None, 80).accesses}
    assert widths["image"] == widths["out"] == 16
    value, scale_value = randn(40, 9), randn(40, seed=1)
    out = torch.empty_like(value)
    run(kernel, value, scale_value, out)
    torch.testing.assert_close(out, value * scale_value[:, None])
