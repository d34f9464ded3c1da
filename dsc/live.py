"""State in graphs: nodes that stand for its entries, and updates of it inside of a step.

A joint pass calls ``read`` and ``update``; the compiler does the rest.  What readers see: in the graph that updates an
entry (forward or backward) the value from before, since all updates come last there; afterwards the new one.  The
backward therefore sees what its forward stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.errors import BadState
from dsc.runtime.state import State, attribute, is_attribute
from dsc.torch_shim import FakeTensor

Split = tuple[GraphModule, GraphModule]


def read(gm: GraphModule, state: State, name: str) -> Node:
    """A new node, at the graph's insertion point, that stands for the entry ``name``, which must be there."""
    target, tensor = attribute(name), state[name]
    if not hasattr(gm, target):
        gm.register_buffer(target, tensor, persistent=False)
    node = gm.graph.get_attr(target)
    node.meta["val"] = _fake(gm.graph, tensor)
    return node


def update(gm: GraphModule, state: State, name: str, value: Node) -> Node:
    """Store ``value`` into the entry ``name`` at the end of the graph that computes it: forward, or backward.

    Raises:
        BadState: the value has another shape or dtype than the entry.
    """
    have, given = state[name], ops.tensor(value)
    if (tuple(have.shape), have.dtype) != (tuple(given.shape), given.dtype):
        raise BadState(
            name, f"is {have.dtype}{list(have.shape)}", f"the value to store is {given.dtype}{list(given.shape)}"
        )
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(inputs[-1] if value.op == "placeholder" else value):
        entry = read(gm, state, name)
    with gm.graph.inserting_after(entry):
        node = gm.graph.call_function(torch.ops.aten.copy_.default, (entry, value))
    node.meta["val"] = entry.meta["val"]
    node.meta["partitioner_tag"] = value.meta.get("partitioner_tag", "is_forward")
    return node


def split(joint: GraphModule, partition: Callable[..., Split], inputs: Sequence[Any], **kwargs: Any) -> Split:
    """A joint graph with state to its forward and its backward.

    No partitioner may see an entry as a value to be saved, nor an update: each reader gets an entry of its own, and
    what is to be stored becomes a result for as long as the graph is split.
    """
    if not any(is_attribute(n.target) for n in joint.graph.find_nodes(op="get_attr")):
        return partition(joint, inputs, **kwargs)
    lifted = _lift(joint.graph, kwargs["num_fwd_outputs"])
    _apart(joint.graph)
    joint.recompile()
    kwargs["num_fwd_outputs"] += len(lifted.forward)
    forward, backward = partition(joint, inputs, **kwargs)
    count = kwargs["num_fwd_outputs"] - len(lifted.forward)
    _store(forward, joint, lifted.forward, count)
    _store(backward, joint, lifted.backward, len(_results(backward.graph)) - len(lifted.backward))
    for gm in (forward, backward):
        _join(gm.graph)
        gm.recompile()
    return forward, backward


def bind(gm: GraphModule, state: State) -> None:
    """Give a graph the state's own tensors: AOTAutograd hands over a copy of the backward, and of all its buffers."""
    for target in {n.target for n in gm.graph.find_nodes(op="get_attr") if is_attribute(n.target)}:
        gm.register_buffer(target, state[state.named(target)], persistent=False)


@dataclass(frozen=True, slots=True)
class _Lifted:
    """The entries that each graph updates, in order."""

    forward: tuple[str, ...]
    backward: tuple[str, ...]


def _lift(graph: Graph, count: int) -> _Lifted:
    """Take updates out of the graph, and give out what they store: behind the ``count`` results, and at the end."""
    found: dict[bool, list[tuple[str, Node]]] = {False: [], True: []}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.copy_.default:
            continue
        entry, value = node.args
        assert isinstance(entry, Node) and isinstance(value, Node)
        if is_attribute(entry.target):
            found[node.meta["partitioner_tag"] == "is_backward"].append((str(entry.target), value))
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            if not entry.users:
                graph.erase_node(entry)
    output = graph.output_node()
    results, described = _results(graph), output.meta.get("desc")
    output.args = (tuple(_with(results, count, [v for _, v in found[False]], [v for _, v in found[True]])),)
    if described:
        first = next(iter(described))
        output.meta["desc"] = _with(list(described), count, [first] * len(found[False]), [first] * len(found[True]))
    return _Lifted(tuple(t for t, _ in found[False]), tuple(t for t, _ in found[True]))


def _with(items: Sequence[Any], count: int, middle: Sequence[Any], end: Sequence[Any]) -> list[Any]:
    return [*items[:count], *middle, *items[count:], *end]


def _store(gm: GraphModule, joint: GraphModule, targets: Sequence[str], count: int) -> None:
    """Results ``count``, ``count + 1``, ... are not given out but stored into the entries, last of all."""
    output, results = gm.graph.output_node(), _results(gm.graph)
    for target, value in zip(targets, results[count:]):
        assert isinstance(value, Node)
        tensor = getattr(joint, target)
        gm.register_buffer(target, tensor, persistent=False)
        with gm.graph.inserting_before(output):
            entry = gm.graph.get_attr(target)
            node = gm.graph.call_function(torch.ops.aten.copy_.default, (entry, value))
        entry.meta["val"] = node.meta["val"] = _fake(gm.graph, tensor)
    output.args = (tuple(results[:count] + results[count + len(targets) :]),)
    if described := output.meta.get("desc"):
        output.meta["desc"] = [*described[:count], *described[count + len(targets) :]]


def _apart(graph: Graph) -> None:
    """Every reader of an entry gets a node of its own, just before it."""
    for node in [n for n in graph.find_nodes(op="get_attr") if is_attribute(n.target)]:
        for user in list(node.users):
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
        graph.erase_node(node)


def _join(graph: Graph) -> None:
    """One node for each entry, right behind the inputs."""
    inputs = graph.find_nodes(op="placeholder")
    first: dict[object, Node] = {}
    for node in [n for n in graph.find_nodes(op="get_attr") if is_attribute(n.target)]:
        if node.target not in first:
            with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
                first[node.target] = graph.node_copy(node)
        node.replace_all_uses_with(first[node.target])
        graph.erase_node(node)


def _results(graph: Graph) -> list[Any]:
    found = graph.output_node().args[0]
    assert isinstance(found, (list, tuple))
    return list(found)


def _fake(graph: Graph, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor that looks as ``tensor``, in the mode of the graph."""
    known = next((v for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)), None)
    if known is None or isinstance(tensor, FakeTensor):
        return tensor
    return known.fake_mode.from_tensor(tensor, static_shapes=True)
