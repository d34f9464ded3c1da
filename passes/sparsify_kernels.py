"""Products on sparse tensor cores in place of masked ones."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from dsc import ops, packed
from dsc.passes.canonicalize import Rewriter
from dsc.passes.linears import PRODUCTS, Linear

if TYPE_CHECKING:
    from dsc.passes.sparsify import Sparsify

aten = torch.ops.aten
assert packed.LIBRARY is not None  # importing it registers the operators


def replaced(rw: Rewriter, x: Linear, kernel: str, p: Sparsify, masked: Node, keep: Node) -> Linear:
    """The layer with its forward product, and a transposable one's input gradient, by ``kernel``: mma.sp or cusparselt.

    Each product reads the weight packed.  Where ``keep`` says that the layer is dense, it reads the weight itself.
    """
    dtype = ops.tensor(x.forward).dtype
    both = p.transposable and x.dgrad is not None
    first = next(iter(masked.users))
    with rw.gm.graph.inserting_before(first):
        if kernel == "mma.sp":
            own = p.importance == "magnitude" and p.refresh == 1 and not p.transposable
            four = rw.call(x.forward, torch.ops.dsc.pack24.default, x.weight if own else masked, both, dtype)
            parts = [rw.call(x.forward, operator.getitem, four, i) for i in range(4 if both else 2)]
            op, packs = torch.ops.dsc.sparse_mm24.default, [tuple(parts[:2]), tuple(parts[2:])]
        else:
            low = rw.call(x.forward, aten._to_copy.default, masked, dtype=dtype)
            op, compress = torch.ops.dsc.cslt_mm.default, torch.ops.dsc.cslt_compress.default
            packs = [(rw.call(x.forward, compress, low),)]
            if both:
                turned = rw.call(x.forward, aten.t.default, low)
                whole = rw.call(x.forward, aten.clone.default, turned, memory_format=torch.contiguous_format)
                packs.append((rw.call(x.forward, compress, whole),))
    left = PRODUCTS[ops.name_of(x.forward)]
    with rw.gm.graph.inserting_before(x.forward):
        forward = rw.call(x.forward, op, x.forward.args[left], *packs[0], x.weight, keep, False)
        result = forward
        if left:  # addmm: the bias comes first
            result = rw.call(x.forward, aten.add.Tensor, forward, x.forward.args[0])
    x.forward.replace_all_uses_with(result)
    rw.gm.graph.erase_node(x.forward)
    dgrad = x.dgrad
    if both and dgrad is not None:
        with rw.gm.graph.inserting_before(dgrad):
            new = rw.call(dgrad, op, dgrad.args[0], *packs[1], x.weight, keep, True)
        dgrad.replace_all_uses_with(new)
        rw.gm.graph.erase_node(dgrad)
        dgrad = new
    return replace(x, forward=forward, dgrad=dgrad)
