"""Products of matrices with what comes before and after: equal to eager in the interpreter, held to their machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dsc import bind, domain, gemm_tiles, keep, ops  # noqa: F401  # keep defines dsc::keep
from dsc.codegen import cubin, triton_stream
from dsc.codegen.alternatives import alternatives, modelled, troubled
from dsc.codegen.builder import Unlowerable
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import Kernel, product
from dsc.codegen.lower import Bound
from dsc.codegen.triton import default_schedule, emit, grid
from dsc.codegen.triton_nest import cuttable, nest, with_tile
from dsc.codegen.triton_plan import Plan, of_product, plan
from dsc.codegen.triton_run import interpreted, launch, prepare_plan
from dsc.precision import ops as precision_ops  # noqa: F401  # defines dsc::mm_tf32
from dsc.steps import Step
from dsc.target import find
from kit_graphs import trace

Tensor = torch.Tensor
LAYOUTS = ["nn", "nt", "tn", "tt"]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def matrices(layout: str, m: int, n: int, k: int, dtype: torch.dtype, *batch: int) -> tuple[Tensor, Tensor]:
    a = drawn(*batch, m, k, dtype=dtype) if layout[0] == "n" else drawn(*batch, k, m, dtype=dtype).mT
    b = drawn(*batch, k, n, dtype=dtype) if layout[1] == "n" else drawn(*batch, n, k, dtype=dtype).mT
    return a, b


def bound(f: Callable[..., object], *inputs: Tensor, dynamic: bool = False) -> Bound:
    """The kernel of all that ``f`` computes."""
    gm = trace(f, *inputs, dynamic=dynamic)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and isinstance(ops.value(n), (Tensor, tuple))]
    return bind.Binder("eager", "k").bind(Step(tuple(n for n in nodes if not ops.is_view(n)), "k0"))


def check(f: Callable[..., object], *inputs: Tensor, close: float = 2e-5, dynamic: bool = False) -> Bound:
    """``f`` as one kernel in the interpreter, against eager."""
    found = f(*inputs)
    want = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    made = bound(f, *inputs, dynamic=dynamic)
    assert product(made.kernel) is not None
    by_name = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), inputs, strict=False))
    outs = [torch.full_like(w, float("nan")) for w in want]
    given = iter(outs)
    buffers = [by_name[n.name] if n.op == "placeholder" else next(given) for n in made.nodes]
    sizes = sizes_of(made, by_name)
    schedule = default_schedule(made.kernel, interpreter=True)
    launch(made.kernel, schedule, interpreted(emit(made.kernel, schedule), made.kernel.name), buffers, sizes)
    for got, exact in zip(outs, want):
        torch.testing.assert_close(got, exact, rtol=close, atol=close)
    return made


def sizes_of(made: Bound, inputs: dict[str, Tensor]) -> dict[str, int]:
    """Size symbols by the inputs that show them."""
    symbols: dict[str, int] = {}
    for n in made.nodes:
        if n.op == "placeholder":
            symbols.update((str(e), size) for e, size in zip(domain.shape(ops.tensor(n)), inputs[n.name].shape))
    return {s: symbols[s] for s in made.kernel.sizes}


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


TAILS: dict[str, Callable[..., object]] = {
    "gelu+residual": lambda a, b, c, r: r + F.gelu(torch.addmm(c, a, b), approximate="tanh"),
    "saved+relu": lambda a, b, c, r: (h := torch.addmm(c, a, b), F.relu(h) * r),
}


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


def held(kernel: Kernel, facts: cubin.KernelFacts, capability: int) -> None:
    assert facts.spilled == 0
    assert 0 < facts.shared <= cubin.LIMITS[capability].shared_block
    assert set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
    short = {v.access[0] for v in kernel.lets if v.op == "load" and len(v.axes) < 2}
    matrices = [x for x in facts.accesses if x.buffer not in short]
    assert len(matrices) >= 3 and all(x.width == 16 for x in matrices), matrices


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


def in_parts(f: Callable[..., object], *inputs: Tensor, parts: int, close: float) -> Plan:
    """``f`` as two launches in the interpreter, against eager."""
    made = bound(f, *inputs)
    default = default_schedule(made.kernel)
    whole = of_product(made.kernel, replace(default, parts=parts))
    want = f(*inputs)
    outs = [torch.full_like(w, float("nan")) for w in ([want] if isinstance(want, Tensor) else want)]  # type: ignore[attr-defined]
    names = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), inputs, strict=False))
    given = iter(outs)
    prepare_plan(whole)([names[n.name] if n.op == "placeholder" else next(given) for n in made.nodes], {}, None)
    for got, exact in zip(outs, [want] if isinstance(want, Tensor) else want):  # type: ignore[call-overload]
        torch.testing.assert_close(got, exact, rtol=close, atol=close)
    return whole


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


# Persistent kernels: programs walk the tiles.


def walked(f: Callable[..., object], *inputs: Tensor, close: float, **changes: object) -> str:
    """``f`` by three programs that walk its tiles, in the interpreter, against eager and against a program a tile."""
    made = bound(f, *inputs)
    found = f(*inputs)
    want = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    names = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), inputs, strict=False))
    plain = default_schedule(made.kernel)
    results = []
    for schedule in (plain, replace(plain, programs=3, **changes)):  # type: ignore[arg-type]
        outs = [torch.full_like(w, float("nan")) for w in want]
        given = iter(outs)
        buffers = [names[n.name] if n.op == "placeholder" else next(given) for n in made.nodes]
        source = emit(made.kernel, schedule)
        launch(made.kernel, schedule, interpreted(source, made.kernel.name), buffers, {})
        results.append(outs)
    assert grid(made.kernel, schedule, {}) == 3 < grid(made.kernel, plain, {})
    for got, same, exact in zip(*results, want):
        assert torch.equal(got, same)
        torch.testing.assert_close(got, exact, rtol=close, atol=close)
    return source


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_walk_the_tiles(layout: str, dtype: torch.dtype) -> None:
    """Tiles that are no multiple of the programs, edges, a bias, a residual; what a backward needs is stored too."""
    a, b = matrices(layout, 200, 168, 72, dtype)
    bias, residual = drawn(168, dtype=dtype), drawn(200, 168, dtype=dtype)

    def f(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addmm(bias, a, b)
        return h, residual + torch.tanh(h) * 0.5

    close = 3e-5 if dtype == torch.float32 else 6e-3
    source = walked(f, a, b, bias, residual, close=close)
    assert "flatten=True" in source and source.index("flatten=True") < source.index("range(0, 72, KB)")
    if dtype == torch.float16:
        both = walked(f, a, b, bias, residual, close=close, tma=True)
        assert both.index("make_tensor_descriptor(") < both.index("flatten=True"), "made once, not for each tile"


def test_programs_walk_batches_and_computed_operands() -> None:
    a, b = matrices("nt", 70, 100, 33, torch.float32, 3)
    walked(lambda a, b: torch.relu(torch.bmm(a, b) * 2), a, b, close=3e-5)
    walked(lambda a, s, b: torch.mm(a * s + 1, torch.exp(b)) - 1, drawn(130, 50), drawn(50), drawn(50, 132), close=1e-4)
    # what belongs to a row or a column as a whole is computed before the main loop
    f = lambda a, s, b, t: torch.relu(torch.mm(a * s, b * t))  # noqa: E731
    walked(f, drawn(130, 50), drawn(130, 1), drawn(50, 132), drawn(132), close=3e-5)

    def norm(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        y = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], g, None, 1e-5)[0]
        return F.relu(torch.mm(y, w.t()))

    walked(norm, drawn(200, 80), drawn(80), drawn(150, 80) / 8, close=3e-5)


def joined(sass: str, unit: str, copy: str) -> int:
    """Instructions of the shortest loop that multiplies, fetches operands and stores results: of tiles and terms at once."""
    found = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)]
    jumps = [(at, int(to[0], 16)) for at, text in found if "BRA" in text and (to := re.findall("0x[0-9a-f]+", text))]
    loops = [[text for at, text in found if to <= at <= end] for end, to in jumps if to < end]
    whole = [x for x in loops if all(any(word in text for text in x) for word in (unit, copy, "STG"))]
    return min(map(len, whole), default=0)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code_of_walking_programs(capability: int, layout: str) -> None:
    """One loop that is pipelined across tiles: copies of the next one's operands are in the loop that stores this one."""
    a, b = matrices(layout, 4096, 4096, 4096, torch.bfloat16)
    c, r = drawn(4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    kernel = bound(TAILS["gelu+residual"], a, b, c, r).kernel
    target = find("a100" if capability == 80 else "h100")
    unit = "HMMA" if capability == 80 else "HGMMA"
    tried = [s for s in alternatives(kernel, default_schedule(kernel), target) if s.programs]
    assert {s.tma for s in tried} == ({False} if capability == 80 else {True, False})
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        if s.RB == 256:
            continue  # the large tile: with a tail as long as this one it spills, and is ruled out
        assert s.programs == target.sms
        assert facts.spilled == 0 and 0 < facts.shared <= cubin.LIMITS[capability].shared_block
        assert set(facts.tensor) == {unit}
        assert joined(facts.sass(), unit, "UTMALDG" if s.tma else "LDGSTS")
        assert {x.width for x in facts.accesses if x.buffer != "b3"} == {16}
    plain = cubin.inspect(kernel, default_schedule(kernel), capability)
    assert not joined(plain.sass(), unit, "LDGSTS")


def test_machine_code_of_the_large_tile() -> None:
    a, b = matrices("nt", 4096, 4096, 4096, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    (large,) = [s for s in alternatives(kernel, default_schedule(kernel), find("h100")) if s.RB == 256]
    facts = cubin.inspect(kernel, large, 90)
    assert facts.spilled == 0 and facts.shared <= cubin.LIMITS[90].shared_block and facts.code.blocks == 1
    assert joined(facts.sass(), "HGMMA", "UTMALDG") and "HGMMA.64x256x16" in facts.sass()


def test_where_programs_walk() -> None:
    """Where tiles outnumber them: not in a small product, one in fp32, a contraction in parts, or behind a norm.

    The model takes it where a multiprocessor holds one tile at a time and many follow each other after short sums.
    """
    half = lambda *shape: drawn(*shape, dtype=torch.bfloat16)  # noqa: E731
    relu = lambda a, b: torch.relu(a @ b)  # noqa: E731
    a100 = find("a100")
    for k, taken in ((256, True), (8192, False)):
        kernel = bound(relu, half(4096, k), half(k, 4096)).kernel
        default = default_schedule(kernel)
        tried = alternatives(kernel, default, a100)
        (walk,) = [s for s in tried if s.programs]
        assert walk == replace(default, programs=108) and "108 programs walk the tiles" in walk.label
        assert not any(s.programs for s in alternatives(kernel, default))
        alone = Code(156, 0, 65536, 8, 1, 0.125, 500, {}, {}, tensor=4)
        choice = modelled(kernel, default, a100, dict.fromkeys(tried, alone))
        assert (choice.chosen == walk) == taken, choice.why
        beside = dict.fromkeys(tried, replace(alone, blocks=2))
        assert modelled(kernel, default, a100, beside).chosen == default, "another tile multiplies while one waits"
    for f, inputs in (
        (relu, (half(512, 512), half(512, 512))),
        (relu, (drawn(4096, 256), drawn(256, 4096))),
        (lambda x, g: torch.mm(x.t(), g).float() * 2, (half(8192, 256), half(8192, 128))),
        (lambda x, w: torch.relu(F.layer_norm(x, (256,)) @ w), (half(4096, 256), half(256, 4096))),
    ):
        kernel = bound(f, *inputs).kernel  # type: ignore[arg-type]
        assert not any(s.programs for s in alternatives(kernel, default_schedule(kernel), a100))


# Dropout behind a product.


def dropping(a: Tensor, b: Tensor, c: Tensor, r: Tensor, seed: Tensor) -> Tensor:
    y = torch.addmm(c, a, b)
    return r + y * torch.ops.dsc.keep(seed, list(y.shape), 0.9) * 1.125


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_behind_a_product(layout: str) -> None:
    """The mask that the product's tiles draw is the one that is drawn alone; also by programs that walk, and in parts."""
    a, b = matrices(layout, 100, 72, 256, torch.float16)
    inputs = a, b, drawn(72, dtype=torch.float16), drawn(100, 72, dtype=torch.float16), torch.tensor(2**40 + 5)
    check(dropping, *inputs, close=6e-3)
    in_parts(dropping, *inputs, parts=2, close=6e-3)
    a, b = matrices(layout, 200, 168, 64, torch.float16)
    walked(
        dropping, a, b, drawn(168, dtype=torch.float16), drawn(200, 168, dtype=torch.float16), inputs[-1], close=6e-3
    )


def test_a_gradient_through_dropout_behind_a_product() -> None:
    """With a mask of eager's, which is stored: the product of the gradient takes it."""
    mask = drawn(100, 72) > 0
    f = lambda g, w, m, h: torch.ops.aten.gelu_backward(  # noqa: E731
        torch.ops.aten.native_dropout_backward(g @ w, m, 1.25), h
    )
    check(f, drawn(100, 48), drawn(48, 72), mask, drawn(100, 72), close=3e-5)


@pytest.mark.parametrize("capability", [80, 90])
def test_machine_code_of_dropout_behind_a_product(capability: int) -> None:
    a, b = matrices("nt", 4096, 4096, 512, torch.bfloat16)
    c, r = drawn(4096, dtype=torch.bfloat16), drawn(4096, 4096, dtype=torch.bfloat16)
    kernel = bound(dropping, a, b, c, r, torch.tensor(1)).kernel
    default = default_schedule(kernel)
    target = find("a100" if capability == 80 else "h100")
    tried = alternatives(kernel, default, target)
    assert all(s.RB <= 64 for s in tried), "wider ones spill on sm_90"
    assert any(s.programs for s in tried)
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        assert facts.spilled == 0 and set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
        assert {x.width for x in facts.accesses if x.buffer not in ("b3", "b4")} == {16}


# Maxima of blocks of columns, for the scales of 8-bit formats.


def peaked(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(torch.addmm(c, a, b))
    return y, y.abs().view(y.shape[0], -1, 64).amax(2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_product_finds_the_maxima_of_its_blocks(layout: str) -> None:
    """Of what it stores, bit for bit, also at the edges, where programs walk, and of what is no number."""
    a, b = matrices(layout, 200, 320, 72, torch.float16)
    c = drawn(320, dtype=torch.float16)
    made = check(peaked, a, b, c, close=6e-3)
    assert [x.role for x in made.kernel.buffers].count("out") == 2 and not cuttable(nest(made.kernel))
    walked(peaked, a, b, c, close=6e-3)
    a[3, 5] = float("nan")
    made = bound(peaked, a, b, c)
    schedule = default_schedule(made.kernel)
    y, top = torch.empty(200, 320, dtype=torch.float16), torch.full((200, 5), 7.0, dtype=torch.float16)
    given = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), (a, b, c)))
    outs = iter((y, top))
    buffers = [given[n.name] if n.op == "placeholder" else next(outs) for n in made.nodes]
    launch(made.kernel, schedule, interpreted(emit(made.kernel, schedule), made.kernel.name), buffers, {})
    assert torch.equal(top[4:], y[4:].abs().view(196, 5, 64).amax(2)) and bool(top[3].isnan().all())


def test_maxima_of_batches() -> None:
    a, b = matrices("nt", 70, 128, 33, torch.float16, 3)
    f = lambda a, b: ((y := torch.bmm(a, b) * 2), y.abs().view(3, 70, 2, 64).amax(3))  # noqa: E731
    check(f, a, b, close=6e-3)


def test_maxima_that_no_tile_has_are_no_part_of_a_product() -> None:
    """Of other blocks, of rows, of fp32, whose tiles are narrower."""
    half = lambda *shape: drawn(*shape, dtype=torch.float16)  # noqa: E731
    for f, inputs in (
        (lambda a, b: (a @ b).abs().view(64, -1, 32).amax(2), (half(64, 48), half(48, 128))),
        (lambda a, b: (a @ b).abs().amax(1), (half(64, 48), half(48, 128))),
        (lambda a, b: (a @ b).abs().view(64, -1, 64).amax(2), (drawn(64, 48), drawn(48, 128))),
    ):
        with pytest.raises(Unlowerable):
            bound(f, *inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_machine_code_of_maxima(capability: int, layout: str) -> None:
    a, b = matrices(layout, 4096, 2048, 512, torch.bfloat16)
    kernel = bound(peaked, a, b, drawn(2048, dtype=torch.bfloat16)).kernel
    default = default_schedule(kernel)
    target = find("a100" if capability == 80 else "h100")
    tried = [default, *(s for s in alternatives(kernel, default, target) if s.programs)]
    assert len(tried) > 1
    for s in tried:
        facts = cubin.inspect(kernel, s, capability)
        assert facts.spilled == 0 and 0 < facts.shared <= cubin.LIMITS[capability].shared_block
        assert set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
        assert {x.width for x in facts.accesses if x.buffer in ("b0", "b1", "o0")} == {16}


# Steps of tiles that programs share evenly.


@pytest.mark.parametrize(
    ("programs", "steps", "tiles"), [(7, 16, 8), (108, 64, 32), (5, 3, 11), (132, 128, 64), (6, 6, 1)]
)
def test_every_step_is_a_program_s_and_every_piece_is_stored_once(programs: int, steps: int, tiles: int) -> None:
    h = triton_stream.Share(programs, steps, tiles)
    owners = [p for p in range(programs) for _ in range(h.start(p), h.start(p + 1))]
    assert owners == [h.program(step) for step in range(h.total)]
    assert max(map(owners.count, range(programs))) == h.longest
    stored = []
    for p in range(programs):
        touched = sorted({step // steps for step in range(h.total) if owners[step] == p})
        assert len(touched) <= h.segments
        for t in touched:
            piece = p - h.program(t * steps)
            last = owners[(t + 1) * steps - 1] == p
            stored += [(t, i) for i in (range(piece, h.pieces) if last else [piece])]
    assert sorted(stored) == [(t, i) for t in range(tiles) for i in range(h.pieces)]


def shared(f: Callable[..., object], *inputs: Tensor, programs: int, close: float) -> Plan:
    """``f`` by programs that share its steps, in the interpreter, against eager."""
    made = bound(f, *inputs)
    schedule = replace(default_schedule(made.kernel), parts=0, streams=programs)
    h = triton_stream.share(made.kernel, schedule, programs)
    assert h.total % programs and h.pieces > 1, "it is no even cut"
    whole = of_product(made.kernel, replace(schedule, parts=h.pieces))
    found = f(*inputs)
    want = [found] if isinstance(found, Tensor) else list(found)  # type: ignore[call-overload]
    outs = [torch.full_like(w, float("nan")) for w in want]
    names = dict(zip((n.name for n in made.nodes[0].graph.nodes if n.op == "placeholder"), inputs, strict=False))
    given = iter(outs)
    prepare_plan(whole)([names[n.name] if n.op == "placeholder" else next(given) for n in made.nodes], {}, None)
    for got, exact in zip(outs, want):
        torch.testing.assert_close(got, exact, rtol=close, atol=close)
    assert grid(whole.parts[0].kernel, whole.parts[0].schedule, {}) == programs
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_share_the_steps(layout: str, dtype: torch.dtype) -> None:
    """All that follows from the product comes from the second launch; edges of rows, columns and of the contraction."""
    a, b = matrices(layout, 100, 200, 500, dtype)
    bias, residual = drawn(200, dtype=dtype), drawn(100, 200, dtype=dtype)

    def f(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.addmm(bias, a, b, alpha=0.5)
        return h, residual + torch.tanh(h)

    whole = shared(f, a, b, bias, residual, programs=9, close=3e-5 if dtype == torch.float32 else 8e-3)
    assert len(whole.parts) == 2 and product(whole.parts[1].kernel) is None


def test_batches_and_computed_operands_share_the_steps() -> None:
    a, b = matrices("nt", 40, 24, 300, torch.float32, 3)
    shared(lambda a, b: torch.relu(torch.bmm(a, b) * 2), a, b, programs=5, close=3e-5)
    x, g = drawn(4, 70, 40), drawn(4, 70, 24)  # the sum walks [B, T]
    f = lambda x, g: torch.exp(torch.mm(x.view(-1, 40).t(), g.view(-1, 24)) / 64)  # noqa: E731
    shared(f, x, g, programs=5, close=3e-5)
    f = lambda a, s, b: torch.relu(torch.mm(a * s, torch.exp(b)))  # noqa: E731
    shared(f, drawn(70, 300), drawn(70, 1), drawn(300, 40) / 9, programs=5, close=2e-4)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_machine_code_of_shared_steps(capability: int, layout: str) -> None:
    a, b = matrices(layout, 128, 4096, 4096, torch.bfloat16)
    r = drawn(128, 4096, dtype=torch.bfloat16)
    kernel = bound(lambda a, b, r: r + a @ b, a, b, r).kernel
    target = find("a100" if capability == 80 else "h100")
    (s, *_) = [s for s in alternatives(kernel, default_schedule(kernel), target) if s.streams]
    first, join = of_product(kernel, s).parts
    held(first.kernel, cubin.inspect(first.kernel, first.schedule, capability), capability)
    facts = cubin.inspect(join.kernel, join.schedule, capability)
    assert facts.spilled == 0 and {a.width for a in facts.accesses if a.buffer.endswith("_part")} == {16}


def test_where_steps_are_shared() -> None:
    """The model takes it for skinny products on 108 multiprocessors; not where tiles are many, or sums short."""
    half = lambda *shape: drawn(*shape, dtype=torch.bfloat16)  # noqa: E731
    relu = lambda a, b: torch.relu(a @ b)  # noqa: E731
    a100 = find("a100")
    code = Code(96, 0, 65536, 8, 2, 0.25, 500, {}, {}, tensor=4)
    skinny = bound(relu, half(128, 4096), half(4096, 4096)).kernel
    tried = alternatives(skinny, default_schedule(skinny), a100)
    choice = modelled(skinny, default_schedule(skinny), a100, dict.fromkeys(tried, code))
    assert choice.chosen.streams == 108 and "108 programs share the steps" in choice.chosen.label
    assert not any(s.streams for s in alternatives(skinny, default_schedule(skinny)))
    for m, k in ((4096, 4096), (128, 256)):
        kernel = bound(relu, half(m, k), half(k, 4096)).kernel
        assert not any(s.streams for s in alternatives(kernel, default_schedule(kernel), a100))
