"""A schedule back into the joint graph: what runs again is copied to where the backward runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.notes import set_keep
from dsc.passes.memory_again import call_again, device_of, draw_again, is_dropped, redrawn, state_before, state_value
from dsc.passes.memory_offload import PLACE
from dsc.passes.memory_problem import Extracted, makes
from dsc.torch_shim import lazy_graph_module


def rebuilt(gm: GraphModule, found: Extracted, saved: Sequence[Node], script: Sequence[Node]) -> GraphModule:
    """A new joint graph with the same results: the forward as it was, then ``script``, a call each, in this order.

    1. A forward call in the script is copied there; later readers read the copy.
    2. Views are copied to the backward too, onto whatever they are of there, so that each saved storage crosses once.
    3. ``saved`` values and recomputed ones are noted; checkpoint tags are gone, since they have been honoured.
    4. A draw in the script is repeated from the state that its generator has when the forward draws: a saved value more.
    """
    builder = _Builder(gm, found, saved, script)
    builder.forward()
    builder.mark()
    for place, (node, whole) in enumerate(zip(script, wholes(script))):
        builder.run(node, place, whole)
    builder.finish()
    return GraphModule(gm, builder.graph)


def halves(
    gm: GraphModule, found: Extracted, saved: Sequence[Node], script: Sequence[Node]
) -> tuple[GraphModule, GraphModule, dict[str, int]]:
    """The forward and the backward that the rebuilt graph will be split into, and which result each saved input is.

    For a look at a plan: far cheaper than to rebuild and split, and the same in what matters to time and memory.
    """
    back = _Builder(gm, found, saved, script, apart=True)
    for place, (node, whole) in enumerate(zip(script, wholes(script))):
        back.run(node, place, whole)
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    back.graph.output(tuple(back.result(r) if isinstance(r, Node) else r for r in results[found.results :]))
    crossing = [n for n in back.inputs if back.is_forward(n)]
    forward = _forward(gm, found, results[: found.results] + crossing, list(back.states))
    handed = [*crossing, *back.states.values()]
    places = {n.name: found.results + i for i, n in enumerate(handed)}
    return lazy_graph_module(gm, forward), lazy_graph_module(gm, back.graph), places


def wholes(script: Sequence[Node]) -> list[bool]:
    """For each call, whether the script goes on to read the result of a dropout that it is, before it runs once more."""
    out: list[bool] = []
    wanted: set[Node] = set()
    for n in reversed(script):
        out.append(n in wanted)
        wanted.discard(n)
        if is_dropped(n):
            wanted.add(ops.operand(n, 0))
    return out[::-1]


def _forward(gm: GraphModule, found: Extracted, results: Sequence[object], redrawn: Sequence[Node]) -> Graph:
    """The forward's nodes that lead to these results, or have an effect; the states before draws come last."""
    effects, repeated = {found.nodes[o] for o in found.problem.effects}, set(redrawn)
    wanted: set[Node] = {r for r in results if isinstance(r, Node)} | effects
    for late in reversed(list(gm.graph.nodes)):
        if late in wanted:
            wanted.update(late.all_input_nodes)
    graph = Graph()
    new: dict[Node, Node] = {}
    states: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        if n in repeated:
            states[n] = state_before(graph, n)
        mine = n.name in found.joint.forward and found.joint.forward[n.name] is n
        if n.op != "output" and mine and (n in wanted or n.op == "placeholder"):
            new[n] = graph.node_copy(n, new.__getitem__)
    handed = [new[r] if isinstance(r, Node) else r for r in results]
    graph.output((*handed, *(states[n] for n in redrawn)))  # type: ignore[arg-type]
    return graph


@dataclass
class _Builder:
    gm: GraphModule
    found: Extracted
    saved: Sequence[Node]
    script: Sequence[Node]
    apart: bool = False
    """Build the backward alone: what it reads of the forward becomes its inputs."""

    def __post_init__(self) -> None:
        self.graph = Graph()
        self.inputs: dict[Node, Node] = {}
        """Apart: nodes of the joint graph -> inputs of the backward."""
        self.place = -1
        self.ahead: dict[Node, Node] = {}
        """Old node -> new one, as the forward knows it."""
        self.now: dict[Node, Node] = {}
        """Value -> the node that holds it in the backward."""
        self.views: dict[tuple[Node, Node], Node] = {}
        self.behind: dict[Node, Node] = {}
        self.redrawn = redrawn(self.script, self.is_forward)
        self.kept = set(self.saved)
        self.states: dict[Node, Node] = {}
        """Draw -> the state before it."""
        self.drawn: dict[Node, Node] = {}
        """Draw -> its latest copy, if that read the real operand."""

    def forward(self) -> None:
        for n in self.gm.graph.nodes:
            if n.op == "placeholder" or (n.name in self.found.joint.forward and n.op != "output"):
                if n in self.redrawn:
                    self.states[n] = state_before(self.graph, n)
                self.ahead[n] = self.copy(n, self.ahead.__getitem__)

    def copy(self, n: Node, where: Callable[[Node], Node], again: bool = False) -> Node:
        new = call_again(self.graph, n, where, self.at_hand) if again else self.graph.node_copy(n, where)
        for key in ("recompute", "ac_graph_id"):
            new.meta.pop(key, None)
        if again:
            new.meta["partitioner_tag"] = "is_backward"
        if self.place >= 0:
            new.meta[PLACE] = self.place
        return new

    def mark(self) -> None:
        again = {m for n in self.script if n.name in self.found.joint.forward for m in makes(n, self.found.root)}
        for n in self.saved:
            set_keep(self.ahead[n], "save")
        for n in again - self.kept:
            set_keep(self.ahead[n], "recompute")

    def run(self, n: Node, place: int, whole: bool) -> None:
        """``whole``: of a dropout, that its result will be wanted, not its mask alone."""
        again, self.whole, self.place = self.is_forward(n), whole, place
        new = self.repeated(n) if again else self.copy(n, self.operand)
        if again:
            set_keep(new, None)
        else:
            self.behind[n] = new
        for m in makes(n, self.found.root):
            held = new if m is n else self.copy(m, lambda _: new, again)
            if again:
                set_keep(held, None)
            else:
                self.behind[m] = held
            self.now[m] = held

    def repeated(self, n: Node) -> Node:
        """A call of the forward once more."""
        if is_dropped(n) and (drawn := self.drawn.pop(ops.operand(n, 0), None)) is not None:
            made = self.copy(n, lambda _: drawn)  # the draw has made it on the way
            made.meta["partitioner_tag"] = "is_backward"
            return made
        if n not in self.redrawn:
            return self.copy(n, self.operand, again=True)
        real = self.whole and all(map(self.at_hand, n.all_input_nodes))
        new = draw_again(self.graph, self.state(n), device_of(n), lambda: self.copy(n, self.operand, again=True))
        if real:
            self.drawn[n] = new
        return new

    def at_hand(self, n: Node) -> bool:
        """Whether a draw that runs again may read its operand: it is there, and what it makes of it is wanted."""
        root = self.found.root.get(n, n)
        return self.whole and (root in self.now or root in self.kept or not self.is_forward(root))

    def state(self, draw: Node) -> Node:
        if draw not in self.states:
            self.states[draw] = self.placeholder(f"rng_state_{draw.name}", state_value(draw))
        return self.states[draw]

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
            self.inputs[n] = self.placeholder(n.name, n.meta.get("val"))
        return self.inputs[n]

    def placeholder(self, name: str, val: object) -> Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else nullcontext():
            new = self.graph.placeholder(name)
        new.meta = {"val": val}
        return new

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
