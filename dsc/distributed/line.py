"""A traced forward as a line of operators: what can be cut where, what crosses, and what each piece costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from dsc import ops
from dsc.distributed import topology
from dsc.distributed.cluster import Cluster, Link
from dsc.distributed.forward import Forward
from dsc.distributed.plan import Degrees
from dsc.distributed.stage_cost import Layout, NodeCost, costs
from dsc.passes.solve.stage_cut import Line

LAYER = re.compile(r"(?:\w+\.)*?\d+(?=\.|$)")
"""The outermost member of a list of modules in a module's path."""


STATE = {"adam": (8, 12), "sgd": (0, 4), "momentum": (4, 8)}
"""Optimizer -> bytes of state for a parameter of 4 bytes, and for one of 2, which has a master copy in 4."""


@dataclass(frozen=True)
class Memory:
    """Bytes for a byte of parameters: of its gradient, and of the optimizer's state."""

    gradient: float
    state: float
    shares: tuple[int, int, int] = (1, 1, 1)
    """Replicas over which ZeRO spreads parameters, gradients and state."""


@dataclass(frozen=True)
class Laid:
    """A line with the nodes that its numbers are of."""

    forward: Forward
    line: Line
    nodes: tuple[Node, ...]
    """The operators, in order."""
    copied: frozenset[Node]
    """Calls that every stage that reads them runs itself."""
    costs: Mapping[Node, NodeCost]
    layers: tuple[int, ...]
    """Places where a layer starts: a member of the outermost lists of modules."""
    names: tuple[str, ...]
    """Of those layers."""


def lay(
    forward: Forward,
    layout: Layout,
    memory: Memory,
    wire: Link,
    near: Link,
    order: Sequence[Node] | None = None,
    priced: Mapping[Node, NodeCost] | None = None,
) -> Laid:
    """The graph as a line, in the order of the program or another one in which it can run.

    ``wire`` links stages of different machines, ``near`` those of one.  ``priced``: other costs than the roofline's.
    """
    priced = costs(forward, layout) if priced is None else priced
    copied = copies(forward)
    calls = [n for n in forward.gm.graph.nodes if n.op == "call_function"]
    nodes = tuple(n for n in order or calls if n not in copied)
    place = {n: i for i, n in enumerate(nodes)}
    count = len(nodes)
    mine = [priced[n] for n in nodes]

    def sums(values: Iterable[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.concatenate([[0.0], np.cumsum(np.fromiter(values, float, count))])

    made = np.zeros(count)
    for c in mine:
        for root, nbytes in c.saved.items():
            if root in place:
                made[place[root]] += nbytes
    crossing, allowed = _crossing(forward, nodes, place, copied)
    (weights, gradients, state), shared = _parameters(forward, place, copied, layout, memory)
    crossing = crossing / max(layout.degrees.sequence, 1)
    line = Line(
        sums(c.forward for c in mine),
        sums(c.dgrad for c in mine),
        sums(c.wgrad for c in mine),
        sums(made),
        sums(c.late for c in mine),
        sums(weights),
        sums(gradients),
        sums(state),
        crossing,
        np.array([wire.seconds(b) for b in crossing]),
        np.array([near.seconds(b) for b in crossing]),
        allowed,
        shared,
    )
    layers, names = _layers(nodes)
    return Laid(forward, line, nodes, copied, priced, layers, names)


def on_cluster(
    traced: Forward,
    cluster: Cluster,
    degrees: Degrees,
    optimizer: str = "adam",
    order: Sequence[Node] | None = None,
    priced: Mapping[Node, NodeCost] | None = None,
) -> Laid:
    """The line of a traced model on one card of a pipeline, with costs by the roofline, or ``priced``."""
    place = topology.devices(degrees)
    one_machine = len({d // cluster.per_node for d in place}) == 1
    wire = cluster.inside if one_machine else cluster.between
    half = any(
        n.meta["val"].dtype in (torch.bfloat16, torch.float16)
        for n in traced.gm.graph.nodes
        if n.op == "placeholder" and n.name in traced.parameters
    )
    state = STATE[optimizer][half] / (2 if half else 4)
    shares = tuple(degrees.data if degrees.zero >= level else 1 for level in (3, 2, 1))
    memory = Memory(1.0, state, shares)  # type: ignore[arg-type]  # three of them
    return lay(traced, Layout(cluster, degrees), memory, wire, cluster.inside, order, priced)


def copies(forward: Forward) -> frozenset[Node]:
    """Calls that are cheap to repeat: on buffers and constants alone, or views of parameters."""
    found: set[Node] = set()
    for n in forward.gm.graph.nodes:
        if n.op != "call_function" or ops.mutated(n) or ops.info(n).kind == "random":
            continue
        sources = n.all_input_nodes
        if not all(a in found or (a.op == "placeholder" and a.name not in forward.inputs) for a in sources):
            continue
        trained = any(a.name in forward.parameters or _reads_weight(a, forward, found) for a in sources)
        if not trained or ops.is_view(n) or ops.is_split(n) or ops.info(n).kind == "item":
            found.add(n)
    written = {a for n in forward.gm.graph.nodes if n.op == "call_function" for a in ops.mutated(n)}
    return frozenset(n for n in found if not written & {n, *n.all_input_nodes})


def _reads_weight(n: Node, forward: Forward, found: set[Node]) -> bool:
    return n in found and any(
        a.name in forward.parameters or _reads_weight(a, forward, found) for a in n.all_input_nodes
    )


def readers(n: Node, copied: frozenset[Node]) -> list[Node]:
    """The operators that read a value, also through copied calls."""
    found: dict[Node, None] = {}
    stack = list(n.users)
    while stack:
        user = stack.pop()
        if user in copied:
            stack += user.users
        else:
            found[user] = None
    return list(found)


def values(forward: Forward, nodes: Sequence[Node]) -> list[Node]:
    """What may cross a cut: inputs and the results of operators."""
    return [n for n in forward.gm.graph.nodes if n.op == "placeholder" and n.name in forward.inputs] + list(nodes)


def _crossing(
    forward: Forward, nodes: Sequence[Node], place: Mapping[Node, int], copied: frozenset[Node]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Bytes that cross each place, and whether a cut may be there."""
    count = len(nodes)
    steps = np.zeros(count + 2)
    allowed = np.ones(count + 1, bool)
    outputs = set(forward.results)
    for n in values(forward, nodes):
        start = place.get(n, -1)
        uses = [place[u] for u in readers(n, copied) if u in place]
        end = count - 1 if n.name in outputs and n in place else max(uses, default=start)
        if end <= start:
            continue
        value = ops.value(n)
        if isinstance(value, Tensor):
            steps[start + 1] += value.numel() * value.element_size()
            steps[end + 1] -= value.numel() * value.element_size()
        else:
            allowed[start + 1 : end + 1] = False
    for n in nodes:
        for written in ops.mutated(n):
            allowed[place.get(written, -1) + 1 : place[n] + 1] &= written.op == "placeholder"
    if count:
        allowed[0] = allowed[count] = True
    return np.cumsum(steps)[: count + 1], allowed


def _parameters(
    forward: Forward, place: Mapping[Node, int], copied: frozenset[Node], layout: Layout, memory: Memory
) -> tuple[list[list[float]], tuple[tuple[tuple[float, float, float], tuple[int, ...]], ...]]:
    """Bytes of (parameters, gradients, state) by the only operator that reads them; those with several readers apart."""
    once = [[0.0] * len(place) for _ in range(3)]
    groups: dict[str, tuple[Node, set[int]]] = {}
    for n in forward.gm.graph.nodes:
        if n.op == "placeholder" and n.name in forward.state:
            entry = groups.setdefault(forward.state[n.name], (n, set()))
            entry[1].update(place[u] for u in readers(n, copied) if u in place)
    shared = []
    for n, uses in groups.values():
        value = ops.value(n)
        if not uses or not isinstance(value, Tensor):
            continue
        nbytes = float(value.numel() * value.element_size())
        if value.dim() == 3:
            nbytes /= layout.degrees.expert
        if value.dim() > 1:
            nbytes /= layout.degrees.tensor
        trained = n.name in forward.parameters
        weights, gradients, state = (
            nbytes / memory.shares[0],
            nbytes * memory.gradient / memory.shares[1] if trained else 0.0,
            nbytes * memory.state / memory.shares[2] if trained else 0.0,
        )
        if len(uses) == 1:
            (at,) = uses
            for sums, each in zip(once, (weights, gradients, state)):
                sums[at] += each
        else:
            shared.append(((weights, gradients, state), tuple(sorted(uses))))
    return once, tuple(shared)


def _layers(nodes: Sequence[Node]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    starts: dict[str, int] = {}
    for i, n in enumerate(nodes):
        for path, _ in (n.meta.get("nn_module_stack") or {}).values():
            found = LAYER.match(path)
            if found:
                starts.setdefault(found[0], i)
                break
    order = sorted(starts, key=starts.__getitem__)
    return tuple(starts[name] for name in order), tuple(order)


def orders(forward: Forward) -> list[tuple[Node, ...]]:
    """Orders in which the calls can run: the program's; and each as late as possible, where nothing forbids it.

    Where a call writes or draws random numbers, only the program's.
    """
    calls = tuple(n for n in forward.gm.graph.nodes if n.op == "call_function")
    if any(ops.mutated(n) or (ops.info(n).kind == "random" and _draws(n)) for n in calls):
        return [calls]
    late: list[Node] = []
    seen: set[Node] = set()
    output = forward.gm.graph.output_node()
    stack: list[tuple[Node, bool]] = [(output, False)]
    while stack:
        n, done = stack.pop()
        if done:
            if n.op == "call_function":
                late.append(n)
            continue
        if n in seen:
            continue
        seen.add(n)
        stack.append((n, True))
        stack += [(a, False) for a in reversed(n.all_input_nodes)]
    rest = [n for n in calls if n not in seen]
    return [calls] if rest or tuple(late) == calls else [calls, tuple(late)]


def _draws(n: Node) -> bool:
    """Whether a call that may draw random numbers does: attention without dropout does not."""
    return not (n.name.startswith("scaled_dot_product") and (len(n.args) < 5 or n.args[4] == 0.0))
