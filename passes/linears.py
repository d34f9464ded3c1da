"""The linear layers of a joint or inference graph: their weights, their products, and what they are to each other."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops
from dsc.torch_shim import OpOverload

CASTS = ("_to_copy.default",)
TURNS = ("t.default", "transpose.int", "permute.default")
PRODUCTS = {"mm.default": 0, "addmm.default": 1}
"""Product -> the place of its left operand; the right one comes after it."""
BENDS = (
    "gelu relu silu tanh sigmoid elu hardswish hardtanh leaky_relu mish pow softplus "
    "erf clamp_min mul maximum"
).split()  # fmt: skip
"""Pointwise operators that make what stands between two linear layers more than linear (``mul``: a gate)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """``y = x @ weight.T (+ bias)`` for x [M, K] and weight [N, K], forward, and its two products backward."""

    layer: str
    """Dotted name of the module."""
    weight: Node
    """The placeholder."""
    forward: Node
    dgrad: Node | None
    """``g @ weight``; None if nobody wants the gradient of x, or the graph has no backward."""
    wgrad: Node | None
    """``g.T @ x``."""
    gradient: int | None
    """Place of the weight's gradient among the results of a joint graph."""
    hidden: bool
    """Between its result and the input of another linear layer stand only pointwise operators, or the other way round."""

    @property
    def shape(self) -> tuple[int | torch.SymInt, int, int]:
        """(M, N, K) of the forward product; M may be a symbol."""
        rows, columns = ops.tensor(self.weight).shape
        return ops.tensor(self.forward).shape[0], int(rows), int(columns)


@dataclass(frozen=True, slots=True)
class Refused:
    """A product with an input that cannot be treated as a layer, and why."""

    layer: str
    why: str


def find(gm: GraphModule) -> tuple[list[Linear], list[Refused]]:
    """All linear layers, in the order of their weights, and what looks like one but is not to be touched."""
    found: list[Linear] = []
    refused: list[Refused] = []
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = [p for p in inputs if not is_tangent(p)]
    joint = len(primals) < len(inputs)
    results = _results(gm.graph)
    for place, weight in enumerate(primals):
        products = [u for u in _readers(weight) if _is_right(u, weight)]
        ahead = [u for u in products if not _is_backward(u)]
        if not ahead:
            continue
        layer = layer_of(ahead[0]) or weight.name
        gradient = len(results) - len(primals) + place if joint else None
        if (why := _problem(weight, ahead, products, gradient, results)) is not None:
            refused.append(Refused(layer, why))
            continue
        wgrad = _product_behind(results[gradient]) if gradient is not None else None
        dgrad = next((u for u in products if _is_backward(u)), None)
        found.append(Linear(layer, weight, ahead[0], dgrad, wgrad, gradient, hidden=False))
    ahead_of = {x.forward: _next(x.forward, {y.forward for y in found}) for x in found}
    inner = {n for f, others in ahead_of.items() if others for n in (f, *others)}
    return [_replaced(x, x.forward in inner) for x in found], refused


def _replaced(x: Linear, hidden: bool) -> Linear:
    return Linear(x.layer, x.weight, x.forward, x.dgrad, x.wgrad, x.gradient, hidden)


def _problem(
    weight: Node, ahead: list[Node], products: list[Node], gradient: int | None, results: list[object]
) -> str | None:
    value = weight.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return "its weight has not two dimensions"
    if not all(isinstance(d, int) for d in value.shape):
        return "its weight's shape is not fixed"
    if len(ahead) > 1:
        return f"its weight is shared by {len(ahead)} products"
    if not _is_linear(ahead[0]):
        return "it is no nn.Linear"
    if other := [u for u in _readers(weight) if u not in products and u.op != "output"]:
        return f"its weight is tied: {ops.name_of(other[0])} reads it too"
    if gradient is not None and not isinstance(results[gradient], Node):
        return "its weight is frozen"
    return None


def is_tangent(p: Node) -> bool:
    """Whether an input of a joint graph is a gradient of a result."""
    return p.meta.get("partitioner_tag") == "is_backward" or ops.is_tangent(p)


def _is_backward(n: Node) -> bool:
    return n.meta.get("partitioner_tag") == "is_backward"


def _results(graph: Graph) -> list[object]:
    found = graph.output_node().args[0]
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _readers(n: Node) -> Iterator[Node]:
    """Who reads a value, through casts and turns."""
    for u in n.users:
        if u.op == "call_function" and ops.name_of(u) in (*CASTS, *TURNS, "detach.default", "alias.default"):
            yield from _readers(u)
        else:
            yield u


def _is_right(u: Node, weight: Node) -> bool:
    """Whether ``u`` is a product with the weight as its right operand, and nothing else of it."""
    left = PRODUCTS.get(ops.name_of(u)) if u.op == "call_function" else None
    if left is None:
        return False
    right = u.args[left + 1]
    return _root(right) is weight and not any(_root(a) is weight for a in u.args[: left + 1])


def _root(n: object) -> Node:
    assert isinstance(n, Node)
    while n.op == "call_function" and ops.name_of(n) in (*CASTS, *TURNS, "detach.default", "alias.default"):
        n = ops.operand(n, 0)
    return n


def _product_behind(result: object) -> Node | None:
    """The product that gives a gradient, through views and casts."""
    while isinstance(result, Node) and result.op == "call_function":
        if ops.name_of(result) == "mm.default":
            return result
        if not (ops.is_view(result) or ops.name_of(result) in CASTS):
            return None
        result = result.args[0]
    return None


def _stack(n: Node) -> list[tuple[str, object]]:
    stack = n.meta.get("nn_module_stack") or n.meta.get("fwd_nn_module_stack") or {}
    return list(stack.values())


def layer_of(n: Node) -> str:
    """``L['self'].blocks.0.up`` in a node's module stack -> ``blocks.0.up``; empty without one."""
    stack = _stack(n)
    if not stack:
        return ""
    path = re.sub(r"^[LG]\[['\"]\w+['\"]\]\.?|^L__self___?", "", str(stack[-1][0]))
    path = re.sub(r"_modules\[['\"]([^'\"]+)['\"]\]|\[['\"]?([^\]'\"]+)['\"]?\]", r".\1\2", path)
    return re.sub(r"\.+", ".", path.replace("_orig_mod.", "")).strip(".") or "model"


def _is_linear(n: Node) -> bool:
    stack = _stack(n)
    kind = stack[-1][1] if stack else None
    if isinstance(kind, str):
        return kind.rpartition(".")[2] == "Linear"
    return isinstance(kind, type) and issubclass(kind, torch.nn.Linear)


def _next(product: Node, known: set[Node]) -> list[Node]:
    """The linear layers that read a layer's result past pointwise operators, one of them at least not linear."""
    out: list[Node] = []
    seen: set[tuple[Node, bool]] = set()
    queue = [(product, False)]
    while queue:
        n, bent = queue.pop()
        for u in n.users:
            if u in known and bent and u.args[PRODUCTS[ops.name_of(u)]] is n:
                out.append(u)
            if u.op != "call_function" or _is_backward(u) or u in known:
                continue
            through = ops.info(u).kind in ("pointwise", "view", "item") or u.target is operator.getitem
            step = (u, bent or packet(u) in BENDS)
            if through and step not in seen:
                seen.add(step)
                queue.append(step)
    return out


def packet(n: Node) -> str:
    """The name of the operator that a node calls, whatever its overload."""
    return n.target.overloadpacket.__name__ if isinstance(n.target, OpOverload) else ""
