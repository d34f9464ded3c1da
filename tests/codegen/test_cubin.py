"""What is read off compiled kernels, held against the machine code itself."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from dsc.codegen.cubin import KernelFacts, compile_source, inspect, occupancy
from dsc.codegen.triton import Schedule
from dsc.errors import CodegenFailed
from kit_kernels import pointwise
from kit_triton import column_sum, gather_kernel, layernorm_kernel, transpose_kernel

GEMM = """import triton
import triton.language as tl


@triton.jit
def gemm(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, 64)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(0, K, 64):
        x = tl.load(a + m[:, None] * K + (k + i)[None, :])
        y = tl.load(b + (k + i)[:, None] * N + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty))
"""


def gemm(capability: int, m: int, n: int, warps: int = 8, dtype: str = "*bf16") -> KernelFacts:
    types = [dtype] * 2 + ["*bf16"] + ["constexpr"] * 3
    return compile_source(
        GEMM, "gemm", types, {"M": m, "N": n, "K": 512}, [0, 1, 2], Schedule(num_warps=warps, num_stages=3), capability
    )


def widths(facts: KernelFacts) -> dict[str, tuple[int, int]]:
    """Buffer -> bytes at once, instructions."""
    return {a.buffer: (a.width, a.count) for a in facts.accesses}


def test_accesses_by_buffer() -> None:
    facts = inspect(pointwise("add", 4096, ["bf16", "f32"], "f32"), None, 90)
    loads = {a.buffer: a for a in facts.accesses if not a.store}
    [out] = [a for a in facts.accesses if a.store]
    assert len(loads) == 2
    assert (out.width, out.count) == (16, 2)  # 1024 points, 128 threads, 4 bytes
    assert facts.loads == facts.wide(store=False) == 3
    assert facts.stores == facts.wide(store=True) == 2
    line = facts.source.splitlines()[out.line - 1]
    assert f"tl.store({out.buffer}" in line


@pytest.mark.parametrize("capability", [80, 90])
def test_counts_are_those_of_the_machine_code(capability: int) -> None:
    """Straight-line kernels: the assembler splits no access, and that of Triton 3.7 joins all loads of one address."""
    import triton

    joins = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    for kernel in (layernorm_kernel(4096, 768), transpose_kernel(8, 512, 768), gather_kernel(50)):
        facts = inspect(kernel, None, capability)
        sass = facts.sass()
        most = facts.loads if joins else len(re.findall(r"\bld\.global", facts.ptx))
        assert facts.loads <= len(re.findall(r"\bLDG\.E", sass)) <= most
        assert len(re.findall(r"\bLDG\.E\.128", sass)) == facts.wide(store=False)
        assert len(re.findall(r"\bSTG\.E", sass)) == facts.stores
        assert len(re.findall(r"\bSTG\.E\.128", sass)) == facts.wide(store=True)
        assert "/* 0x" not in sass


def test_layernorm_reads_16_bytes_and_writes_a_number_a_row() -> None:
    assert {b: w for b, (w, _) in widths(inspect(layernorm_kernel(4096, 768), None, 80)).items()} == {
        "x": 16,
        "weight": 16,
        "bias": 16,
        "y": 16,
        "mean": 4,
        "rstd": 4,
    }
    assert widths(inspect(column_sum(4096, 768), None, 80))["x"][0] == 16


def test_tensor_core_instructions_and_asynchronous_copies() -> None:
    ampere, hopper = gemm(80, 128, 128), gemm(90, 128, 128)
    assert set(ampere.tensor) == {"HMMA"}
    assert len(re.findall(r"\bHMMA", ampere.sass())) == 8 * ampere.tensor["HMMA"]  # the assembler unrolls all 8 turns
    assert ampere.async_copies > 0
    assert set(hopper.tensor) == {"HGMMA"}
    assert re.search(r"\bHGMMA", hopper.sass())
    assert set(gemm(90, 128, 128, dtype="*fp8e4nv").tensor) == {"QGMMA"}


def test_spills_and_occupancy() -> None:
    facts = gemm(80, 256, 256)
    assert facts.spilled > 0
    assert re.search(r"\bSTL", facts.sass())
    assert facts.registers == 255
    assert facts.occupancy == pytest.approx(8 / 64)
    assert inspect(layernorm_kernel(4096, 768), None, 80).spilled == 0


def test_occupancy_by_hand() -> None:
    assert occupancy(32, 0, 4, 80) == 1.0  # 16 blocks of 4 warps, 1024 registers a warp
    assert occupancy(33, 0, 4, 80) == 48 / 64  # rounded up to 1280 a warp: 51 warps, 12 blocks
    assert occupancy(32, 60 * 1024, 4, 80) == 8 / 64  # 2 blocks of 61 KiB in 164
    assert occupancy(32, 60 * 1024, 4, 90) == 12 / 64  # 3 in 228
    assert occupancy(16, 200 * 1024, 4, 80) == 0.0  # more than a block may have
    assert occupancy(32, 200 * 1024, 4, 90) == 4 / 64
    assert occupancy(16, 0, 1, 80) == 32 / 64  # no more than 32 blocks


def test_what_a_target_cannot_do() -> None:
    with pytest.raises(CodegenFailed, match="Triton refuses it for sm_80"):
        gemm(80, 64, 64, dtype="*fp8e4nv")
