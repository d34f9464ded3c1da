"""Functions through the whole compiler, and how close their answers must come to eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from dsc import compiler, ops
from dsc import options as opt
from dsc.compilation import Compilation
from dsc.errors import DscWarning
from dsc.notes import notes
from dsc.target import find

Function = Callable[..., Any]

CLOSE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.bfloat16: (8e-3, 1e-4),
    torch.float16: (1e-3, 1e-6),
}
"""dtype -> relative and absolute tolerance: one unit in the last place of the 16-bit dtypes."""


def tensors(x: object) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]


def clone(t: torch.Tensor) -> torch.Tensor:
    """The same values in the same strides: an expanded tensor stays one."""
    if any(s == 0 for s in t.stride()):
        base = t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride())], t.stride())
        return base.clone().expand(t.shape).requires_grad_(t.requires_grad)
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    out.copy_(t.detach())
    return out.requires_grad_(t.requires_grad)


def difference(got: object, want: object, close: dict[torch.dtype, tuple[float, float]] = CLOSE) -> str | None:
    """What tells two results apart, in a line, or None: dtype, shape, strides, values."""
    g, w = tensors(got), tensors(want)
    if len(g) != len(w):
        return f"{len(g)} tensors instead of {len(w)}"
    for i, (a, b) in enumerate(zip(g, w)):
        if (found := _difference(a.detach(), b.detach(), close)) is not None:
            return f"result {i}: {found}"
    return None


def _difference(a: torch.Tensor, b: torch.Tensor, close: dict[torch.dtype, tuple[float, float]]) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
    strides = [(s, t) for n, s, t in zip(a.shape, a.stride(), b.stride()) if n > 1 and s != t]
    if strides and a.numel():
        return f"strides {a.stride()} instead of {b.stride()}"
    relative, absolute = close.get(b.dtype, (0.0, 0.0))
    same = torch.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    if not bool(same.all()):
        where = tuple((~same).nonzero()[0].tolist())
        return (
            f"{a[where].item()!r} instead of {b[where].item()!r} at {where}, {int((~same).sum())} of {a.numel()} differ"
        )
    return None


def trace(fn: Function, inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The ATen graph of a function, without gradients, with a fake value on every node."""
    with torch.no_grad():
        return make_fx(lambda *xs: tuple(tensors(fn(*xs))), tracing_mode="fake")(*inputs)


def run(gm: GraphModule, inputs: Sequence[torch.Tensor], **options: object) -> tuple[list[torch.Tensor], Compilation]:
    """The results of a traced graph through passes, kernels and linking, and the record of its compilation."""
    seen: list[Any] = []
    chosen = opt.parse({**options, "on_compile": seen.append}, None, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", DscWarning)
        call = compiler.compile_aten(gm, "inference", compiler.make(chosen, find("cpu")))[0]
    return list(call(list(inputs))), seen[0]  # type: ignore[arg-type]


def in_kernels(gm: GraphModule, record: Compilation) -> set[str]:
    """Operators of a compiled graph that kernels computed."""
    refused = {r.node for name, report in record.reports if name == "link" for r in report.remarks}
    return {ops.name_of(n) for n in gm.graph.nodes if notes(n).group is not None and notes(n).group not in refused}


def together(
    fns: Sequence[Function], inputs: Sequence[torch.Tensor], **options: object
) -> tuple[list[list[torch.Tensor]], set[str]]:
    """Independent functions of the same inputs as one graph, so that one call of the C++ compiler serves all."""
    gm = trace(lambda *xs: [fn(*xs) for fn in fns], inputs)
    results, record = run(gm, inputs, **options)
    with torch.no_grad():
        counts = [len(tensors(fn(*inputs))) for fn in fns]
    rest = iter(results)
    return [[next(rest) for _ in range(c)] for c in counts], in_kernels(gm, record)


def results_and_gradients(fn: Function, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outs = [t for t in tensors(fn(*inputs))]
    leaves = [t for t in inputs if t.requires_grad]
    roots = [t for t in outs if t.requires_grad]
    if not roots or not leaves:
        return outs
    seeds = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t.dtype) for t in roots]
    found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return [*outs, *(torch.zeros(()) if t is None else t for t in found)]


def compile_and_compare(fn: Function, inputs: Sequence[torch.Tensor], *, grad: bool = True, **options: object) -> None:
    """torch.compile against eager: results, gradients, and what inputs hold afterwards.

    Raises:
        AssertionError: they differ, with where and how.
    """
    ours, theirs = [clone(t) for t in inputs], [clone(t) for t in inputs]
    run_both = results_and_gradients if grad else lambda f, xs: tensors(f(*xs))
    want = run_both(fn, theirs)
    torch._dynamo.reset()
    got = run_both(torch.compile(fn, backend="dsc", options=dict(options)), ours)
    assert (found := difference(got, want)) is None, found
    assert (found := difference(ours, theirs)) is None, f"inputs afterwards: {found}"
