"""The forward and the backward of a plain joint graph, copied out of it once.

torch's ``default_partition`` (torch/_functorch/partitioners.py) serves every graph, and copies each node four times to find
out what is saved: that is most of what a large graph costs between its passes.  Where nothing special is asked for, what is
saved can be told from who reads what, and each node is copied once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.torch_shim import FakeTensor, OpOverload, lazy_graph_module, plain_partition, saved_descriptions

_COPY = torch.ops.aten.copy_.default
SPECIAL = ("recompute", "saved_tensor_with_no_vc_check")
"""Keys of ``meta`` by which others ask the partitioner for something."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Inputs, nodes to copy, and results of one graph."""

    inputs: Sequence[Node]
    nodes: frozenset[Node]
    results: Sequence[Any]
    described: Sequence[Any]


def extract(joint: GraphModule, num_fwd_outputs: int) -> tuple[GraphModule, GraphModule] | None:
    """What ``default_partition`` makes of the graph; None where that may be more than this.

    1. The forward is all up to the last node that is tagged so, but tangents; results of the forward, and what a node
       outside of the forward reads, is saved if the backward needs it.
    2. The backward copies what it needs and can compute from saved values and tangents; the forward likewise, from inputs.
    3. Writes of results into inputs, which AOTAutograd puts at the end for the forward, are copied there.
    4. Not for: sizes that are symbols, other writes, calls with effects, collectives, attributes, checkpoint policies, random
       calls that nobody needs, and settings of torch that change what is saved.
    """
    nodes = list(joint.graph.nodes)
    *nodes, output = nodes
    writes = _last_writes(nodes)
    nodes, every = nodes[: len(nodes) - len(writes)], nodes
    if output.op != "output" or not _is_plain(nodes) or not plain_partition():
        return None
    results = output.args[0]
    if not isinstance(results, (list, tuple)) or any(isinstance(r, (list, tuple, dict)) for r in results):
        return None
    described = output.meta.get("desc") or [None] * len(results)
    inputs = [n for n in nodes if n.op == "placeholder"]
    primals, tangents = ([n for n in inputs if ops.is_tangent(n) is late] for late in (False, True))
    ahead, behind = slice(num_fwd_outputs), slice(num_fwd_outputs, None)
    candidates = _candidates(nodes)
    back = _needed(nodes, [*candidates, *tangents], results[behind])
    if back is None:
        return None
    read = {a for n in back for a in n.all_input_nodes} | {r for r in results[behind] if isinstance(r, Node)}
    saved = [n for n in candidates if n in read]
    first = [*results[ahead], *saved]
    fore = _needed(every, primals, [*first, *writes])
    notes = saved_descriptions(len(saved))
    if fore is None or notes is None or not all(map(_is_sized, (*saved, *tangents))):
        return None
    if any(ops.info(n).kind == "random" and n not in fore and n not in back for n in nodes):
        return None
    forward = _copied(every, Parts(primals, fore, first, [*described[ahead], *notes]))
    backward = _copied(nodes, Parts([*saved, *tangents], back, results[behind], described[behind]))
    for n in backward.nodes:
        if n.op == "call_function":
            n.meta["autograd_backward"] = True
    return lazy_graph_module(joint, forward), lazy_graph_module(joint, backward)


def _last_writes(nodes: Sequence[Node]) -> list[Node]:
    """Case 3: buffers that the forward updates, the running statistics of norms among them."""
    found = list(itertools.takewhile(_is_write_of_forward, reversed(nodes)))
    return found[::-1]


def _is_write_of_forward(n: Node) -> bool:
    if n.op != "call_function" or n.target is not _COPY or n.users or len(n.args) != 2 or n.kwargs:
        return False
    into = ops.operand(n, 0)
    return (
        n.meta.get("partitioner_tag") == "must_be_in_forward" and into.op == "placeholder" and not ops.is_tangent(into)
    )


def _is_plain(nodes: Iterable[Node]) -> bool:
    """Case 4, of single nodes."""
    known: dict[object, bool] = {operator.getitem: True}
    for n in nodes:
        if any(n.meta.get(key) is not None for key in SPECIAL):
            return False
        if n.op == "placeholder":
            if not str(n.target).startswith(("primals", "tangents")) or not _is_sized(n):
                return False
            continue
        if n.op != "call_function" or n.meta.get("partitioner_tag") not in ("is_forward", "is_backward", None):
            return False
        if not isinstance(n.meta.get("val"), (FakeTensor, tuple, list)):
            return False
        key = n.target._name if isinstance(n.target, OpOverload) else n.target
        if key not in known:
            known[key] = isinstance(n.target, OpOverload) and _has_no_effect(n)
        if not known[key]:
            return False
    return True


def _has_no_effect(n: Node) -> bool:
    kind = ops.info(n).kind
    if kind == "collective" or ops.written_places(n.target):
        return False
    return kind == "random" or not n.is_impure()


def _is_sized(n: Node) -> bool:
    """A tensor whose layout is all numbers."""
    v = n.meta.get("val")
    return isinstance(v, FakeTensor) and all(isinstance(s, int) for s in (*v.shape, *v.stride()))


def _candidates(nodes: Sequence[Node]) -> list[Node]:
    """Of the forward, in order: tensors that a node outside of it reads."""
    ends = [
        i
        for i, n in enumerate(nodes)
        if n.meta.get("partitioner_tag") == "is_forward" or (n.op == "placeholder" and not ops.is_tangent(n))
    ]
    ahead = dict.fromkeys(n for n in nodes[: max(ends, default=-1) + 1] if not ops.is_tangent(n))
    return [
        n
        for n in ahead
        if any(u not in ahead for u in n.users) and not all(u.target is operator.getitem for u in n.users)
    ]


def _needed(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Any]) -> frozenset[Node] | None:
    """The nodes that compute the results from these inputs; None if not all can be had."""
    given = set(inputs)
    wanted = {r for r in results if isinstance(r, Node)}
    for n in reversed(nodes):
        if n in wanted and n not in given:
            if n.op != "call_function":
                return None
            wanted.update(n.all_input_nodes)
    return frozenset(wanted - given)


def _items_first(nodes: Iterable[Node]) -> list[Node]:
    """Results of a call stand right behind it, in their order: what nobody reads dies early."""
    out: list[Node] = []
    items: dict[Node, list[Node]] = {}
    for n in nodes:
        if n.target is operator.getitem:
            items.setdefault(ops.operand(n, 0), []).append(n)
        else:
            out.append(n)

    def spread(found: Iterable[Node]) -> Iterator[Node]:
        for n in found:
            yield n
            yield from spread(items.get(n, ()))

    return list(spread(out))


def _copied(nodes: Sequence[Node], parts: Parts) -> Graph:
    graph = Graph()
    known: dict[Node, Node] = {}
    for n in parts.inputs:
        known[n] = graph.placeholder(n.name)
        known[n].meta = n.meta
    for n in _items_first(n for n in nodes if n in parts.nodes):
        known[n] = graph.node_copy(n, known.__getitem__)
    results = [known[r] if isinstance(r, Node) else r for r in parts.results]
    output = graph.output(tuple(results))
    output.meta["desc"] = list(parts.described)
    output.meta["output_stack_traces"] = [r.meta.get("stack_trace") if isinstance(r, Node) else None for r in results]
    return graph
