"""Which calls of the forward may run a second time in the backward, and how they then run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from dsc import cost, ops, replay
from dsc.passes.recompute import Joint
from dsc.torch_shim import OpOverload

PURE_NAMESPACES = frozenset({"aten", "prims", "dsc"})
UNSTEADY = frozenset(
    "index_put scatter_add scatter_reduce index_add index_reduce bincount histc cumsum_backward _unsafe_index_put "
    "put scatter".split()
)
"""Sums in an order that CUDA does not fix: twice is not the same."""
FORM_ONLY = frozenset(
    "native_dropout.default bernoulli.p rand_like.default randn_like.default empty_like.default".split()
)
"""What they make, the result of a dropout left out, depends on the operand's sizes, strides and dtype alone."""

Where = Callable[[Node], Node]
"""The node to read in the new graph for one of the old."""


def why_not_again(node: Node, joint: Joint) -> str | None:
    """Why a forward call must not run twice; None if it may.

    1. Random calls of ATen run again from the state that their generator had; those with a generator of their own, or
       on devices whose state ``dsc.replay`` cannot read, are run once: a mask is saved, from which the result of a
       dropout can be had again.  Attention without dropout draws nothing, whatever its tag says.
    2. Collectives, calls that write to an operand, and calls with effects run once.
    3. Operators of other libraries promise nothing; higher-order calls hide a graph.
    4. Sizes that the data decide, and sums whose order CUDA does not fix, may come out otherwise.
    5. What reads an input that the graph writes would read what was written.
    """
    target = node.target
    if is_dropped(node):
        return None
    if not isinstance(target, OpOverload):
        return "a call that hides a graph"
    kind = ops.info(node).kind
    if kind == "collective":
        return "a collective"
    if draws(node) and not replays(node):
        return "it draws random numbers"
    if target._schema.is_mutable or node.is_impure(impure_random=False):
        return "it writes to an operand"
    if target.namespace not in PURE_NAMESPACES:
        return "an operator that promises nothing"
    if torch.Tag.dynamic_output_shape in target.tags or torch.Tag.data_dependent_output in target.tags:
        return "its size depends on data"
    if target.overloadpacket.__name__ in UNSTEADY:
        return "a sum whose order is not fixed"
    if any(joint.root.get(a, a) in joint.written for a in inputs_again(node)):
        return "it reads an input that the graph writes"
    return None


def draws(node: Node) -> bool:
    """Whether a call takes numbers from a generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = cost.arguments(node)
    rates = [given[k] for k in ("dropout_p", "dropout", "p") if k in given]
    return not (rates and rates[0] == 0 and cost.unit(node) == "attention")


def replays(node: Node) -> bool:
    """Whether a call draws, from the default generator of a device whose state can be read and set."""
    target = node.target
    if not draws(node) or not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    if target.namespace not in PURE_NAMESPACES or cost.arguments(node).get("generator") is not None:
        return False
    return device_of(node).type in replay.STATE_BYTES


def device_of(node: Node) -> torch.device:
    """Where a call makes its results."""
    v = ops.value(node)
    tensors = [t for t in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(t, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("meta")


def inputs_again(node: Node) -> list[Node]:
    """What a call reads when it runs again (see ``call_again``)."""
    if is_dropped(node):
        dropout = ops.operand(node, 0)
        mask = mask_of(dropout)
        return [ops.operand(dropout, 0)] + ([mask] if mask is not None else [])
    if needs_form_only(node):
        return []
    unused = {a for a in node.args[3:5] if isinstance(a, Node)} if is_training_norm(node) else set()
    return [a for a in node.all_input_nodes if a not in unused]


def needs_form_only(node: Node) -> bool:
    """Whether an empty tensor can stand in for the operand of a call that runs again."""
    if ops.name_of(node) not in FORM_ONLY or len(node.all_input_nodes) != 1:
        return False
    t = ops.tensor(ops.operand(node, 0))
    if t.layout != torch.strided or not all(isinstance(s, int) for s in (*t.shape, *t.stride())):
        return False
    items = [u for u in node.users if ops.info(u).kind == "item" and u.args[1] == 0]
    return ops.name_of(node) != "native_dropout.default" or all(map(is_dropped, items))


def is_training_norm(node: Node) -> bool:
    """A batch norm that normalizes by its batch, with weights that can stand in for the statistics that it updates."""
    if ops.name_of(node) != "_native_batch_norm_legit_functional.default" or node.args[5] is not True:
        return False
    weight, mean = node.args[1], node.args[3]
    if not isinstance(weight, Node) or not isinstance(mean, Node):
        return False
    return ops.tensor(weight).dtype == ops.tensor(mean).dtype


def is_dropped(node: Node) -> bool:
    """The result of a dropout whose mask is a value of its own: from that it can be computed again, with no new draw."""
    if ops.info(node).kind != "item" or node.args[1] != 0 or not isinstance(node.args[0], Node):
        return False
    dropout = node.args[0]
    if ops.name_of(dropout) != "native_dropout.default" or mask_of(dropout) is None:
        return False
    return dropout.args[2] is True and isinstance(dropout.args[1], float) and 0 < dropout.args[1] < 1


def mask_of(dropout: Node) -> Node | None:
    return next((u for u in dropout.users if u.args[1] == 1), None)


def call_again(graph: Graph, node: Node, where: Where, at_hand: Callable[[Node], bool] = lambda _: True) -> Node:
    """The copy of a call that runs again, with its operands as ``where`` gives them.

    1. A batch norm in training: nobody reads its new statistics, and its weight stands in for the old ones.
    2. The result of a dropout is what its backward would make of the input: ``x * mask / (1 - p)``.
    3. A call that needs the form of its operand alone reads an empty tensor, unless the operand is at hand.
    """
    if is_training_norm(node):
        weight = node.args[1]
        return graph.node_copy(node, lambda a: where(weight if a in node.args[3:5] else a))  # type: ignore[arg-type]
    if needs_form_only(node) and not at_hand(ops.operand(node, 0)):
        blank = _blank(graph, ops.operand(node, 0))
        return graph.node_copy(node, lambda _: blank)
    if not is_dropped(node):
        return graph.node_copy(node, where)
    dropout = ops.operand(node, 0)
    mask, p = mask_of(dropout), dropout.args[1]
    assert mask is not None and isinstance(p, float)
    operands = (where(ops.operand(dropout, 0)), where(mask), 1.0 / (1.0 - p))
    new = graph.call_function(torch.ops.aten.native_dropout_backward.default, operands)
    new.meta = {**node.meta}
    new.meta.pop("dsc", None)
    return new


def draw_again(graph: Graph, state: Node, device: torch.device, copy: Callable[[], Node]) -> Node:
    """The copy of a draw that ``copy`` makes, with the state that the generator had, and has no more afterwards."""
    set_state, val = torch.ops.dsc.set_rng_state.default, state.meta["val"]
    before = graph.call_function(set_state, (state, device))
    new = copy()
    after = graph.call_function(set_state, (before, device))
    for n in (before, after):
        n.meta["val"] = val
    for n in (before, new, after):
        n.meta["partitioner_tag"] = "must_be_in_backward"
    return new


def state_before(graph: Graph, node: Node) -> Node:
    """A call that reads the state of the generator of a draw that follows."""
    call = torch.ops.dsc.rng_state.default
    new = graph.create_node("call_function", call, (device_of(node),), name=f"rng_state_{node.name}")
    new.meta = {"val": state_value(node), "partitioner_tag": "is_forward"}
    return new


def state_value(node: Node) -> torch.Tensor:
    """The fake value of the state for a draw."""
    v = ops.value(node)
    first = next(t for t in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(t, torch.Tensor))
    return first.new_empty(replay.STATE_BYTES[first.device.type], dtype=torch.uint8, device="cpu")


def redrawn(script: Collection[Node], forward: Callable[[Node], bool]) -> set[Node]:
    """The draws of the forward that a script repeats."""
    return {n for n in script if forward(n) and n.op == "call_function" and replays(n)}


def _blank(graph: Graph, like: Node) -> Node:
    t = ops.tensor(like)
    form: dict[str, Any] = {"dtype": t.dtype, "device": t.device}
    new = graph.call_function(torch.ops.aten.empty_strided.default, (list(t.shape), list(t.stride())), form)
    new.meta = {"val": t, "partitioner_tag": "is_backward"}
    return new
