"""Which node of a graph stands for which node of the graph before a pass, and which nodes the pass changed.

1. Nodes of one name, if the pass keeps names (it left them, or rewrote them in place, or something before them).
2. Nodes that compute the same by construction: equal operators on equal operands, down to the inputs.
3. Operands at the same places of nodes that correspond, from the results up: what a pass puts in place of a node is
   read where that node was.  A new node that computes the same as another one than that is in the wrong place.
4. What then has no counterpart is new: its value may still be that of some node that the pass removed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import ops, text


@dataclass(frozen=True)
class Alignment:
    before: GraphModule
    after: GraphModule
    same: Mapping[Node, Node]
    """Node after -> node before that computes the same by construction."""
    counterpart: Mapping[Node, Node]
    """Node after -> node before that it stands for, though it is computed otherwise."""
    vanished: tuple[Node, ...]
    """Nodes before that nothing after computes in the same way."""


def align(before: GraphModule, after: GraphModule, pairs: list[tuple[Node, Node]], names: bool) -> Alignment:
    """``pairs`` are results (after, before) that correspond; ``names``: whether nodes of one name do."""
    forms = Forms()
    known = {n.name: n for n in before.graph.nodes}
    old = forms.of(before, {})
    inputs = {n.name: old[known[n.name]] for n in after.graph.find_nodes(op="placeholder") if n.name in known}
    new = forms.of(after, inputs)
    first: dict[int, Node] = {}
    for n, form in old.items():
        first.setdefault(form, n)
    named = known if names else {}
    equal = {n: first[form] for n, form in new.items() if form in first}
    same = {n: b for n, b in equal.items() if new[n] == old.get(named.get(n.name, b))}
    alive = set(new.values())
    counterpart = _counterparts(after, pairs, same, named)
    same = {n: b for n, b in same.items() if n not in counterpart or old[counterpart[n]] == new[n]}
    vanished = tuple(n for n, form in old.items() if form not in alive and n.op != "output")
    return Alignment(before, after, same, counterpart, vanished)


def _counterparts(
    after: GraphModule, pairs: list[tuple[Node, Node]], same: Mapping[Node, Node], named: Mapping[str, Node]
) -> dict[Node, Node]:
    read: dict[Node, Node] = {}
    for a, b in pairs:
        read.setdefault(a, b)
    found: dict[Node, Node] = {}
    for node in reversed(after.graph.nodes):
        if node.op == "output":
            continue
        likely = [b for b in (named.get(node.name), read.get(node)) if b is not None and _alike(node, b)]
        if likely and (node not in same or (named and node.name not in named)):
            found[node] = likely[0]
        partner = same.get(node) or found.get(node)
        if partner is not None and node.target == partner.target:
            for x, y in zip(_operands(node), _operands(partner)):
                if isinstance(x, Node) and isinstance(y, Node):
                    read.setdefault(x, y)
    return found


def _operands(node: Node) -> Iterator[Any]:
    for a in (*node.args, *(v for _, v in sorted(node.kwargs.items()))):
        if isinstance(a, (list, tuple)):
            yield from a
        else:
            yield a


def _alike(a: Node, b: Node) -> bool:
    """Whether values of these nodes can be compared."""
    return _form_of_value(a.meta.get("val")) == _form_of_value(b.meta.get("val"))


def _form_of_value(v: object) -> object:
    if isinstance(v, torch.Tensor):
        return (v.dtype, *map(str, v.shape))
    if isinstance(v, (list, tuple)):
        return len(v)
    return type(v).__name__


class Forms:
    """A number for each way to compute something, equal in all graphs that ask the same ``Forms``."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def of(self, gm: GraphModule, inputs: Mapping[str, int]) -> dict[Node, int]:
        """``inputs``: forms of placeholders by name, where they are not forms of their own."""
        found: dict[Node, int] = {}
        ordered = 0
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                found[node] = inputs.get(node.name, self._number(("input", node.name)))
                continue
            key: tuple[object, ...] = (
                node.op if node.op != "call_function" else "",
                node.target,
                _frozen(node.args, found),
                _frozen(dict(node.kwargs), found),
            )
            if ops.is_ordered(node) or ops.mutated(node):
                key, ordered = (*key, ordered), ordered + 1  # another place in the order, another number or memory
            found[node] = self._number(key)
        return found

    def _number(self, key: object) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def same_results(before: GraphModule, after: GraphModule) -> bool:
    """Whether two graphs give the same by construction: graphs that write to memory are not told to."""
    if any(ops.mutated(n) for gm in (before, after) for n in gm.graph.nodes):
        return False
    forms = Forms()
    a, b = (forms.of(gm, {}) for gm in (before, after))
    return a[before.graph.output_node()] == b[after.graph.output_node()] and _draws(before) == _draws(after)


def _draws(gm: GraphModule) -> list[str]:
    """Random calls in their order, which nobody need read."""
    return [ops.name_of(n) for n in gm.graph.nodes if ops.is_ordered(n)]


def _frozen(a: object, found: Mapping[Node, int]) -> object:
    match a:
        case Node():
            return ("node", found[a])
        case list() | tuple():
            return tuple(_frozen(x, found) for x in a)
        case dict():
            return tuple((k, _frozen(v, found)) for k, v in sorted(a.items()))
        case slice():
            return ("slice", *(_frozen(x, found) for x in (a.start, a.stop, a.step)))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return ("size", str(a))
        case bool() | int() | float() | complex():
            return (type(a).__name__, repr(a))
        case torch.Tensor():
            return ("tensor", id(a))
        case _:
            return a


# What a pass changed.


def changed_around(alignment: Alignment, node: Node) -> tuple[list[Node], list[Node]]:
    """The smallest set of changed nodes, linked with each other, that ``node`` is in: (removed, new or changed)."""
    old = {n.name: n for n in alignment.before.graph.nodes}
    fresh = {n for n in alignment.after.graph.nodes if n.op == "call_function" and _differs(n, old.get(n.name))}
    names = {n.name for n in alignment.after.graph.nodes}
    gone = {n for n in alignment.before.graph.nodes if n.op == "call_function" and n.name not in names}
    start = node if node in fresh else next((a for a in node.all_input_nodes if a in fresh), None)
    if start is None:
        return [], [node]
    seen_new, seen_old, stack = {start}, set[Node](), [start]
    while stack:
        n = stack.pop()
        for m in (*n.all_input_nodes, *n.users):
            if m in fresh and m not in seen_new and _new(m, n, old):
                seen_new.add(m)
                stack.append(m)
    for n in seen_new:
        before = old.get(n.name) or alignment.counterpart.get(n)
        if before is not None:
            seen_old |= _removed(before, gone)
    place = {n: i for gm in (alignment.before, alignment.after) for i, n in enumerate(gm.graph.nodes)}
    return sorted(seen_old, key=place.__getitem__), sorted(seen_new, key=place.__getitem__)


def _new(a: Node, b: Node, old: Mapping[str, Node]) -> bool:
    """Whether of two linked changed nodes one is new: otherwise both only read something new."""
    return a.name not in old or b.name not in old


def _removed(node: Node, gone: set[Node]) -> set[Node]:
    """Removed nodes that ``node`` is or reads, through removed ones, and their items."""
    found, stack = set[Node](), [node, *node.all_input_nodes]
    while stack:
        n = stack.pop()
        if n in gone and n not in found:
            found.add(n)
            items = [u for u in n.users if u.target is operator.getitem]
            stack += [*n.all_input_nodes, *items]
    return found


def _differs(node: Node, before: Node | None) -> bool:
    return before is None or plain(node) != plain(before)


def plain(node: Node) -> str:
    """The node's line without notes."""
    return text.line(node).split("  {")[0]
