"""What the allocator really holds while a program runs, and train steps as the two graphs that a backend gets."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dsc import kernels, link, liveness
from dsc.compiler import split
from dsc.manager import PassPipeline
from dsc.options import Options
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory import Memory
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.runtime import run
from dsc.runtime.pool import Pool
from dsc.torch_shim import aot_autograd, default_partition, make_boxed_func
from dsc.watch import Watcher
from kit_graphs import CPU


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


# --- budgets -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.rate = nn.LayerNorm(width), rate
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.rate, self.training)
        return x + F.dropout(self.down(hidden), self.rate, self.training)


class Stack(nn.Module):
    """Residual blocks with dropout, whose forward gives a loss."""

    def __init__(self, layers: int = 6, width: int = 32, rate: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, rate) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return F.cross_entropy(self.head(x), target)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


def stack() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(256, 32), torch.randint(8, (256,)))


@dataclass
class Found(Watcher):
    """What the memory pass said."""

    numbers: dict[str, float] = field(default_factory=dict)

    def after(self, stage: str, p: Any, gm: Any, report: Any, seconds: float) -> None:
        if p.name == "memory":
            self.numbers = dict(report.numbers)


def gradients(model: nn.Module, inputs: Sequence[Tensor], call: Callable[..., Tensor]) -> list[Tensor]:
    """The loss, all gradients, and a random number drawn afterwards."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = call(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(3)]


def compiled(model: nn.Module, **options: Any) -> tuple[Callable[..., Tensor], Found]:
    found = Found()
    torch._dynamo.reset()
    return torch.compile(model, backend="dsc", options={**options, "watchers": [found]}), found


def search(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]], fused: bool = False) -> Search:
    """The planner on the joint graph of a model."""
    step = train_step(*make())
    Canonicalize().run(step.joint, CPU)
    return Search(step.joint, extract(step.joint, CPU, fused), CPU, fused)


@functools.cache
def peaks() -> tuple[int, int]:
    """Of the stack on ATen: the default plan's peak, and the smallest that the planner finds."""
    planner = search(stack)
    return planner.default.peak, planner.least().peak


def planned_and_measured(emit: str, budget: int, **chosen: str) -> tuple[dict[str, float], int]:
    """What the pass ``memory`` says of a step of ``stack`` with such options, and the peak of its programs."""
    planned: dict[str, float] = {}

    def partition_within(joint: GraphModule, inputs: Any, **rest: Any) -> tuple[GraphModule, GraphModule]:
        Canonicalize().run(joint, CPU)
        planned.update(Memory(budget, fused=emit == "cpp", **chosen).run(joint, CPU).numbers)
        return split(joint, inputs, **rest)

    step = train_step(*stack(), partition_within)
    options = Options(emit=emit, memory_budget=budget, **chosen)  # type: ignore[arg-type]
    calls = []
    for gm, kind in ((step.forward, "forward"), (step.backward, "backward")):
        if emit == "cpp":
            PassPipeline((Canonicalize(), Fuse())).run(gm, CPU)
        program, _, _ = link.link(gm, options, kind)
        calls.append(run.load(program, kernels.launches(program, options), Pool(), kind))
    return planned, measured_peak(step, *calls)[0]  # type: ignore[arg-type]
