"""Producers that are copied into the groups that read them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dsc import ops
from dsc.passes.fuse_space import onwards
from dsc.passes.fuse_web import Unit, Web, computing, read
from dsc.passes.walks import through
from dsc.steps import storage_of


def duplicate(gm: GraphModule, web: Web, limit: int) -> None:
    """Case 5, from the last producer to the first, so that chains move as a whole."""
    for unit in reversed(web.live()):
        if unit.space is None or unit.space.reduces or unit.writes or any(v in unit.reads for v in unit.makes):
            continue
        readers = sorted({r for v in unit.makes for r in web.readers.get(v, ())} - {unit.id})
        homes = [web.units[r] for r in readers if web.units[r].space is not None]
        if not homes:
            continue
        needed = any(v in web.pinned for v in unit.makes) or len(homes) < len(readers)
        cost = sum(web.size[v] for h in homes for v in unit.reads if v not in h.reads)
        again = sum(web.size[v] for h in homes for v in unit.makes if v in h.reads)
        written = 0 if needed else sum(web.size[v] for v in unit.makes)
        if cost > again + written or (needed and cost >= again):
            continue
        if any(h.writes for h in homes):
            continue
        if any(len(h.nodes) + len(unit.nodes) > limit for h in homes) or len(unit.nodes) > limit // 4:
            continue
        for home in homes:
            copy_into(gm, web, unit, home)
        if not needed:
            drop(gm, web, unit)


def copy_into(gm: GraphModule, web: Web, unit: Unit, home: Unit) -> None:
    """Clones a group's nodes, and the views between, in front of the reader."""
    clones: dict[Node, Node] = {}
    compute = [n for n in home.nodes if computing(n) is n]
    for n in unit.nodes:
        with gm.graph.inserting_before(n.next):
            for arg in n.all_input_nodes:
                if storage_of(arg) in clones:
                    _clone_chain(gm, arg, clones)
            clones[n] = gm.graph.node_copy(n, lambda x: clones.get(x, x))
        web.order[clones[n]] = web.order[n]
    made = [clones[n] for n in unit.nodes]
    for reader in compute:
        for arg in reader.all_input_nodes:
            if storage_of(arg) in clones:
                with gm.graph.inserting_before(reader):
                    reader.replace_input_with(arg, _clone_chain(gm, arg, clones))
    to = onwards(unit, home)
    for v in unit.makes:
        if home.reads.pop(v, None) is not None:
            web.readers[v].discard(home.id)
    web.units[unit.id].succs.discard(home.id)
    home.preds.discard(unit.id)
    home.nodes = sorted([*made, *home.nodes], key=web.order.__getitem__)
    for v, walks in unit.reads.items():
        read(web, home, v, through(walks, to))
    home.makes += [clones[v] for v in unit.makes]
    for v in unit.makes:
        web.maker[clones[v]] = home.id
        web.size[clones[v]] = web.size[v]


def _clone_chain(gm: GraphModule, arg: Node, clones: dict[Node, Node]) -> Node:
    if arg in clones:
        return clones[arg]
    parent = ops.operand(arg, 0)
    inner = _clone_chain(gm, parent, clones)
    clones[arg] = gm.graph.node_copy(arg, lambda x: inner if x is parent else x)
    return clones[arg]


def drop(gm: GraphModule, web: Web, unit: Unit) -> None:
    """Takes a group that nobody reads any more out of the graph."""
    for n in reversed(unit.nodes):
        erase_with_views(gm, n)
    for v in unit.reads:
        web.readers[v].discard(unit.id)
    for p in unit.preds:
        web.units[p].succs.discard(unit.id)
    for s in unit.succs:
        web.units[s].preds.discard(unit.id)
    del web.units[unit.id]


def erase_with_views(gm: GraphModule, node: Node) -> None:
    for user in list(node.users):
        erase_with_views(gm, user)
    gm.graph.erase_node(node)
