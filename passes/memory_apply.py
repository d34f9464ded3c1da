"""A schedule back into the joint graph: what runs again is copied to where the backward runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.notes import Keep, notes, set_notes
from dsc.passes.memory_problem import Extracted, call_again, makes
from dsc.torch_shim import lazy_graph_module


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


def halves(
    gm: GraphModule, found: Extracted, script: Sequence[Node]
) -> tuple[GraphModule, GraphModule, dict[str, int]]:
    """The forward and the backward that the rebuilt graph will be split into, and which result each saved input is.

    For a look at a plan: far cheaper than to rebuild and split, and the same in what matters to time and memory.
    """
    back = _Builder(gm, found, apart=True)
    for node in script:
        back.run(node)
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    back.graph.output(tuple(back.result(r) if isinstance(r, Node) else r for r in results[found.results :]))
    saved = [n for n in back.inputs if n in found.joint.forward.values()]
    ahead = results[: found.results] + saved
    forward = _forward(gm, found, ahead)
    places = {n.name: found.results + i for i, n in enumerate(saved)}
    return lazy_graph_module(gm, forward), lazy_graph_module(gm, back.graph), places


def _forward(gm: GraphModule, found: Extracted, results: Sequence[object]) -> Graph:
    """The forward's nodes that lead to these results, or have an effect."""
    effects = {found.nodes[o] for o in found.problem.effects}
    wanted: set[Node] = {r for r in results if isinstance(r, Node)} | effects
    for late in reversed(list(gm.graph.nodes)):
        if late in wanted:
            wanted.update(late.all_input_nodes)
    graph = Graph()
    new: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        mine = n.name in found.joint.forward and found.joint.forward[n.name] is n
        if n.op != "output" and mine and (n in wanted or n.op == "placeholder"):
            new[n] = graph.node_copy(n, new.__getitem__)
    graph.output(tuple(new[r] if isinstance(r, Node) else r for r in results))  # type: ignore[misc]
    return graph


@dataclass
class _Builder:
    gm: GraphModule
    found: Extracted
    apart: bool = False
    """Build the backward alone: what it reads of the forward becomes its inputs."""

    def __post_init__(self) -> None:
        self.graph = Graph()
        self.inputs: dict[Node, Node] = {}
        """Apart: nodes of the joint graph -> inputs of the backward."""
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
        new = call_again(self.graph, n, where) if again else self.graph.node_copy(n, where)
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
        if self.apart and (self.is_forward(n) or n.op == "placeholder"):
            return self.input(n)
        if n in self.ahead:
            return self.ahead[n]
        self.behind[n] = self.copy(n, self.operand)  # a size or a constant of the backward
        return self.behind[n]

    def input(self, n: Node) -> Node:
        if n not in self.inputs:
            first = next(iter(self.graph.nodes), None)
            with self.graph.inserting_before(first) if first is not None else nullcontext():
                self.inputs[n] = self.graph.placeholder(n.name)
            self.inputs[n].meta = {"val": n.meta.get("val")}
        return self.inputs[n]

    def finish(self) -> None:
        old = self.gm.graph.output_node()
        results = old.args[0]
        assert isinstance(results, (list, tuple))
        new = [self.result(r) if isinstance(r, Node) else r for r in results]
        output = self.graph.output(type(results)(new))
        output.meta = dict(old.meta)

    def result(self, n: Node) -> Node:
        if self.apart and (self.is_forward(n) or n.op == "placeholder"):
            return self.input(n)
        return self.ahead[n] if self.is_forward(n) or n.op == "placeholder" else self.operand(n)


def _note(node: Node, keep: Keep | None) -> None:
    if notes(node).keep != keep:
        set_notes(node, replace(notes(node), keep=keep))
