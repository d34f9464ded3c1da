"""A small graph through one pass, or to kernels, beside the same graph on ATen: what reduced reproducers call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dsc import compiler, errors, ops, passlist
from dsc import target as targets
from dsc.debug.bisect import lowered
from dsc.debug.bisect.run import NodeRaised, Results, run, run_twins, seeded
from dsc.debug.bisect.tolerance import Difference, Rule, coarsest, compare, worst
from dsc.manager import Pass, PassPipeline
from dsc.options import Options

OPTIONS, RULE = Options(), Rule()
On = Literal["joint", "forward", "backward", "inference"]


@dataclass(frozen=True)
class Setting:
    """Where a graph is wrong: after ``passes``, or in the kernels that are made after them."""

    passes: tuple[Pass, ...]
    on: On = "forward"
    kernels: bool = False
    target: str = "cpu"
    options: Options = OPTIONS
    rule: Rule = RULE


def check(
    graph: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *passes: Pass,
    on: On = "forward",
    kernels: bool = False,
    target: str = "cpu",
    unit: float | None = None,
) -> Difference | None:
    """How the results of ``graph(*inputs)`` differ after ``passes`` (with ``kernels``: in the program) from before.

    ``graph`` is a function of ATen calls that returns a tuple of tensors.  In a ``joint`` graph, arguments named
    ``tangents_*`` are where the backward starts.  ``unit`` is a relative tolerance in place of that of the dtype.
    """
    setting = Setting(passes, on, kernels, target, rule=Rule(unit))
    return difference(traced(graph, inputs, on), inputs, setting)


def difference(gm: GraphModule, inputs: Sequence[torch.Tensor], setting: Setting) -> Difference | None:
    """As ``check``, for a traced graph."""
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, inputs, strict=True))
    with seeded():
        want = run_twins(gm, given)
    after = compiler.copied(gm)
    PassPipeline(setting.passes, verify=False).run(after, targets.find(setting.target))
    rule = Rule(setting.rule.unit, setting.rule.against, coarsest(gm))
    try:
        got = _results(after, given, setting)
    except NodeRaised as why:
        return Difference("raises", str(why))
    if len(got.outputs) != len(want.outputs):
        return Difference("missing", f"{len(got.outputs)} results instead of {len(want.outputs)}")
    pairs = zip(got.every(), want.every())
    return worst(compare(g, w, rule, strides=setting.kernels) for g, w in pairs)


def _results(gm: GraphModule, given: dict[str, Any], setting: Setting) -> Results:
    if setting.kernels:
        if not lowered.runnable(setting.options):
            raise errors.CompilerMissing(("g++", "clang++", "c++"))
        return lowered.run_program(gm, given, setting.on, setting.options)
    with seeded():
        return run(gm, given)


def traced(graph: Callable[..., Any], inputs: Sequence[torch.Tensor], on: On) -> GraphModule:
    """The graph of a function of ATen calls, tagged as AOTAutograd tags a joint one."""
    with torch.no_grad():
        gm = make_fx(graph, tracing_mode="fake")(*inputs)
    if on == "joint":
        late = {n for n in gm.graph.find_nodes(op="placeholder") if ops.is_tangent(n)}
        for n in gm.graph.nodes:
            if any(a in late for a in n.all_input_nodes):
                late.add(n)
            n.meta["partitioner_tag"] = "is_backward" if n in late else "is_forward"
    return gm


def drawn(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    below: int = 2,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """A seeded tensor: normal floats; integers from 0 to ``below``; bools.  ``order``: dimensions, outermost in memory first."""
    generator = torch.Generator().manual_seed(seed)
    stored = [shape[d] for d in order] if order is not None else list(shape)
    if dtype.is_floating_point:
        made = (torch.randn(stored, generator=generator, dtype=torch.float64) * std + mean).to(dtype)
    else:
        made = torch.randint(0, max(below, 1), stored, generator=generator).to(dtype)
    if order is None:
        return made
    back = [0] * len(order)
    for place, d in enumerate(order):
        back[d] = place
    return made.permute(back)


def default_passes() -> tuple[Pass, ...]:
    """What runs on a graph before its kernels are made."""
    return passlist.GRAPH


def literal(t: torch.Tensor) -> str:
    """A small tensor as Python."""
    if t.is_floating_point() and not bool(t.isfinite().all()):
        body = str(_spelled(t.tolist())).replace("'", "")
    else:
        body = str(t.tolist())
    return f"torch.tensor({body}, dtype={t.dtype})"


def _spelled(x: Any) -> Any:
    if isinstance(x, list):
        return [_spelled(i) for i in x]
    return repr(x) if math.isfinite(x) else f'float("{x}")'
