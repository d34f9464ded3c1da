"""Which forward values to save for the backward, and which to compute again, so that the fewest bytes are moved.

A minimum cut between what the forward must compute and what the backward reads, as in He and Yu, "Transcending
Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True, slots=True)
class Value:
    name: str
    save: int
    """Bytes moved if it is saved: read in the backward, and written if the forward would not write it anyway."""
    again: int | None = None
    """Bytes moved if it is computed again, on top of what makes its ``deps`` available; None if it cannot be."""
    deps: tuple[str, ...] = ()
    """Values that it is computed from."""


@dataclass(frozen=True, slots=True)
class Problem:
    values: tuple[Value, ...]
    """Each after its deps."""
    required: tuple[str, ...]
    """What the backward reads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Both in the order of the problem.  A value in neither is not available in the backward."""

    save: tuple[str, ...]
    recompute: tuple[str, ...]


def cost(problem: Problem, plan: Plan) -> int:
    """Bytes that a plan moves."""
    value = {v.name: v for v in problem.values}
    return sum(value[n].save for n in plan.save) + sum(value[n].again or 0 for n in plan.recompute)


def solve(problem: Problem) -> Plan:
    """The plan that moves the fewest bytes; of equal ones, the one that recomputes least.  Exact.

    1. A value is never recomputed where saving it costs no more than its own ``again``: it can be saved instead.
    2. What must be saved, and what is recomputed from such values at no cost, is available for free.
    3. The rest falls into parts that share no value; each is a minimum cut.
    """
    value = {v.name: v for v in problem.values}
    redo = {v.name: v.again for v in problem.values if v.again is not None and v.again < v.save}
    needed = _reach(problem.required, value, redo)
    required = set(problem.required)
    free: set[str] = set()
    for v in problem.values:
        if v.name not in needed:
            continue
        forced = v.name in required or v.save == 0
        if forced if v.name not in redo else redo[v.name] == 0 and free.issuperset(v.deps):
            free.add(v.name)
    saved = {n for n in needed if n not in redo}
    open_values = [v for v in problem.values if v.name in needed and v.name not in free]
    for part in _parts(open_values, redo):
        saved |= _cut(part, redo, required, free)
    chosen = _reach(problem.required, value, redo.keys() - saved)
    return Plan(
        tuple(v.name for v in problem.values if v.name in chosen and v.name in saved),
        tuple(v.name for v in problem.values if v.name in chosen and v.name not in saved),
    )


def _reach(start: Iterable[str], value: dict[str, Value], through: Iterable[str]) -> set[str]:
    """Names reached from ``start`` by following the deps of values in ``through``."""
    through = set(through)
    seen: set[str] = set()
    todo = list(start)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += value[name].deps if name in through else ()
    return seen


def _parts(values: list[Value], redo: dict[str, int]) -> Iterator[list[Value]]:
    """Values that are linked by deps which may matter, part by part, in order."""
    links: nx.Graph = nx.Graph()
    links.add_nodes_from(v.name for v in values)
    links.add_edges_from((v.name, d) for v in values if v.name in redo for d in v.deps if d in links)
    for names in nx.connected_components(links):
        yield [v for v in values if v.name in names] if len(names) < len(values) else values


def _cut(part: list[Value], redo: dict[str, int], required: set[str], free: set[str]) -> set[str]:
    """The values of one part to save.

    Every value is an edge from (name, 0) to (name, 1), cut if it is saved.  What is left on the side of the backward
    is recomputed; networkx gives the smallest such side of all minimum cuts.
    """
    flow: nx.DiGraph = nx.DiGraph()
    source, sink = ("", 0), ("", 1)
    flow.add_nodes_from((source, sink))
    for v in part:
        start, end = ((v.name, 0) if v.name in redo else source), (v.name, 1)
        flow.add_edge(start, end, capacity=v.save)
        if v.name in required:
            flow.add_edge(end, sink)
        if v.name in redo:
            flow.add_edge(source, start, capacity=redo[v.name])
            flow.add_edges_from(((d, 1), start) for d in v.deps if d not in free)
    _, (ahead, behind) = nx.minimum_cut(flow, source, sink)
    return {v.name for v in part if (v.name, 1) in behind and ((v.name, 0) in ahead or v.name not in redo)}
