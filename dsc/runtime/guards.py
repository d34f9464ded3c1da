"""What a program checks while it runs, and how it lets ATen raise the errors that are ATen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import ops


def expect(t: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor if it has these strides (those of size-1 dimensions aside) and this dtype, else a copy that has."""
    found = t.stride()
    if t.dtype == dtype and (found == stride or all(f == s or n <= 1 for f, s, n in zip(found, stride, t.shape))):
        return t
    return torch.empty_strided(t.shape, stride, dtype=dtype, device=t.device).copy_(t)


def as_function(nodes: Sequence[Node]) -> tuple[Callable[..., object], list[Node]]:
    """Nodes of a graph as a function that ATen runs, and the nodes outside that it takes.

    Views on the way are run again from the tensors that they look at.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    inside = set(nodes)
    inputs: list[Node] = []

    def again(n: Node) -> bool:
        return n in inside or ops.is_view(n) or ops.is_split(n)

    def outer(n: Node) -> None:
        if again(n):
            for a in n.all_input_nodes:
                outer(a)
        elif n not in copies:
            copies[n] = graph.placeholder(n.name)
            inputs.append(n)

    def copied(n: Node) -> None:
        if n not in copies:
            for a in n.all_input_nodes:
                copied(a)
            copies[n] = graph.node_copy(n, lambda x: copies[x])

    for n in nodes:  # placeholders stand before everything else
        outer(n)
    for n in nodes:
        copied(n)
    graph.output(())
    return GraphModule(torch.nn.Module(), graph), inputs
