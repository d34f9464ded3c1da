"""A joint graph as operators over storages, for the memory planner."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsc import cost, domain, liveness, ops
from dsc.passes import recompute
from dsc.passes.memory_again import inputs_again, is_dropped, needs_form_only, why_not_again
from dsc.passes.recompute import Joint, is_transparent
from dsc.passes.solve import mincut
from dsc.passes.solve.activations import Op, Problem, Value
from dsc.steps import aliases
from dsc.target import Target
from dsc.torch_shim import OpOverload

SAVES = (CheckpointPolicy.MUST_SAVE,)
REPEATS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True)
class Extracted:
    problem: Problem
    joint: Joint
    nodes: tuple[Node, ...]
    """Operator -> the node that calls it."""
    values: tuple[Node, ...]
    """Value -> the node that stands for it."""
    results: int
    """How many results are the forward's."""
    root: Mapping[Node, Node]
    """Tensor node -> the node of its value, through views."""


def extract(gm: GraphModule, target: Target, fused: bool = True) -> Extracted:
    """The problem of a joint graph, and which node is what in it."""
    joint = with_epilogue(recompute.read(gm))
    root: dict[Node, Node] = {}
    for n in joint.forward.values():
        root[n] = _root(n, root) if joint.root[n] is not n or _is_alias(n) else n
    for n in joint.backward:
        root[n] = _root(n, root)
    values: list[Node] = []
    for n in gm.graph.nodes:
        if n.op != "output" and root.get(n) is n and isinstance(ops.value(n), torch.Tensor):
            values.append(n)
    number = {n: i for i, n in enumerate(values)}
    calls = [n for n in joint.forward.values() if is_call(n, root)] + [n for n in joint.backward if is_call(n, root)]
    ahead, back, count = _returned(gm, joint)
    gradients = {number[root[n]] for n in back if root.get(n) in number}
    unread = _unread(calls, joint, root, number, gradients)
    calls = [n for n in calls if n not in unread]
    place = {n: i for i, n in enumerate(calls)}
    makers = {m: place[n] for n in calls for m in makes(n, root)}
    ahead_of = set(joint.forward.values())
    problem = Problem(
        tuple(_op(n, joint, root, number, target, fused) for n in calls),
        tuple(Value(n.name, _nbytes(n), makers.get(n, -1), _kind(n)) for n in values),
        frozenset(number[root[n]] for n in ahead if root.get(n) in number),
        frozenset(gradients),
        target.bandwidth * cost.BANDWIDTH_EFFICIENCY,
        cost.LAUNCH_SECONDS[target.kind],
        frozenset(number[n] for n in values if n.meta.get("recompute") in SAVES),
        frozenset(number[n] for n in values if n in ahead_of and _is_barred(n, joint, root)),
        frozenset(number[joint.forward[name]] for name in default(gm, joint).save),
        frozenset(place[n] for n in calls if n in root and n.name in joint.forward and has_effect(n)),
    )
    return Extracted(problem, joint, tuple(calls), tuple(values), count, root)


def with_epilogue(joint: Joint) -> Joint:
    """Writes to inputs that stand behind the backward but read only what the forward makes belong to the forward."""
    late = {
        n.name: n
        for n in joint.backward
        if n.op == "call_function" and ops.mutated(n) and not any(a in joint.backward for a in n.all_input_nodes)
    }
    if not late:
        return joint
    return replace(
        joint,
        forward={**joint.forward, **late},
        backward={n: level for n, level in joint.backward.items() if n.name not in late},
        root={**joint.root, **{n: n for n in late.values()}},
    )


def default(gm: GraphModule, joint: Joint) -> mincut.Plan:
    """What is saved without a budget."""
    return mincut.solve(recompute.extract(gm, joint))


def has_effect(node: Node) -> bool:
    """Whether a call must run though nobody reads its results."""
    return bool(ops.mutated(node)) or node.is_impure() or ops.is_ordered(node)


def is_call(node: Node, root: Mapping[Node, Node]) -> bool:
    """Whether a node is an operator of the problem: it makes tensors, or has an effect."""
    if node.op != "call_function":
        return False
    if ops.info(node).kind == "item":
        return is_dropped(node)
    if is_transparent(node):
        return root.get(node) is node
    return isinstance(ops.value(node), (torch.Tensor, tuple, list)) or has_effect(node)


def makes(node: Node, root: Mapping[Node, Node]) -> list[Node]:
    """The values that a call makes."""
    if isinstance(ops.value(node), torch.Tensor):
        return [node] if root.get(node) is node else []
    items = [u for u in node.users if ops.info(u).kind == "item" and isinstance(ops.value(u), torch.Tensor)]
    return [u for u in items if not is_dropped(u)]


def _root(n: Node, root: Mapping[Node, Node]) -> Node:
    if n.op == "call_function" and (is_transparent(n) or _is_alias(n)):
        source = ops.operand(n, 0) if is_transparent(n) else aliases(n)[0]
        return root.get(source, source)
    return n


def _is_alias(n: Node) -> bool:
    return isinstance(n.target, OpOverload) and isinstance(ops.value(n), torch.Tensor) and bool(aliases(n))


def _returned(gm: GraphModule, joint: Joint) -> tuple[list[Node], list[Node], int]:
    """What the forward returns, what the backward does, and how many results are the forward's."""
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (list, tuple))
    described = output.meta.get("desc") or ()
    if len(described) == len(results):
        first = next((i for i, d in enumerate(described) if type(d).__name__.startswith("Grad")), len(results))
    else:
        behind = [i for i, r in enumerate(results) if isinstance(r, Node) and r in joint.backward]
        first = min(behind, default=len(results))
    ahead, back = results[:first], results[first:]
    return [n for n in ahead if isinstance(n, Node)], [n for n in back if isinstance(n, Node)], first


def _unread(
    calls: Iterable[Node], joint: Joint, root: Mapping[Node, Node], number: Mapping[Node, int], gradients: set[int]
) -> set[Node]:
    """Backward calls that lead to no gradient and have no effect."""
    out: set[Node] = set()
    wanted: set[Node] = set()
    for n in reversed(list(calls)):
        if n not in joint.backward:
            break
        made = makes(n, root)
        if has_effect(n) or any(m in wanted or number[m] in gradients for m in made):
            wanted.update(root[a] for a in n.all_input_nodes if a in root)
        else:
            out.add(n)
    return out


def _op(
    n: Node, joint: Joint, root: Mapping[Node, Node], number: Mapping[Node, int], target: Target, fused: bool
) -> Op:
    reads: dict[int, int] = {}
    for a in inputs_again(n):
        if isinstance(ops.value(a), torch.Tensor) and (v := number.get(root.get(a, a))) is not None:
            reads[v] = max(reads.get(v, 0), cost.touched(n, a))
    forward = n.name in joint.forward and joint.forward[n.name] is n
    plain = is_transparent(n) or is_dropped(n)
    fuses = fused and (plain or ops.why_not_fused(n) is None)
    space = domain.of(n) if fuses and not plain else None
    reduces = space is not None and space.reduces
    return Op(
        n.name,
        tuple(reads.items()),
        tuple(number[m] for m in makes(n, root)),
        cost.flops(n) / cost.rate(n, target) + _blank_seconds(n, target),
        forward,
        forward and why_not_again(n, joint) is None,
        fuses,
        zlib.crc32(str(space).encode()) if reduces else 0,
        not reduces or ops.info(n).kind == "rowwise" or (space is not None and space.dims[-1].reduce),
        cost.unit(n) != "vector",
        ops.name_of(n),
    )


def _blank_seconds(n: Node, target: Target) -> float:
    """What a dropout that runs again for its mask moves besides: its operand and its result."""
    if ops.name_of(n) != "native_dropout.default" or not needs_form_only(n):
        return 0.0
    return 2 * liveness.nbytes(ops.operand(n, 0)) / (target.bandwidth * cost.BANDWIDTH_EFFICIENCY)


def _nbytes(n: Node) -> int:
    return 0 if is_transparent(n) else liveness.nbytes(n)


def _kind(n: Node) -> str:
    if n.op != "placeholder":
        return "made"
    return "tangent" if ops.is_tangent(n) else "input"


def _is_barred(n: Node, joint: Joint, root: Mapping[Node, Node]) -> bool:
    """Whether the user checkpointed a region that has the value inside: nothing after the region reads it."""
    region = n.meta.get("ac_graph_id")
    if n.meta.get("recompute") not in REPEATS:
        return False
    readers = [u for u in _readers(n) if u.name in joint.forward and joint.forward[u.name] is u]
    return all(u.meta.get("recompute") in REPEATS and u.meta.get("ac_graph_id") == region for u in readers)


def _readers(n: Node) -> Iterator[Node]:
    for u in n.users:
        if is_transparent(u):
            yield from _readers(u)
        elif u.op == "call_function":
            yield u
