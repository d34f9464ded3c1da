"""Emitted Triton compiled for GPUs that are not here: registers, spills, width of loads."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from dsc.codegen.cubin import inspect
from dsc.codegen.kernel import Kernel
from dsc.codegen.triton import Schedule
from kit_kernels import Build, pointwise
from kit_triton import (
    bag_kernel,
    column_sum,
    everything,
    gather_kernel,
    in_place_kernel,
    layernorm_kernel,
    softmax_kernel,
    transpose_kernel,
    uniform_kernel,
)

COMPILED: dict[str, tuple[Kernel, Schedule | None]] = {
    "gelu": (pointwise("tanh", 4096 * 768, ["bf16"], "bf16"), None),
    "softmax": (softmax_kernel(4096, 1000, "bf16"), None),
    "softmax_looped": (softmax_kernel("m", "n"), None),
    "layernorm": (layernorm_kernel(4096, 768), None),
    "column_sum": (column_sum(4096, 768), None),
    "column_any": (column_sum(64, 768, "any", "b1"), None),
    "embedding": (gather_kernel(50000), None),
    "uniform": (uniform_kernel(), None),
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
    info = inspect(kernel, schedule, capability)
    assert info.spilled == 0
    assert 0 < info.registers <= 160
    assert f"sm_{capability}" in info.ptx
    if name in ("gelu", "layernorm", "column_sum"):  # 16 bytes a load, whichever axis is contiguous
        assert "ld.global.v4.b32" in info.ptx


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "b1"])
def test_cross_compile_of_every_operation(dtype: str, looped: bool) -> None:
    info = inspect(everything(dtype), Schedule(2, 16 if looped else 64), 80)
    assert info.spilled == 0
    if dtype == "f32":
        assert "div.rn.f32" in info.ptx
        assert "sqrt.rn.f32" in info.ptx
        assert "div.full.f32" in info.ptx  # inside of helpers, where an error of two units is accounted for


@pytest.mark.parametrize("schedule", [Schedule(2, 128), Schedule(2, 32)], ids=["persistent", "looped"])
def test_cross_compile_with_barrier_and_checks(schedule: Schedule) -> None:
    assert "bar.sync" in inspect(in_place_kernel(), schedule, 90).ptx
    info = inspect(bag_kernel(), schedule, 90)
    assert info.spilled == 0
    assert inspect(layernorm_kernel("m", "n"), schedule, 80).spilled == 0


def test_hints_widen_loads() -> None:
    kernel = softmax_kernel("m", "n")
    assert "ld.global.v4" not in inspect(kernel, None, 80).ptx
    assert "ld.global.v4" in inspect(kernel, None, 80, divisible=["n"]).ptx
    assert "ld.global.v4" not in inspect(kernel, None, 80, aligned=False, divisible=["n"]).ptx


def test_products_and_sums_are_rounded_apart() -> None:
    b = Build("axpy", i=1024)
    b.store("y", b["i"], b.let("add", b.let("mul", b.load("a", b["i"]), b.load("x", b["i"])), b.load("b", b["i"])))
    assert "fma" not in inspect(b.kernel(), None, 80).ptx
    assert "fma" in inspect(b.kernel(), Schedule(1024, fp_fusion=True), 80).ptx
    assert "fma.rn.f32" in inspect(pointwise("fma", 1024, ["f32"] * 3, "f32"), None, 80).ptx


def test_transpose_reads_and_writes_whole_lines() -> None:
    info = inspect(transpose_kernel(8, 512, 768), None, 80)
    assert info.spilled == 0
    assert info.shared > 0
    assert "ld.global.v4.b32" in info.ptx
    assert "st.global.v4.b32" in info.ptx
