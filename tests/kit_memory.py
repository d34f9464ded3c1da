"""What the allocator really holds while a program runs, and train steps as the two graphs that a backend gets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dsc import liveness
from dsc.torch_shim import aot_autograd, default_partition, make_boxed_func


class Allocator(TorchDispatchMode):
    """Counts the bytes of all storages that ATen calls give back, until they die."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, int] = {}

    def add(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.now -= size
        del self.known[key]

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        pytree.tree_map_only(Tensor, self.add, out)
        return out


@dataclass(frozen=True)
class TrainStep:
    """The graphs of one train step, and real inputs of the forward."""

    joint: GraphModule
    forward: GraphModule
    backward: GraphModule
    saved: dict[str, int]
    results: int
    """Of the forward, besides what is saved."""
    inputs: tuple[Tensor, ...]


Partition = Callable[..., tuple[GraphModule, GraphModule]]


def train_step(model: nn.Module, inputs: Sequence[Tensor], partition: Partition = default_partition) -> TrainStep:
    """A model whose forward gives a loss, traced as a backend gets it and split by ``partition``."""
    seen: dict[str, Any] = {}

    def split(joint: GraphModule, given: Any, *, num_fwd_outputs: int, **rest: Any) -> tuple[GraphModule, GraphModule]:
        seen["joint"], seen["results"] = joint, num_fwd_outputs
        fw, bw = partition(joint, given, num_fwd_outputs=num_fwd_outputs, **rest)
        seen["forward"], seen["backward"] = fw, bw
        seen["saved"] = liveness.saved_places(fw, bw)
        return fw, bw

    def run(gm: GraphModule, given: Any) -> Any:
        def call(args: list[Any]) -> Any:
            seen.setdefault("inputs", tuple(args))
            return gm.forward(*args)

        return make_boxed_func(lambda *args: call(list(args)))

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=split))
    compiled(*inputs).backward()
    model.zero_grad()
    torch._dynamo.reset()
    fields = ("joint", "forward", "backward", "saved", "results", "inputs")
    return TrainStep(*(seen[k] for k in fields))


Run = Callable[[list[Any]], Sequence[Any]]


def interpreter(gm: GraphModule) -> Run:
    """Node by node on ATen; every value dies at its last use."""
    last: dict[Node, Node] = {}
    for n in gm.graph.nodes:
        for a in n.all_input_nodes:
            last[a] = n
    dead: dict[Node, list[Node]] = {}
    for a, n in last.items():
        dead.setdefault(n, []).append(a)

    def call(args: list[Any]) -> Sequence[Any]:
        env: dict[Node, Any] = {}
        for n in gm.graph.nodes:
            if n.op == "placeholder":
                env[n] = args.pop(0)
            elif n.op == "output":
                return torch.fx.node.map_arg(n.args[0], env.__getitem__)  # type: ignore[no-any-return]
            elif n.op == "get_attr":
                env[n] = getattr(gm, n.target)
            else:
                given, named = torch.fx.node.map_arg((n.args, n.kwargs), env.__getitem__)
                env[n] = n.target(*given, **named)
                del given, named
            for d in dead.get(n, []):
                del env[d]
            if n not in last:
                del env[n]
        raise AssertionError("no output")

    return call


def measured_peak(step: TrainStep, forward: Run, backward: Run, warm: bool = False) -> tuple[int, list[Any], list[Any]]:
    """Peak bytes of forward and backward, the forward's results, and the gradients.

    ``warm`` runs the step once before, so that what is kept between calls is there.
    """
    tracker = Allocator()
    with torch.no_grad(), tracker:
        for t in step.inputs:
            tracker.add(t)
        for _ in range(2 if warm else 1):
            gradients, outs, seeds, args = [], [], [], []
            tracker.peak = tracker.now
            torch.manual_seed(0)
            outs = list(forward(list(step.inputs)))
            for n in step.backward.graph.find_nodes(op="placeholder"):
                if n.name not in step.saved:
                    v = n.meta["val"]
                    seeds.append(torch.ones(v.shape, dtype=v.dtype))
                args.append(outs[step.saved[n.name]] if n.name in step.saved else seeds[-1])
            outs = [o for i, o in enumerate(outs) if i not in set(step.saved.values())]
            gradients = list(backward(args))
    return tracker.peak, outs, gradients
