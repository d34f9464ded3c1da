"""Results that are views of inputs, made by the very calls that eager makes.

AOTAutograd makes such a result anew behind the graph: by the same views where their sizes are numbers and the graph was
traced in this process, else by the strides and the offset of what the graph gave (``gen_alias_from_base``).  Those are not
the input's where it was written: made functional, it lies elsewhere, and the result reads other memory.  Nor does
``as_strided`` have the gradient of the views where elements share memory.

So these results leave the graph, and behind it the views are called on the inputs, as they are by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsc.dynamo import LAYS_OUT, VIEWS, name_of, tensor_of, written
from dsc.layouts import hint, is_dense, reads, shares
from dsc.torch_shim import OpOverload, OpOverloadPacket, is_traceable_wrapper_subclass

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

SIZES = frozenset("size sym_size numel sym_numel dim ndimension stride sym_stride storage_offset getattr".split())
"""Ask what a tensor is, not for its elements."""

_MODES = frozenset("_enter_inference_mode _exit_inference_mode _enter_autocast _exit_autocast".split())


def take_out(gm: GraphModule) -> Wrap:
    """Take the views of inputs from the results of a Dynamo graph, in place; what comes back gives them back."""
    output = gm.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)) or changes_what_tensors_are(gm):
        return lambda compiled: compiled
    chains = {i: c for i, r in enumerate(results) if isinstance(r, Node) and (c := chain(r)) is not None}
    found = [i for i, c in chains.items() if len(c) > 1]  # one alone is the input itself
    if not found:
        return lambda compiled: compiled
    views = replay(gm, [chains[i] for i in found])
    output.args = (tuple(r for i, r in enumerate(results) if i not in found),)
    gm.recompile()
    return lambda compiled: merged(compiled, views, found, len(results))


def left(gm: GraphModule) -> str | None:
    """Why a result that is still a view of a written input would read other memory."""
    for r in gm.graph.output_node().all_input_nodes:
        value, source = tensor_of(r), input_of(r, gm)
        if value is None or source is None or resolved(r) is source or source.meta["example_value"]._version == 0:
            continue
        if not all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset())):
            return "AOTAutograd makes views of written inputs by strides that are not theirs"
    if any(name_of(n) == "as_strided" and _reads_around(n, gm) for n in gm.graph.nodes):
        return "AOTAutograd takes as_strided of a written input from a copy, which has not all of the memory around it"
    return None


def _reads_around(node: Node, gm: GraphModule) -> bool:
    """Whether places of memory are named that a dense copy of the input would have elsewhere, or not at all."""
    value = tensor_of(node)
    source = input_of(node, gm)
    whole = tensor_of(source)
    if value is None or whole is None or whole._version == 0:
        return False
    last = hint(value.storage_offset()) + sum((hint(n) - 1) * hint(s) for n, s in zip(value.shape, value.stride()))
    return hint(whole.storage_offset()) != 0 or not is_dense(whole) or last >= hint(whole.numel())


def merged(compiled: Callable[..., Any], views: GraphModule, places: Sequence[int], count: int) -> Callable[..., Any]:
    """The compiled graph's results with the views in their places."""
    where = {place: i for i, place in enumerate(places)}

    def call(*inputs: Any) -> tuple[Any, ...]:
        rest = iter(compiled(*inputs))
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # what the views change is put back
            made = views(*inputs)
        return tuple(made[where[i]] if i in where else next(rest) for i in range(count))

    return call


def changes_what_tensors_are(gm: GraphModule) -> bool:
    """Whether an input may be another view after the graph than before, or modes are entered that views depend on."""
    names = {name_of(n) for n in gm.graph.nodes if n.op in ("call_method", "call_function")}
    return not names.isdisjoint(LAYS_OUT | _MODES)


def chain(result: Node) -> list[Node] | None:
    """The input and the views from it to a result, with the sizes that they name; None if that is not all there is to it."""
    value = tensor_of(result)
    if value is None or is_traceable_wrapper_subclass(value):
        return None
    found: dict[Node, None] = {}
    return list(found) if _reach(resolved(result), value, found) else None


def _reach(node: Node, whole: torch.Tensor, found: dict[Node, None]) -> bool:
    """Add what a view is made of, sources first; False if something else than views and sizes is among it."""
    if node in found:
        return True
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor) and not shares(value, whole):
        return _add(node, found) if node.op == "placeholder" and value.layout == torch.strided else False
    if node.op == "placeholder":
        return _add(node, found)
    if node.op not in ("call_method", "call_function") or not _may_be_called_again(node):
        return False
    if isinstance(value, (torch.Tensor, tuple, list)):
        if not any(reads(resolved(n), whole) for n in node.all_input_nodes):  # made here, and not a view
            return False
    elif not _only_asks_for_sizes(node):
        return False
    if written(node) is not None or not all(_reach(resolved(n), whole, found) for n in node.all_input_nodes):
        return False
    return _add(node, found)


def _only_asks_for_sizes(node: Node) -> bool:
    """Whether a number depends on no element of a tensor, as that of ``item`` does."""
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]
    return not tensors or name_of(node) in SIZES


def _add(node: Node, found: dict[Node, None]) -> bool:
    found[node] = None
    return True


def _may_be_called_again(node: Node) -> bool:
    """Whether a call does nothing but make a view, or a number of numbers and sizes."""
    target = node.target
    if isinstance(target, OpOverload):
        return not target._schema.is_mutable
    if isinstance(target, OpOverloadPacket):
        return not any(s.is_mutable for s in target._schemas.values())
    if node.op == "call_method":
        return target in VIEWS or target in SIZES
    module = getattr(target, "__module__", None) or type(target).__module__
    numbers = module.split(".")[0] in ("_operator", "operator", "math", "builtins") or name_of(node).startswith("sym_")
    if numbers and not _has_tensors(node):
        return True
    return name_of(node) in VIEWS | SIZES and not module.startswith(("torch._dynamo", "torch._C._functorch"))


def _has_tensors(node: Node) -> bool:
    return any(isinstance(n.meta.get("example_value"), torch.Tensor) for n in (node, *node.all_input_nodes))


def resolved(node: Node) -> Node:
    """What a call that writes to its operand gives back: that operand."""
    while (target := written(node)) is not None and name_of(node) != "setitem":
        node = target
    return node


def input_of(node: Node, gm: GraphModule) -> Node | None:
    """The input whose memory a value reads."""
    value = tensor_of(node)
    if value is None or is_traceable_wrapper_subclass(value):
        return None
    inputs = gm.graph.find_nodes(op="placeholder")
    return next((n for n in inputs if shares(n.meta.get("example_value"), value)), None)


def replay(gm: GraphModule, chains: Sequence[Sequence[Node]]) -> GraphModule:
    """A function of the inputs of ``gm`` that makes the ends of chains, each view in the grad mode that it stood in."""
    wanted = {n for c in chains for n in c}
    graph, made = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            made[node] = graph.placeholder(node.name)
        elif name_of(node) == "_set_grad_enabled":
            graph.call_function(node.target, node.args)
        elif node in wanted:
            made[node] = graph.node_copy(node, lambda n: made[resolved(n)])
    graph.output(tuple(made[c[-1]] for c in chains))
    return GraphModule(gm, graph)
