"""Graphs for another device than the one they were traced on: a model traced on a CPU becomes a CUDA program.

Nothing here needs a GPU: fake tensors carry the device.  Not seen: Python that branches on ``x.is_cuda``, and the
differences between the lists of operators that autocast casts on a CPU and on CUDA.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from dsc import errors, ops, sdpa
from dsc.torch_shim import RNG_CALLS, FakeTensor, FakeTensorMode, OpOverload, detect_fake_mode

aten = torch.ops.aten
ATTENTION = (
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
STATISTICS: Mapping[Any, tuple[int, int]] = {
    aten.native_layer_norm_backward.default: (3, 5),
    aten.native_batch_norm_backward.default: (5, 7),
}
"""Places of operands that have 32 bits on CUDA where a CPU rounds them to the 16 of the input."""
FLASH_RESULTS = (0, 1, 6, 7)
"""Output, logsumexp, seed and offset among the results of the flash kernel."""
CUDA_RNG_BYTES = 16
"""Size of a CUDA generator's state: a seed and an offset, in CPU memory."""


def prepare(gm: GraphModule) -> None:
    """In a Dynamo graph, before AOTAutograd: attention chooses its kernel as on CUDA (see ``dsc.sdpa.attention``).

    The graph still runs on a CPU, with the same values unless there is dropout.
    """
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        found = [n for n in module.graph.nodes if n.op == "call_function" and n.target in ATTENTION]
        for node in found:
            node.target = sdpa.attention
        if found:
            module.recompile()


def to_device(gm: GraphModule, device: torch.device) -> None:
    """Make an ATen graph (joint, forward or backward) that was traced on a CPU one for ``device``, in place.

    1. Fake values move to the device, with their sizes and strides; each operator tells anew what it returns there (on
       CUDA the statistics of a 16-bit layer norm have 32 bits).
    2. A CPU device among the arguments of an operator becomes ``device``.
    3. ``dsc::sdpa`` and its backward become the CUDA kernels that they stand for.
    4. Constants of the graph are copied to the device where they are read; the state of a generator stays on the CPU.

    Raises:
        CpuOnly: an operator that exists on the CPU alone.
    """
    mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    mover = _Mover(mode, device, _states(gm))
    for node in list(gm.graph.nodes):
        match node.op:
            case "placeholder":
                node.meta["val"] = mover.input(node)
            case "get_attr" if isinstance(mover.moved(node.meta.get("val")), torch.Tensor):
                _copied(gm, node, mover)
            case "call_function":
                mover.call(gm, node)
            case _:
                pass
        node.meta.pop("tensor_meta", None)  # strides may be others now
        node.meta.pop("example_value", None)
    gm.recompile()


class _Mover:
    def __init__(self, mode: FakeTensorMode | None, device: torch.device, states: frozenset[Node]) -> None:
        self.mode, self.device, self.states = mode, device, states

    def moved(self, value: Any) -> Any:
        """The same fake values on the device."""

        def one(t: Any) -> Any:
            if not isinstance(t, FakeTensor) or t.device.type != "cpu":
                return t
            with t.fake_mode:
                made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self.device)
            return made.requires_grad_(t.requires_grad) if t.requires_grad else made

        return pytree.tree_map(one, value)

    def input(self, node: Node) -> Any:
        value = node.meta.get("val")
        if node in self.states:
            return _state(value)
        wide = any(node in u.args[slice(*STATISTICS[u.target])] for u in node.users if u.target in STATISTICS)
        if wide and isinstance(value, FakeTensor) and value.dtype in sdpa.HALF:  # in a graph already split
            with value.fake_mode:
                value = torch.empty_strided(value.shape, value.stride(), dtype=torch.float32)
        return self.moved(value)

    def call(self, gm: GraphModule, node: Node) -> None:
        if isinstance(node.target, OpOverload) and _cpu_only(node.target):
            raise errors.CpuOnly(str(node.target), node.name, str(self.device))
        if (rule := ATTENTION_OF.get(node.target)) is not None:
            rule(gm, node, self)
        node.args = map_aggregate(node.args, self.device_of)
        node.kwargs = map_aggregate(node.kwargs, self.device_of)
        if "val" in node.meta or node.target is operator.getitem:
            node.meta["val"] = self.result(node)

    def device_of(self, a: Any) -> Any:
        return self.device if isinstance(a, torch.device) and a.type == "cpu" else a

    def result(self, node: Node) -> Any:
        """What the operator says that it returns for operands on the device; where it cannot say, what it did before."""
        old: Any = node.meta.get("val")
        if node in self.states:
            return _state(old)
        if _saves_state(node):
            return (_state(old[0]), self.moved(old[1]))
        if not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
            return self.moved(old)
        if isinstance(node.target, OpOverload) and UNKNOWN_SIZES & set(node.target.tags):
            return self.moved(old)  # the sizes have their symbols already
        target: Callable[..., Any] = node.target
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        try:
            with self.mode or nullcontext():
                new = target(*args, **kwargs)
        except Exception:
            return self.moved(old)
        return new if _same_shapes(old, new) else self.moved(old)


UNKNOWN_SIZES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _same_shapes(old: Any, new: Any) -> bool:
    pairs = list(zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=False))
    return all(a.shape == b.shape for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor))


def _cpu_only(op: OpOverload) -> bool:
    name: str = op._schema.name
    return "_for_cpu" in name or name.startswith(("mkldnn::", "mkl::", "aten::mkldnn_"))


def _copied(gm: GraphModule, node: Node, mover: _Mover) -> None:
    """A constant of the graph, which stays where it is -> its copy on the device."""
    with gm.graph.inserting_after(node):
        copy = gm.graph.call_function(aten._to_copy.default, (node,), {"device": mover.device})
    copy.meta["val"] = mover.moved(node.meta["val"])
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


# The generator's state, by which the backward repeats random numbers of the forward.


def _saves_state(node: Node) -> bool:
    return RNG_CALLS.get(getattr(node.target, "__name__", "")) == "saves"


def _states(gm: GraphModule) -> frozenset[Node]:
    """Nodes that hold a generator's state."""
    saved = {u for n in gm.graph.nodes if _saves_state(n) for u in n.users if u.args[1] == 0}
    read = {n.args[0] for n in gm.graph.nodes if RNG_CALLS.get(getattr(n.target, "__name__", "")) == "restores"}
    return frozenset(n for n in saved | read if isinstance(n, Node))


def _state(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty(CUDA_RNG_BYTES, dtype=torch.uint8)


# dsc::sdpa -> CUDA's kernels.


def _forward(gm: GraphModule, node: Node, mover: _Mover) -> None:
    q, k, v, mask, dropout, causal, scale, kernel = _arguments(node)
    node.kwargs = {"scale": scale}
    if kernel == "flash":
        node.target = aten._scaled_dot_product_flash_attention.default
        node.args = (q, k, v, dropout, causal, False)
        for user in list(node.users):
            user.args = (node, FLASH_RESULTS[user.args[1]])  # type: ignore[index]
        return
    node.target = aten._scaled_dot_product_efficient_attention.default
    node.args = (q, k, v, mask, any(u.args[1] == 1 and u.users for u in node.users), dropout, causal)


def _backward(gm: GraphModule, node: Node, mover: _Mover) -> None:
    g, q, k, v, mask, out, lse, seed, offset, dropout, causal, scale, kernel = _arguments(node)
    node.kwargs = {"scale": scale}
    if kernel == "flash":
        lengths = [_length(gm, node, x) for x in (q, k)]
        node.target = aten._scaled_dot_product_flash_attention_backward.default
        node.args = (g, q, k, v, out, lse, None, None, *lengths, dropout, causal, seed, offset)
        return
    node.target = aten._scaled_dot_product_efficient_attention_backward.default
    node.args = (g, q, k, v, mask, out, lse, seed, offset, dropout, [True, True, True, False], causal)


def _arguments(node: Node) -> list[Any]:
    """By position, defaults filled in."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :])]


def _length(gm: GraphModule, before: Node, x: Node) -> int | Node:
    """Tokens of [B, H, T, D]: a number, or a node where it is a symbol."""
    length = ops.tensor(x).shape[2]
    if isinstance(length, int):
        return length
    with gm.graph.inserting_before(before):
        node = gm.graph.call_function(aten.sym_size.int, (x, 2))
    node.meta["val"] = length
    return node


ATTENTION_OF: Mapping[Any, Callable[[GraphModule, Node, _Mover], None]] = {
    torch.ops.dsc.sdpa.default: _forward,
    torch.ops.dsc.sdpa_backward.default: _backward,
}
