"""Maxima that scales need, as nodes of the graph: found by the kernel that makes the values, or in one read of them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dsc import cost, domain, ops, products
from dsc.passes import gemm_model
from dsc.passes.precision_apply import aten, fake
from dsc.precision import ops as eight
from dsc.products import PEAK, Product
from dsc.steps import storage_of
from dsc.target import Target

WIDE = ("tensor", "row")
"""Grains whose scales span more than the tile that a program rounds."""


def find_maxima(gm: GraphModule, target: Target) -> list[Node]:
    """``quantise(x, dtype, "row")`` -> ``quantise_by(x, amax(abs(x), -1), dtype, "row")``; a whole matrix has the largest of those.

    1. What makes the rows of x (a norm, an activation, a sum) finds their maxima on the way, once ``fuse`` has joined the two.
       A maximum is exact in any order.
    2. Where x is a product of matrices, or pointwise nodes behind one, which ``fuse`` is modelled to generate, its tiles find
       the maxima of blocks of columns, and those of rows are found from them: x is not read again.
    3. It must not fire for blocks, whose maxima the kernel that rounds finds.

    Returns the new nodes.
    """
    out = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in (eight.quantise, eight.quantise_both):
            continue
        x, dtype, grain = node.args
        if grain not in WIDE or not isinstance(x, Node) or 0 in ops.tensor(x).shape:
            continue
        with gm.graph.inserting_before(node):
            size = _call(node, aten.abs.default, x)
            rows = rows_of(node, size, target)
            found = [_call(node, aten.amax.default, rows, [0])] if grain == "tensor" else [rows]
            if node.target is eight.quantise_both:
                found.append(found[0] if grain == "tensor" else _call(node, aten.amax.default, size, [0]))
            made_by = eight.quantise_by_maxima if node.target is eight.quantise else eight.quantise_both_by_maxima
            made = _call(node, made_by, x, *found, dtype, grain)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        out.append(made)
    return out


def rows_of(node: Node, size: Node, target: Target) -> Node:
    """The maxima of rows, by case 1 or 2."""
    rows = _call(node, aten.amax.default, size, [1])
    behind = product_behind(size)
    if behind is None:
        return rows
    p, tail = behind
    apart = gemm_model.library(p, target) + cost.seconds_of_group([*tail, rows], target)
    node.graph.erase_node(rows)
    m, n = ops.tensor(size).shape
    cut = _call(node, aten.view.default, size, [m, n // PEAK, PEAK])
    blocks = _call(node, aten.amax.default, cut, [2])
    rows = _call(node, aten.amax.default, blocks, [1])
    whole = gemm_model.generated([p.node, *tail, blocks], p, target) + cost.seconds_of_group([rows], target)
    if whole < apart:
        return rows
    for made in (rows, blocks, cut):
        node.graph.erase_node(made)
    return _call(node, aten.amax.default, size, [1])


def product_behind(size: Node) -> tuple[Product, list[Node]] | None:
    """The product whose result, or what pointwise nodes make of it, is a matrix of whole blocks; with those nodes, in order."""
    t = ops.tensor(size)
    if not all(isinstance(e, int) for e in t.shape) or t.shape[1] % PEAK or t.shape[1] <= PEAK:
        return None
    found: list[Product] = []
    tail: list[Node] = []
    todo, seen = [size], set[Node]()
    while todo:
        n = todo.pop()
        if n in seen or n.op != "call_function":
            continue
        seen.add(n)
        if (p := products.of(n)) is not None:
            found.append(p)
        elif ops.info(n).kind == "pointwise":
            tail.append(n)
            todo += [storage_of(a) for a in n.all_input_nodes]
    if len(found) != 1 or found[0].form == "f32" or not domain.same(found[0].n, t.shape[1]):
        return None
    on_the_way = {found[0].node}
    order = [n for n in size.graph.nodes if n in seen]
    for n in order:
        if any(storage_of(a) in on_the_way for a in n.all_input_nodes):
            on_the_way.add(n)
    return found[0], [n for n in order if n in on_the_way and n in tail]


def _call(like: Node, target: Any, *args: Any) -> Node:
    """A new node that knows what the other one was made of."""
    node = like.graph.call_function(target, args)
    node.meta = {k: v for k, v in like.meta.items() if k != "val"}
    node.meta["val"] = fake(target, args)
    return node
