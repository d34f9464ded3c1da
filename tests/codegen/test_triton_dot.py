"""Products of matrices with what comes before and after: equal to eager in the interpreter, held to their machine code."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dsc import gemm_tiles
from dsc.codegen import cubin
from dsc.codegen.alternatives import alternatives, modelled, troubled
from dsc.codegen.builder import Unlowerable
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import product
from dsc.codegen.triton import default_schedule, emit, grid
from dsc.codegen.triton_nest import with_tile
from dsc.codegen.triton_plan import plan
from dsc.codegen.triton_run import interpreted, launch
from dsc.precision import ops as precision_ops  # noqa: F401  # defines dsc::mm_tf32
from dsc.target import find
from kit_products import LAYOUTS, TAILS, bound, check, drawn, held, in_parts, matrices

Tensor = torch.Tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_layout_with_a_tail(layout: str, dtype: torch.dtype) -> None:
    a, b = matrices(layout, 100, 72, 50, dtype)
    bias, residual = drawn(72, dtype=dtype), drawn(100, 72, dtype=dtype)

    def f(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return residual + torch.tanh(torch.addmm(bias, a, b)) * 0.5

    check(f, a, b, bias, residual, close=2e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(layout: str) -> None:
    a, b = matrices(layout, 70, 40, 33, torch.float32, 3)
    check(lambda a, b: torch.relu(torch.bmm(a, b) * 2), a, b)
    c = drawn(3, 70, 40)
    check(lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2).sigmoid(), c, a, b)


def test_what_the_backward_needs_is_stored_too() -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addmm(b, x, w.t())
        return h, F.gelu(h, approximate="tanh")

    made = check(f, drawn(64, 48), drawn(96, 48), drawn(96))
    assert [b.role for b in made.kernel.buffers] == ["in"] * 3 + ["out"] * 2


def test_heads_are_rows_and_columns_of_other_shapes() -> None:
    """The tail walks [B, T, H, D], the product [B T, H D]."""

    def f(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        y = torch.mm(x.view(-1, x.shape[-1]), w).view(2, 36, 4, 16)
        return y + r.view(2, 1, 1, 16)

    check(f, drawn(2, 36, 40), drawn(40, 64), drawn(2, 16))


def test_rows_are_normalised_where_they_are_read() -> None:
    """A layer norm of the rows before the product, an activation after it, in fp16 and fp32."""

    def f(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
        y = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], g, b, 1e-5)[0]
        return F.relu(torch.addmm(c, y, w.t()))

    for dtype, close in ((torch.float32, 2e-5), (torch.float16, 5e-3)):
        x, g, b, w, c = (drawn(*s, dtype=dtype) for s in ((70, 80), (80,), (80,), (50, 80), (50,)))
        made = check(f, x, g, b, w / 8, c, close=close)
        assert emit(made.kernel).count("for ") == 3  # mean, variance, product


def test_normalised_rows_are_stored_once() -> None:
    """By the first tile of the rows, with their moments, in fp32 and fp16; also where the matrix is square."""

    def f(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], g, None, 1e-5)
        return y, mean, rstd, torch.mm(y, w.t()).relu()

    for n, dtype, close in ((150, torch.float32, 2e-5), (150, torch.float16, 5e-3), (80, torch.float32, 2e-5)):
        x, g, w = (drawn(*s, dtype=dtype) for s in ((70, 80), (80,), (n, 80)))
        check(f, x, g, w / 8, close=close)


def test_what_varies_with_the_contraction_alone() -> None:
    """Scales of the contraction: one side of an operand is broadcast, the ends of the tile are zero."""

    def f(a: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a * s + 1, torch.exp(b)) - 1

    check(f, drawn(64, 50), drawn(50), drawn(50, 64), close=1e-4)


def test_rows_whose_number_is_not_known() -> None:
    a, b, c = drawn(100, 32), drawn(32, 64), drawn(64)
    made = check(lambda a, b, c: F.silu(torch.mm(a, b) + c), a, b, c, dynamic=True)
    assert made.kernel.sizes


def test_two_products_are_no_kernel() -> None:
    with pytest.raises(Unlowerable, match=r"two products|being added up|other elements"):
        bound(lambda a, b: torch.mm(torch.mm(a, b), b), drawn(64, 64), drawn(64, 64))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code(capability: int, layout: str) -> None:
    """No spills, whole accesses, the right matrix unit, shared memory within the target; every tile of the list."""
    a, b = matrices(layout, 512, 384, 256, torch.bfloat16)
    c, r = drawn(384, dtype=torch.bfloat16), drawn(512, 384, dtype=torch.bfloat16)
    tail = TAILS["gelu+residual" if layout[0] == "n" else "saved+relu"]
    kernel = bound(tail, a, b, c, r).kernel
    for t in gemm_tiles.TILES["bf16"] if layout == "nt" else gemm_tiles.TILES["bf16"][:1]:
        held(kernel, cubin.inspect(kernel, with_tile(t), capability), capability)


@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_of_a_norm_before_and_of_tf32(capability: int) -> None:
    def f(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], g, None, 1e-5)[0]
        return F.relu(torch.mm(y, w.t()))

    x, g, w = (drawn(*s, dtype=torch.bfloat16) for s in ((512, 256), (256,), (384, 256)))
    facts = cubin.inspect(bound(f, x, g, w).kernel, None, capability)
    assert facts.spilled == 0 and set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
    tf32 = bound(lambda a, b: torch.relu(torch.ops.dsc.mm_tf32(a, b)), drawn(256, 256), drawn(256, 256)).kernel
    facts = cubin.inspect(tf32, None, capability)
    assert facts.spilled == 0 and facts.tensor


def test_candidates_are_tiles_ranked_by_the_model() -> None:
    """All tiles of the list are compiled, none is ruled out; one that fills the machine beats a large one that does not."""
    a, b = matrices("nt", 1024, 768, 512, torch.bfloat16)
    kernel = bound(lambda a, b: F.relu(a @ b), a, b).kernel
    default = default_schedule(kernel)
    tried = alternatives(kernel, default)
    assert tried[0] == default and sum(not s.parts for s in tried) == len(gemm_tiles.TILES["bf16"])
    code = Code(96, 0, 65536, 8, 2, 0.25, 500, {}, {}, tensor=4)
    choice = modelled(kernel, default, find("h100"), dict.fromkeys(tried, code))
    assert choice.chosen == default and all("modelled" in c.lost for c in choice.candidates[1:])
    assert not troubled(code) and troubled(replace(code, spilled=8))


def test_the_best_tile_fills_the_machine() -> None:
    assert gemm_tiles.best(1, 8192, 8192, "bf16") == gemm_tiles.TILES["bf16"][0]
    assert gemm_tiles.best(1, 512, 512, "bf16").m == gemm_tiles.best(1, 512, 512, "bf16").n == 64
    assert gemm_tiles.best(None, None, 8192, "bf16").m == 128
    assert gemm_tiles.best(1, 1024, 1536, "bf16", rows=True).n == 256
    assert gemm_tiles.best(1, 1024, 96, "bf16", rows=True).n == 128
    small = [t for t in gemm_tiles.ranked(1, 8192, 8192, "bf16", limit=70_000)]
    assert small and all(t.shared(2) <= 70_000 for t in small)


# A contraction in parts.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_contraction_in_parts(layout: str, dtype: torch.dtype) -> None:
    """All that follows from the product, and what a backward needs of it, comes from the second launch."""
    a, b = matrices(layout, 100, 72, 256, dtype)
    bias, residual = drawn(72, dtype=dtype), drawn(100, 72, dtype=dtype)

    def f(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addmm(bias, a, b, alpha=0.5)
        return h, residual + torch.tanh(h)

    whole = in_parts(f, a, b, bias, residual, parts=4, close=3e-5 if dtype == torch.float32 else 6e-3)
    first, join = whole.parts
    assert product(first.kernel) is not None and product(join.kernel) is None
    assert [t.size for t in whole.temporaries] == [4 * 100 * 72]


def test_batches_and_contractions_of_two_axes_in_parts() -> None:
    a, b = matrices("nt", 40, 24, 128, torch.float32, 3)
    in_parts(lambda a, b: torch.relu(torch.bmm(a, b) * 2), a, b, parts=2, close=3e-5)
    x, g = drawn(4, 64, 40), drawn(4, 64, 24)  # the sum walks [B, T]
    f = lambda x, g: torch.exp(torch.mm(x.view(-1, 40).t(), g.view(-1, 24)) / 64)  # noqa: E731
    in_parts(f, x, g, parts=2, close=3e-5)


def test_few_tiles_and_long_sums_are_cut() -> None:
    """A weight's gradient of many tokens, a skinny product; not a large one, a short one, or one of no even parts."""
    assert gemm_tiles.chosen(1, 768, 768, 16384, "bf16")[1] > 1
    assert gemm_tiles.chosen(1, 64, 64, 65536, "bf16")[1] == gemm_tiles.MOST_PARTS
    for m, n, k in ((8192, 8192, 8192), (64, 64, 256), (768, 768, 16381)):
        assert gemm_tiles.chosen(1, m, n, k, "bf16")[1] == 1
    x, g = drawn(8192, 256, dtype=torch.bfloat16), drawn(8192, 128, dtype=torch.bfloat16)
    kernel = bound(lambda x, g: torch.mm(x.t(), g).float() * 2, x, g).kernel
    default = default_schedule(kernel)
    made = plan(kernel)
    assert default.parts > 1 and len(made.parts) == 2 and made.whole is not None and made.whole.schedule == default
    assert grid(made.parts[0].kernel, made.parts[0].schedule, {}) <= gemm_tiles.SMS
    whole = made.with_schedules({kernel.name: replace(default, parts=0)})
    assert len(whole.parts) == 1 and len(whole.with_schedules({kernel.name: default}).parts) == 2


def test_candidates_are_also_cut() -> None:
    """Where tiles do not fill the machine; the model weighs the second launch."""
    x, g = drawn(4096, 256, dtype=torch.bfloat16), drawn(4096, 256, dtype=torch.bfloat16)
    kernel = bound(lambda x, g: torch.relu(torch.mm(x.t(), g)), x, g).kernel
    default = default_schedule(kernel)
    tried = alternatives(kernel, default)
    assert {bool(s.parts) for s in tried} == {True, False}
    code = Code(96, 0, 65536, 8, 2, 0.25, 500, {}, {}, tensor=4)
    choice = modelled(kernel, default, find("h100"), dict.fromkeys(tried, code))
    assert choice.chosen.parts > 1 and "parts" in choice.chosen.label
    assert any("slower" in c.lost for c in choice.candidates if not c.schedule.parts)
    big = bound(lambda x: torch.relu(x @ x), drawn(2048, 2048, dtype=torch.bfloat16)).kernel
    assert not any(s.parts for s in alternatives(big, default_schedule(big)))


@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_of_parts(capability: int) -> None:
    x, g = drawn(4096, 256, dtype=torch.bfloat16), drawn(4096, 384, dtype=torch.bfloat16)
    r = drawn(256, 384, dtype=torch.bfloat16)
    kernel = bound(lambda x, g, r: r + torch.mm(x.t(), g), x, g, r).kernel
    first, join = plan(kernel).parts
    held(first.kernel, cubin.inspect(first.kernel, first.schedule, capability), capability)
    facts = cubin.inspect(join.kernel, join.schedule, capability)
    assert facts.spilled == 0 and {a.width for a in facts.accesses if a.buffer.endswith("_part")} == {16}


# Operands by descriptors.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_descriptors_give_the_same_and_zeros_outside(layout: str) -> None:
    a, b = matrices(layout, 104, 72, 88, torch.float16)
    f = lambda a, b: torch.relu(a @ b)  # noqa: E731
    made = bound(f, a, b)
    schedule = replace(default_schedule(made.kernel), tma=True)
    source = emit(made.kernel, schedule)
    assert source.count("tl.make_tensor_descriptor(") == 2 and source.count(".load([") == 2
    out = torch.full((104, 72), float("nan"), dtype=torch.float16)
    names = dict(zip("ab", (a, b)))
    buffers = [names[n.name[0]] if n.op == "placeholder" else out for n in made.nodes]
    launch(made.kernel, schedule, interpreted(source, made.kernel.name), buffers, {})
    torch.testing.assert_close(out, f(a, b), rtol=4e-3, atol=4e-3)


def test_what_has_no_descriptor_is_loaded_as_before() -> None:
    """Batches, rows of odd bytes, operands that are computed, fp32, sizes that are not known."""
    half = lambda *shape: drawn(*shape, dtype=torch.float16)  # noqa: E731
    for f, inputs, dynamic in (
        (lambda a, b: torch.relu(torch.bmm(a, b)), (half(2, 64, 64), half(2, 64, 64)), False),
        (lambda a, b: torch.relu(a @ b), (half(64, 63), half(63, 61)), False),
        (lambda a, b: torch.relu(a @ b), (drawn(64, 64), drawn(64, 64)), False),
        (lambda a, b: torch.relu(a @ b), (half(64, 64), half(64, 64)), True),
    ):
        kernel = bound(f, *inputs, dynamic=dynamic).kernel  # type: ignore[arg-type]
        default = default_schedule(kernel)
        assert emit(kernel, replace(default, tma=True)) == emit(kernel, default)


def looped(sass: str) -> int:
    """Instructions of the main loop: between the target of a branch back and the branch, around matrix units."""
    found = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)]
    units = [at for at, text in found if "HGMMA" in text]
    jumps = [(at, int(to[0], 16)) for at, text in found if "BRA" in text and (to := re.findall("0x[0-9a-f]+", text))]
    return min((at - to) // 16 for at, to in jumps if any(to <= u <= at for u in units))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code_of_descriptors(layout: str) -> None:
    """Copies of whole tiles by the accelerator; fewer registers, and a shorter loop, than with addresses a thread."""
    a, b = matrices(layout, 4096, 4096, 4096, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    default = default_schedule(kernel)
    plain = cubin.inspect(kernel, default, 90)
    facts = cubin.inspect(kernel, replace(default, tma=True), 90)
    assert facts.spilled == 0 and facts.shared <= cubin.LIMITS[90].shared_block
    assert set(facts.tensor) == {"HGMMA"}
    assert "cp.async.bulk.tensor" in facts.ptx and "UTMALDG" in facts.sass() and "LDGSTS" not in facts.sass()
    assert facts.registers < plain.registers and looped(facts.sass()) < looped(plain.sass())
    assert {x.width for x in facts.accesses if x.store} == {16}


def test_descriptors_are_a_candidate_of_large_products_from_sm_90_on() -> None:
    a, b = matrices("nt", 4096, 4096, 4096, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    default = default_schedule(kernel)
    (found,) = [s for s in alternatives(kernel, default, find("h100")) if s.tma and not s.programs]
    assert found == replace(default, tma=True) and "descriptors" in found.label
    assert not any(s.tma for s in (*alternatives(kernel, default, find("a100")), *alternatives(kernel, default)))
    small = bound(lambda a, b: torch.relu(a @ b), *matrices("nt", 256, 256, 256, torch.bfloat16)).kernel
    assert not any(s.tma for s in alternatives(small, default_schedule(small), find("h100")))
    code = Code(96, 0, 65536, 8, 2, 0.25, 500, {}, {}, tensor=4)
    choice = modelled(kernel, default, find("h100"), dict.fromkeys((default, found), code))
    assert choice.chosen == default, "only a measurement takes it"
