"""Maxima that scales need, as nodes of the graph: found by the kernel that makes the values, or in one read of them."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from dsc import ops
from dsc.passes.precision_apply import aten, fake
from dsc.precision import ops as eight

WIDE = ("tensor", "row")
"""Grains whose scales span more than the tile that a program rounds."""


def find_maxima(gm: GraphModule) -> list[Node]:
    """``quantise(x, dtype, "row")`` -> ``quantise_by(x, amax(abs(x), -1), dtype, "row")``; a whole matrix has the largest of those.

    What makes the rows of x (a norm, an activation, a sum) finds their maxima on the way, once ``fuse`` has joined the two.  A
    maximum is exact in any order.  It must not fire for blocks, whose maxima the kernel that rounds finds.  Returns the new
    nodes.
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
            rows = _call(node, aten.amax.default, size, [1])
            found = [_call(node, aten.amax.default, rows, [0])] if grain == "tensor" else [rows]
            if node.target is eight.quantise_both:
                found.append(found[0] if grain == "tensor" else _call(node, aten.amax.default, size, [0]))
            target = eight.quantise_by_maxima if node.target is eight.quantise else eight.quantise_both_by_maxima
            made = _call(node, target, x, *found, dtype, grain)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        out.append(made)
    return out


def _call(like: Node, target: Any, *args: Any) -> Node:
    """A new node that knows what the other one was made of."""
    node = like.graph.call_function(target, args)
    node.meta = {k: v for k, v in like.meta.items() if k != "val"}
    node.meta["val"] = fake(target, args)
    return node
