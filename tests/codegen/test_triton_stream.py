"""Skinny products whose programs share the steps of all tiles evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from dsc.codegen import cubin, triton_stream
from dsc.codegen.alternatives import alternatives, modelled
from dsc.codegen.candidates import Code
from dsc.codegen.kernel import product
from dsc.codegen.triton import default_schedule, emit, grid
from dsc.codegen.triton_plan import Plan, of_product
from dsc.codegen.triton_run import prepare_plan
from dsc.target import find
from kit_products import LAYOUTS, bound, drawn, held, matrices

Tensor = torch.Tensor


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


def test_text(golden: Callable[..., None]) -> None:
    """Both launches."""
    a, b = matrices("nn", 128, 4096, 4096, torch.bfloat16)
    kernel = bound(lambda a, b: torch.relu(a @ b), a, b).kernel
    (s, *_) = [s for s in alternatives(kernel, default_schedule(kernel), find("a100")) if s.streams]
    golden("\n\n".join(emit(p.kernel, p.schedule) for p in of_product(kernel, s).parts))
