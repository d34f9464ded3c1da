"""Dropout that kernels draw themselves: behind a product, in its epilogue, with no mask in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch.fx import GraphModule, Node

from dsc import (
    keep,  # noqa: F401  # registers the operator
    ops,
)
from dsc.manager import Pass, Remark, Report
from dsc.passes.canonicalize import Rewriter, only_items
from dsc.target import Target

aten = torch.ops.aten
SEEDS = 2**62


@dataclass(frozen=True)
class Dropout(Pass):
    """Masks of dropout are drawn where they are used, from one number of the generator a call.  They are not eager's.

    1. ``native_dropout(x, p)`` -> ``x * keep * 1/(1-p)`` with ``keep = dsc::keep(seed, x.shape, 1-p)``: pointwise all of it, so that
       it joins what is before and after, a product too.  ``1/(1-p)`` is rounded to fp32, as in ATen's kernel on a GPU.
    2. On CPUs ``canonicalize`` has taken dropout apart: of what it made, ``bernoulli`` is replaced.
    3. The seed is a draw of its own from the device's generator, in the place of the call: the same seeds give the same masks.
       The backward draws the mask again where that is cheaper than to save it (``recompute``).
    4. Does not fire: outside of training, with p of 0 or 1, on what is not contiguous, inside of attention that is one call.
    """

    name: ClassVar[str] = "dropout"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    def run(self, gm: GraphModule, target: Target) -> Report:
        rw, remarks = Rewriter(gm), []
        for node in list(gm.graph.nodes):
            match ops.name_of(node) if node.op == "call_function" else "":
                case "native_dropout.default":
                    why = whole(rw, node)
                case "bernoulli.p":
                    why = taken_apart(rw, node)
                case _:
                    continue
            words = "drawn in the kernel that uses it" if why is None else f"stays ATen's call: {why}"
            remarks.append(Remark(node.name, "did" if why is None else "skipped", words))
        rw.finish()
        return Report(any(r.verdict == "did" for r in remarks), tuple(remarks))


def whole(rw: Rewriter, node: Node) -> str | None:
    """Case 1; else why not."""
    x, p, train = ops.operand(node, 0), node.args[1], node.args[2]
    t = ops.tensor(x)
    if not isinstance(p, float) or not 0 < p < 1 or train is not True:
        return "it drops nothing, or all"
    if t.dtype not in ops.SHORT or not t.is_contiguous() or not only_items(node):
        return "its input is not contiguous, or of a dtype that kernels have not"
    with rw.gm.graph.inserting_before(node):
        mask = drawn(rw, node, x, 1 - p)
        kept = rw.call(node, aten.mul.Tensor, x, mask)
        scale = float(np.float32(1) / np.float32(1 - p)) if t.dtype != torch.float64 else 1 / (1 - p)
        out = rw.call(node, aten.mul.Tensor, kept, scale)
    rw.replace_items_later(node, {0: out, 1: mask})
    return None


def taken_apart(rw: Rewriter, node: Node) -> str | None:
    """Case 2; else why not."""
    like = ops.operand(node, 0)
    if ops.name_of(like) != "empty_like.default" or ops.tensor(like).dtype != torch.bool:
        return "it is no dropout"
    x, p = ops.operand(like, 0), node.args[1]
    assert isinstance(p, float), "as canonicalize makes it"
    with rw.gm.graph.inserting_before(node):
        mask = drawn(rw, node, x, p)
    node.replace_all_uses_with(mask)
    rw.gm.graph.erase_node(node)
    if not like.users:
        rw.gm.graph.erase_node(like)
    return None


def drawn(rw: Rewriter, node: Node, x: Node, p: float) -> Node:
    """The mask of a value, and its seed."""
    t = ops.tensor(x)
    sizes = [n if isinstance(n, int) else rw.call(node, aten.sym_size.int, x, i) for i, n in enumerate(t.shape)]
    seed = rw.call(node, aten.randint.default, SEEDS, [], dtype=torch.int64, device=t.device)
    return rw.call(node, torch.ops.dsc.keep.default, seed, sizes, p)
