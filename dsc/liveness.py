"""How many bytes are alive at every step of a program as it will run, and whose they are.

What counts is what the allocator sees: storages, with all their views as one; nothing for values that live and die
inside of a kernel; the pool of temporaries as one block that is always there.  The workspaces that a call of ATen
allocates and frees inside are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import sympy
import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.cost import read_outside
from dsc.packing import aligned, pack, span_bytes
from dsc.steps import Step, aliases, last_uses, steps, storage_of
from dsc.torch_shim import optimization_hint, sym_expr

Kind = Literal["input", "tangent", "saved", "result", "gradient", "temporary", "pool", "compressed"]

WRITES_INTO_POOL = frozenset("mm.default addmm.default bmm.default baddbmm.default".split())
"""Calls of ATen that may write their result into the pool."""


@dataclass(frozen=True, slots=True)
class Live:
    """A storage, alive from step ``first`` to step ``last``; -1 is before the first step."""

    name: str
    nbytes: int
    first: int
    last: int
    kind: Kind


@dataclass(frozen=True)
class Profile:
    timeline: tuple[tuple[str, int], ...]
    """Name of each step, and the bytes alive while it runs."""
    values: tuple[Live, ...]
    lost: int = 0
    """Bytes of the pool that are alive at no step: what packing wastes."""

    @property
    def peak(self) -> int:
        return max((n for _, n in self.timeline), default=sum(v.nbytes for v in self.values))

    @property
    def at(self) -> int:
        """The first step at which the peak is reached."""
        sizes = [n for _, n in self.timeline]
        return sizes.index(max(sizes)) if sizes else -1

    def largest(self, k: int = 10) -> tuple[Live, ...]:
        """The largest storages that are alive at the peak."""
        return tuple(sorted(self.alive(self.at), key=lambda v: (-v.nbytes, v.first))[:k])

    def alive(self, step: int) -> tuple[Live, ...]:
        return tuple(v for v in self.values if v.first <= step <= v.last)

    def by_kind(self, step: int) -> dict[Kind, int]:
        out: dict[Kind, int] = {}
        for v in self.alive(step):
            out[v.kind] = out.get(v.kind, 0) + v.nbytes
        return out


def profile(gm: GraphModule, *, pooled: bool = False, refused: frozenset[str] = frozenset()) -> Profile:
    """Of one graph, called with its inputs held by the caller.

    ``pooled``: temporaries lie in one arena, kept between calls, as programs have it without a memory budget; else each
    is allocated when it is made and freed after its last use.  ``refused`` groups run on ATen, node by node.
    """
    order = steps(gm, refused)
    end = len(order) - 1
    values = [replace(v, last=end) if v.first < 0 else v for v in lifetimes(gm, order, pooled)]
    return _profile([_title(s) for s in order], values)


def profile_step(
    forward: GraphModule,
    backward: GraphModule,
    saved: Mapping[str, int],
    *,
    pooled: bool = False,
    fixed: Mapping[str, int] | None = None,
    refused: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset()),
) -> Profile:
    """Of a forward and the backward that follows it.

    ``saved``: input of the backward -> place among the forward's results.  Saved tensors die at their last use in the
    backward, unless they are inputs or results that the caller holds; gradients live to the end.  ``fixed``: what else
    is always alive, by name, such as the optimizer's state.
    """
    first, second = steps(forward, refused[0]), steps(backward, refused[1])
    ahead, behind = lifetimes(forward, first, pooled), lifetimes(backward, second, pooled)
    count, end = len(first), len(first) + len(second) - 1
    names = [_title(s) for s in (*first, *second)]
    handed, kept = _handed_over(forward, backward, saved)
    values: list[Live] = []
    arena = [v for v in (*ahead, *behind) if v.kind == "pool"]
    if arena:
        values.append(Live("pool", max(v.nbytes for v in arena), -1, end, "pool"))
    dies: dict[str, int] = {}
    for v in behind:
        if v.kind in ("input", "tangent"):
            root = handed.get(v.name)
            if root is not None:
                dies[root] = max(dies.get(root, -1), count + v.last)
            elif v.name not in saved:
                values.append(Live(v.name, v.nbytes, count, end, "tangent"))
        elif v.kind != "pool":
            kind: Kind = "gradient" if v.kind == "result" else v.kind
            values.append(Live(v.name, v.nbytes, count + v.first, count + v.last, kind))
    for v in ahead:
        if v.kind == "input":
            values.append(Live(v.name, v.nbytes, -1, end, "input"))
        elif v.kind == "result":
            last = end if v.name in kept else dies.get(v.name, count - 1)
            values.append(Live(v.name, v.nbytes, v.first, last, "result" if v.name in kept else "saved"))
        elif v.kind != "pool":
            values.append(v)
    values += [Live(name, n, -1, end, "input") for name, n in (fixed or {}).items()]
    lost = max((_lost(gm, o) for gm, o in ((forward, first), (backward, second))), default=0) if pooled else 0
    return _profile(names, values, lost)


def saved_places(forward: GraphModule, backward: GraphModule) -> dict[str, int]:
    """Input of the backward -> place among the forward's results, by name: right after the split, before any pass."""
    place = {n.name: i for i, n in enumerate(_results(forward)) if isinstance(n, Node)}
    inputs = [n for n in backward.graph.find_nodes(op="placeholder") if not ops.is_tangent(n)]
    return {n.name: place[n.name] for n in inputs if n.name in place}


def lifetimes(gm: GraphModule, order: Sequence[Step], pooled: bool) -> list[Live]:
    """Every storage of one program.  Results, and what may be handed on under another name, live to the end."""
    last, end = last_uses(order), len(order) - 1
    outlive = escaping(gm, order)
    results = {storage_of(n) for n in _results(gm) if isinstance(n, Node)}
    in_pool = pool_of(gm, order) if pooled else {}
    freed = _freed(order) if pooled else range(len(order))
    out = []
    for n in gm.graph.find_nodes(op="placeholder"):
        if isinstance(ops.value(n), torch.Tensor):
            until = end if n in outlive else freed[last[n]] if n in last else -1
            out.append(Live(n.name, nbytes(n), -1, until, "tangent" if ops.is_tangent(n) else "input"))
    for i, step in enumerate(order):
        for n in _made(step):
            if n in in_pool:
                continue
            until = end if n in outlive else freed[max(last.get(n, i), i, _tuple_dies(n, last))]
            out.append(Live(n.name, nbytes(n), i, until, "result" if n in results else "temporary"))
        for k, size in _unread_items(step):
            out.append(Live(f"{step.node.name}.{k}", size, i, freed[last.get(step.node, i)], "temporary"))
    if in_pool:
        out.append(Live("pool", pack(*_packing(in_pool)).total, -1, end, "pool"))
    return out


def escaping(gm: GraphModule, order: Sequence[Step]) -> set[Node]:
    """Storages that outlive the call, or that ATen may hand on under another name."""
    out = {storage_of(n) for n in gm.graph.output_node().all_input_nodes}
    for step in order:
        if step.group is None and not (ops.is_view(step.node) or ops.is_split(step.node)):
            out.update(storage_of(a) for a in aliases(step.node))
    return out


def pool_of(gm: GraphModule, order: Sequence[Step]) -> dict[Node, tuple[int, int, int]]:
    """Temporaries that lie in the pool: bytes, first step and last step of each."""
    last, outlive = last_uses(order), escaping(gm, order)
    early = _early_symbols(gm)
    out = {}
    for i, step in enumerate(order):
        for n in _made(step):
            if n in outlive or not _symbols(ops.tensor(n)) <= early:
                continue
            if step.group is not None or (ops.name_of(n) in WRITES_INTO_POOL and poolable(n)):
                out[n] = (aligned(nbytes(n)), i, max(last.get(n, i), i))
    return out


def poolable(n: Node) -> bool:
    """Whether the out= form of a call computes the same: no operand is of another dtype."""
    t = ops.tensor(n)
    return t.layout == torch.strided and all(ops.tensor(a).dtype == t.dtype for a in ops.tensor_operands(n))


def nbytes(n: Node) -> int:
    """Bytes of the storage that a call makes for a result, or of what an input shows."""
    t = ops.tensor(n)
    if t.layout != torch.strided:
        return optimization_hint(t.numel()) * t.element_size()
    return span_bytes(
        [optimization_hint(s) for s in t.shape], [optimization_hint(s) for s in t.stride()], t.element_size()
    )


def _profile(names: Sequence[str], values: Iterable[Live], lost: int = 0) -> Profile:
    values = tuple(values)
    change = [0] * (len(names) + 1)
    for v in values:
        if v.last >= max(v.first, 0):
            change[max(v.first, 0)] += v.nbytes
            change[v.last + 1] -= v.nbytes
    return Profile(tuple(zip(names, accumulate(change[:-1]))), values, lost)


def _made(step: Step) -> list[Node]:
    """Nodes whose storage the step allocates.  Items of a call stand for its results."""
    if step.group is not None:
        inside = set(step.nodes)
        return [n for n in step.nodes if isinstance(ops.value(n), torch.Tensor) and read_outside(n, inside)]
    n = step.node
    if n.op != "call_function" or ops.is_view(n) or ops.is_split(n) or ops.info(n).kind == "item":
        return []
    if isinstance(ops.value(n), torch.Tensor):
        return [] if _is_alias(n) else [n]
    return [u for u in n.users if ops.info(u).kind == "item" and isinstance(ops.value(u), torch.Tensor)]


def _is_alias(n: Node) -> bool:
    """Whether a call gives back an operand: it writes in place, or is a view that the table does not know."""
    return isinstance(n.target, torch._ops.OpOverload) and bool(aliases(n))


def _unread_items(step: Step) -> list[tuple[int, int]]:
    """Results of a call that nobody takes out: they die with the tuple."""
    v = ops.value(step.node)
    if step.group is not None or not isinstance(v, (tuple, list)) or ops.is_split(step.node):
        return []
    taken = {u.args[1] for u in step.node.users if ops.info(u).kind == "item"}
    unread = [(k, t) for k, t in enumerate(v) if isinstance(t, torch.Tensor) and k not in taken]
    return [(k, optimization_hint(t.numel()) * t.element_size()) for k, t in unread]


def _tuple_dies(n: Node, last: Mapping[Node, int]) -> int:
    """The step until which the tuple that ``n`` is an item of holds it."""
    return last.get(ops.operand(n, 0), -1) if ops.info(n).kind == "item" else -1


def _freed(order: Sequence[Step]) -> list[int]:
    """Step -> the step after which what dies there is freed: kernels wait for the next call of ATen and run in a row."""
    out = list(range(len(order)))
    waiting: list[int] = []
    pending = False
    for i, step in enumerate(order):
        if _flushes(step):
            for j in waiting:
                out[j] = max(i - 1, j)
            waiting, pending = [], False
        if step.group is not None:
            pending = True
        if pending:
            waiting.append(i)
        if step.group is not None and any(ops.may_fail(n) for n in step.nodes):  # checked at once
            for j in waiting:
                out[j] = i
            waiting, pending = [], False
    for j in waiting:
        out[j] = len(order) - 1
    return out


def _flushes(step: Step) -> bool:
    n = step.node
    if step.group is not None or n.op == "get_attr":
        return False
    return not (ops.is_view(n) or ops.is_split(n) or ops.info(n).kind == "item")


def _packing(in_pool: Mapping[Node, tuple[int, int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
    return [n for n, _, _ in in_pool.values()], [(first, last) for _, first, last in in_pool.values()]


def _lost(gm: GraphModule, order: Sequence[Step]) -> int:
    """Bytes of the arena beyond what is alive in it at any one step."""
    sizes, spans = _packing(pool_of(gm, order))
    change = [0] * (len(order) + 1)
    for n, (first, last) in zip(sizes, spans):
        change[first] += n
        change[last + 1] -= n
    return pack(sizes, spans).total - max(accumulate(change), default=0)


def _handed_over(
    forward: GraphModule, backward: GraphModule, saved: Mapping[str, int]
) -> tuple[dict[str, str], set[str]]:
    """Input of the backward -> the forward's storage that it is; and those that the caller holds."""
    results = _results(forward)
    places = set(saved.values())
    kept = {storage_of(n).name for i, n in enumerate(results) if isinstance(n, Node) and i not in places}
    handed = {}
    for n in backward.graph.find_nodes(op="placeholder"):
        source = results[saved[n.name]] if n.name in saved else None
        if isinstance(source, Node):
            handed[n.name] = storage_of(source).name
    return handed, kept


def _results(gm: GraphModule) -> list[object]:
    out = gm.graph.output_node().args[0]
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _early_symbols(gm: GraphModule) -> set[str]:
    """Size symbols that are known when the program starts."""
    out: set[str] = set()
    for n in gm.graph.find_nodes(op="placeholder"):
        v = ops.value(n)
        if isinstance(v, torch.Tensor):
            out |= {str(e) for e in map(sym_expr, v.shape) if isinstance(e, sympy.Symbol)}
        elif isinstance(v, torch.SymInt) and isinstance(e := sym_expr(v), sympy.Symbol):
            out.add(str(e))
    return out


def _symbols(t: torch.Tensor) -> set[str]:
    return {s.name for e in map(sym_expr, (*t.shape, *t.stride())) for s in sympy.sympify(e).free_symbols}


def _title(step: Step) -> str:
    return step.group or step.node.name
