"""A joint graph as operators over storages, for the memory planner."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from dsc import cost, domain, liveness, ops
from dsc.passes import recompute
from dsc.passes.recompute import Joint
from dsc.passes.solve import mincut
from dsc.passes.solve.activations import Op, Problem, Value
from dsc.steps import aliases
from dsc.target import Target
from dsc.torch_shim import OpOverload

SAVES = (CheckpointPolicy.MUST_SAVE,)
REPEATS = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
PURE_NAMESPACES = frozenset({"aten", "prims", "dsc"})
UNSTEADY = frozenset(
    "index_put scatter_add scatter_reduce index_add index_reduce bincount histc cumsum_backward _unsafe_index_put "
    "put scatter".split()
)
"""Sums in an order that CUDA does not fix: twice is not the same."""


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
    problem = Problem(
        tuple(_op(n, joint, root, number, target, fused) for n in calls),
        tuple(Value(n.name, _nbytes(n), makers.get(n, -1), _kind(n)) for n in values),
        frozenset(number[root[n]] for n in ahead if root.get(n) in number),
        frozenset(gradients),
        target.bandwidth * cost.BANDWIDTH_EFFICIENCY,
        cost.LAUNCH_SECONDS[target.kind],
        frozenset(number[n] for n in values if n.meta.get("recompute") in SAVES),
        frozenset(number[n] for n in values if n in joint.forward.values() and _is_barred(n, joint, root)),
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


def why_not_again(node: Node, joint: Joint) -> str | None:
    """Why a forward call must not run twice; None if it may.

    1. Random numbers are drawn once: the mask is saved, from which the result of a dropout can be had again.  Attention without dropout draws none, whatever its tag says.
    2. Collectives, calls that write to an operand, and calls with effects run once.
    3. Operators of other libraries promise nothing; higher-order calls hide a graph.
    4. Sizes that the data decide, and sums whose order CUDA does not fix, may come out otherwise.
    5. What reads an input that the graph writes would read what was written.
    """
    target = node.target
    if is_dropped(node):
        return None
    if not isinstance(target, OpOverload):
        return "a call that hides a graph"
    kind = ops.info(node).kind
    if kind == "collective":
        return "a collective"
    if torch.Tag.nondeterministic_seeded in target.tags and not draws_nothing(node):
        return "it draws random numbers"
    if target._schema.is_mutable or node.is_impure(impure_random=False):
        return "it writes to an operand"
    if target.namespace not in PURE_NAMESPACES:
        return "an operator that promises nothing"
    if torch.Tag.dynamic_output_shape in target.tags or torch.Tag.data_dependent_output in target.tags:
        return "its size depends on data"
    if target.overloadpacket.__name__ in UNSTEADY:
        return "a sum whose order is not fixed"
    if any(joint.root.get(a, a) in joint.written for a in inputs_again(node)):
        return "it reads an input that the graph writes"
    return None


def inputs_again(node: Node) -> list[Node]:
    """What a call reads when it runs again (see ``call_again``)."""
    if is_dropped(node):
        dropout = ops.operand(node, 0)
        mask = mask_of(dropout)
        return [ops.operand(dropout, 0)] + ([mask] if mask is not None else [])
    unused = {a for a in node.args[3:5] if isinstance(a, Node)} if is_training_norm(node) else set()
    return [a for a in node.all_input_nodes if a not in unused]


def is_training_norm(node: Node) -> bool:
    """A batch norm that normalizes by its batch, with weights that can stand in for the statistics that it updates."""
    if ops.name_of(node) != "_native_batch_norm_legit_functional.default" or node.args[5] is not True:
        return False
    weight, mean = node.args[1], node.args[3]
    if not isinstance(weight, Node) or not isinstance(mean, Node):
        return False
    return ops.tensor(weight).dtype == ops.tensor(mean).dtype


def draws_nothing(node: Node) -> bool:
    """Whether a call that may draw random numbers has a dropout of 0."""
    given = cost.arguments(node)
    rates = [given[k] for k in ("dropout_p", "dropout", "p") if k in given]
    return bool(rates) and rates[0] == 0 and cost.unit(node) == "attention"


def has_effect(node: Node) -> bool:
    """Whether a call must run though nobody reads its results."""
    return bool(ops.mutated(node)) or node.is_impure() or ops.is_ordered(node)


def is_transparent(node: Node) -> bool:
    """Views and pieces: the same storage."""
    return node.op == "call_function" and (ops.is_view(node) or ops.is_split(node))


def is_dropped(node: Node) -> bool:
    """The result of a dropout whose mask is a value of its own: from that it can be computed again, with no new draw."""
    if ops.info(node).kind != "item" or node.args[1] != 0 or not isinstance(node.args[0], Node):
        return False
    dropout = node.args[0]
    if ops.name_of(dropout) != "native_dropout.default" or mask_of(dropout) is None:
        return False
    return dropout.args[2] is True and isinstance(dropout.args[1], float) and 0 < dropout.args[1] < 1


def mask_of(dropout: Node) -> Node | None:
    return next((u for u in dropout.users if u.args[1] == 1), None)


def call_again(graph: Graph, node: Node, where: Callable[[Node], Node]) -> Node:
    """The copy of a call that runs again, with its operands as ``where`` gives them.

    1. A batch norm in training: nobody reads its new statistics, and its weight stands in for the old ones.
    2. The result of a dropout is what its backward would make of the input: ``x * mask / (1 - p)``.
    """
    if is_training_norm(node):
        weight = node.args[1]
        return graph.node_copy(node, lambda a: where(weight if a in node.args[3:5] else a))  # type: ignore[arg-type]
    if not is_dropped(node):
        return graph.node_copy(node, where)
    dropout = ops.operand(node, 0)
    mask, p = mask_of(dropout), dropout.args[1]
    assert mask is not None and isinstance(p, float)
    operands = (where(ops.operand(dropout, 0)), where(mask), 1.0 / (1.0 - p))
    new = graph.call_function(torch.ops.aten.native_dropout_backward.default, operands)
    new.meta = {**node.meta}
    new.meta.pop("dsc", None)
    return new


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
        cost.flops(n) / cost.rate(n, target),
        forward,
        forward and why_not_again(n, joint) is None,
        fuses,
        zlib.crc32(str(space).encode()) if reduces else 0,
        not reduces or ops.info(n).kind == "rowwise" or (space is not None and space.dims[-1].reduce),
        cost.unit(n) != "vector",
        ops.name_of(n),
    )


def _nbytes(n: Node) -> int:
    return 0 if is_transparent(n) else liveness.nbytes(n)


def _kind(n: Node) -> str:
    if n.op != "placeholder":
        return "made"
    return "tangent" if "tangents" in n.name else "input"


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
