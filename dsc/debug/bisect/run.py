"""Running a graph node by node on ATen, alone or beside its twin in float64."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from dsc import ops
from dsc.debug.capture import same_again

SEED = 0
SMALLER = (torch.float32, torch.bfloat16, torch.float16)


class NodeRaised(Exception):
    """A node of the graph raised."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node} raised {why}")
        self.node, self.why = node, why


@dataclass(frozen=True)
class Results:
    """What a graph gave, and what it left in the inputs that it writes to."""

    outputs: list[Any]
    written: dict[str, Any] = field(default_factory=dict)

    def every(self) -> list[Any]:
        return [*self.outputs, *self.written.values()]


@dataclass(frozen=True)
class Twin:
    """A value as eager computes it, and as float64 does: integers and random numbers are eager's in both."""

    value: Any
    exact: Any


See = Callable[[Node, Any], Any]
"""Hears of every value, and gives it back or another one in its place."""


@contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Equal random numbers each time, no gradients, and the caller's generator left as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        yield


def run(
    gm: GraphModule, inputs: Mapping[str, object], see: See | None = None, until: Collection[Node] | None = None
) -> Results:
    """The graph on ATen.  Inputs that it writes to are copied first; other values die after their last reader.

    ``until``: only these nodes are wanted, and no results; nothing else runs than what they need.

    Raises:
        NodeRaised: a node raises.
    """
    given = _owned(gm, inputs)
    outputs = _walk(gm, given, _call, see, until)
    return Results(outputs, {n.name: given[n.name] for n in written(gm)})


def run_twins(
    gm: GraphModule, inputs: Mapping[str, object], see: See | None = None, until: Collection[Node] | None = None
) -> Results:
    """As ``run``, where every value is a ``Twin``: what the roundings of eager make of each value shows between them.

    A twin goes the way of eager: indices, masks and random numbers are taken over, and where an operator does not
    compute in float64 its result is eager's.
    """
    given = {k: twin(v) for k, v in _owned(gm, inputs).items()}
    outputs = _walk(gm, given, _call_twins, see, until)
    return Results(outputs, {n.name: given[n.name] for n in written(gm)})


def twin(value: Any) -> Twin:
    return Twin(value, pytree.tree_map(_wide, value))


def written(gm: GraphModule) -> list[Node]:
    """Inputs to which the graph writes."""
    return list(dict.fromkeys(w for n in gm.graph.nodes for w in ops.mutated(n) if w.op == "placeholder"))


def _owned(gm: GraphModule, inputs: Mapping[str, object]) -> dict[str, object]:
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    mine = {n.name for n in written(gm)}
    return {name: same_again(inputs[name]) if name in mine else inputs[name] for name in names}


def _walk(
    gm: GraphModule,
    given: Mapping[str, object],
    call: Callable[..., Any],
    see: See | None,
    until: Collection[Node] | None,
) -> list[Any]:
    wanted = _needed(gm, until) if until is not None else list(gm.graph.nodes)
    last: dict[Node, Node] = {}
    for node in wanted:
        for a in node.all_input_nodes:
            last[a] = node
    dying: dict[Node, list[Node]] = {}
    for a, node in last.items():
        dying.setdefault(node, []).append(a)
    env: dict[Node, Any] = {}
    for node in wanted:
        match node.op:
            case "placeholder":
                value: Any = given[node.name]
            case "get_attr":
                value = operator.attrgetter(str(node.target))(gm)
                value = twin(value) if call is _call_twins else value
            case "output":
                results = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
                return [env[r] if isinstance(r, Node) else twin(r) if call is _call_twins else r for r in results]
            case _:
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                value = call(node, args, kwargs)
        env[node] = value if see is None else see(node, value)
        for a in dying.get(node, ()):
            del env[a]
    return []


def _needed(gm: GraphModule, until: Collection[Node]) -> list[Node]:
    """What ``until`` is computed from, and what must run before it: random and impure calls, writes to memory."""
    inside = cone(until)
    if not inside:
        return []
    nodes = list(gm.graph.nodes)
    end = max(i for i, n in enumerate(nodes) if n in inside)
    fixed = [n for n in nodes[:end] if ops.is_ordered(n) or ops.mutated(n)]
    inside |= cone(fixed)
    return [n for n in nodes if n in inside]


def cone(roots: Iterable[Node]) -> set[Node]:
    """The nodes that ``roots`` are computed from, and themselves."""
    found, stack = set[Node](), list(roots)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += n.all_input_nodes
    return found


def _call(node: Node, args: Any, kwargs: Any) -> Any:
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as why:
        raise NodeRaised(node.name, f"{type(why).__name__}: {str(why).strip().splitlines()[0]}") from why


def _call_twins(node: Node, args: Any, kwargs: Any) -> Twin:
    value = _call(node, *_side((args, kwargs), "value"))
    if ops.info(node).kind == "random" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return twin(value)
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return Twin(value, value)
    wide_args, wide_kwargs = _side((args, kwargs), "exact")
    wide_args, wide_kwargs = map_aggregate((wide_args, wide_kwargs), _wide_dtype)
    try:
        exact = node.target(*wide_args, **wide_kwargs)  # type: ignore[operator]
    except Exception:  # the operator has no float64, or wants equal dtypes of what is eager's and what is not
        return twin(value)
    got, wanted = pytree.tree_leaves(exact), pytree.tree_leaves(value)
    if len(got) != len(wanted):
        return twin(value)
    merged = iter([_merged(e, v) for e, v in zip(got, wanted)])
    return Twin(value, pytree.tree_map(lambda _: next(merged), value))


def _merged(exact: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    fits = isinstance(exact, torch.Tensor) and exact.shape == value.shape
    return _wide(exact if fits else value)


def _side(a: Any, side: str) -> Any:
    return map_aggregate(a, lambda x: getattr(x, side) if isinstance(x, Twin) else x)


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.dtype in SMALLER else x


def _wide_dtype(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in SMALLER else x
