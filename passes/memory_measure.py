"""What a block really costs: its operators fused and laid out as the compiler will do it, instead of simulated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import cost, liveness, ops
from dsc.passes.fuse import Fuse
from dsc.passes.memory_again import call_again, is_dropped
from dsc.passes.memory_apply import wholes
from dsc.passes.memory_problem import Extracted, makes
from dsc.passes.solve.activations import Stretch
from dsc.steps import steps, storage_of
from dsc.target import Target
from dsc.torch_shim import lazy_graph_module


def measure(
    found: Extracted,
    script: Sequence[int],
    results: Collection[int],
    dying: Collection[int],
    held: int,
    target: Target,
    fused: bool = True,
) -> Stretch:
    """As ``activations.simulate``, on a graph of the operators."""
    gm = stretch(found, script, results)
    if fused:
        Fuse().run(gm, target)
    order = steps(gm)
    profile = liveness.profile(gm)
    inputs = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    outside = {found.values[v].name for v in dying}
    change = [0] * (len(order) + 1)
    until: dict[str, int] = {}
    for i, step in enumerate(order):
        for n in step.nodes:
            for a in n.all_input_nodes:
                root = storage_of(a)
                if root.name in outside and root.name in inputs:
                    until[root.name] = i
    for name, i in until.items():
        change[i + 1] -= liveness.nbytes(inputs[name])
    fixed = sum(liveness.nbytes(n) for n in inputs.values() if isinstance(ops.value(n), torch.Tensor))
    peak, drift = held, 0
    for i, (_, alive) in enumerate(profile.timeline):
        drift += change[i]
        peak = max(peak, held + alive - fixed + drift)
    seconds = sum(
        cost.seconds_of_group(s.nodes, target) if s.group is not None else cost.seconds(s.node, target) for s in order
    )
    return Stretch(seconds, peak, len(order))


def stretch(found: Extracted, script: Sequence[int], results: Collection[int]) -> GraphModule:
    """The operators of a script as a graph of their own: what they read from outside becomes inputs."""
    graph = Graph()
    wanted: list[Node] = [found.nodes[o] for o in script]
    inside = {m for n in wanted for m in makes(n, found.root)}
    inputs: dict[Node, Node] = {}
    held: dict[Node, Node] = {}

    def outside(n: Node) -> Node:
        """Names of inputs are those of the values, so that callers find them."""
        if n not in inputs:
            with graph.inserting_before(first):
                new = graph.placeholder(n.name)
            new.meta = {"val": n.meta.get("val")}
            inputs[n] = new
        return inputs[n]

    def operand(n: Node) -> Node:
        if n in held:
            return held[n]
        root = found.root.get(n, n)
        if root is n or (root.op != "call_function" and n.op != "call_function"):
            return outside(n)
        if not isinstance(ops.value(n), (torch.Tensor, tuple, list)):
            return outside(n)
        held[n] = graph.node_copy(n, operand)
        return held[n]

    marker = graph.call_function(torch.ops.aten.sym_size.int)
    first = marker
    again = any(not found.problem.ops[o].forward for o in script)
    for n, whole in zip(wanted, wholes(wanted)):
        made = is_dropped(n) and ops.operand(n, 0) in held
        if made or not (again and found.joint.forward.get(n.name) is n):
            new = graph.node_copy(n, operand)
        else:
            new = call_again(graph, n, operand, lambda _, whole=whole: whole)  # type: ignore[misc]
        if not makes(n, found.root) or not isinstance(ops.value(n), torch.Tensor):
            held[n] = new
        for m in makes(n, found.root):
            held[m] = new if m is n else graph.node_copy(m, lambda _, new=new: new)  # type: ignore[misc]
    graph.erase_node(marker)
    kept = [held[found.values[v]] for v in results if found.values[v] in inside]
    graph.output(tuple(kept))
    return lazy_graph_module(torch.nn.Module(), graph)
