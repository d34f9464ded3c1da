"""A stage's graph to functions: forward, and backward whole or as dgrad and wgrad, compiled by dsc or interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dsc import compiler
from dsc import target as targets
from dsc.distributed import split
from dsc.options import Options
from dsc.torch_shim import aot_autograd, lowered_at_once, make_boxed_func

Later = Callable[[], Sequence[object]]
"""Computes the gradients of the weights of one micro-batch, None where a weight has none."""


@dataclass
class Functions:
    """``forward`` is differentiable; its backward leaves the gradients of the weights to ``later``, if it was split."""

    forward: Callable[..., Sequence[torch.Tensor]]
    split: bool = False
    later: list[Later] = field(default_factory=list)
    """What backwards have left to do, oldest first."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Nodes of each graph, and ``passed``: values that dgrad hands to wgrad."""


def build(
    gm: nn.Module, inputs: Sequence[torch.Tensor], weights: int, options: Options | None, split_backward: bool
) -> Functions:
    """Functions of a graph, or a module, whose arguments are ``weights`` parameters, then buffers and activations.

    ``options`` of None runs the graphs node by node.  Traces on fake tensors: no memory, no time on the device.

    Raises:
        DscError: an option, target or pass that does not exist; a graph that a pass broke.
    """
    made = Functions(lambda *_: (), split_backward)
    make = None if options is None else compiler.make(options, _target(options, inputs))

    def compiled(graph: GraphModule, kind: str) -> split.Boxed:
        made.sizes[kind] = sum(n.op == "call_function" for n in graph.graph.nodes)
        if make is None:
            return make_boxed_func(graph.forward)
        return compiler.compile_aten(graph, kind, make)[0]

    def backward(graph: GraphModule, _: object) -> split.Boxed:
        if not split_backward:
            return compiled(graph, "backward")
        halves = split.split(graph, range(weights))
        made.sizes["passed"] = halves.passed
        dgrad, wgrad = compiled(halves.dgrad, "dgrad"), compiled(halves.wgrad, "wgrad")
        return split.run(halves, dgrad, wgrad, made.later.append)

    def partition(joint: GraphModule, given: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        return compiler.split(joint if make is None else compiler.run_joint(joint, make), given, **kwargs)

    aot = aot_autograd(
        fw_compiler=lambda g, _: compiled(g, "forward"),
        bw_compiler=backward,
        inference_compiler=lambda g, _: compiled(g, "inference"),
        partition_fn=partition,
    )
    with lowered_at_once():
        made.forward = aot(gm, list(inputs))
    return made


def _target(options: Options, inputs: Sequence[torch.Tensor]) -> targets.Target:
    return targets.find(options.target) if options.target else targets.for_device(inputs[0].device)
