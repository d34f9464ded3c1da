"""Products of matrices that compute the rows of their left operand as they read them: a norm, an activation.

1. The operand is made by a group of nothing but pointwise nodes and reductions of its rows, and is read in the order in
   which it is written.  If others read it too, the first tile of each row stores it.  The group reads one matrix: the
   values of two at once do not fit the registers beside the sums.
2. What else the group gives has an element for each row: the moments that a backward needs.
3. It joins the product if one kernel is modelled to take less time than the two: no launch and no operand in memory,
   against rows that every tile reads and computes again (``dsc.passes.gemm_model``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from dsc import cost, domain, ops, products
from dsc.manager import Remark
from dsc.notes import notes
from dsc.passes.gemm_groups import Groups, forbidden, in_order, readers
from dsc.passes.gemm_model import generated, library, micro
from dsc.products import Product
from dsc.steps import storage_of
from dsc.target import Target

KINDS = frozenset({"pointwise", "create", "rowwise", "reduction", "item"})


def decide(g: Groups, p: Product) -> Remark | None:
    """Whether a product takes the group before it; None where there is none that it could take."""
    value = storage_of(p.a)
    home, own = notes(value).group, notes(p.node).group
    if home is None or home == own or not fits(p, value, g.nodes[home]):
        return None
    rows, mine = g.nodes[home], [p.node] if own is None else g.nodes[own]
    if len(rows) + len(mine) > g.limit:
        return None
    if (why := forbidden(g, [*rows, *mine])) is not None:
        return Remark(p.node.name, "skipped", f"{home} stays a kernel of its own: {why}")
    apart = cost.seconds_of_group(rows, g.target)
    apart += library(p, g.target) if own is None else generated(mine, p, g.target)
    whole = generated([*rows, *mine], p, g.target, rows)
    words = f"modelled {micro(whole)} with the rows computed in it, {micro(apart)} apart"
    if whole >= apart:
        return Remark(p.node.name, "skipped", f"{home} stays a kernel of its own: {words}")
    made = own if own is not None else g.fresh()
    del g.nodes[home]
    g.put(made, [*rows, *mine])
    return Remark(p.node.name, "did", f"computes its rows, {home}, in {made}: {words}")


def seconds(nodes: Sequence[Node], target: Target) -> float:
    """Of a group as a kernel of its own, or of what it adds to the product that may take it, whichever is less."""
    least = cost.seconds_of_group(nodes, target)
    for value in nodes:
        for p in filter(None, map(products.of, readers(value))):
            if storage_of(p.a) is value and fits(p, value, nodes):
                least = min(least, generated([*nodes, p.node], p, target, nodes) - library(p, target))
    return least


def fits(p: Product, value: Node, nodes: Sequence[Node]) -> bool:
    """Cases 1 and 2."""
    inside = set(nodes)
    if any(ops.info(n).kind not in KINDS or ops.mutated(n) or ops.may_fail(n) for n in inside):
        return False  # also what looks up an index: its check would be made by every tile
    if not in_order(p.node, inside):
        return False
    if any(storage_of(a) in inside for a in (p.b, p.bias) if a is not None):
        return False
    rows, whole = domain.product((p.batch, p.m)), domain.product((p.batch, p.m, p.k))
    outside = {r for n in inside for a in n.all_input_nodes if (r := storage_of(a)) not in inside}
    if sum(large(r, whole) for r in outside) > 1:
        return False
    if not domain.same(domain.product(domain.shape(ops.tensor(value))), whole):
        return False
    for n in inside:
        if ops.info(n).kind in ("rowwise", "reduction"):
            reduced = domain.product(d.extent for d in domain.of(n).dims if d.reduce)
            if not domain.same(reduced, p.k) or any(d.reduce for d in domain.of(n).dims[:-1]):
                return False
        if not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        if (
            n is not value
            and cost.read_outside(n, inside)
            and not domain.same(domain.product(domain.shape(ops.tensor(n))), rows)
        ):
            return False
    return True


def large(value: Node, whole: domain.Extent) -> bool:
    """Whether a value has as many elements as the operand."""
    t = value.meta.get("val")
    return isinstance(t, torch.Tensor) and domain.same(domain.product(domain.shape(t)), whole)
