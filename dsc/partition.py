"""A joint graph to its forward and its backward, as torch's ``default_partition`` splits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from dsc import ops
from dsc.extract import extract
from dsc.torch_shim import default_partition


def partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """What the forward computes and the backward reads is saved; what stands behind the forward runs in the backward.

    Takes what AOTAutograd gives to a partitioner.
    """
    if (plain := extract(joint, kwargs["num_fwd_outputs"])) is not None:
        return plain
    forward, backward = default_partition(joint, inputs, **kwargs)
    drop_leftovers(forward, backward)
    return forward, backward


def drop_leftovers(forward: GraphModule, backward: GraphModule) -> None:
    """Take random calls out of the graph that they do not belong to, where torch leaves them though nobody reads them.

    It copies whatever can be computed there and keeps dead copies of random calls: they would draw again.
    """
    ahead = {n.name: n.target for n in forward.graph.nodes if n.op == "call_function"}
    _drop(forward, lambda n: n.meta.get("partitioner_tag") == "is_backward")
    _drop(backward, lambda n: ahead.get(n.name) is n.target and n.meta.get("partitioner_tag") != "is_backward")


def _drop(gm: GraphModule, strange: Callable[[Node], bool]) -> None:
    count = 0
    for node in reversed(list(gm.graph.nodes)):
        if node.op != "call_function" or node.users or not strange(node):
            continue
        if not ops.mutated(node) and ops.info(node).kind != "collective":
            gm.graph.erase_node(node)
            count += 1
    if count:
        gm.recompile()
