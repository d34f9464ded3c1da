"""Products of matrices that take what follows them into their kernel, where that is modelled to be faster.

1. A product stays with ATen (cuBLAS) unless a group reads it, in the order in which it is written, on a GPU.
2. What it may take of that group is its pointwise part: all nodes that need no reduction, and whose results that are
   wanted elsewhere have an element for each of the product's.  The rest stays a group and reads what was stored, and
   what it can compute from that it computes.
   The largest of each block of columns is taken too (``products.peaks``): a tile has whole blocks.
3. Nothing is taken if a path leads from the product to it through a third, if an input is written in place, or if a side
   of the product is shorter than ``LEAST``.
4. It is taken if one kernel is modelled to take less time than the library and the group (``dsc.passes.gemm_model``);
   the rest counts as a kernel, or as what the next product takes (``dsc.passes.prologue``).
5. Then what computes its rows is taken on the same terms (``dsc.passes.prologue``).
6. Dropout with eager's numbers is never taken: which number an element gets depends on how many threads ATen's launch has
   on the GPU that runs it, and on where the tensor lies.  With ``dropout="kernel"`` it is pointwise (``dsc.passes.dropout``).
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dsc import cost, domain, gemm_tiles, ops, products
from dsc.manager import Remark
from dsc.notes import notes
from dsc.passes import prologue
from dsc.passes.gemm_groups import Groups, forbidden, in_order, readers
from dsc.passes.gemm_model import generated, library, micro
from dsc.products import Product
from dsc.steps import storage_of
from dsc.target import Target

LEAST = 16
"""Rows, columns and terms of a sum below which a product has no tile."""


def absorb(gm: GraphModule, target: Target, limit: int) -> list[Remark]:
    """Cases 1 to 5, for every product of the graph in order."""
    g = Groups(gm, target, limit)
    found = [p for n in gm.graph.nodes if notes(n).group is None and (p := products.of(n)) is not None]
    remarks = [decide(g, p) for p in found] + [prologue.decide(g, p) for p in found if min(p.sizes[1:]) >= LEAST]
    return [r for r in remarks if r is not None] + [r for p in found if (r := dropped(p)) is not None]


def dropped(p: Product) -> Remark | None:
    """Case 6: what is said of a product that dropout follows, perhaps behind pointwise nodes."""
    todo, seen = list(readers(p.node)), set[Node]()
    while todo:
        n = todo.pop()
        if ops.name_of(n) == "native_dropout.default":
            why = (
                f"{n.name} stays ATen's call: eager's mask depends on the threads that its launch has on the GPU; "
                'options={"dropout": "kernel"} draws another one in the kernel that uses it'
            )
            return Remark(p.node.name, "skipped", why)
        if n not in seen and ops.info(n).kind == "pointwise":
            seen.add(n)
            todo += readers(n)
    return None


def decide(g: Groups, p: Product) -> Remark | None:
    """What becomes of one product; None where nothing reads it that could be taken."""
    name = p.node.name
    homes = list(dict.fromkeys(h for n in readers(p.node) if (h := notes(n).group) is not None))
    tails = {h: t for h in homes if (t := tail(g, p, h))}
    if not tails:
        return None
    if min(p.sizes[1:]) < LEAST:
        return Remark(name, "skipped", f"a side of {' x '.join(map(str, p.sizes[1:]))} is too short for a tile")
    home = max(tails, key=lambda h: cost.bytes_of_group(g.nodes[h]))
    taken = tails[home]
    if (why := forbidden(g, [p.node, *taken])) is not None:
        return Remark(name, "skipped", f"{home} stays a kernel of its own: {why}")
    rest = [n for n in g.nodes[home] if n not in taken]
    apart = library(p, g.target) + cost.seconds_of_group(g.nodes[home], g.target)
    whole = generated([p.node, *taken], p, g.target) + (prologue.seconds(rest, g.target) if rest else 0.0)
    saved = cost.bytes_moved(p.node) + cost.bytes_of_group(g.nodes[home])
    saved -= cost.bytes_of_group([p.node, *taken]) + (cost.bytes_of_group(rest) if rest else 0)
    words = f"{micro(whole)} with {len(taken)} nodes of {home}, {micro(apart)} apart, {saved} bytes fewer"
    if whole >= apart:
        return Remark(name, "skipped", f"stays with ATen, modelled {words}")
    made = g.fresh() if rest else home
    g.put(made, [p.node, *taken])
    if rest:
        g.put(home, rest)
    tile, parts = gemm_tiles.chosen(*p.sizes, p.form, lean=any(ops.name_of(x) == "dsc.keep.default" for x in taken))
    pieces = f", the contraction in {parts} parts" if parts > 1 else ""
    return Remark(name, "did", f"generated as {made}, modelled {words}; tiles of {tile}{pieces}")


def tail(g: Groups, p: Product, home: str) -> list[Node]:
    """Case 2: the nodes of a group that can be computed where the product is; none if they read it out of order."""
    inside, mine = set(g.nodes[home]), products.space(p)
    if any(ops.mutated(n) for n in inside):
        return []
    early: set[Node] = set()
    after: set[Node] = {p.node}
    for n in g.nodes[home]:
        roots = {storage_of(a) for a in n.all_input_nodes}
        if (
            (ops.info(n).kind not in ("pointwise", "create") and not products.peaks(n, p))
            or ops.may_fail(n)
            or not (roots & inside) <= early
        ):
            continue
        if not isinstance(n.meta.get("val"), torch.Tensor):
            continue
        if roots & after:
            if domain.meet(mine, products.space_of(n, p)) is None or not in_order(n, after):
                continue
            after.add(n)
        early.add(n)
    kept = needed(after - {p.node}, early)
    while True:  # what is wanted elsewhere has to be stored from the product's tile
        bad = {n for n in kept if cost.read_outside(n, kept) and n not in after}
        if not bad:
            break
        kept = {n for n in kept if n not in bad and not depends(n, bad)}
    if not any(p.node in {storage_of(a) for a in n.all_input_nodes} for n in kept) or len(kept) >= g.limit:
        return []
    return sorted(trimmed(g, p, kept, inside), key=g.order.__getitem__)


def trimmed(g: Groups, p: Product, kept: set[Node], inside: set[Node]) -> set[Node]:
    """Without what the rest of the group can compute from values that are stored anyway: a square, a wider copy.

    Maxima are kept: they are there so that nothing is read again.
    """
    for n in sorted(kept, key=g.order.__getitem__, reverse=True):
        if products.peaks(n, p):
            continue
        roots = {storage_of(a) for a in n.all_input_nodes}
        if (
            cost.read_outside(n, kept)
            and not cost.read_outside(n, inside)
            and not any(n in {storage_of(a) for a in r.all_input_nodes} for r in kept - {n})
            and roots <= kept
            and all(cost.read_outside(r, kept) for r in roots)
        ):
            kept = kept - {n}
    return kept


def needed(roots: set[Node], among: set[Node]) -> set[Node]:
    """``roots`` and all that they need of ``among``."""
    out: set[Node] = set()
    todo = list(roots)
    while todo:
        n = todo.pop()
        if n not in out:
            out.add(n)
            todo += [s for a in n.all_input_nodes if (s := storage_of(a)) in among]
    return out


def depends(n: Node, on: set[Node]) -> bool:
    return any(storage_of(a) in on for a in n.all_input_nodes)
