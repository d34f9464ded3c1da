"""The node that a pass got wrong: the first whose value differs from that of its counterpart before the pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dsc.debug.bisect.align import Alignment, align
from dsc.debug.bisect.run import NodeRaised, Twin, cone, run, run_twins, seeded
from dsc.debug.bisect.tolerance import Difference, Rule, compare

KEPT_BYTES = 2 << 30
"""Of values before the pass that are held at once; where there are more, the graphs run once more for the rest."""
FIRST = 32
"""Nodes that are compared at first: most often the first node that is computed otherwise is the wrong one.  Then four
times as many, and so on."""
TRIES = 4
"""Suspects of which it is tried whether the results come right without them."""
STRICTER = (1.0, 100.0, math.inf)
"""Where no node is off by more than the tolerance although a result is, small differences add up."""


@dataclass(frozen=True)
class Suspect:
    """A node after a pass, its counterpart before it, and how their values differ."""

    node: Node
    counterpart: Node | None
    difference: Difference
    confirmed: bool
    """Whether the results come right once this node's value is replaced by its counterpart's."""
    unknown: tuple[Node, ...] = ()
    """New nodes that it reads, whose values have no counterpart: the mistake may lie in them."""


@dataclass(frozen=True)
class Change:
    """Two graphs around a pass, with inputs, and the results that should be equal: (after, before)."""

    before: GraphModule
    after: GraphModule
    inputs: Mapping[str, object]
    """Of ``before``, by name; ``given`` are those of ``after`` where they differ."""
    given: Mapping[str, object]
    pairs: list[tuple[Node, Node]]
    wrong: Mapping[Node, Twin]
    """Results after the pass that are wrong, and what they should be."""
    names: bool
    """Whether the pass keeps the names of nodes that it keeps."""


def locate(change: Change, rule: Rule) -> tuple[Suspect | None, Alignment]:
    """The first wrong node of those that the wrong results are computed from; None if only results tell them apart."""
    alignment = align(change.before, change.after, change.pairs, change.names)
    inside = cone(change.wrong)
    for times in STRICTER:
        for nodes in _windows(change, alignment, inside):
            suspects, values = _compare(change, alignment, nodes, rule.stricter(times))
            for s in suspects[:TRIES]:
                if _repairs(change, s, values, rule):
                    return replace(s, confirmed=True), alignment
            if suspects:
                return suspects[0], alignment
    return None, alignment


def _windows(change: Change, alignment: Alignment, inside: set[Node]) -> Iterator[list[Node]]:
    """The nodes to compare, in the order of the graph, so many at a time that their values can be held."""
    wanted = [
        n for n in change.after.graph.nodes if n in inside and n.op == "call_function" and n not in alignment.same
    ]
    most = FIRST
    while wanted:
        held: list[Node] = []
        size = 0
        for n in wanted:
            size += _nbytes(n)
            if held and (size > KEPT_BYTES or len(held) == most):
                break
            held.append(n)
        wanted = wanted[len(held) :]
        most *= 4
        yield held


def _compare(
    change: Change, alignment: Alignment, nodes: list[Node], rule: Rule
) -> tuple[list[Suspect], Mapping[Node, Twin]]:
    """The nodes that differ and are computed from none that does; and the values before the pass that were held."""
    here = set(nodes)
    partners = {alignment.counterpart[n] for n in nodes if n in alignment.counterpart}
    partners |= _likely(alignment, [n for n in nodes if n not in alignment.counterpart])
    values: dict[Node, Twin] = {}

    def keep(node: Node, value: Twin) -> Twin:
        if node in partners:
            values[node] = value
        return value

    found: list[Suspect] = []
    unknown: set[Node] = set()
    spoiled: set[Node] = set()

    def check(node: Node, value: Any) -> Any:
        if not spoiled.isdisjoint(node.all_input_nodes):
            spoiled.add(node)
        if node not in here or node in spoiled:
            return value
        partner = alignment.counterpart.get(node)
        if partner is None or partner not in values:
            if not any(_equal(value, values[v], rule) for v in alignment.vanished if v in values):
                unknown.add(node)
        elif (d := compare(value, values[partner], rule)) is not None:
            found.append(Suspect(node, partner, d, False, tuple(_reads(node, unknown))))
            spoiled.add(node)
        return value

    with seeded():
        run_twins(change.before, change.inputs, keep, until=partners)
    with seeded():
        try:
            run(change.after, change.given, check, until=here)
        except NodeRaised as why:
            node = next(n for n in change.after.graph.nodes if n.name == why.node)
            found.append(Suspect(node, alignment.counterpart.get(node), Difference("raises", why.why), False))
    return found, values


def _likely(alignment: Alignment, new: list[Node]) -> set[Node]:
    """Removed nodes whose value some new node may have."""
    shapes = {s for n in new for s in _shapes(n)}
    return {v for v in alignment.vanished if shapes & _shapes(v)}


def _shapes(node: Node) -> set[tuple[object, ...]]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {(v.dtype, *map(str, v.shape)) for v in leaves if isinstance(v, torch.Tensor)}


def _reads(node: Node, unknown: set[Node]) -> list[Node]:
    """Nodes of ``unknown`` that ``node`` reads, through such nodes, nearest first."""
    found: dict[Node, None] = {}
    stack = [node]
    while stack:
        for a in stack.pop(0).all_input_nodes:
            if a in unknown and a not in found:
                found[a] = None
                stack.append(a)
    return list(found)


def _equal(value: Any, want: Twin, rule: Rule) -> bool:
    """Whether the value, or each of its items, is (an item of) what was wanted."""
    items = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
    known = list(zip(pytree.tree_leaves(want.value), pytree.tree_leaves(want.exact)))
    wanted = [Twin(v, e) for v, e in known if isinstance(v, torch.Tensor)]
    return bool(items) and all(
        any(w.value.shape == v.shape and w.value.dtype == v.dtype and compare(v, w, rule) is None for w in wanted)
        for v in items
    )


def _repairs(change: Change, suspect: Suspect, values: Mapping[Node, Twin], rule: Rule) -> bool:
    """Whether the wrong results come right with the counterpart's value in place of the suspect's."""
    if suspect.counterpart not in values or suspect.difference.kind == "raises":
        return False
    got: dict[Node, Any] = {}

    def patch(node: Node, value: Any) -> Any:
        if node is suspect.node:
            value = values[suspect.counterpart].value  # type: ignore[index]  # looked up above
        if node in change.wrong:
            got[node] = value
        return value

    with seeded():
        try:
            run(change.after, change.given, patch)
        except NodeRaised:
            return False
    return all(w in got and compare(got[w], want, rule) is None for w, want in change.wrong.items())


def _nbytes(node: Node) -> int:
    """Twice: the value, and its twin in float64."""
    leaves = [v for v in pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return sum(int(v.numel()) * (v.element_size() + 8) for v in leaves if not any(map(_symbolic, v.shape)))


def _symbolic(s: object) -> bool:
    return not isinstance(s, int)
