"""Products of matrices with what comes before and after: equal to eager in the interpreter, held to their machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from dsc import bind, domain, gemm_tiles, ops
from dsc.codegen import cubin
from dsc.codegen.alternatives import alternatives, modelled, troubled
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import Kernel, product
from dsc.codegen.lower import Bound, Unlowerable
from dsc.codegen.triton import default_schedule, emit
from dsc.codegen.triton_nest import with_tile
from dsc.codegen.triton_run import interpreted, launch
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
    assert len(matrices) >= 4 and all(x.width == 16 for x in matrices), matrices


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
    assert tried[0] == default and len(tried) == len(gemm_tiles.TILES["bf16"])
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
