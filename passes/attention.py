"""Attention in the form that moves the fewest bytes: written by hand, with repeated heads, or in a fused kernel of ATen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import cost, flash_attention, ops
from dsc.manager import Pass, Remark, Report
from dsc.passes import attention_cost as costs
from dsc.passes import attention_varlen as varlen
from dsc.passes.attention_heads import Repeated, repeated, summed
from dsc.passes.attention_match import Found, find
from dsc.passes.attention_write import backward_of, write_by_hand, write_fused, write_result
from dsc.passes.canonicalize import Rewriter, drop_dead
from dsc.passes.linears import packet
from dsc.passes.sparse_attention import read_beyond
from dsc.passes.triton_missing import without_triton
from dsc.target import Target

FUSED = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
}
SOFTMAX = ("_softmax", "_safe_softmax")


@dataclass(frozen=True)
class Attention(Pass):
    """On CUDA targets, attention -> the kernel that is modelled fastest, if it gives what eager gives.

    1. ATen's flash kernel on keys and values that are repeated for the heads that share them reads them unrepeated:
       the same numbers, without the copies.
    2. ATen's memory-efficient kernel -> ``dsc::flash_attention`` (Triton), which reads shared heads and broadcast masks as
       they are.  Both keep scores in fp32 and round weights once.
    3. ``matmul, scale, mask, softmax, dropout, matmul`` and its backward -> ``dsc::flash_attention``: no scores in memory.
       Masks made of constants that are causal are not read; dropout keeps eager's random numbers, whose mask is read.
       In fp32 this changes the order of sums alone.  Of 16 bits eager rounds scores, and their gradients, in memory, and
       the kernel does not: it is nearer to the exact result, but not the same, so this is done with ``fast`` only
       (``numerics="fast"``).
    4. ``varlen_attn``, and ATen's flash and memory-efficient kernels over sequences that lie one after the other ->
       ``dsc::varlen_attention`` (Triton), where it is modelled faster both if all are as long as the others and if all
       are as long as the longest: short ones, whose gradients ATen's flash kernel adds in memory.  Sums of rows are
       given out as the flash kernel does; windows, and queries that see nothing, are its own.
    5. Whatever is taken is modelled at least ``gain`` times as fast; ``gain=0`` takes all that can be, for the memory.
    6. Does not fire: without Triton; other dtypes, heads wider than 256 (fp32: 64), keys and values of different widths, masks that have a gradient,
       two masks, weights or scores that something else reads, dropout in ATen's kernels (random numbers of their own).
    """

    name: ClassVar[str] = "attention"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"
    on_inference: ClassVar[bool] = True

    fast: bool = False
    gain: float = 1.1

    def run(self, gm: GraphModule, target: Target) -> Report:
        if target.kind != "cuda":
            return Report(False)
        if (missing := without_triton()) is not None:
            return Report(False, (missing,))
        rw = Rewriter(gm)
        remarks: list[Remark] = []
        gone: set[Node] = set()
        for node in list(gm.graph.nodes):
            name = packet(node) if node.op == "call_function" else ""
            if name in FUSED:
                remarks += self.fused(rw, node, FUSED[name], target)
            elif name in SOFTMAX:
                remarks += self.by_hand(rw, node, gone, target)
            elif varlen.packs(node):
                remarks.append(self.packed(rw, node, target))
        changed = any(r.verdict == "did" for r in remarks)
        if changed:
            sweep(gm, gone)
        return Report(changed, tuple(remarks))

    # ATen's fused kernels.

    def fused(self, rw: Rewriter, node: Node, kernel: str, target: Target) -> list[Remark]:
        given = cost.arguments(node)
        backward = backward_of(node)
        heads, why = shared_heads(given, backward)
        if kernel == "flash":
            if heads is None:
                return [Remark(node.name, "skipped", f"heads stay repeated: {why}")] if why else []
            return [unrepeat(rw, node, backward, heads)]
        if (no := refuses_fused(given, node, backward)) is not None:
            return [Remark(node.name, "skipped", f"ATen's efficient kernel stays: {no}")]
        return [self.replace_fused(rw, node, backward, heads, target)]

    def replace_fused(
        self, rw: Rewriter, node: Node, backward: Node | None, heads: Sequence[Repeated] | None, target: Target
    ) -> Remark:
        """Case 2."""
        given = cost.arguments(node)
        q, k, v = (given[n] for n in ("query", "key", "value"))
        assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
        bias = given.get("attn_bias")
        masks = [ops.tensor(bias)] if isinstance(bias, Node) else []
        causal = given["is_causal"] is True
        query = ops.tensor(q)
        old = costs.fused("efficient", query, ops.tensor(k), masks, causal, backward is not None, target)
        if heads is not None:
            k, v = (r.narrow for r in heads)
            for r in heads:
                copy = 2.0 * cost.stored_bytes(ops.tensor(r.wide))
                moved = copy * (2 if backward is not None else 1)
                old += costs.Spent(moved / target.bandwidth / cost.BANDWIDTH_EFFICIENCY, moved)
        new = costs.fused("triton", query, ops.tensor(k), masks, causal, backward is not None, target)
        if (remark := self.slower(node, "ATen's efficient kernel stays", old, new)) is not None:
            return remark
        scale = given.get("scale")
        factor = float(scale) if isinstance(scale, (int, float)) else float(query.shape[-1]) ** -0.5
        write_fused(rw, node, backward, (q, k, v), bias, causal, factor, heads)
        return Remark(node.name, "did", f"Triton instead of ATen's efficient kernel: {new} instead of {old}")

    # Sequences of any length.

    def packed(self, rw: Rewriter, node: Node, target: Target) -> Remark:
        """Case 4."""
        found = varlen.find(node)
        if isinstance(found, str):
            return Remark(node.name, "skipped", f"stays with ATen: {found}")
        sizes = varlen.weigh(found)
        lengths = (sizes.mean, max(sizes.mean, sizes.longest))  # the truth lies between
        both = [
            (costs.packed(found.kernel, sizes, n, target), costs.packed("triton", sizes, n, target)) for n in lengths
        ]
        for old, new in both:
            if (remark := self.slower(node, f"ATen's {found.kernel} kernel stays", old, new)) is not None:
                return remark
        made = varlen.write(rw, found)
        old, new = both[0]
        return Remark(made.name, "did", f"Triton instead of ATen's {found.kernel} kernel: {new} instead of {old}")

    # Written by hand.

    def by_hand(self, rw: Rewriter, node: Node, gone: set[Node], target: Target) -> list[Remark]:
        """Case 3; ``gone`` gets what nobody reads any more."""
        found = find(rw.gm, node)
        if isinstance(found, str):
            return [Remark(node.name, "skipped", f"stays products and a softmax: {found}")] if found else []
        q, v = ops.tensor(found.query), ops.tensor(found.value)
        why = refuses(q, v)
        if why is None and q.dtype != torch.float32 and not self.fast:
            why = (
                f'{ops.SHORT.get(q.dtype, q.dtype)} scores are rounded in memory, which only numerics="fast" leaves out'
            )
        if why is not None:
            return [Remark(node.name, "skipped", f"stays products and a softmax: {why}")]
        old, new = self.weigh(found, target)
        if (remark := self.slower(node, "stays products and a softmax", old, new)) is not None:
            return [remark]
        gone.update(found.scores, found.backward.scores if found.backward is not None else ())
        write_by_hand(rw, found)
        seen = "causal, " if found.causal else ""
        return [Remark(node.name, "did", f"flash attention, {seen}no scores in memory: {new} instead of {old}")]

    def weigh(self, found: Found, target: Target) -> tuple[costs.Spent, costs.Spent]:
        """As it is, and as one kernel."""
        order = {n: i for i, n in enumerate(found.softmax.graph.nodes)}
        b = found.backward
        old = costs.apart(sorted({*found.scores}, key=order.__getitem__), target)
        if b is not None:
            old += costs.apart(sorted({*b.scores}, key=order.__getitem__), target)
        masks = [ops.tensor(m) for m in (found.mask, found.hidden) if m is not None]
        if found.dropout is not None:
            noise = next(ops.value(u) for u in found.dropout.users if u.args[1] == 1)
            assert isinstance(noise, torch.Tensor)
            masks.append(noise)
        q = ops.tensor(found.query)
        r = repeated(found.value)
        key = r.narrow if r is not None else found.value
        new = costs.fused("triton", q, ops.tensor(key), masks, found.causal, b is not None, target)
        if found.dropout is not None:
            moved = float(cost.bytes_moved(found.dropout))
            new += costs.Spent(moved / target.bandwidth / cost.BANDWIDTH_EFFICIENCY, moved)
        return old, new

    def slower(self, node: Node, stays: str, old: costs.Spent, new: costs.Spent) -> Remark | None:
        if old.seconds >= self.gain * new.seconds:
            return None
        return Remark(node.name, "skipped", f"{stays}: {old}, Triton's flash attention would take {new}")


def sweep(gm: GraphModule, gone: set[Node]) -> None:
    """Erase the nodes, and whatever was read by them alone."""
    erased = True
    while erased:
        dead = [n for n in reversed(list(gm.graph.nodes)) if n in gone and not n.users]
        for n in dead:
            gm.graph.erase_node(n)
        erased = bool(drop_dead(gm)) or bool(dead)


def refuses(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernel cannot have these operands, in a few words."""
    if q.dtype not in flash_attention.WIDEST or q.dtype != v.dtype:
        return f"{ops.SHORT.get(q.dtype, q.dtype)} operands"
    if not isinstance(q.shape[-1], int) or q.shape[-1] > flash_attention.WIDEST[q.dtype]:
        return f"heads {q.shape[-1]} wide"
    return None


def refuses_fused(given: dict[str, object], node: Node, backward: Node | None) -> str | None:
    q, v = (ops.tensor(given[n]) for n in ("query", "value"))  # type: ignore[arg-type]
    if given["dropout_p"]:
        return "dropout has random numbers of its own"
    if q.shape[-1] != v.shape[-1]:
        return "keys and values differ in width"
    if any(u.args[1] != 0 and read_beyond(u) for u in node.users):
        return "its sums are read"
    if backward is not None and any(u.args[1] == 3 and u.users for u in backward.users):
        return "its mask has a gradient"
    return refuses(q, v)


def shared_heads(given: dict[str, object], backward: Node | None) -> tuple[list[Repeated] | None, str]:
    """The repeated keys and values of an attention, if they can be left out; or why not, if there are any."""
    heads = [r for n in ("key", "value") if (r := repeated(given[n])) is not None]  # type: ignore[arg-type]
    if len(heads) != 2 or heads[0].times != heads[1].times:
        return None, ""
    if backward is not None:
        items = {u.args[1]: u for u in backward.users}
        if any(i in items and items[i].users and summed(items[i], r) is None for i, r in zip((1, 2), heads)):
            return None, "their gradients are read before they are summed"
    return heads, ""


def unrepeat(rw: Rewriter, node: Node, backward: Node | None, heads: Sequence[Repeated]) -> Remark:
    """Case 1."""
    narrow = {r.wide: r.narrow for r in heads}
    saved = 2 * sum(cost.stored_bytes(ops.tensor(r.wide)) for r in heads)
    for at in (node, backward):
        if at is not None:
            at.args = tuple(narrow.get(a, a) if isinstance(a, Node) else a for a in at.args)
    if backward is not None:
        items = {u.args[1]: u for u in backward.users}
        totals = [(summed(items[i], r), items[i]) for i, r in zip((1, 2), heads) if i in items and items[i].users]
        backward.meta["val"] = retold(rw, backward)
        for i, item in items.items():
            item.meta["val"] = backward.meta["val"][i]
        for total, item in totals:
            assert total is not None
            write_result(rw, total, item)
    return Remark(node.name, "did", f"reads {heads[0].times} heads where one is shared: {saved / 1e6:,.1f} MB less")


def retold(rw: Rewriter, node: Node) -> Any:
    """What the operator says that it returns for its operands as they are now."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with rw.mode or nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]
