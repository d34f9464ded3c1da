"""Puts ``dsc::flash_attention`` and its backward in place of other forms of attention, in a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Node

from dsc import cost, ops
from dsc.passes.attention_heads import Repeated, repeated, summed
from dsc.passes.attention_match import SHAPES, Found, Shape, origin
from dsc.passes.canonicalize import Rewriter, is_pure
from dsc.passes.linears import packet
from dsc.passes.sparse_attention import OUT, SUMS, replace_items, restrided

aten = torch.ops.aten
FORWARD, BACKWARD = torch.ops.dsc.flash_attention.default, torch.ops.dsc.flash_attention_backward.default


def backward_of(node: Node) -> Node | None:
    """The gradient of one of ATen's fused kernels."""
    name = f"{packet(node)}_backward"
    return next((u for i in node.users for u in i.users if packet(u) == name), None)


def turned(key: Node) -> Node | None:
    """[..., D, S] -> the node [..., S, D] that it is the transpose of, if there is one."""
    return ops.operand(key, 0) if packet(key) == "transpose" and _last_two(key) else None


def _last_two(n: Node) -> bool:
    rank = ops.tensor(n).dim()
    return {d % rank for d in n.args[1:]} == {rank - 2, rank - 1}  # type: ignore[operator]


# ATen's fused kernels.


def write_fused(
    rw: Rewriter, node: Node, backward: Node | None, operands: Sequence[Node], bias: object, causal: bool, scale: float,
    heads: Sequence[Repeated] | None,
) -> None:  # fmt: skip
    """In place of memory-efficient attention; with ``heads`` the operands are those that it repeats."""
    q, k, v = operands
    with rw.gm.graph.inserting_before(node):
        both = rw.call(node, FORWARD, q, k, v, bias, None, 1.0, causal, scale, True)
        out = rw.call(node, operator.getitem, both, OUT)
        sums = rw.call(node, operator.getitem, both, SUMS)
    if backward is not None:
        grad = cost.arguments(backward)["grad_out_"]
        with rw.gm.graph.inserting_before(backward):
            three = rw.call(backward, BACKWARD, grad, q, k, v, out, sums, bias, None, 1.0, causal, scale)
        items = {u.args[1]: u for u in backward.users}
        for i, r in zip((1, 2), heads or ()):
            if i in items and (total := summed(items[i], r)) is not None:
                with rw.gm.graph.inserting_before(items[i]):
                    write_result(rw, total, rw.call(items[i], operator.getitem, three, i))
        _drop(rw, [u for i in (1, 2) if heads and i in items for u in items[i].users])
        replace_items(rw, backward, three, 3)
    _drop(rw, [u for i in node.users if i.args[1] != OUT for u in i.users])  # aliases that the backward read
    replace_items(rw, node, both, 1, {OUT: out})


# Written by hand.


def write_by_hand(rw: Rewriter, found: Found) -> None:
    """In place of products and a softmax."""
    batch, heads, rows, columns, width = found.shape
    b = found.backward
    key = turned(found.key)
    shared = _shared(found, key)
    with rw.gm.graph.inserting_before(found.out):
        q = _four(rw, found.query, (batch, heads, rows, width))
        if shared is not None:
            k, v = (r.narrow for r in shared)
        else:
            if key is None:
                key = rw.call(found.out, aten.transpose.int, found.key, -2, -1)
            k = _four(rw, origin(key, (batch, heads, columns, width)), (batch, heads, columns, width))
            v = _four(rw, found.value, (batch, heads, columns, width))
        mask, keep, grow = _mask(rw, found), None, 1.0
        if found.dropout is not None:
            keep, grow = _noise(rw, found), 1 / (1 - float(found.dropout.args[1]))  # type: ignore[arg-type]
        settings = (grow, found.causal, found.scale)
        both = rw.call(found.out, FORWARD, q, k, v, mask, keep, *settings, found.safe)
        out = rw.call(found.out, operator.getitem, both, OUT)
        sums = rw.call(found.out, operator.getitem, both, SUMS)
    if b is not None:
        order = {n: i for i, n in enumerate(rw.gm.graph.nodes)}
        first = min(b.scores, key=order.__getitem__)
        with rw.gm.graph.inserting_before(first):
            grad = _four(rw, origin(b.grad, (batch, heads, rows, width)), (batch, heads, rows, width))
            three = rw.call(first, BACKWARD, grad, q, k, v, out, sums, mask, keep, *settings)
            items = [rw.call(first, operator.getitem, three, i) for i in range(3)]
        if b.query is not None:
            _land(rw, found, b.query, items[0], False, None)
        if b.key is not None:
            _land(rw, found, b.key, items[1], True, shared[0] if shared else None)
        if b.value is not None:
            _land(rw, found, b.value, items[2], False, shared[1] if shared else None)
    _land(rw, found, found.out, out, False, None)


def _shared(found: Found, key: Node | None) -> tuple[Repeated, Repeated] | None:
    """Keys and values whose repeated heads can be left out: also the gradients are summed at once."""
    pair = (repeated(key) if key is not None else None, repeated(found.value))
    if pair[0] is None or pair[1] is None or pair[0].times != pair[1].times:
        return None
    if (b := found.backward) is not None:
        for product, is_turned, r in ((b.key, True, pair[0]), (b.value, False, pair[1])):
            if product is None:
                continue
            landed = _landing(found, product, is_turned)
            if landed is None or summed(landed, r) is None:
                return None
    return pair[0], pair[1]


def _four(rw: Rewriter, n: Node, shape: Shape) -> Node:
    return n if tuple(ops.tensor(n).shape) == tuple(shape) else rw.call(n, aten.view.default, n, list(shape))


def _mask(rw: Rewriter, found: Found) -> Node | None:
    mask = found.mask
    if found.hidden is not None:
        mask = rw.call(found.out, aten.logical_not.default, found.hidden)
    if mask is None:
        return None
    if ops.tensor(found.softmax).dim() == 3 and ops.tensor(mask).dim() == 3:
        mask = rw.call(found.out, aten.unsqueeze.default, mask, 1)
    return rw.call(found.out, aten.expand.default, mask, list(found.shape[:4]))


def _noise(rw: Rewriter, found: Found) -> Node:
    """What dropout keeps: the same call to the generator, on memory that nobody fills."""
    node = found.dropout
    assert node is not None
    t = ops.tensor(ops.operand(node, 0))
    with rw.gm.graph.inserting_before(node):
        empty = rw.call(node, aten.new_empty.default, found.query, list(t.shape), dtype=t.dtype)
    node.args = (empty, *node.args[1:])
    item = next((u for u in node.users if u.args[1] == 1), None)
    if item is None:
        item = rw.call(found.out, operator.getitem, node, 1)
    return _four(rw, item, found.shape[:4])


def _landing(found: Found, product: Node, is_turned: bool) -> Node | None:
    """The node with the elements of a product in four dimensions, if nothing else reads it on the way."""
    batch, heads, _, _, width = found.shape
    length = found.shape[2] if product is found.out or _is_query(found, product) else found.shape[3]
    n = product
    while tuple(ops.tensor(n).shape) != (batch, heads, length, width) or is_turned:
        if len(n.users) != 1:
            return None
        (n,) = n.users
        if packet(n) == "transpose" and is_turned and _last_two(n):
            is_turned = False
        elif packet(n) not in SHAPES:
            return None
    return n


def _is_query(found: Found, product: Node) -> bool:
    return found.backward is not None and product is found.backward.query


def _land(rw: Rewriter, found: Found, product: Node, new: Node, is_turned: bool, shared: Repeated | None) -> None:
    """``new`` [B, H, L, D] in place of a product [B H, L, D], or of its sum over heads."""
    landed = _landing(found, product, is_turned)
    if shared is not None:
        assert landed is not None
        landed = summed(landed, shared)
    if landed is not None:
        write_result(rw, landed, new)
        return
    with rw.gm.graph.inserting_before(product):
        if is_turned:
            new = rw.call(product, aten.transpose.int, new, -2, -1)
        new = rw.call(product, aten.clone.default, new, memory_format=torch.contiguous_format)
        new = rw.call(product, aten._unsafe_view.default, new, list(ops.tensor(product).shape))
    product.replace_all_uses_with(new)


def write_result(rw: Rewriter, old: Node, new: Node) -> None:
    """``new`` for ``old``, both [B, H, L, D], in the strides that readers expect; one that turns and copies needs neither."""
    for user in list(old.users):
        if packet(user) != "transpose" or user.args[1:] != (1, 2):
            continue
        with rw.gm.graph.inserting_before(user):
            lines = rw.call(user, aten.transpose.int, new, 1, 2)
        for reader in list(user.users):
            copies = [reader] if _is_copy(reader) else list(reader.users) if packet(reader) in SHAPES else []
            if not copies or not all(map(_is_copy, copies)):
                continue
            with rw.gm.graph.inserting_before(reader):
                shape = list(ops.tensor(copies[0]).shape)
                whole = lines if copies == [reader] else rw.call(reader, aten.view.default, lines, shape)
            for copy in copies:
                if ops.tensor(copy).stride() == ops.tensor(whole).stride():
                    copy.replace_all_uses_with(whole)
    _drop(rw, list(old.users))
    if old.users:
        with rw.gm.graph.inserting_before(old):
            old.replace_all_uses_with(restrided(rw, new, old))


def _is_copy(n: Node) -> bool:
    return packet(n) == "clone" and n.kwargs.get("memory_format") == torch.contiguous_format


def _drop(rw: Rewriter, nodes: Sequence[Node]) -> None:
    """What nobody reads any more, and its readers that nobody reads."""
    below: set[Node] = set()
    todo = list(nodes)
    while todo:
        n = todo.pop()
        if n not in below:
            below.add(n)
            todo += n.users
    for n in reversed(list(rw.gm.graph.nodes)):
        if n in below and not n.users and is_pure(n):
            rw.gm.graph.erase_node(n)
