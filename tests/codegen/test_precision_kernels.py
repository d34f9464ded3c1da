"""Triton's 8-bit kernels against the emulation, in the interpreter; and what they compile to for sm_80 and sm_90."""

from __future__ import annotations

import pytest
import torch

from dsc import bind
from dsc.codegen import cubin
from dsc.codegen.cubin import KernelFacts
from dsc.codegen.templates import gemm8, quantise8
from dsc.codegen.triton import Schedule
from dsc.codegen.triton_run import interpreted
from dsc.precision import emulate, ops
from dsc.precision.formats import BLOCK
from dsc.steps import Step
from kit_graphs import trace

Tensor = torch.Tensor
POINTER = {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5", "int8": "*i8"}
PAIRS = [("1x128", "128x128"), ("1x128", "1x128"), ("row", "row"), ("tensor", "tensor")]


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def plain(q: Tensor) -> Tensor:
    """fp8 as fp16, which holds every e4m3: the interpreter multiplies those."""
    return q if q.dtype == torch.int8 else q.half()


def multiplied(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, grains: tuple[str, str]) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty(m, n)
    constants = gemm8.constants(*grains, a.dtype == torch.int8, k)
    run = interpreted(gemm8.SOURCE, "mm8")
    run(gemm8.programs(m, n), [plain(a), sa, plain(b), sb, c, m, n, k], constants, Schedule())  # type: ignore[arg-type]
    return c


@pytest.mark.parametrize("grains", PAIRS)
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("shape", [(130, 70, 256), (40, 130, 200)])
def test_products_equal_the_emulation(shape: tuple[int, int, int], dtype: str, grains: tuple[str, str]) -> None:
    m, n, k = shape
    (a, sa), (b, sb) = (emulate.quantise(drawn(r, k, r), dtype, g) for r, g in zip((m, n), grains))
    got, want = multiplied(a, sa, b, sb, grains), emulate.mm8(a, sa, b, sb, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("grain", emulate.GRAINS)
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("turned", [False, True])
def test_rounding_equals_the_emulation(dtype: str, grain: str, turned: bool) -> None:
    rows, columns = 130, 200
    x = drawn(columns, rows, 1).t() if turned else drawn(rows, columns, 1)
    x[3], x[:, 5] = 0.0, x[:, 5] * 50
    want = emulate.quantise_both(x, dtype, grain)
    stored = torch.int8 if dtype == "int8" else torch.float16
    q, qt = torch.empty(rows, columns, dtype=stored), torch.empty(columns, rows, dtype=stored)
    s, st = torch.empty_like(want[1]), torch.empty_like(want[3])
    inverse, inverse_t = want[1].reciprocal(), want[3].reciprocal()
    constants = quantise8.constants(grain, True, True, emulate.LIMIT[dtype], dtype == "int8")
    arguments = [x, x, q, s, qt, st, inverse, inverse_t, rows, columns, *x.stride()]
    run = interpreted(quantise8.SOURCE, "quantise")
    run(quantise8.programs(rows, columns), arguments, constants, Schedule())  # type: ignore[arg-type]
    if grain in ("1x128", "128x128"):
        assert torch.equal(s, want[1]) and torch.equal(st, want[3])
    for got, exact in ((q, want[0]), (qt, want[2])):
        eighth = got if dtype == "int8" else got.to(torch.float8_e4m3fn)
        if dtype == "int8":
            assert torch.equal(eighth, exact)
        else:  # rounded to fp16 first here: a value in the middle of two of e4m3 may go either way
            assert float((eighth.float() != exact.float()).float().mean()) < 1e-2


@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
@pytest.mark.parametrize("grain", ["1x128", "128x128"])
def test_what_is_not_finite_shows_in_the_scale(dtype: str, grain: str) -> None:
    x = drawn(128, 256, 0)
    x[7, 140] = float("inf")
    q, s = torch.empty(128, 256, dtype=torch.float16), torch.empty(emulate.scale_shape(128, 256, grain))
    constants = quantise8.constants(grain, True, False, emulate.LIMIT[dtype], dtype == "int8")
    run = interpreted(quantise8.SOURCE, "quantise")
    run(quantise8.programs(128, 256), [x, x, q, s, q, s, s, s, 128, 256, *x.stride()], constants, Schedule())  # type: ignore[arg-type]
    assert int((~torch.isfinite(s)).sum()) == 1


def test_tf32_products() -> None:
    a, b = emulate.round_tf32(drawn(70, 50, 1)), emulate.round_tf32(drawn(50, 130, 2))
    c = torch.empty(70, 130)
    arguments = [a, b, c, 70, 130, 50, *a.stride(), *b.stride()]
    run = interpreted(gemm8.SOURCE, "mm_tf32")
    run(gemm8.programs(70, 130), arguments, dict(gemm8.TF32), Schedule())  # type: ignore[arg-type]
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)


def product_facts(dtype: str, grains: tuple[str, str], k: int, capability: int) -> KernelFacts:
    types = [POINTER[dtype], "*fp32", POINTER[dtype], "*fp32", "*bf16", *["i32"] * 3, *["constexpr"] * 8]
    schedule = Schedule(num_warps=gemm8.WARPS, num_stages=gemm8.STAGES, fp_fusion=True)
    constants = gemm8.constants(*grains, dtype == "int8", k)
    return cubin.compile_source(gemm8.SOURCE, "mm8", types, constants, range(8), schedule, capability)  # type: ignore[arg-type]


UNITS = {(80, "int8"): "IMMA", (90, "int8"): "IGMMA", (90, "e4m3"): "QGMMA"}


@pytest.mark.parametrize(("capability", "dtype"), list(UNITS))
@pytest.mark.parametrize("grains", PAIRS)
@pytest.mark.parametrize("k", [BLOCK, BLOCK - 16])
def test_every_main_loop_multiplies_8_bits(capability: int, dtype: str, grains: tuple[str, str], k: int) -> None:
    facts = product_facts(dtype, grains, k, capability)
    assert set(facts.tensor) == {UNITS[capability, dtype]}
    assert facts.spilled == 0
    assert facts.registers <= 255
    sass = facts.sass()
    assert UNITS[capability, dtype] in sass
    assert "HMMA" not in sass and "HGMMA" not in sass


@pytest.mark.parametrize(("capability", "dtype"), list(UNITS))
@pytest.mark.parametrize("grain", ["1x128", "128x128"])
def test_rounding_reads_once_and_writes_twice_in_whole_words(capability: int, dtype: str, grain: str) -> None:
    types = [
        "*bf16",
        "*bf16",
        POINTER[dtype],
        "*fp32",
        POINTER[dtype],
        *["*fp32"] * 3,
        *["i32"] * 3,
        *["constexpr"] * 8,
    ]
    constants = {**quantise8.constants(grain, True, True, emulate.LIMIT[dtype], dtype == "int8"), "x1": 1}
    schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1)
    facts = cubin.compile_source(quantise8.SOURCE, "quantise", types, constants, range(11), schedule, capability)  # type: ignore[arg-type]
    moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
    elements = quantise8.SIDE**2
    assert (moved["x"], moved["q"], moved["qt"]) == (2 * elements, elements, elements)
    assert all(a.width == cubin.WIDEST for a in facts.accesses if a.buffer in ("x", "q", "qt"))
    scales = sum(emulate.scale_shape(128, 128, grain)[0] for _ in range(2)) * 4
    assert (moved["x"] + moved["q"] + moved["qt"] + scales) / elements <= 4.1
    assert facts.spilled == 0


@pytest.mark.parametrize("producer", list(ops.PRODUCERS))
def test_values_are_computed_on_the_way(producer: str) -> None:
    x, y = drawn(128, 256, 1), drawn(128, 256, 2)
    inputs = [x, y] if producer in ("silu_mul", "add") else [x]
    want = ops.produced(inputs, producer, "int8", "1x128")
    q, qt = torch.empty(128, 256, dtype=torch.int8), torch.empty(256, 128, dtype=torch.int8)
    s, st = torch.empty_like(want[1]), torch.empty_like(want[3])
    constants = quantise8.constants("1x128", True, True, 127.0, True, producer)
    run = interpreted(quantise8.SOURCE, "quantise")
    run(quantise8.programs(128, 256), [x, y, q, s, qt, st, s, s, 128, 256, *x.stride()], constants, Schedule())  # type: ignore[arg-type]
    torch.testing.assert_close(s, want[1], rtol=1e-5, atol=0)
    assert int((q.int() - want[0].int()).abs().max()) <= 1
    assert float((q != want[0]).float().mean()) < 1e-3 and float((qt != want[2]).float().mean()) < 1e-3


@pytest.mark.parametrize("producer", ["gelu", "silu_mul"])
def test_fused_rounding_writes_8_bits_and_nothing_else(producer: str) -> None:
    types = ["*bf16", "*bf16", POINTER["e4m3"], "*fp32", POINTER["e4m3"], *["*fp32"] * 3, *["i32"] * 3]
    constants = {**quantise8.constants("1x128", True, True, 448.0, False, producer), "x1": 1}
    schedule = Schedule(num_warps=quantise8.WARPS, num_stages=1, fp_fusion=True)
    types += ["constexpr"] * 8
    facts = cubin.compile_source(quantise8.SOURCE, "quantise", types, constants, range(11), schedule, 90)  # type: ignore[arg-type]
    moved = {a.buffer: a.width * a.count * quantise8.WARPS * 32 for a in facts.accesses}
    elements = quantise8.SIDE**2
    assert moved["x"] == 2 * elements  # what the producer reads anyway
    assert ("y" in moved) == (producer == "silu_mul")
    assert (moved["q"] + moved["qt"] + 2 * 128 * 4) / elements <= 2.1
    assert facts.spilled == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_that_makes_rows_finds_their_maxima(capability: int) -> None:
    """Nothing is read for it, and nothing but a number a row is written."""

    def f(h: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.gelu(h + b)
        return y, y.abs().amax(1)

    gm = trace(f, torch.empty(1024, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16))
    nodes = tuple(n for n in gm.graph.nodes if n.op == "call_function")
    kernel = bind.Binder("eager", "k").bind(Step(nodes, "k0")).kernel
    facts = cubin.inspect(kernel, None, capability)
    assert facts.spilled == 0 and [b.role for b in kernel.buffers].count("out") == 2
    assert {a.buffer: a.width for a in facts.accesses if a.buffer in ("b0", "o0")} == {"b0": 16, "o0": 16}
    assert len({a.line for a in facts.accesses if a.buffer == "b0"}) == 1, "one read"
