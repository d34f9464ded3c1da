"""Kernels that multiply matrices: made from functions, run in the interpreter against eager, held to their machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from dsc import bind, domain, ops
from dsc.codegen import cubin
from dsc.codegen.kernel import Kernel, product
from dsc.codegen.lower import Bound
from dsc.codegen.triton import default_schedule, emit, grid
from dsc.codegen.triton_plan import Plan, of_product
from dsc.codegen.triton_run import interpreted, launch, prepare_plan
from dsc.steps import Step
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


TAILS: dict[str, Callable[..., object]] = {
    "gelu+residual": lambda a, b, c, r: r + F.gelu(torch.addmm(c, a, b), approximate="tanh"),
    "saved+relu": lambda a, b, c, r: (h := torch.addmm(c, a, b), F.relu(h) * r),
}


def held(kernel: Kernel, facts: cubin.KernelFacts, capability: int) -> None:
    assert facts.spilled == 0
    assert 0 < facts.shared <= cubin.LIMITS[capability].shared_block
    assert set(facts.tensor) == {"HMMA" if capability == 80 else "HGMMA"}
    short = {v.access[0] for v in kernel.lets if v.op == "load" and len(v.axes) < 2}
    matrices = [x for x in facts.accesses if x.buffer not in short]
    assert len(matrices) >= 3 and all(x.width == 16 for x in matrices), matrices


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
