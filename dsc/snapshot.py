"""A graph as it was, kept while passes rewrite it in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from dsc.torch_shim import lazy_graph_module


class _Kept(NamedTuple):
    """What can change of one node.  Arguments are never changed in place: a rewrite gives the node others."""

    node: Node
    op: str
    name: str
    target: Callable[..., Any] | str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    type: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Every node of a graph as it was.  To take one costs a tenth of a copy, which is wanted only if a pass fails."""

    attributes: GraphModule
    """What the nodes mention of the module: a pass may take it away."""
    nodes: tuple[_Kept, ...]

    def restored(self) -> GraphModule:
        """A new module of the graph, with nodes of the same names; each has a ``meta`` of its own, with the same values."""
        graph = Graph()
        known: dict[Node, Node] = {}
        for k in self.nodes:
            args, kwargs = map_arg((k.args, k.kwargs), known.__getitem__)
            made = graph.create_node(k.op, k.target, args, kwargs, k.name, k.type)
            made.meta = dict(k.meta)
            known[k.node] = made
        return lazy_graph_module(self.attributes, graph)


def take(gm: GraphModule) -> Snapshot:
    """The graph as it is now."""
    nodes = tuple(_Kept(n, n.op, n.name, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in gm.graph.nodes)
    named = Graph()
    for k in nodes:
        if k.op in ("get_attr", "call_module"):
            named.create_node(k.op, k.target, ())
    return Snapshot(lazy_graph_module(gm, named), nodes)
