"""Values that a graph makes of nothing but constants, such as causal masks."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.torch_shim import OpOverload

LARGEST = 1 << 26
"""Elements of a value that is looked at: a mask of 8192 x 8192."""
MOST = 64
"""Nodes that are computed for it."""


def constant(gm: GraphModule, node: Node) -> torch.Tensor | None:
    """What a node is in every call, on the CPU, or None if it depends on an input, on chance, or on a size.

    To be called where no fake tensors are made.
    """
    order: dict[Node, None] = {}
    if not _known(node, order):
        return None
    values: dict[Node, Any] = {}
    for n in order:
        if n.op == "get_attr":
            value = getattr(gm, str(n.target), None)
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or type(value) is not torch.Tensor:
                return None
            values[n] = value
            continue
        args, kwargs = torch.fx.node.map_arg((n.args, dict(n.kwargs)), values.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # a value only its device can make
            return None
    found = values[node]
    return found if isinstance(found, torch.Tensor) else None


def _known(n: Node, order: dict[Node, None]) -> bool:
    """Whether all that a node needs is constant and small; ``order`` gets it, operands first."""
    if n in order:
        return True
    if n.op == "get_attr":
        order[n] = None
        return True
    if n.op != "call_function" or not isinstance(n.target, OpOverload) or len(order) >= MOST:
        return False
    if torch.Tag.nondeterministic_seeded in n.target.tags or n.target._schema.is_mutable:
        return False
    value = ops.value(n)
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int) or value.numel() > LARGEST:
        return False
    if any(isinstance(a, torch.SymInt) for a in (*value.shape, *n.args)):
        return False
    if not all(_known(a, order) for a in n.all_input_nodes):
        return False
    order[n] = None
    return True
