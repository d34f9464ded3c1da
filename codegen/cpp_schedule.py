"""How a kernel walks its axes on a CPU: which one goes 16 at a time, how far it unrolls, what is kept in scratch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import sympy

from dsc.codegen.cpp_axes import WIDTH as WIDTH
from dsc.codegen.cpp_axes import counted, strip, work
from dsc.codegen.cpp_expr import bound, known, stride
from dsc.codegen.cpp_ops import HEAVY
from dsc.codegen.kernel import Axis, Index, Kernel, Let, indirect, stages

CHAIN = 256
"""Terms that may be added in one float before the sum moves on to a double: about as accurate as torch's cascade."""
SCRATCH = 1 << 18
"""Bytes of stack for values kept between the stages of a row."""


@dataclass(frozen=True, slots=True)
class Schedule:
    kernel: Kernel
    """With long reductions cut into blocks."""
    vector: str | None
    """The axis that goes 16 at a time; None when there is nothing to walk."""
    unroll: int
    flush: bool
    """Sums of floats leave the innermost loop for a double."""
    keep: frozenset[str]
    """Values of a row computed in one stage and read back in later ones."""
    tile: str | None
    """The other axis of 16 x 16 tiles, along which some buffers are contiguous."""
    work: Index


def schedule(k: Kernel) -> Schedule:
    axis = vector_axis(k)
    total = work(k)
    along = next((a for a in k.axes if a.name == axis), None)
    k, flush = _flushed(k, along)
    along = next((a for a in k.axes if a.name == axis), None)
    return Schedule(k, axis, _unroll(k, along), flush, _kept(k, along), _tile_axis(k, axis), total)


def vector_axis(k: Kernel) -> str | None:
    """The axis along which most accesses are contiguous, those inside a reduction counting ten times."""
    blocks = counted(k)
    candidates = [a for a in (*reversed(k.reduced), *reversed(k.parallel)) if a.name not in blocks]
    best = max(candidates, key=lambda a: _contiguity(k, a), default=None)
    return best.name if best else None


def _contiguity(k: Kernel, axis: Axis) -> float:
    reduced = frozenset(a.name for a in k.reduced)
    varying = {v.name for v in k.lets if axis.name in v.axes}
    score = 0.0
    accesses = [(*v.access, v.axes, 2) for v in k.lets if v.op == "load"]
    accesses += [(s.buffer, s.index, mentioned_by(s.index), 3) for s in k.stores]
    for _, index, axes, gain in accesses:
        weight = 10 if not reduced or axes & reduced else 1
        step = None if indirect(index, k) & varying else stride(index, axis.name)
        score += weight * (gain if step == 1 else 0 if step == 0 else -gain)
    n = known(axis.extent)
    return score - 8 * (1 - n / WIDTH) if n is not None and n < WIDTH else score


def _flushed(k: Kernel, along: Axis | None) -> tuple[Kernel, bool]:
    """Cut long reductions so that no accumulator adds up more than CHAIN terms."""
    if along is None or not any(v.op == "reduce" and v.attr == "sum" and v.dtype == "f32" for v in k.lets):
        return k, False
    lanes = 4 * WIDTH if along.reduce else 1
    inner = along if along.reduce else k.reduced[-1]
    terms = [bound(a.extent) for a in k.reduced]
    if all(t is not None for t in terms) and sympy.prod(terms) <= CHAIN * lanes:
        return k, False
    n, limit = bound(inner.extent), CHAIN * lanes
    return (k, True) if n is not None and n <= limit else (strip(k, inner, limit // 2)[0], True)


def _unroll(k: Kernel, along: Axis | None) -> int:
    if along is None or not k.reduced:
        return 1
    n = known(along.extent)
    heavy = any(v.op in HEAVY and along.name in v.axes for v in k.lets)
    want = 2 if heavy else 4
    while want > 1 and n is not None and n < WIDTH * want:
        want //= 2
    while want > 1 and n is not None and n < 8 * WIDTH * want and n % (WIDTH * want):
        want //= 2
    return want


def closure(k: Kernel, roots: Iterable[str], stop: frozenset[str] = frozenset()) -> tuple[list[Let], frozenset[str]]:
    """Values to compute for ``roots``, in order, and those at which the way down ended: reductions and ``stop``."""
    wanted, ends, out = set(roots), set(), []
    for v in reversed(k.lets):
        if v.name not in wanted:
            continue
        if v.name in stop or v.op == "reduce":
            ends.add(v.name)
            continue
        out.append(v)
        wanted.update(v.args)
        wanted.update(mentioned(v))
    return out[::-1], frozenset(ends)


def mentioned_by(e: Index) -> frozenset[str]:
    return frozenset(s.name for s in sympy.sympify(e).free_symbols)


def mentioned(v: Let) -> frozenset[str]:
    """Symbols of the index of a value."""
    match v.attr:
        case (_, index):
            return mentioned_by(index)
        case sympy.Expr():
            return mentioned_by(v.attr)
        case _:
            return frozenset()


def passes(k: Kernel) -> list[tuple[list[Let], list[int]]]:
    """For every pass over the reduce axes: reductions, and stores (by number) that a point of the space makes.

    A store waits for the last pass if its buffer is also read: an earlier one would spoil what later passes load.
    """
    stage = stages(k)
    reduced = {a.name for a in k.reduced}
    reads = [v.axes & reduced for v in k.lets if v.op == "reduce"]
    last = max((stage[v.name] for v in k.lets if v.op == "reduce"), default=0) if reads else 0
    out: list[tuple[list[Let], list[int]]] = [([], []) for _ in range(last + 1)]
    for v in k.lets:
        if v.op == "reduce":
            out[stage[v.name] - 1][0].append(v)
    for i, s in enumerate(k.stores):
        if mentioned_by(s.index) & reduced:
            needs = max(stage[n] for n in (s.value, *indirect(s.index, k)))
            out[last if k.buffer(s.buffer).role == "inout" else needs][1].append(i)
    return out


def pass_roots(k: Kernel, p: tuple[list[Let], list[int]]) -> list[str]:
    reductions, stores = p
    roots = [v.args[0] for v in reductions]
    for i in stores:
        roots += [k.stores[i].value, *indirect(k.stores[i].index, k)]
    return roots


def _kept(k: Kernel, along: Axis | None) -> frozenset[str]:
    if along is None or not along.reduce or len(k.reduced) != 1:
        return frozenset()
    n = known(along.extent)
    if n is None or n * 4 > SCRATCH:
        return frozenset()
    plan = [p for p in passes(k) if p[0] or p[1]]
    uses = Counter(
        v.name for p in plan for v in closure(k, pass_roots(k, p))[0] if v.op in HEAVY and along.name in v.axes
    )
    candidates = frozenset(name for name, count in uses.items() if count > 1)
    kept: frozenset[str] = frozenset()
    made: frozenset[str] = frozenset()
    for p in plan:
        lets, ends = closure(k, pass_roots(k, p), made)
        kept |= ends & candidates
        made |= candidates & {v.name for v in lets}
    size = sum(n * (8 if v.dtype == "f64" else 4) for v in k.lets if v.name in kept)
    return kept if size <= SCRATCH else frozenset()


def _tile_axis(k: Kernel, axis: str | None) -> str | None:
    """Another axis along which some buffers are contiguous while the vector axis strides."""
    if axis is None or k.reduced:
        return None
    found: Counter[str] = Counter()
    for index in turned_candidates(k):
        if stride(index, axis) not in (0, 1, None):
            found.update(a.name for a in k.parallel if a.name != axis and stride(index, a.name) == 1)
    if not found:
        return None
    best = found.most_common(1)[0][0]
    short = [a for a in k.axes if a.name in (best, axis) and (n := known(a.extent)) is not None and n < 8]
    return None if short else best


def turned_candidates(k: Kernel) -> list[Index]:
    loads = [v.access[1] for v in k.lets if v.op == "load" and v.dtype == "f32" and not v.args]
    dtype = {v.name: v.dtype for v in k.lets}
    return loads + [s.index for s in k.stores if dtype[s.value] == "f32" and not indirect(s.index, k)]


def turned(index: Index, axis: str, tile: str) -> bool:
    """Contiguous along ``tile`` and not along the vector axis."""
    return stride(index, tile) == 1 and stride(index, axis) not in (0, 1, None)
