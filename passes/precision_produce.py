"""Round values to 8 bits in the kernel that computes them: they are never written in 16 bits, nor read again."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from dsc import ops
from dsc.passes.precision_apply import aten, fake
from dsc.passes.precision_maxima import WIDE
from dsc.precision import ops as eight


def fuse_producers(gm: GraphModule) -> list[Node]:
    """``quantise_both(view(gelu(x)))`` -> ``quantise_of([view(x)], "gelu")``, where nothing else reads the value.

    The operators are those of ``dsc.precision.ops.PRODUCERS``.  It must not fire where the backward, or a product in
    another format, reads the value too, nor where a scale needs the maximum of a row or of all (``precision_maxima``).
    Returns the new nodes.
    """
    out = []
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is eight.quantise_both and node.args[2] not in WIDE:
            found = producer(ops.operand(node, 0))
            if found is not None:
                out.append(_replace(gm, node, *found))
    return out


def producer(value: Node) -> tuple[str, list[Node]] | None:
    """The name and the inputs of what makes a value that has one reader, through one view that changes its shape."""
    made = value
    if ops.is_view(value) and len(value.users) == 1:
        made = ops.operand(value, 0)
    if len(made.users) != 1 or made.op != "call_function":
        return None
    match ops.name_of(made):
        case "gelu.default":
            name = "gelu_tanh" if made.kwargs.get("approximate") == "tanh" else "gelu"
            inputs = [ops.operand(made, 0)]
        case "relu.default":
            name, inputs = "relu", [ops.operand(made, 0)]
        case "mul.Tensor" | "add.Tensor" if len(made.args) == 2 and not made.kwargs:
            left, right = made.args
            if not isinstance(left, Node) or not isinstance(right, Node):
                return None
            name, inputs = "add", [left, right]
            if ops.name_of(made) == "mul.Tensor":
                if ops.name_of(left) != "silu.default":
                    return None
                name, inputs = "silu_mul", [ops.operand(left, 0), right]
        case _:
            return None
    whole = ops.tensor(made)
    like = all(ops.tensor(i).shape == whole.shape and ops.tensor(i).dtype == whole.dtype for i in inputs)
    return (name, inputs) if like and ops.tensor(value).dim() == 2 else None


def _replace(gm: GraphModule, node: Node, name: str, inputs: list[Node]) -> Node:
    shape = list(ops.tensor(ops.operand(node, 0)).shape)
    _, dtype, grain = node.args
    with gm.graph.inserting_before(node):
        flat = []
        for i in inputs:
            view = i
            if ops.tensor(i).dim() != 2:
                view = gm.graph.call_function(aten.reshape.default, (i, shape))
                view.meta = {k: v for k, v in node.meta.items() if k != "val"}
                view.meta["val"] = fake(aten.reshape.default, [i, shape])
            flat.append(view)
        made = gm.graph.call_function(eight.produced, (flat, name, dtype, grain))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    value = ops.operand(node, 0)
    gm.graph.erase_node(node)
    while value.op == "call_function" and not value.users:  # the view, and what it showed
        before = ops.operand(value, 0)
        gm.graph.erase_node(value)
        value = before
    return made
