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
from torch.utils import _pytree as pytree

from dsc import compiler, errors, retarget, traps, watch
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.debug import crash, source
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
    calls: dict[str, dict[str, object]] = field(default_factory=dict)
    """Forward, backward or inference -> the inputs of its first call, by name, if the capture keeps values."""

    def of(self, graph: str) -> list[Stage]:
        """The stages of one graph, in order."""
        return [s for s in self.stages if s.graph == graph]


@dataclass(frozen=True)
class Outcome:
    """What a model gave: the tensors of its result, and a gradient (or None) for each of its parameters."""

    results: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Session:
    """All regions of one model for one target."""

    model: Model
    target: Target
    options: Options
    regions: tuple[Region, ...]
    seconds: float
    """Wall time of tracing, passes and emission."""
    outcome: Outcome
    """What the graphs gave as they were traced, before any pass."""


@dataclass(frozen=True)
class RegionRecorder(Watcher):
    """Fills one region.  Graphs are copied, since the passes go on to change them."""

    region: Region
    keep_stages: bool = True

    def traced(self, stage: str, gm: GraphModule) -> None:
        if not self.keep_stages:
            return
        self.region.stages.append(Stage(stage, TRACED, compiler.copied(gm)))

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        if not self.keep_stages:
            return
        self.region.stages.append(Stage(stage, p.name, compiler.copied(gm), p, report, seconds))

    def compiled(self, compilation: Compilation) -> None:
        self.region.programs.append(compilation)

    def left(self, stage: str, why: str) -> None:
        self.region.left.append((stage, why))


@dataclass(frozen=True)
class Recorder(Watcher):
    """Collects the regions of all compilations that it hears of."""

    regions: list[Region] = field(default_factory=list)
    keep_stages: bool = True

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        self.regions.append(Region(gm, tuple(inputs)))
        return RegionRecorder(self.regions[-1], self.keep_stages)


def capture(
    model: Model,
    target: Target | str = "cpu",
    options: Options | None = None,
    *,
    training: bool = True,
    watchers: Sequence[Watcher] = (),
    keep_values: bool = False,
    on_host: bool = False,
    keep_stages: bool = True,
) -> Session:
    """Trace ``model`` and take its graphs through every pass for ``target``.

    ``keep_values`` keeps what the graphs are called with.  ``on_host`` leaves them on the device of the model's own
    tensors, so that they run here: the passes decide as for ``target``, the operators and kernels are the host's.
    Without ``keep_stages`` the regions have programs, but not the graphs on the way to them.

    Raises:
        ModelFailed: the model itself raises on these inputs.
        Untraceable: torch or dsc raises where the model does not.
        DscError: options that do not exist; a pass that fails (here it is not hidden by a way around it).
    """
    found = targets.find(target) if isinstance(target, str) else target
    options = replace(options or Options(), target=found.name)
    recorder = Recorder(keep_stages=keep_stages)
    heard = (recorder, *watchers, *watch.active())
    start = time.perf_counter()

    def backend(gm: GraphModule, inputs: Sequence[Any], **_: object) -> Callable[..., Any]:
        told = watch.captured(heard, gm, inputs)
        calls = recorder.regions[-1].calls if keep_values else None
        return plan_graph(gm, inputs, found, options, told, calls, on_host)

    run(model, model.module, training)  # what is wrong with the model itself shows as in eager
    torch.compiler.reset()
    try:
        outcome = run(model, torch.compile(model.module, backend=backend), training)
    except errors.ModelFailed as why:
        reason = compiler.first_line(root_of(why.__cause__ or why))
        raise errors.Untraceable(model.name, reason, "it runs in eager, so please report it") from why.__cause__
    finally:
        torch.compiler.reset()  # what was compiled here must not serve another caller
    return Session(model, found, options, tuple(recorder.regions), time.perf_counter() - start, outcome)


def run(model: Model, call: Callable[..., Any], training: bool) -> Outcome:
    """One forward of ``call``, and with ``training`` one backward, so that all graphs are made; ``model`` stays as it was.

    Raises:
        ModelFailed: the model raises.
        DscError: a pass does.
    """
    try:
        with warnings.catch_warnings(), untouched(model.module), torch.set_grad_enabled(training):
            warnings.simplefilter("ignore")
            for p in model.module.parameters():
                p.grad = None
            result = call(*model.args)
            loss = source.loss_of(result) if training else None
            if loss is not None:
                torch.autograd.backward(loss)
            results = [t.detach() for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
            return Outcome(tuple(results), tuple(p.grad for p in model.module.parameters()))
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


def root_of(why: BaseException) -> Exception:
    """What Dynamo wrapped in its own exceptions."""
    while isinstance(inner := getattr(why, "inner_exception", None), BaseException):
        why = inner
    return why if isinstance(why, Exception) else RuntimeError(str(why))


def of_ours(why: BaseException | None) -> errors.DscError | None:
    """The mistake of ours that Dynamo wrapped in its own exception, if there is one."""
    while why is not None:
        if isinstance(why, errors.DscError):
            return why
        why = getattr(why, "inner_exception", None) or why.__cause__
    return None


def plan_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    target: Target,
    options: Options,
    watchers: tuple[Watcher, ...],
    calls: dict[str, dict[str, object]] | None = None,
    on_host: bool = False,
) -> Callable[..., Any]:
    """Plan one Dynamo graph for ``target``, and give back a function that runs it on ATen, and fills ``calls``."""
    if (trap := traps.find(gm)) is not None:
        for w in watchers:
            w.left("dynamo", trap)
        return gm.forward
    make = compiler.make(options, target, watchers, crash.save)
    foreign = (
        target.kind == "cuda" and not on_host and not any(x.is_cuda for x in inputs if isinstance(x, torch.Tensor))
    )
    if foreign:
        retarget.prepare(gm)

    def moved(aten: GraphModule) -> GraphModule:
        copy = compiler.copied(aten)
        if foreign:
            retarget.to_device(copy, torch.device("cuda"))
        return copy

    def planned(aten: GraphModule, kind: str) -> None:
        before = compiler.copied(aten)
        try:
            compiler.tell(compiler.plan(aten, kind, make, build=False), make)
        except errors.PassFailed as why:
            raise compiler.saved(before, kind, why, make) from why.cause

    def planned_joint(joint: GraphModule) -> GraphModule:
        try:
            return compiler.plan_joint(moved(joint), make)
        except errors.PassFailed as why:
            raise compiler.saved(moved(joint), "joint", why, make) from why.cause

    def partition(joint: GraphModule, args: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = compiler.split(planned_joint(joint), args, **kwargs)
        planned(forward, "forward")
        planned(backward, "backward")
        return compiler.split(joint, args, **kwargs)

    def runs(kind: str) -> Callable[[GraphModule, Sequence[Any]], compiler.Compiled]:
        return lambda aten, _: make_boxed_func(aten.forward if calls is None else kept(aten, kind, calls))

    def infers(aten: GraphModule, given: Sequence[Any]) -> compiler.Compiled:
        planned(moved(aten), "inference")
        return runs("inference")(aten, given)

    aot = aot_autograd(
        fw_compiler=runs("forward"),
        bw_compiler=runs("backward"),
        inference_compiler=infers,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = aot(gm, inputs)
    return compiled


def kept(aten: GraphModule, kind: str, calls: dict[str, dict[str, object]]) -> Callable[..., Any]:
    """The graph as a function that keeps a copy of its first inputs under their names."""
    names = [n.name for n in aten.graph.find_nodes(op="placeholder")]

    def call(*args: object) -> Any:
        if kind not in calls:
            calls[kind] = {name: same_again(a) for name, a in zip(names, args, strict=True)}
        return aten.forward(*args)

    return call


def same_again(a: object) -> object:
    """A tensor's values in memory of their own, in the same strides: an expanded tensor stays one."""
    if not isinstance(a, torch.Tensor):
        return a
    t = a.detach()
    if t.layout is not torch.strided:
        return t.clone()
    if 0 in t.stride() and t.numel():
        base = t.as_strided([1 if s == 0 else n for n, s in zip(t.shape, t.stride())], t.stride())
        return base.clone().expand(t.shape)
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
