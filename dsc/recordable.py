"""Why the launches of a graph could not be recorded once and replayed: what a CUDA graph cannot hold, or would freeze."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from dsc import ops
from dsc.runtime.state import is_attribute
from dsc.steps import storage_of
from dsc.torch_shim import OpOverload

OURS = ("aten", "prims", "dsc")
"""Namespaces of operators that do the same on the host at every call; others may not."""
ON_HOST = frozenset("dsc.offload dsc.offloaded dsc.fetch dsc.fetched dsc.rng_state dsc.set_rng_state dsc.given".split())
"""Our own that wait for the host, or read what it holds."""
WAITS = frozenset(
    "_linalg_check_errors _linalg_eigh _linalg_svd linalg_eig linalg_eigvals linalg_lstsq cholesky inverse linalg_cholesky"
    " linalg_inv multinomial bincount histc histogram _ctc_loss randperm unique_consecutive _unique2 masked_select"
    " nonzero nonzero_static _assert_async _assert_scalar _convolution_double_backward".split()
)
"""ATen's that look at results on the host, on some inputs at least."""


def refusals(gm: GraphModule, device: str) -> tuple[str, ...]:
    """The reasons, one for each kind of obstacle, in the order of the graph; none: it can be recorded.

    1. Something waits for the device: a number becomes Python's, a size depends on values, a result is checked.
    2. A tensor lies elsewhere than on ``device``: copies between them wait, and what is on the host would be frozen.
    3. State that lives between steps, collectives, calls of other libraries, graphs within graphs, generators of the
       user's own.
    """
    found: dict[str, None] = {}
    for n in gm.graph.nodes:
        if (why := _refusal(n, device)) is not None:
            found.setdefault(why, None)
    return tuple(found)


def _refusal(n: Node, device: str) -> str | None:
    if n.op == "get_attr" and is_attribute(n.target):
        return "it reads or writes state that lives between steps"
    for t in _tensors(n.meta.get("val")):
        if t.device.type != device:
            return f"{n.name} is on {t.device.type}, not on {device}"
    if n.op != "call_function" or ops.info(n).kind in ("view", "item"):
        return None
    if not isinstance(n.target, OpOverload):
        if isinstance(n.target, torch._ops.HigherOrderOperator):
            return f"{n.name} runs a graph of its own"
        return None  # sizes
    namespace, packet = n.target.namespace, n.target.overloadpacket.__name__
    if namespace not in OURS:
        return f"{namespace}.{packet} is not PyTorch's: what it does on the host would be done once"
    if ops.info(n).kind == "collective":
        return f"{packet} talks to other processes"
    if f"{namespace}.{packet}" in ON_HOST or packet in WAITS or _waits(n):
        return f"{packet} waits for the device, or for the host"
    if n.kwargs.get("generator") is not None:
        return f"{packet} draws from a generator of its own"
    return None


def _waits(n: Node) -> bool:
    """By the tags of the operator; an index of integers has results of known sizes, though its operator is tagged."""
    tags = {t.name for t in getattr(n.target, "tags", ())}
    if tags & {"data_dependent_output", "cudagraph_unsafe"}:
        return True
    if "dynamic_output_shape" not in tags:
        return False
    indices = [t for a in n.args[1:2] if isinstance(a, (list, tuple)) for x in a for t in _tensors(_value(x))]
    return ops.name_of(n) != "index.Tensor" or any(t.dtype in (torch.bool, torch.uint8) for t in indices)


def written(gm: GraphModule) -> tuple[int, ...]:
    """Places of the inputs that the graph writes to."""
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    targets = {storage_of(w) for n in gm.graph.nodes if n.op == "call_function" for w in ops.mutated(n)}
    return tuple(sorted(places[t] for t in targets if t in places))


def _value(x: object) -> object:
    return x.meta.get("val") if isinstance(x, Node) else None


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []
