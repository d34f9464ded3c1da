"""A schedule back into the joint graph: what runs again is copied to where the backward runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.notes import Keep, notes, set_notes
from dsc.passes.memory_problem import Extracted, is_training_norm, makes


def rebuilt(gm: GraphModule, found: Extracted, saved: Sequence[Node], script: Sequence[Node]) -> GraphModule:
    """A new joint graph with the same results: the forward as it was, then ``script``, a call each, in this order.

    1. A forward call in the script is copied there; later readers read the copy.
    2. Views are copied to the backward too, onto whatever they are of there, so that each saved storage crosses once.
    3. ``saved`` values and recomputed ones are noted; checkpoint tags are gone, since they have been honoured.
    """
    builder = _Builder(gm, found)
    builder.forward()
    builder.mark(saved, script)
    for node in script:
        builder.run(node)
    builder.finish()
    return GraphModule(gm, builder.graph)


@dataclass
class _Builder:
    gm: GraphModule
    found: Extracted

    def __post_init__(self) -> None:
        self.graph = Graph()
        self.ahead: dict[Node, Node] = {}
        """Old node -> new one, as the forward knows it."""
        self.now: dict[Node, Node] = {}
        """Value -> the node that holds it in the backward."""
        self.views: dict[tuple[Node, Node], Node] = {}
        self.behind: dict[Node, Node] = {}

    def forward(self) -> None:
        for n in self.gm.graph.nodes:
            if n.op == "placeholder" or (n.name in self.found.joint.forward and n.op != "output"):
                self.ahead[n] = self.copy(n, self.ahead.__getitem__)

    def copy(self, n: Node, where: Callable[[Node], Node], again: bool = False) -> Node:
        new = self.graph.node_copy(n, where)
        for key in ("recompute", "ac_graph_id"):
            new.meta.pop(key, None)
        if again:
            new.meta["partitioner_tag"] = "is_backward"
        return new

    def mark(self, saved: Sequence[Node], script: Sequence[Node]) -> None:
        again = {m for n in script if n.name in self.found.joint.forward for m in makes(n, self.found.root)}
        for n in saved:
            _note(self.ahead[n], "save")
        for n in again - set(saved):
            _note(self.ahead[n], "recompute")

    def run(self, n: Node) -> None:
        again = self.is_forward(n)
        if again and is_training_norm(n):  # its new statistics are not read: the weight stands in for the old ones
            new = self.copy(n, lambda a: self.operand(a if a not in n.args[3:5] else n.args[1]), again)  # type: ignore
        else:
            new = self.copy(n, self.operand, again)
        if again:
            _note(new, None)
        else:
            self.behind[n] = new
        for m in makes(n, self.found.root):
            held = new if m is n else self.copy(m, lambda _: new, again)
            if again:
                _note(held, None)
            else:
                self.behind[m] = held
            self.now[m] = held

    def is_forward(self, n: Node) -> bool:
        return self.found.joint.forward.get(n.name) is n

    def operand(self, n: Node) -> Node:
        """The node to read in the backward for an old one."""
        root = self.found.root.get(n, n)
        if root is n or not isinstance(ops.value(n), (torch.Tensor, tuple, list)):
            return self.value(n)
        held = self.value(root)
        if (n, held) not in self.views:
            self.views[n, held] = self.copy(n, self.operand, again=True)
        return self.views[n, held]

    def value(self, n: Node) -> Node:
        if n in self.now:
            return self.now[n]
        if n in self.behind:
            return self.behind[n]
        if n in self.ahead:
            return self.ahead[n]
        self.behind[n] = self.copy(n, self.operand)  # a size or a constant of the backward
        return self.behind[n]

    def finish(self) -> None:
        old = self.gm.graph.output_node()
        results = old.args[0]
        assert isinstance(results, (list, tuple))
        new = [self.result(r) if isinstance(r, Node) else r for r in results]
        output = self.graph.output(type(results)(new))
        output.meta = dict(old.meta)

    def result(self, n: Node) -> Node:
        return self.ahead[n] if self.is_forward(n) or n.op == "placeholder" else self.operand(n)


def _note(node: Node, keep: Keep | None) -> None:
    if notes(node).keep != keep:
        set_notes(node, replace(notes(node), keep=keep))


__all__ = ["rebuilt"]
