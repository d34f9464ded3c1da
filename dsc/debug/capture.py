"""A whole compilation as data: every graph after every pass, for any target, on a machine that need not have it.

The model is traced on the CPU.  For a GPU target its graphs are then rewritten as that GPU's (``dsc.retarget``) and go
through the same passes and emitters as on the GPU; nothing is built, and what runs meanwhile is plain ATen.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dsc import compiler, errors, retarget, traps, watch
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.debug import source
from dsc.debug.source import Model
from dsc.manager import Pass, Report
from dsc.options import Options
from dsc.target import Target
from dsc.torch_shim import aot_autograd, make_boxed_func
from dsc.watch import Watcher

TRACED = "trace"
"""The name of the first stage: the graph as AOTAutograd gave it."""


@dataclass(frozen=True)
class Stage:
    """One graph at one moment."""

    graph: str
    """joint, forward, backward or inference."""
    name: str
    """The pass that has just run, or ``trace``.  A pass that ran twice on one graph is told apart by its place."""
    gm: GraphModule
    """A copy that nothing changes any more."""
    applied: Pass | None = None
    report: Report | None = None
    seconds: float = 0.0


@dataclass
class Region:
    """What became of one Dynamo graph: a model has several if the graph breaks."""

    dynamo: GraphModule
    inputs: tuple[object, ...]
    stages: list[Stage] = field(default_factory=list)
    programs: list[Compilation] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    """Stage and reason, for what stays with PyTorch."""

    def of(self, graph: str) -> list[Stage]:
        """The stages of one graph, in order."""
        return [s for s in self.stages if s.graph == graph]


@dataclass(frozen=True)
class Session:
    """All regions of one model for one target."""

    model: Model
    target: Target
    options: Options
    regions: tuple[Region, ...]
    seconds: float
    """Wall time of tracing, passes and emission."""


@dataclass(frozen=True)
class RegionRecorder(Watcher):
    """Fills one region.  Graphs are copied, since the passes go on to change them."""

    region: Region

    def traced(self, stage: str, gm: GraphModule) -> None:
        self.region.stages.append(Stage(stage, TRACED, compiler.copied(gm)))

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        self.region.stages.append(Stage(stage, p.name, compiler.copied(gm), p, report, seconds))

    def compiled(self, compilation: Compilation) -> None:
        self.region.programs.append(compilation)

    def left(self, stage: str, why: str) -> None:
        self.region.left.append((stage, why))


@dataclass(frozen=True)
class Recorder(Watcher):
    """Collects the regions of all compilations that it hears of."""

    regions: list[Region] = field(default_factory=list)

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        self.regions.append(Region(gm, tuple(inputs)))
        return RegionRecorder(self.regions[-1])


def capture(
    model: Model,
    target: Target | str = "cpu",
    options: Options | None = None,
    *,
    training: bool = True,
    watchers: Sequence[Watcher] = (),
) -> Session:
    """Trace ``model`` and take its graphs through every pass for ``target``.

    Raises:
        ModelFailed: the model itself raises on these inputs.
        DscError: options that do not exist; a pass that fails (here it is not hidden by a way around it).
    """
    found = targets.find(target) if isinstance(target, str) else target
    options = replace(options or Options(), target=found.name)
    recorder = Recorder()
    heard = (recorder, *watchers)
    start = time.perf_counter()

    def backend(gm: GraphModule, inputs: Sequence[Any], **_: object) -> Callable[..., Any]:
        return plan_graph(gm, inputs, found, options, watch.captured(heard, gm, inputs))

    torch.compiler.reset()
    try:
        run(model, backend, training)
    finally:
        torch.compiler.reset()  # what was compiled here must not serve another caller
    return Session(model, found, options, tuple(recorder.regions), time.perf_counter() - start)


def run(model: Model, backend: Callable[..., Any], training: bool) -> None:
    """One forward, and with ``training`` one backward, so that all graphs are made; the model stays as it was."""
    module = torch.compile(model.module, backend=backend)
    try:
        with warnings.catch_warnings(), untouched(model.module), torch.set_grad_enabled(training):
            warnings.simplefilter("ignore")
            result = module(*model.args)
            loss = source.loss_of(result) if training else None
            if loss is not None:
                torch.autograd.backward(loss)
    except errors.DscError:
        raise
    except Exception as why:
        if (ours := of_ours(why)) is not None:
            raise ours from why
        raise errors.ModelFailed(model.name, compiler.first_line(why)) from why


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """What runs inside leaves gradients, buffers and the state of random numbers as they were."""
    grads = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for p, grad in grads:
            p.grad = grad
        with torch.no_grad():
            for b, kept in buffers:
                b.copy_(kept)


def of_ours(why: BaseException | None) -> errors.DscError | None:
    """The mistake of ours that Dynamo wrapped in its own exception, if there is one."""
    while why is not None:
        if isinstance(why, errors.DscError):
            return why
        why = getattr(why, "inner_exception", None) or why.__cause__
    return None


def plan_graph(
    gm: GraphModule, inputs: Sequence[Any], target: Target, options: Options, watchers: tuple[Watcher, ...]
) -> Callable[..., Any]:
    """Plan one Dynamo graph for ``target``, and give back a function that runs it on ATen."""
    if (trap := traps.find(gm)) is not None:
        for w in watchers:
            w.left("dynamo", trap)
        return gm.forward
    make = compiler.make(options, target, watchers)
    foreign = target.kind == "cuda" and not any(x.is_cuda for x in inputs if isinstance(x, torch.Tensor))
    if foreign:
        retarget.prepare(gm)

    def moved(aten: GraphModule) -> GraphModule:
        copy = compiler.copied(aten)
        if foreign:
            retarget.to_device(copy, torch.device("cuda"))
        return copy

    def planned(aten: GraphModule, kind: str) -> None:
        compiler.tell(compiler.plan(aten, kind, make, build=False), make)

    def partition(joint: GraphModule, args: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = compiler.split(compiler.plan_joint(moved(joint), make), args, **kwargs)
        planned(forward, "forward")
        planned(backward, "backward")
        return compiler.split(joint, args, **kwargs)

    def runs(aten: GraphModule, _: Sequence[Any]) -> compiler.Compiled:
        return make_boxed_func(aten.forward)

    def infers(aten: GraphModule, _: Sequence[Any]) -> compiler.Compiled:
        planned(moved(aten), "inference")
        return make_boxed_func(aten.forward)

    aot = aot_autograd(
        fw_compiler=runs,
        bw_compiler=runs,
        inference_compiler=infers,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = aot(gm, inputs)
    return compiled
