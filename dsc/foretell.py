"""Strides as ATen will give them, where the fake tensors of a trace have others.

Fake pointwise results are not always laid out as ``TensorIterator`` lays out real ones (``dsc.ops.layout``), nor those of
batch norms as ATen lays them out, and whatever
is computed from them follows: kernels write their results by the fake strides.  So these are put right before anything
reads them.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dsc import ops


def correct(gm: GraphModule) -> list[Node]:
    """Give nodes fake values with the strides of eager; which ones changed.

    Those that read a changed value are computed anew, on fake tensors.  Where the true strides allow no such view, eager
    has copied (``reshape``), and so does the graph then; where anything else is refused it stays as it was traced.
    """
    before: dict[Node, object] = {}
    copies: list[Node] = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        moved = not before.keys().isdisjoint(node.all_input_nodes)
        try:
            if moved and ops.is_view(node) and not allowed(node):
                copies.append(copy_for(gm, node))
            found = truth(node, moved)
        except Exception:  # whatever fake tensors raise
            return restore(gm, before, copies)
        if found is not None:
            before[node] = node.meta["val"]
            node.meta["val"] = found
    return list(before)


def allowed(view: Node) -> bool:
    try:
        again(view)
    except (RuntimeError, ValueError):
        return False
    return True


def copy_for(gm: GraphModule, view: Node) -> Node:
    """A contiguous copy of what the view looks at, in front of it."""
    source = ops.operand(view, 0)
    with gm.graph.inserting_before(view):
        made = gm.graph.call_function(
            torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
        )
    made.meta = {**source.meta, "val": again(made)}
    view.replace_input_with(source, made)
    return made


def restore(gm: GraphModule, before: dict[Node, object], copies: list[Node]) -> list[Node]:
    """The graph as it was traced."""
    for node, value in before.items():
        node.meta["val"] = value
    for made in copies:
        made.replace_all_uses_with(ops.operand(made, 0))
        gm.graph.erase_node(made)
    return []


def truth(node: Node, moved: bool) -> object | None:
    """The true fake value of a node if it is another than the one it has; ``moved``: one of its operands changed."""
    value = node.meta.get("val")
    if moved and node.target is operator.getitem:
        source = ops.value(ops.operand(node, 0))
        fresh = source[node.args[1]] if isinstance(source, (tuple, list)) else value  # type: ignore[index]
        return fresh if strides(fresh) != strides(value) else None
    if moved and isinstance(node.target, torch._ops.OpOverload):
        fresh = again(node)
        if fresh is not None and strides(fresh) != strides(value):
            right = pointwise(node, fresh)
            return fresh if right is None else right
    return pointwise(node, value)


def again(node: Node) -> object | None:
    """The node on the fake values of its operands, None where they have no fake mode."""
    operands = [x for n in node.all_input_nodes if isinstance(x := ops.value(n), torch.Tensor)]
    mode = next((x.fake_mode for x in operands if hasattr(x, "fake_mode")), None)
    if mode is None:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), ops.value)  # type: ignore[arg-type]  # values, not arguments
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator,no-any-return]


def pointwise(node: Node, value: object) -> object | None:
    """A fake tensor with the strides of a pointwise result, where ``value`` has others; likewise the first of several."""
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], torch.Tensor):
        want = ops.foretold_first(node, value[0])
        if want is None or want == value[0].stride():
            return None
        return (value[0].new_empty_strided(value[0].shape, want), *value[1:])
    if not isinstance(value, torch.Tensor):
        return None
    want = ops.foretold(node, value)
    if want is None or want == value.stride():
        return None
    return value.new_empty_strided(value.shape, want)


def strides(value: object) -> object:
    """Of a tensor or of each of several."""
    if isinstance(value, (tuple, list)):
        return tuple(map(strides, value))
    return tuple(value.stride()) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None
