"""Graphs for tests: ATen graphs of small functions, as a backend gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsc import target, text
from dsc.manager import Pass, PassPipeline

CPU = target.find("cpu")


def trace(f: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool = False) -> GraphModule:
    """``f`` as a graph of ATen calls, nothing decomposed, with fake values."""
    return make_fx(f, tracing_mode="symbolic" if dynamic else "fake")(*inputs)


def captured(fn: Callable[..., Any], *inputs: torch.Tensor, dynamic: bool | None = None) -> GraphModule:
    """The graph that Dynamo hands to a backend."""
    seen: list[GraphModule] = []

    def keep(gm: GraphModule, _: object) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, dynamic=dynamic)(*inputs)
    assert len(seen) == 1
    return seen[0]


def story(gm: GraphModule, *passes: Pass, where: target.Target = CPU) -> str:
    """Text before, text after, and what the passes say of it: one golden file."""
    before = text.show(gm.graph)
    reports = PassPipeline(passes).run(gm, where)
    lines = [f"{r.verdict:8}{r.node}: {r.why}" for _, report in reports for r in report.remarks]
    names = ", ".join(p.name for p in passes)
    return f"--- before\n{before}--- after {names}\n{text.show(gm.graph)}--- remarks\n" + "".join(
        f"{x}\n" for x in lines
    )
