"""Nodes as units that read and make values: what fusion joins, copies and marks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from dsc import domain, ops
from dsc.domain import Space
from dsc.manager import Remark
from dsc.passes.walks import Walk, walk_of
from dsc.steps import storage_of
from dsc.torch_shim import optimization_hint


@dataclass
class Unit:
    """A node with its results, or a group of them: what runs at one place."""

    id: int
    nodes: list[Node]
    space: Space | None
    """None: ATen computes it."""
    preds: set[int] = field(default_factory=set)
    succs: set[int] = field(default_factory=set)
    reads: dict[Node, frozenset[Walk]] = field(default_factory=dict)
    """Value -> the orders in which it is read."""
    makes: list[Node] = field(default_factory=list)
    low: int = 0
    writes: frozenset[Node] = frozenset()
    """Inputs of the graph that it writes to (case 11)."""


@dataclass
class Web:
    """Units, and who reads which value."""

    units: dict[int, Unit]
    maker: dict[Node, int]
    readers: dict[Node, set[int]]
    size: dict[Node, int]
    pinned: set[Node]
    """Values that must exist in memory whatever the groups: results of the graph, operands of ATen."""
    remarks: list[Remark]
    order: dict[Node, int]
    columns: bool = False
    """Whether case 10 is wanted."""
    below: dict[int, int] = field(default_factory=dict)
    """Unit -> those that a path leads to, as a set of bits, until groups stop growing."""
    bits: dict[int, int] = field(default_factory=dict)
    """Unit -> the bits that stand for it in these sets: one for each unit that it was joined from."""

    def live(self) -> list[Unit]:
        return sorted((u for u in self.units.values() if u.space is not None), key=lambda u: u.low)

    def outside(self, value: Node, unit_ids: set[int]) -> bool:
        """Whether a value is wanted outside of these units."""
        return value in self.pinned or not self.readers.get(value, set()) <= unit_ids


def bytes_of(value: Node) -> int:
    t = value.meta.get("val")
    if not isinstance(t, torch.Tensor):
        return 0
    return int(optimization_hint(t.numel())) * t.element_size()


def computing(value: Node) -> Node:
    """The node that computes a value: itself, or the op with several results that it is one of."""
    while value.op == "call_function" and ops.info(value).kind == "item" and isinstance(value.args[0], Node):
        value = value.args[0]
    return value


def is_transparent(node: Node) -> bool:
    """Nodes that are no units: views, pieces and results of others."""
    return ops.is_alias(node) or ops.info(node).kind == "item"


def build(gm: GraphModule) -> Web:
    web = Web({}, {}, {}, {}, set(), [], {n: i for i, n in enumerate(gm.graph.nodes)})
    last_write: dict[Node, int] = {}
    touched: dict[Node, set[int]] = {}
    last_ordered: int | None = None
    # what a backward is given may come in other strides than the trace foresaw, and in memory of its own
    forward = not any(ops.is_tangent(n) for n in gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if node.op == "output":
            web.pinned.update(storage_of(a) for a in node.all_input_nodes)
        if node.op != "call_function":
            continue
        if ops.info(node).kind == "item" and not ops.is_view(node):
            unit = web.units[web.maker[computing(node)]]
            unit.nodes.append(node)
            unit.makes.append(node)
            web.maker[node] = unit.id
            web.size[node] = bytes_of(node)
            continue
        if is_transparent(node):
            continue
        place = web.order[node]
        in_place = forward and writes_input(node)
        why = None if in_place else ops.why_not_fused(node)
        unit = Unit(place, [node], None if why else domain.of(node), makes=[node], low=place)
        if in_place:
            unit.writes = frozenset(ops.mutated(node))
        web.units[place] = unit
        web.maker[node] = place
        web.size[node] = bytes_of(node)
        if why and not why.endswith(" op"):
            web.remarks.append(Remark(node.name, "skipped", why))
        written = {storage_of(n) for n in ops.mutated(node)}
        for arg in node.all_input_nodes:
            value, walk = walk_of(arg)
            if value not in unit.writes:
                read(web, unit, value, frozenset({walk}))
            if unit.space is None:
                web.pinned.add(value)
            # writes in place: after every earlier reader of the storage, before every later one
            if value in last_write:
                link(web, last_write[value], place)
            if value in written:
                for other in touched.get(value, ()):
                    link(web, other, place)
            touched.setdefault(value, set()).add(place)
        for value in written:
            last_write[value] = place
        if ops.is_ordered(node):
            if last_ordered is not None:
                link(web, last_ordered, place)
            last_ordered = place
    return web


def writes_input(node: Node) -> bool:
    """Case 11: ``copy_(input, value)``, of dtypes and layouts that a kernel can store."""
    if ops.name_of(node) != "copy_.default" or node.users or len(node.args) != 2 or node.kwargs:
        return False
    target, source = node.args
    if not (isinstance(target, Node) and isinstance(source, Node) and target.op == "placeholder"):
        return False
    t, v = target.meta.get("val"), source.meta.get("val")
    if not (isinstance(t, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    return ops.is_plain(t) and ops.is_plain(v) and t.dtype == v.dtype and t.shape == v.shape and t.device == v.device


def read(web: Web, unit: Unit, value: Node, walks: frozenset[Walk]) -> None:
    unit.reads[value] = unit.reads.get(value, frozenset()) | walks
    web.readers.setdefault(value, set()).add(unit.id)
    web.size.setdefault(value, bytes_of(value))
    made_by = web.maker.get(value)
    if made_by is not None:
        link(web, made_by, unit.id)


def link(web: Web, before: int, after: int) -> None:
    if before != after:
        web.units[before].succs.add(after)
        web.units[after].preds.add(before)


def moved(web: Web, unit: Unit) -> int:
    written = sum(web.size[v] for v in unit.makes if web.outside(v, {unit.id}))
    written += sum(bytes_of(w) for w in unit.writes)
    return written + sum(web.size[v] for v in unit.reads if web.maker.get(v) != unit.id)
