"""Calls whose meaning AOTAutograd changes while it traces: a table, since no error tells of them.

1. AOTAutograd decomposes some ATen operators in Python before autograd sees them (those with a Python kernel for the key
   ``Autograd``); some of those decompositions disagree with the operator.
2. It makes writes functional, also those that eager refuses: into memory that several elements share, or that overlaps
   with what is read.
3. It takes what ``split`` and its kind give for memory of its own.  The gradient of a result that overlaps itself, and is a
   view of such a part, is then taken in the strides of the result, and elements overwrite one another.  What is laid out
   anew in place (``transpose_``) is no base for such views either.

The graph that holds such a call runs in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc.dynamo import LAYS_OUT, is_named_as_write, name_of, tensor_of
from dsc.layouts import is_dense, overlaps, reads, repeats, shares

Trap = Callable[[dict[str, Any]], str | None]
"""Arguments by name -> what goes wrong with them, or None."""


def find(gm: GraphModule) -> str | None:
    """What AOTAutograd would compute wrongly in a Dynamo graph, with the first call that it happens to."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op in ("call_function", "call_method") and (found := _check(node)) is not None:
                return found
    if any(_overlaps_in_a_part(r) for r in gm.graph.output_node().all_input_nodes):
        return "AOTAutograd takes gradients of overlapping parts in their own memory"
    return None


def _overlaps_in_a_part(result: Node) -> bool:
    """Case 3, of what the graph computes; views of inputs are made outside of it (``dsc.aliases``)."""
    value = tensor_of(result)
    if value is None or not value.requires_grad or not overlaps(value):
        return False
    node, part = result, False
    while node.op != "placeholder":
        above = [a for a in node.all_input_nodes if reads(a, value)]
        if not above:
            return part
        node = above[0]
        part = part or isinstance(node.meta.get("example_value"), (tuple, list)) or name_of(node) in LAYS_OUT
    return False


def keeps_writes(gm: GraphModule) -> bool:
    """Whether writes to inputs may stand in the graph, rather than be made behind it.

    AOTAutograd (``create_functionalized_fn``) puts a written input in the place of the result that is that input, but
    forgets that inputs whose writes must be made behind the graph, since they want gradients or get another layout, go
    before the results: with such a write beside it, it overwrites another result.
    """
    values = {n: n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")}
    inputs = [v for v in values.values() if isinstance(v, torch.Tensor)]
    results = [v for n in gm.graph.output_node().all_input_nodes if (v := tensor_of(n)) is not None]
    if not any(shares(r, x) for r in results for x in inputs if x.layout == torch.strided):
        return True
    lays_out = any(name_of(n) in LAYS_OUT for n in gm.graph.nodes)
    return not (lays_out or any(x.requires_grad for x in inputs))


def _check(node: Node) -> str | None:
    name = name_of(node)
    if (written := _written(node, name)) is not None:
        if repeats(written):
            return f"{name} writes to a tensor several elements of which are one place in memory"
        if any(_meet(written, t) for t in map(tensor_of, node.args[1:]) if t is not None):
            return f"{name} writes to memory that it reads elsewhere"
    if name not in TRAPS:
        return None
    parameters, trap = TRAPS[name]
    return trap({**dict(zip(parameters.split(), node.args)), **node.kwargs})


def _multilabel_margin(arguments: dict[str, Any]) -> str | None:
    """The decomposition does not stop a row at its first -1: pytorch/pytorch#185464."""
    return "AOTAutograd misreads the targets of multilabel_margin_loss"


def _dropout(arguments: dict[str, Any]) -> str | None:
    """With p of 1, eager draws no random numbers; native_dropout, to which it is decomposed, does."""
    p = arguments.get("p", 0.5)
    training = arguments.get("training", arguments.get("train", True))
    if isinstance(p, Node):
        p = p.meta.get("example_value")  # a symbol: to ask whether it is 1 adds a guard
    if training and p == 1:
        return "AOTAutograd draws random numbers for dropout with p=1, and eager does not"
    return None


def _of_several_dtypes(arguments: dict[str, Any]) -> str | None:
    """The dtype of the result is that of the input in eager, and the promoted one to fake tensors."""
    x, y = tensor_of(arguments.get("input")), tensor_of(arguments.get("target"))
    if x is not None and y is not None and x.dtype != y.dtype:
        return "AOTAutograd foresees another dtype for a loss of operands of several dtypes"
    return None


def _alpha_dropout(arguments: dict[str, Any]) -> str | None:
    """Not in place; see ``dsc.repair`` for the other.  The mask is drawn in the order of memory."""
    t, training = tensor_of(arguments.get("input")), arguments.get("training", arguments.get("train", False))
    if training and t is not None and arguments.get("inplace") is not True and not t.is_contiguous():
        return "AOTAutograd draws alpha_dropout in another order for tensors that are not contiguous"
    return None


def _rrelu(arguments: dict[str, Any]) -> str | None:
    """Eager draws slopes element by element as they lie in a contiguous copy, the decomposition in the order of memory."""
    t, training = tensor_of(arguments.get("input")), arguments.get("training", False)
    if training and t is not None and not t.is_contiguous():
        return "AOTAutograd draws rrelu in another order for tensors that are not contiguous"
    return None


def _native_dropout(arguments: dict[str, Any]) -> str | None:
    """Eager gives the operand itself back where it has no elements, as depending on itself."""
    t = tensor_of(arguments.get("input"))
    if t is not None and any(isinstance(n, int) and n == 0 for n in t.shape):
        return "AOTAutograd makes a new tensor of native_dropout of no elements"
    return None


def _normal(arguments: dict[str, Any]) -> str | None:
    """Eager fills contiguous memory in blocks and other memory one by one; made functional, the latter becomes the former."""
    t = tensor_of(arguments.get("self"))
    if t is not None and not t.is_contiguous() and not is_dense(t):
        return "AOTAutograd draws normal numbers in another order for tensors with gaps"
    return None


def _softshrink(arguments: dict[str, Any]) -> str | None:
    """Eager gives the gradient of a nan as it is for large values, the decomposition that of small ones."""
    return "AOTAutograd changes the gradient of softshrink at nan"


def _recurrent(arguments: dict[str, Any]) -> str | None:
    """Eager calls one operator; the decomposition draws other numbers for dropout, or saves what autograd refuses."""
    if arguments.get("dropout") and arguments.get("train"):
        return "AOTAutograd draws the dropout between recurrent layers otherwise"
    return None


def _written(node: Node, name: str) -> torch.Tensor | None:
    """What an in-place method, or an assignment to a part that numbers and slices name, writes to."""
    if node.op == "call_method" and is_named_as_write(name):
        return tensor_of(node.args[0])
    if name != "setitem" or (whole := tensor_of(node.args[0])) is None:
        return None
    place = node.args[1]
    parts = place if isinstance(place, tuple) else (place,)
    plain = all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)
    if not plain or not shares(tensor_of(node.args[2]), whole):
        return None
    part = whole[place]  # type: ignore[index]  # the place is a plain one
    return part if isinstance(part, torch.Tensor) else None


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Two dense blocks of one storage overlap and are not the same: ``at::get_overlap_status``."""
    if not shares(a, b) or not (a.is_contiguous() and b.is_contiguous()):
        return False
    spans = [(t.storage_offset(), t.numel()) for t in (a, b)]
    if not all(isinstance(n, int) for span in spans for n in span) or spans[0] == spans[1]:
        return False
    (x, n), (y, m) = spans
    return x < y + m and y < x + n


def _interpolate(arguments: dict[str, Any]) -> str | None:
    """Eager keeps bicubic weights in 32 bits where the decomposition rounds each to 16; of bytes, both kinds differ."""
    t, mode = tensor_of(arguments.get("input")), arguments.get("mode", "bicubic")
    if mode == "bicubic" and (t is None or t.dtype in (torch.float16, torch.bfloat16)):
        return "AOTAutograd rounds bicubic interpolation otherwise in 16 bits"
    if mode in ("linear", "bilinear", "bicubic", "trilinear") and t is not None and t.dtype == torch.uint8:
        return "AOTAutograd rounds the interpolation of bytes otherwise"
    return None


_RECURRENT = "input hx params has_biases num_layers dropout train bidirectional batch_first"

TRAPS: Mapping[str, tuple[str, Trap]] = {
    "multilabel_margin_loss": ("input target", _multilabel_margin),
    "dropout": ("input p training", _dropout),
    "dropout_": ("input p training", _dropout),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (_RECURRENT, _recurrent)),
    "softshrink": ("input lambd", _softshrink),
    "alpha_dropout": ("input p training inplace", _alpha_dropout),
    **dict.fromkeys(("native_dropout", "native_dropout.default"), ("input p train", _native_dropout)),
    "rrelu": ("input lower upper training inplace", _rrelu),
    "normal_": ("self mean std", _normal),
    **dict.fromkeys(("huber_loss", "soft_margin_loss"), ("input target", _of_several_dtypes)),
    "upsample_bicubic2d": ("input", _interpolate),
    "upsample_bilinear2d": ("input", _interpolate),
    "interpolate": ("input size scale_factor mode align_corners", lambda a: _interpolate({"mode": "nearest", **a})),
}
"""Name of a function, its first parameters, and the check."""
