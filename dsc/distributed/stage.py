"""One stage of a pipeline as a module that torch's runtime can drive: parameters by their names in the model, F, I and W."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dsc.distributed import tensor
from dsc.distributed.assemble import Parts
from dsc.distributed.functions import Functions, build
from dsc.options import Options

GIVEN = "input_"
"""Before the name of an input of the model that a stage takes besides what arrives."""


class Edge(torch.autograd.Function):
    """The identity between a stage and the runtime, both ways: contiguous memory, and no view that autograd tracks.

    The runtime sends what it gets as it lies in memory, and detaches it in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data.contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class StageModule(nn.Module):
    """Runs one stage.  Its parameters and buffers have the names that they have in the model.

    ``parts.graph`` takes weights, what else is held, then the stage's inputs, and gives a tuple; an input that it gives
    back untouched is relayed: it skips over this stage.  ``state`` has every name of ``parts``; those of ``saved`` are in
    the module's ``state_dict``.
    """

    def __init__(
        self, parts: Parts, state: Mapping[str, Tensor], saved: Collection[str], borrowed: Sequence[str] = ()
    ) -> None:
        super().__init__()
        names = (*parts.weights, *parts.held)
        for name in names:
            register(home(self, name), leaf(name), state[name], name in saved)
        self._places = [(home(self, name), leaf(name)) for name in names]
        self._weights = len(parts.weights)
        self.trained = frozenset(parts.weights)
        self.borrowed = borrowed
        """Parameters whose memory is that of an earlier stage of this rank, for a gradient of this stage's own."""
        self._given = [GIVEN + name for name in parts.plan.inputs] if parts.plan.receives else []
        self._recompute = parts.plan.recompute
        self._inner, self._outer = without_relays(parts.graph, len(self._places))
        self.functions: Functions | None = None

    def compile(
        self, inputs: Sequence[Tensor], options: Options | None, split_backward: bool, mesh: DeviceMesh | None = None
    ) -> None:
        """Make the functions; ``inputs`` are examples of the stage's inputs; ``mesh`` is that of tensor parallelism."""
        held = self._held()
        graph = self._inner if mesh is None else tensor.Spread(self._inner, held, mesh)
        given = [*(tensor.local(t).detach().requires_grad_(t.requires_grad) for t in held), *inputs]
        self.functions = build(graph, given, self._weights, options, split_backward)

    def forward(self, *inputs: Tensor, **given: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``inputs`` from the stage before, or of the first stage the model's; ``given`` are inputs of the model."""
        assert self.functions is not None
        edges = [edge(x) for x in (*inputs, *(given[name] for name in self._given))]
        held = [tensor.local(t) for t in self._held()]
        if self._recompute and torch.is_grad_enabled():
            found = checkpoint(self.functions.forward, *held, *edges, use_reentrant=False)
        else:
            found = self.functions.forward(*held, *edges)
        out = tuple(edge(found[i] if inner else edges[i]) for inner, i in self._outer)
        return out if len(out) > 1 else out[0]

    def weight_gradients(self) -> Callable[[], None]:
        """The second half of the backward that ran last (the runtime's ``dw_builder``)."""
        assert self.functions is not None
        later = self.functions.later.pop()

        def run() -> None:
            for p, grad in zip(self._held(), later()):
                if isinstance(grad, Tensor):
                    grad = tensor.like(grad, p)
                    p.grad = grad if p.grad is None else p.grad.add_(grad)

        return run

    def _held(self) -> list[Tensor]:
        """Parameters, then buffers, as they are now: FSDP swaps them around a stage's calls."""
        return [getattr(module, name) for module, name in self._places]


def edge(x: Tensor) -> Tensor:
    if not x.requires_grad:
        return x.contiguous()
    made: Tensor = Edge.apply(x)  # type: ignore[no-untyped-call]
    return made


def register(module: nn.Module, name: str, value: Tensor, persistent: bool) -> None:
    if isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent)


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def home(root: nn.Module, name: str) -> nn.Module:
    """The module that holds ``name``, made on the way where it is missing."""
    for part in name.split(".")[:-1]:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def without_relays(graph: GraphModule, held: int) -> tuple[GraphModule, list[tuple[bool, int]]]:
    """The graph of what is really computed, and for each result: whether the graph gives it, and its position.

    Results that are inputs, the same one twice included, never enter the graph: they cost nothing and stay leaves.
    """
    new = torch.fx.Graph()
    known: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs: dict[torch.fx.Node, int] = {}
    computed: dict[torch.fx.Node, int] = {}
    outer: list[tuple[bool, int]] = []
    for n in graph.graph.nodes:
        if n.op == "placeholder":
            inputs[n] = len(inputs) - held
        if n.op != "output":
            known[n] = new.node_copy(n, known.__getitem__)
            continue
        (results,) = n.args
        for r in results:
            if r in inputs:
                outer.append((False, inputs[r]))
                continue
            outer.append((True, computed.setdefault(r, len(computed))))
        new.output(tuple(known[r] for r in computed))
    return GraphModule(graph, new), outer
