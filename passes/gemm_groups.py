"""Groups of a graph while products of matrices join them: who is in which, and which paths lead between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from dsc import ops
from dsc.notes import notes, set_notes
from dsc.passes.walks import walk_of
from dsc.steps import storage_of
from dsc.target import Target


@dataclass
class Groups:
    """What ``fuse`` decided, by name, and what changed since."""

    gm: GraphModule
    target: Target
    limit: int
    """Most nodes of a kernel."""
    nodes: dict[str, list[Node]] = field(default_factory=dict)
    order: dict[Node, int] = field(default_factory=dict)
    written: set[Node] = field(default_factory=set)
    """Storages that the graph writes to."""
    low: list[int] = field(default_factory=list)
    """Place in the graph -> the first place of the groups that reach over it."""

    def __post_init__(self) -> None:
        for i, n in enumerate(self.gm.graph.nodes):
            self.order[n] = i
            if n.op == "call_function":
                self.written.update(storage_of(w) for w in ops.mutated(n))
            if (group := notes(n).group) is not None:
                self.nodes.setdefault(group, []).append(n)
        self.low = list(range(len(self.order)))
        for nodes in self.nodes.values():
            self.reach(nodes)

    def reach(self, nodes: Sequence[Node]) -> None:
        first, last = self.order[nodes[0]], self.order[nodes[-1]]
        for i in range(first, last + 1):
            self.low[i] = min(self.low[i], first)

    def earliest(self, n: Node) -> int:
        """The first place that a path from ``n`` may lead to: forward by edges, back by groups."""
        i = self.order[n]
        while self.low[i] < i:
            i = self.low[i]
        return i

    def put(self, name: str, nodes: Sequence[Node]) -> None:
        self.nodes[name] = sorted(nodes, key=self.order.__getitem__)
        self.reach(self.nodes[name])
        for n in nodes:
            set_notes(n, replace(notes(n), group=name))

    def fresh(self) -> str:
        i = len(self.nodes)
        while f"k{i}" in self.nodes:
            i += 1
        return f"k{i}"


def readers(n: Node) -> Iterator[Node]:
    """Nodes that read a value, perhaps through views."""
    for u in n.users:
        if ops.is_view(u) or ops.is_split(u):
            yield from readers(u)
        else:
            yield u


def in_order(n: Node, values: Collection[Node]) -> bool:
    """Whether ``n`` reads ``values`` in row-major order, as they lie in memory."""
    return not any(root in values and walk for root, walk in map(walk_of, n.all_input_nodes))


def forbidden(g: Groups, nodes: Sequence[Node]) -> str | None:
    """Why these nodes may not become one kernel, in a few words: an input is written, or a path leaves and comes back."""
    inside = set(nodes)
    if {storage_of(a) for n in nodes for a in n.all_input_nodes} & g.written:
        return "an input is written in place"
    third = between(g, inside)
    return None if third is None else f"{third.name} runs between the two"


def between(g: Groups, inside: Collection[Node]) -> Node | None:
    """A reader outside of some nodes from which a path leads back to one of them."""
    last = max(map(g.order.__getitem__, inside))
    seen: set[Node] = set()
    for first in dict.fromkeys(r for n in inside for r in readers(n) if r not in inside):
        todo = [first]
        while todo:
            n = todo.pop()
            if n in inside:
                return first
            if n in seen or g.earliest(n) > last:
                continue
            group = notes(n).group
            alike = [n] if group is None else [x for x in g.nodes[group] if x not in inside]
            seen.update(alike)
            todo += [u for x in alike for u in x.users]
    return None
