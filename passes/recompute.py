"""Compute cheap forward values again in the backward, where that moves fewer bytes than to save them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.manager import Pass, Remark, Report
from dsc.notes import set_keep
from dsc.passes.solve.mincut import Plan, Problem, Value, cost, solve
from dsc.runtime.state import is_attribute
from dsc.target import Target
from dsc.torch_shim import OpOverload, optimization_hint

ROWS = frozenset({"_softmax.default", "_log_softmax.default"})
"""Ops that reduce rows, and are still cheap against the bytes of their result."""


@dataclass(frozen=True)
class Recompute(Pass):
    """On a joint graph: note ``keep``, and copy forward nodes into the backward, so that fewer bytes are moved.

    1. A value that the backward reads is saved, or computed again there from saved values: a minimum cut (``mincut``).
    2. To save a value costs a read of its bytes, and a write if the forward would keep it inside a kernel: if no op of
       ATen makes or reads it, and it is not read again past such an op, nor returned.
    3. To compute it again costs nothing but its operands.  An operand that the backward reads anyway is free if that is
       between the same ops of ATen, so that one kernel can do both, else it is read twice.
    4. Pointwise and creating nodes, ``_softmax`` and ``_log_softmax`` may be recomputed, if kernels compute them.
       Never: products, convolutions, attention, norms and other reductions, random numbers, collectives, opaque ops,
       what reads an input that the graph writes, what ATen reads in the backward, and what the forward reads again past
       an op of ATen (a residual stream: recomputing it would add up all layers).
    5. Views cost nothing: they are copied into the backward too, so that each saved storage crosses once.  A view that
       the graph returns is saved as it is, so that autograd sees a write to it.
    6. A graph with checkpoint policies (``meta["recompute"]``) is left alone: torch's partitioner honours those.

    ``default_partition`` then saves what the plan saves.  As with any saved tensor, writing to a saved input or result
    before the backward is an error.
    """

    name: ClassVar[str] = "recompute"
    gives: ClassVar[frozenset[str]] = frozenset({"keep"})
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    def run(self, gm: GraphModule, target: Target) -> Report:
        policy = next((n for n in gm.graph.nodes if n.meta.get("recompute") is not None), None)
        if policy is not None:
            return Report(False, (Remark(policy.name, "skipped", "the graph has checkpoint policies"),))
        joint = read(gm)
        past = _read_past(joint)
        problem = extract(gm, joint, past)
        plan = solve(problem)
        remarks = tuple(explain(joint, problem, plan, past))
        before = Plan(problem.required, ())
        numbers = (
            ("saved bytes before", float(saved_bytes(joint, before))),
            ("saved bytes after", float(saved_bytes(joint, plan))),
            ("moved bytes before", float(cost(problem, before))),
            ("moved bytes after", float(cost(problem, plan))),
        )
        return Report(apply(gm, plan, joint), remarks, numbers)


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint graph, as torch's ``default_partition`` sees it."""

    forward: dict[str, Node]
    """Name -> node, in order."""
    backward: dict[Node, int]
    """Node -> how many ops of ATen stand between the tangents and it: nodes with equal counts may share a kernel."""
    returned: frozenset[Node]
    written: frozenset[Node]
    """Whose storage the graph writes, or AOTAutograd after it."""
    root: dict[Node, Node]
    """Forward node -> the value whose storage it is, found through views."""
    barriers: frozenset[Node]
    """Ops that ATen runs: no kernel holds what stands before one and what stands after it."""


def read(gm: GraphModule) -> Joint:
    """Forward is all up to the last node that is tagged so, but tangents and what depends on them.

    And what else its results need: views of what it makes, which AOTAutograd traces anew behind the backward.
    """
    nodes = list(gm.graph.nodes)
    output = nodes[-1]
    given = _given_forward(output)
    first = [i for i, n in enumerate(nodes) if _is_input(n) or n.meta.get("partitioner_tag") == "is_forward"]
    end = max(first, default=-1)
    forward: dict[str, Node] = {}
    backward: dict[Node, int] = {}
    root: dict[Node, Node] = {}
    barriers = frozenset(filter(_is_barrier, nodes))
    returned = frozenset(output.all_input_nodes)
    for i, node in enumerate(nodes):
        late = [a for a in node.all_input_nodes if a in backward]
        if node is output or (node.op == "placeholder" and not _is_input(node)):
            backward[node] = 0
        elif late or (i > end and node not in given):
            backward[node] = max((backward[a] + (a in barriers) for a in late), default=0)
        else:
            forward[node.name] = node
            see_through = is_transparent(node) and node not in returned
            root[node] = root[ops.operand(node, 0)] if see_through else node
    del backward[output]
    _place_constants(backward)
    written = frozenset(root.get(a, a) for n in nodes for a in _written(n)) | _written_later(gm)
    updated = {n.target for n in written if is_attribute(n.target)}
    written |= {n for n in nodes if is_attribute(n.target) and n.target in updated}  # an entry of state has many nodes
    return Joint(forward, backward, returned, written, root, barriers)


def _given_forward(output: Node) -> frozenset[Node]:
    """What the results of the forward need; nothing where nobody says which they are."""
    described = output.meta.get("desc") or ()
    results = output.args[0] if isinstance(output.args[0], (list, tuple)) else ()
    found: set[Node] = set()
    todo = [
        r for r, d in zip(results, described) if isinstance(r, Node) and d is not None and not hasattr(d, "grad_of")
    ]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return frozenset(found)


def _place_constants(backward: dict[Node, int]) -> None:
    """What depends on no tangent runs when it is first needed."""
    moving = {n for n in backward if n.op == "placeholder"}
    for node in backward:
        if any(a in moving for a in node.all_input_nodes):
            moving.add(node)
    for node in reversed(backward):
        users = [backward[u] for u in node.users if u in backward]
        if node not in moving and users:
            backward[node] = min(users)


def _written_later(gm: GraphModule) -> frozenset[Node]:
    """Inputs to which AOTAutograd copies a result once the forward has run."""
    described = gm.graph.output_node().meta.get("desc") or ()
    inputs = [d.mutated_input for d in described if hasattr(d, "mutated_input")]
    return frozenset(n for n in gm.graph.find_nodes(op="placeholder") if n.meta.get("desc") in inputs)


def extract(gm: GraphModule, joint: Joint | None = None, past: frozenset[Node] | None = None) -> Problem:
    """The values of the forward, with what it costs to save each or to compute it again."""
    joint = joint or read(gm)
    past = _read_past(joint) if past is None else past
    values = [n for n in joint.forward.values() if joint.root[n] is n and isinstance(ops.value(n), torch.Tensor)]
    cheap = {n for n in values if why_saved(joint, n, past) is None}
    deps = {n: _deps(joint, n) if n in cheap else [] for n in values}
    required: set[Node] = set()
    places: dict[Node, set[int]] = {n: set() for n in values}
    for n in reversed(values):
        late = [u for u in _readers(joint, n) if u in joint.backward]
        places[n].update(joint.backward[u] for u in late)
        if late:
            required.add(n)
        for d in deps[n]:
            if d not in required or d in cheap:
                places[d] |= places[n]
    own = {d: {joint.backward[u] for u in _readers(joint, d) if u in joint.backward} for d in required - cheap}
    made = []
    for n in values:
        twice = [d for d in deps[n] if d in own and own[d].isdisjoint(places[n])]
        again = sum(map(nbytes, twice)) if n in cheap else None
        save = nbytes(n) * (1 if _is_written_anyway(joint, n, past) else 2)
        made.append(Value(n.name, save, again, tuple(d.name for d in deps[n])))
    return Problem(tuple(made), tuple(n.name for n in values if n in required))


def apply(gm: GraphModule, plan: Plan, joint: Joint | None = None) -> bool:
    """Copy recomputed nodes, and views that the backward reads, to before their first reader there."""
    joint = joint or read(gm)
    again = set(plan.recompute)
    for name in plan.save + plan.recompute:
        if joint.forward[name].op == "call_function":
            set_keep(joint.forward[name], "recompute" if name in again else "save")
    place = {n: i for i, n in enumerate(joint.backward)}
    first: dict[int, Node] = {i: n for n, i in place.items()}  # what now stands first at each old node
    changed = False
    for node in reversed(list(joint.forward.values())):
        if node.name not in again and (joint.root[node] is node or joint.root[node] in joint.written):
            continue
        late = [u for u in node.users if u in place and not _is_size(u)]
        if not late:
            continue
        at = min(place[u] for u in late)
        with gm.graph.inserting_before(first[at]):
            copy = gm.graph.node_copy(node)
        copy.meta["partitioner_tag"] = "is_backward"
        set_keep(copy, None)
        first[at], place[copy] = copy, at
        for u in late:
            u.replace_input_with(node, copy)
        if not node.users:
            gm.graph.erase_node(node)
        changed = True
    return changed


def why_saved(joint: Joint, node: Node, past: frozenset[Node]) -> str | None:
    """Why a forward value cannot be recomputed; None if it can."""
    if node.op != "call_function":
        return "an input"
    if is_transparent(node):
        return None if joint.root[ops.operand(node, 0)] not in joint.written else "of an input that the graph writes"
    info = ops.info(node)
    if info.kind == "item":
        return f"one of the results of {ops.name_of(ops.operand(node, 0)).removesuffix('.default')}"
    if info.kind not in ("pointwise", "create") and info.name not in ROWS:
        return f"{info.kind} ops are never computed again"
    if reason := ops.why_not_fused(node):
        return reason
    if any(d in joint.written for d in _deps(joint, node)):
        return "it reads an input that the graph writes"
    late = [u for u in _readers(joint, node) if u in joint.backward]
    if not joint.barriers.isdisjoint(late):
        return "ATen reads it in the backward"
    if node in past:
        return "the forward reads it again after an op of ATen"
    return None


def explain(joint: Joint, problem: Problem, plan: Plan, past: frozenset[Node]) -> Iterator[Remark]:
    """What is recomputed, and why other cheap values that the backward reads are saved."""
    value = {v.name: v for v in problem.values}
    required = set(problem.required)
    for name in plan.recompute:
        size, deps = size_text(nbytes(joint.forward[name])), ", ".join(value[name].deps) or "nothing"
        moved = f"moves {size_text(value[name].again or 0)} instead of {size_text(value[name].save)}"
        yield Remark(name, "did", f"{size} computed again in the backward, from {deps}: {moved}")
    for name in plan.save:
        node = joint.forward[name]
        if node.op != "call_function":
            continue
        if name not in required:
            reason = f"{', '.join(n for n in plan.recompute if name in value[n].deps)} is computed again from it"
        else:
            reason = why_saved(joint, node, past) or "to compute it again would not move fewer bytes"
        yield Remark(name, "skipped", f"{size_text(nbytes(node))} saved: {reason}")


def saved_bytes(joint: Joint, plan: Plan) -> int:
    """Bytes that live from forward to backward because of a plan: inputs live anyway."""
    return sum(nbytes(n) for name in plan.save if (n := joint.forward[name]).op == "call_function")


def nbytes(node: Node) -> int:
    t = ops.tensor(node)
    return optimization_hint(t.numel()) * t.element_size()


def size_text(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB" if n >= 2**10 else f"{n} B"


def _is_input(node: Node) -> bool:
    return (
        node.op == "placeholder"
        and not ops.is_tangent(node)
        and not str(node.target).startswith(("bwd_seed", "bwd_base"))
    )


def is_transparent(node: Node) -> bool:
    """Views and pieces: the same storage."""
    return node.op == "call_function" and ops.is_alias(node)


def _is_size(node: Node) -> bool:
    return isinstance(ops.value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def _is_barrier(node: Node) -> bool:
    """An op that ATen runs.  Norms and losses that are split into what kernels can compute are none."""
    kind = ops.info(node).kind
    if node.op != "call_function" or kind in ("view", "item", "rowwise", "reduction") or _is_size(node):
        return False
    return ops.why_not_fused(node) is not None


def _written(node: Node) -> list[Node]:
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    parameters = enumerate(node.target._schema.arguments)
    written = [(i, a.name) for i, a in parameters if a.alias_info is not None and a.alias_info.is_write]
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in written]
    return [n for a in given for n in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(n, Node)]


def _readers(joint: Joint, node: Node) -> Iterator[Node]:
    """Nodes that read the values of ``node``, through views, but not its sizes."""
    for user in node.users:
        if is_transparent(user) and user not in joint.returned:
            yield from _readers(joint, user)
        elif not _is_size(user) and user.op == "call_function":
            yield user


def _deps(joint: Joint, node: Node) -> list[Node]:
    if is_transparent(node):
        return [joint.root[ops.operand(node, 0)]]
    return list(dict.fromkeys(joint.root[a] for a in ops.tensor_operands(node)))


def _read_past(joint: Joint) -> frozenset[Node]:
    """Forward nodes that the forward reads again past an op of ATen which depends on them: no kernel does both."""
    order = {n: i for i, n in enumerate(joint.forward.values())}
    after: dict[Node, int] = {}  # what depends on a node, as bits
    past: dict[Node, int] = {}  # of that, what does so through an op of ATen
    found = set()
    for node in reversed(order):
        after[node] = past[node] = 0
        for user in node.users:
            if user in order:
                after[node] |= after[user] | 1 << order[user]
                past[node] |= after[user] if user in joint.barriers else past[user]
        if past[node] and any(u in order and past[node] >> order[u] & 1 for u in _readers(joint, node)):
            found.add(node)
    return frozenset(found)


def _is_written_anyway(joint: Joint, node: Node, past: frozenset[Node]) -> bool:
    """Whether the forward puts a value into memory even if nobody saves it."""
    if node.op != "call_function" or node in joint.returned or node in past:
        return True
    maker = ops.operand(node, 0) if ops.info(node).kind == "item" else node
    return maker in joint.barriers or any(u in joint.barriers for u in _readers(joint, node) if u not in joint.backward)
