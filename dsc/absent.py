"""Gradients that eager does not give are not given: ``None`` rather than zeros.

The backward of a compiled graph computes all gradients at once, with zeros for results that the loss does not use.  Where
eager never reaches an input, ``.grad`` would be zeros instead of None: an optimizer would decay a parameter that eager
leaves alone, and ``torch.autograd.grad`` would not tell of an input without use.

1. ``depends`` and ``reach``: on which results each gradient depends.  Nothing to do where all depend on all, as with one
   loss, nor for a gradient one of whose terms depends on none: it may be there for any of them.
2. ``restore``: a hook on the graph's node in autograd takes away the gradients none of whose results got one.
3. Terms of results without a gradient are left out of the others (``dsc.given``).
4. A graph before this one, whose results get no gradient then, gives none either (``silence``).
5. Zeros stay where a hook of the user waits for that gradient: autograd would call it with None, and eager not at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dsc import given, ops
from dsc.torch_shim import is_compiled_node, tangents_noted

Gradients = Sequence[torch.Tensor | None]
Hook = Callable[[Gradients, Gradients], Gradients | None]
Edges = tuple[tuple[Any, int], ...]
"""To the nodes of autograd that take a node's gradients."""


@dataclass(frozen=True)
class Depends:
    """On what the gradients of a joint graph depend."""

    tangents: int
    masks: tuple[int, ...] = ()
    """For each tensor among the inputs: the tangents behind its gradient, a bit each."""

    guarded: bool = False
    """The backward asks which results are used."""


@dataclass(frozen=True)
class Reach:
    """What each gradient of one graph depends on."""

    places: tuple[frozenset[int] | None, ...]
    """For each tensor among the inputs: places of results in the graph's autograd node.  None: its gradient always stays."""

    results: tuple[int, ...]
    """Results of the graph by which its node can be found."""

    numbers: dict[int, int] = field(default_factory=dict)
    """Place of a result -> the number of its tangent, if the backward asks which are used."""


def depends(joint: GraphModule, num_fwd_outputs: int) -> Depends:
    """Case 1, of a joint graph as AOTAutograd traced it; case 3 changes it in place."""
    inputs = joint.graph.find_nodes(op="placeholder")
    tangents = [n for n in inputs if ops.is_tangent(n)]
    results = joint.graph.output_node().args[0]
    if len(tangents) < 2 or not isinstance(results, (list, tuple)):
        return Depends(len(tangents))
    constant = _constants(joint, tangents)
    masks = _masks(joint, tangents, constant)
    guarded = given.guard(joint, masks, tangents)
    pairs = zip((n for n in inputs if not ops.is_tangent(n)), results[num_fwd_outputs:])
    tensors = ((p, g) for p, g in pairs if isinstance(p.meta.get("val"), torch.Tensor))
    found = tuple((masks.get(g) or constant.get(g, 0)) if isinstance(g, Node) else 0 for _, g in tensors)
    return Depends(len(tangents), found, guarded)


def reach(found: Depends) -> Reach | None:
    """Where tangents come from, by what AOTAutograd noted of the graph; None where there is nothing to do."""
    count, masks = found.tangents, found.masks
    every = (1 << count) - 1
    if not found.guarded and all(m in (0, every) for m in masks):
        return None
    noted = tangents_noted()
    if noted is None or len(noted.places) != count or not noted.results:
        return None
    places = (frozenset(p for i, p in enumerate(noted.places) if m >> i & 1) for m in masks)
    numbers = {p: i for i, p in enumerate(noted.places)} if found.guarded else {}
    return Reach(tuple(p if m not in (0, every) else None for m, p in zip(masks, places)), noted.results, numbers)


def restore(compiled: Callable[..., Any], found: Reach | None) -> Callable[..., Any]:
    """Case 2: the compiled function, whose autograd node gives None where eager does."""
    if found is None:
        return compiled

    def call(*inputs: Any) -> Any:
        results = compiled(*inputs)
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        node = _node(results, found)
        if node is not None and len(node.next_functions) == len(tensors) == len(found.places):
            node.register_hook(_hook(found, tensors, node.next_functions))
            if found.numbers:
                node.register_prehook(_before(found.numbers))
        return results

    return call


def _masks(joint: GraphModule, tangents: Sequence[Node], constant: Mapping[Node, int]) -> dict[Node, int]:
    """Nodes that depend on tangents -> which.

    A sum of gradients of which one depends on none that is known counts as of all; what the forward computed is no gradient.
    """
    every = (1 << len(tangents)) - 1
    masks = {n: 1 << i for i, n in enumerate(tangents)}
    for n in joint.graph.nodes:
        operands = n.all_input_nodes if n.op == "call_function" else []
        terms = [masks.get(a, 0) for a in operands]
        if not any(terms):
            continue
        if ops.name_of(n) == "add.Tensor":
            terms = [masks.get(a) or constant.get(a, every if _in_backward(a) else 0) for a in operands]
        masks[n] = reduce(or_, terms)
    return masks


def _constants(joint: GraphModule, tangents: Sequence[Node]) -> dict[Node, int]:
    """Gradients that are constants, as that of the sign in ``copysign`` -> the tangents of all results of that operator.

    Autograd numbers the operators of the forward; what their derivatives computed has the same numbers.  What has no
    derivative shares the next one's number, so that these may be too many.
    """
    output = joint.graph.output_node()
    given_out = output.args[0]
    assert isinstance(given_out, (list, tuple))
    results = dict(zip(output.meta.get("desc") or (), given_out))
    reached: dict[Node, int] = {}
    for i, t in enumerate(tangents):
        result = results.get(getattr(t.meta.get("desc"), "output", None))
        if isinstance(result, Node):
            reached[result] = reached.get(result, 0) | 1 << i
    by_number: dict[int, int] = {}
    for n in reversed(joint.graph.nodes):
        mask = reached.get(n, 0)
        if not mask or n.op == "output":
            continue
        for a in n.all_input_nodes:
            reached[a] = reached.get(a, 0) | mask
        if (number := n.meta.get("seq_nr")) is not None:
            by_number[number] = by_number.get(number, 0) | mask
    back = (n for n in joint.graph.nodes if _in_backward(n))
    found = ((n, by_number.get(n.meta.get("seq_nr"), 0)) for n in back if not n.all_input_nodes)
    return {n: mask for n, mask in found if mask}


def _in_backward(n: Node) -> bool:
    return n.op == "call_function" and n.meta.get("partitioner_tag") == "is_backward"


def _node(results: Any, found: Reach) -> Any:
    """The node of the graph that gave these results; None without gradients."""
    flat = results if isinstance(results, (tuple, list)) else pytree.tree_leaves(results)
    for i in found.results:
        node = flat[i].grad_fn if i < len(flat) and isinstance(flat[i], torch.Tensor) else None
        while node is not None and not is_compiled_node(node):  # results that are views of what the graph computed
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            return node
    return None


def _hook(found: Reach, inputs: Sequence[torch.Tensor], edges: Edges) -> Hook:
    """Takes the gradients of inputs and of results, and gives those of inputs that eager gives."""
    partial = {i: p for i, p in enumerate(found.places) if p is not None}
    heard = {i for i in partial if _hears(inputs[i])}
    alive = {i: weakref.ref(inputs[i]) for i in partial}

    def waits(i: int) -> bool:
        return i in heard or ((tensor := alive[i]()) is not None and _hears(tensor))

    def take_away(gradients: Gradients, results: Gradients) -> Gradients | None:
        given.tell(frozenset())
        missing = {i for i, g in enumerate(results) if g is None}
        gone = {i for i, p in partial.items() if p <= missing and gradients[i] is not None and not waits(i)}
        for i in gone:
            silence(edges[i][0])
        return tuple(None if i in gone else g for i, g in enumerate(gradients)) if gone else None

    return take_away


def _before(numbers: Mapping[int, int]) -> Callable[[Gradients], None]:
    """Tells the backward that is about to run which results have no gradient."""

    def tell(gradients: Gradients) -> None:
        given.tell(frozenset(numbers[i] for i, g in enumerate(gradients) if g is None and i in numbers))

    return tell


def silence(node: Any) -> None:
    """Case 4: a compiled graph is to give its inputs no gradients, if its results got none; leaves that hear one get zeros."""
    if not is_compiled_node(node):
        return
    edges: Edges = node.next_functions

    def is_deaf(n: Any) -> bool:
        return is_compiled_node(n) or (hasattr(n, "variable") and not _hears(n.variable))

    def take_away(gradients: Gradients, results: Gradients) -> Gradients | None:
        if any(g is not None for g in results):
            return None
        for n, _ in edges:
            silence(n)
        return tuple(None if is_deaf(n) else g for (n, _), g in zip(edges, gradients))

    node.register_hook(take_away)


def _hears(tensor: torch.Tensor) -> bool:
    """Whether a hook is told of the tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
