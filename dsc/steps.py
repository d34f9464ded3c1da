"""The order of a program: which nodes run together, in which order, and until when each storage lives."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.notes import notes


@dataclass(frozen=True)
class Step:
    """One kernel's group, or one node that Python runs (an ATen call, a view, a size)."""

    nodes: tuple[Node, ...]
    group: str | None = None

    @property
    def node(self) -> Node:
        return self.nodes[0]


def steps(gm: GraphModule, aten: frozenset[str] = frozenset()) -> list[Step]:
    """Steps in an order that respects data, writes in place, and the order of random and impure calls.

    Groups named in ``aten`` are taken apart: ATen runs their nodes one by one.
    """
    members: dict[str, list[Node]] = {}
    made: dict[Node, int] = {}
    out: list[Step] = []
    for n in gm.graph.nodes:
        if n.op in ("placeholder", "output"):
            continue
        group = notes(n).group
        if group is None or group in aten:
            made[n] = len(out)
            out.append(Step((n,)))
        else:
            members.setdefault(group, []).append(n)
    for group, nodes in members.items():
        for n in nodes:
            made[n] = len(out)
        out.append(Step(tuple(nodes), group))
    return _sorted(gm, out, made)


def _sorted(gm: GraphModule, all_steps: list[Step], made: dict[Node, int]) -> list[Step]:
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    before: list[set[int]] = [set() for _ in all_steps]
    readers: dict[Node, set[int]] = {}
    writer: dict[Node, int] = {}
    last_impure: int | None = None
    storages = Storages()
    for n in gm.graph.nodes:
        if n not in made:
            continue
        me = made[n]
        written = {storages[w] for w in ops.mutated(n)}
        for a in n.all_input_nodes:
            s = storages[a]
            # a kernel reads through views: those between its own nodes are no steps on the way
            source = a if all_steps[me].group is None else s
            if source in made:
                before[me].add(made[source])
            if s in writer:
                before[me].add(writer[s])
            if s in written:
                before[me] |= readers.get(s, set())
            readers.setdefault(s, set()).add(me)
        for s in written:
            writer[s] = me
        if ops.is_ordered(n):
            if last_impure is not None:
                before[me].add(last_impure)
            last_impure = me
    after: list[list[int]] = [[] for _ in all_steps]
    waiting = []
    for i, deps in enumerate(before):
        deps.discard(i)
        waiting.append(len(deps))
        for d in deps:
            after[d].append(i)
    rank = [min(place[n] for n in s.nodes) for s in all_steps]
    ready = [(rank[i], i) for i, w in enumerate(waiting) if w == 0]
    heapq.heapify(ready)
    out: list[Step] = []
    while ready:
        _, i = heapq.heappop(ready)
        out.append(all_steps[i])
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, (rank[j], j))
    assert len(out) == len(all_steps), "fusion made a cycle"
    return out


def view_chain(n: Node) -> list[Node]:
    """A value, and what it views, through pieces too, down to the node that made the storage."""
    chain = [n]
    while ops.is_alias(n):
        n = ops.operand(n, 0)
        chain.append(n)
    return chain


def storage_of(n: Node) -> Node:
    """The node that made the storage which ``n`` looks at, through views and pieces."""
    while ops.is_alias(n):
        n = ops.operand(n, 0)
    return n


class Storages(dict[Node, Node]):
    """``storage_of``, found once a node: for as long as the graph stays as it is."""

    def __missing__(self, n: Node) -> Node:
        self[n] = found = storage_of(n)
        return found


def aliases(n: Node) -> list[Node]:
    """Operands whose storage a result of an opaque call may share (its schema says so, or it has none)."""
    schema = getattr(n.target, "_schema", None)
    tensors = ops.tensor_operands(n)
    if schema is None or not isinstance(n.target, torch._ops.OpOverload):
        return tensors
    if any(r.alias_info is not None for r in schema.returns):
        return tensors
    return []


def last_uses(all_steps: Sequence[Step], storages: Storages | None = None) -> dict[Node, int]:
    """Storage -> the last step that touches it, through any view."""
    last: dict[Node, int] = {}
    found = Storages() if storages is None else storages
    for i, s in enumerate(all_steps):
        for n in s.nodes:
            last[found[n]] = i
            for a in n.all_input_nodes:
                last[found[a]] = i
    return last
