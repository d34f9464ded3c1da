"""Give products of a joint graph their formats: casts, quantised operands that several products share, 8-bit products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.notes import notes, set_notes
from dsc.passes.precision_sites import Operand, Site
from dsc.passes.precision_time import Rounded, rounded
from dsc.precision import ops as eight
from dsc.precision.formats import Format

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KEPT = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "original_aten", "from_node")
"""What new nodes take over from the product that they serve."""


def apply(gm: GraphModule, sites: Sequence[Site], formats: Mapping[str, Format]) -> None:
    """Rewrite every product that ``formats`` names.

    1. Quantised operands stand right behind the values that they round: where a product of the backward reads one that
       the forward has, the 8 bits are saved, not the value.
    2. An operand that products read along both of its sides is read once, and written twice.
    3. 8-bit and cast products give 16 bits, as ``bf16`` unless the model is in fp16, and go on in the dtype of before.
    """
    rewriter = Rewriter(gm, sites, formats)
    for site in sites:
        if (f := formats.get(site.name)) is not None:
            rewriter.replace(site, f)
    drop_dead_views(gm)


class Rewriter:
    """Puts new nodes into one graph, and knows those that it has put there."""

    def __init__(self, gm: GraphModule, sites: Sequence[Site], formats: Mapping[str, Format]) -> None:
        self.gm = gm
        self.start = next(n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr"))
        self.wanted: dict[Rounded, set[bool]] = {}
        self.quantised: dict[tuple[Rounded, bool], tuple[Node, Node]] = {}
        self.casts: dict[tuple[Node, torch.dtype], Node] = {}
        self.now: dict[Node, Node] = {}
        """Products that were replaced, and by what."""
        for s in sites:
            f = formats.get(s.name)
            if f is not None and f.scaled:
                for o in (s.left, s.right):
                    self.wanted.setdefault(rounded(o, f, 0), set()).add(o.turned)

    def replace(self, site: Site, f: Format) -> None:
        """One product in its format, and what followed it."""
        old, dtype = site.node, ops.tensor(site.node).dtype
        with self.gm.graph.inserting_before(old):
            if f.scaled:
                result = self.scaled(site, f, dtype)
            elif f.name == "tf32":
                result = self.tf32(site)
            else:
                result = self.cast(site, DTYPES[f.name])
            self.note(result, f.name)
            if ops.tensor(result).dtype != dtype:
                result = self.call(site.node, aten._to_copy.default, result, dtype=dtype)
            if site.bias is not None:
                result = self.call(site.node, aten.add.Tensor, result, site.bias)
        old.replace_all_uses_with(result)
        self.now[old] = result
        self.gm.graph.erase_node(old)

    def scaled(self, site: Site, f: Format, dtype: torch.dtype) -> Node:
        a, b = self.operand(site, site.left, f), self.operand(site, site.right, f)
        out = torch.float16 if dtype == torch.float16 else torch.bfloat16
        return self.call(site.node, eight.mm8, *a, *b, out)

    def operand(self, site: Site, o: Operand, f: Format) -> tuple[Node, Node]:
        """The values and scales of one side, made where nobody has made them yet."""
        key = rounded(o, f, 0)
        if (key, o.turned) not in self.quantised:
            base = self.now.get(o.base, o.base)
            if len(self.wanted[key]) == 2:
                both = self.behind(base, site.node, eight.quantise_both, base, key.dtype, key.grain)
                q, s, qt, st = self.items(both, site.node, 4)
                self.quantised |= {(key, False): (q, s), (key, True): (qt, st)}
            else:
                base = self.behind(base, site.node, aten.t.default, base) if o.turned else base
                one = self.behind(base, site.node, eight.quantise, base, key.dtype, key.grain)
                q, s = self.items(one, site.node, 2)
                self.quantised[key, o.turned] = q, s
        return self.quantised[key, o.turned]

    def tf32(self, site: Site) -> Node:
        return self.call(site.node, eight.tf32, *site.node.args[-2:])

    def cast(self, site: Site, dtype: torch.dtype) -> Node:
        sides = []
        for o, wanted in ((site.left, False), (site.right, True)):
            side = self.casted(site, o.base, dtype)
            if ops.tensor(site.node).dim() == 2 and o.turned != wanted:
                side = self.call(site.node, aten.t.default, side)
            sides.append(side)
        product = aten.mm.default if ops.tensor(site.node).dim() == 2 else aten.bmm.default
        return self.call(site.node, product, *sides)

    def casted(self, site: Site, base: Node, dtype: torch.dtype) -> Node:
        base = self.now.get(base, base)
        if ops.tensor(base).dtype == dtype:
            return base
        if (base, dtype) not in self.casts:
            self.casts[base, dtype] = self.behind(base, site.node, aten._to_copy.default, base, dtype=dtype)
        return self.casts[base, dtype]

    def note(self, node: Node, format: str) -> None:
        set_notes(node, replace(notes(node), precision=format))

    def items(self, made: Node, site: Node, count: int) -> list[Node]:
        out, at = [], made
        for i in range(count):
            at = self.after(at, site, getitem, made, i, tag=made.meta.get("partitioner_tag"))
            out.append(at)
        return out

    def behind(self, base: Node, site: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call right behind the value that it reads, on the same side of the loss."""
        tag = base.meta.get("partitioner_tag", "is_forward")
        return self.after(base, site, target, *args, tag=tag, **kwargs)

    def after(self, at: Node, site: Node, target: Any, *args: Any, tag: str | None = None, **kwargs: Any) -> Node:
        graph = self.gm.graph
        place = (
            graph.inserting_before(self.start) if at.op in ("placeholder", "get_attr") else graph.inserting_after(at)
        )
        with place:
            return self.call(site, target, *args, tag=tag, **kwargs)

    def call(self, site: Node, target: Any, *args: Any, tag: str | None = None, **kwargs: Any) -> Node:
        """A new node at the insertion point, with its fake value and what is known of the product that it serves."""
        node = self.gm.graph.call_function(target, args, kwargs)
        node.meta = {k: site.meta[k] for k in KEPT if k in site.meta}
        if (tag := tag or site.meta.get("partitioner_tag")) is not None:
            node.meta["partitioner_tag"] = tag
        node.meta["val"] = fake(target, args, kwargs)
        return node


def fake(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """What a call gives for the fake values of its arguments."""
    shown = [a.meta["val"] if isinstance(a, Node) else a for a in args]
    if target is getitem:
        return shown[0][shown[1]]
    mode = next(v.fake_mode for v in shown if hasattr(v, "fake_mode"))
    with mode:
        return target(*shown, **(kwargs or {}))


def drop_dead_views(gm: GraphModule) -> None:
    """The views through which products read that read something else now."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and not node.users and ops.is_view(node):
            gm.graph.erase_node(node)
