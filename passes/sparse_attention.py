"""Attention over chosen blocks in place of attention over everything."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import block_attention, cost, ops
from dsc.errors import BadOption
from dsc.manager import Pass, Remark, Report
from dsc.passes.canonicalize import Rewriter
from dsc.passes.linears import packet
from dsc.target import Target

aten = torch.ops.aten
FORWARD = frozenset(
    f"_scaled_dot_product_{kind}"
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
OUT, SUMS = 0, 1
"""Results of all of them that have a meaning here: the output, and the logarithms of the rows' sums."""


@dataclass(frozen=True)
class SparseAttention(Pass):
    """``scaled_dot_product_attention`` -> one softmax over a local window, the first blocks, and the ``top_k`` best.

    1. On joint and inference graphs: each fused attention of ATen and its backward -> ``dsc.block_select``, which
       chooses in the graph, without a gradient, and ``dsc.block_attention``.  ``window`` and ``sink`` count tokens and
       are rounded up to whole blocks of ``block`` tokens; a window reaches both ways where attention is not causal.
    2. This changes the model.  The work is linear in the length.
    3. Does not fire: masks, dropout, queries and keys of different lengths, widths of key and value that differ, more
       chosen blocks than there are (dense is the same), and attention that PyTorch computes by products and a softmax.
    """

    name: ClassVar[str] = "sparse-attention"
    gives: ClassVar[frozenset[str]] = frozenset({"sparsity"})
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    pattern: Literal["block_sparse"] = "block_sparse"
    window: int = 256
    top_k: int = 8
    sink: int = 64
    block: int = 64

    def __post_init__(self) -> None:
        if self.pattern != "block_sparse":
            raise BadOption("attention.pattern", self.pattern, "'block_sparse', the only one")
        for name, least in (("window", 1), ("top_k", 0), ("sink", 0), ("block", 16)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadOption(f"attention.{name}", value, f"a whole number from {least} on")
        if self.block & (self.block - 1) or self.block > 128:
            raise BadOption("attention.block", self.block, "16, 32, 64 or 128")

    @property
    def blocks(self) -> tuple[int, int, int]:
        """(window, sink, top_k) in blocks."""
        return -(-self.window // self.block), -(-self.sink // self.block), self.top_k

    def run(self, gm: GraphModule, target: Target) -> Report:
        rw = Rewriter(gm)
        remarks = []
        for node in [n for n in gm.graph.nodes if packet(n) in FORWARD]:
            if (why := self.refuses(node)) is not None:
                remarks.append(Remark(node.name, "skipped", why))
                continue
            remarks.append(Remark(node.name, "did", self.said(node)))
            self.replace(rw, node)
        return Report(any(r.verdict == "did" for r in remarks), tuple(remarks))

    def refuses(self, node: Node) -> str | None:
        """Why an attention stays as it is, in a few words."""
        given = cost.arguments(node)
        q, k, v = (ops.tensor(given[n]) for n in ("query", "key", "value"))  # type: ignore[arg-type]
        if given.get("attn_mask") is not None or given.get("attn_bias") is not None:
            return "it has a mask"
        if given["dropout_p"]:
            return "it has dropout"
        if q.shape[-2] != k.shape[-2]:
            return "queries and keys differ in length"
        if q.shape[-1] != v.shape[-1] or k.shape[-1] != q.shape[-1]:
            return "keys and values differ in width"
        items = {u.args[1]: u for u in node.users if u.target is operator.getitem}
        if len(items) < len(node.users) or any(read_beyond(u) for i, u in items.items() if i != OUT):
            return "its intermediate results are read"
        count = self.listed(bool(given["is_causal"]))
        length = q.shape[-2]
        if isinstance(length, int) and count * self.block >= length:
            return f"{count} blocks of {self.block} cover all {length} tokens"
        return None

    def listed(self, causal: bool) -> int:
        return block_attention.listed(causal, *self.blocks)

    def said(self, node: Node) -> str:
        given = cost.arguments(node)
        length, causal = ops.tensor(given["query"]).shape[-2], bool(given["is_causal"])  # type: ignore[arg-type]
        seen = self.listed(causal) * self.block
        share = f", {seen / (length / 2 if causal else length):.0%} of dense" if isinstance(length, int) else ""
        return f"{self.listed(causal)} blocks of {self.block} keys for each of {length} queries{share}"

    def replace(self, rw: Rewriter, node: Node) -> None:
        """The attention and its backward, if it has one."""
        given = cost.arguments(node)
        q, k, v, causal = (given[n] for n in ("query", "key", "value", "is_causal"))
        assert isinstance(q, Node)
        scale = given.get("scale")
        factor = float(scale) if isinstance(scale, (int, float)) else float(ops.tensor(q).shape[-1]) ** -0.5
        backward = next((u for i in node.users for u in i.users if packet(u) == f"{packet(node)}_backward"), None)
        with rw.gm.graph.inserting_before(node):
            choose, attend = torch.ops.dsc.block_select.default, torch.ops.dsc.block_attention.default
            window, sink, top_k = self.blocks
            index = rw.call(node, choose, q, k, bool(causal), self.block, window, sink, top_k)
            both = rw.call(node, attend, q, k, v, index, bool(causal), self.block, factor)
            out = rw.call(node, operator.getitem, both, OUT)
            sums = rw.call(node, operator.getitem, both, SUMS)
        if backward is not None:
            told = cost.arguments(backward)
            grad = told.get("grad_out", told.get("grad_out_"))
            op = torch.ops.dsc.block_attention_backward.default
            with rw.gm.graph.inserting_before(backward):
                three = rw.call(backward, op, grad, q, k, v, out, sums, index, bool(causal), self.block, factor)
            replace_items(rw, backward, three, 3)
        replace_items(rw, node, both, 1, {OUT: out})


def replace_items(rw: Rewriter, old: Node, new: Node, count: int, made: dict[int, Node] | None = None) -> None:
    """The first ``count`` items of ``new`` for those of ``old``, in their strides; the rest of ``old`` goes away."""
    for user in list(old.users):
        place = user.args[1]
        assert isinstance(place, int)
        if user.users and place < count:
            with rw.gm.graph.inserting_before(user):
                item = (made or {}).get(place) or rw.call(old, operator.getitem, new, place)
                user.replace_all_uses_with(restrided(rw, item, user))
        rw.gm.graph.erase_node(user)
    rw.gm.graph.erase_node(old)


def restrided(rw: Rewriter, item: Node, like: Node) -> Node:
    """A value in the strides of another: what reads it was traced with those."""
    t, wanted = ops.tensor(item), ops.tensor(like)
    if t.stride() == wanted.stride():
        return item
    size, stride = list(wanted.shape), list(wanted.stride())
    empty = rw.call(like, aten.new_empty_strided.default, item, size, stride)
    return rw.call(like, aten.copy.default, empty, item)


def read_beyond(item: Node) -> bool:
    """Whether anything else than the backward of attention reads a value."""
    seen = [u for u in item.users if packet(u).removesuffix("_backward") not in FORWARD]
    return any(packet(u) not in ("detach", "alias") or read_beyond(u) for u in seen)
