"""The torch.compile entry point: ``torch.compile(model, backend="dsc", options={...})``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import kernels, link, manager, passlist, text
from dsc import options as opt
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.manager import Pass, PassPipeline, Report
from dsc.options import Options
from dsc.runtime import run
from dsc.runtime.pool import Pool
from dsc.target import Target
from dsc.torch_shim import aot_autograd, default_partition

Compiled = Callable[[list[object]], tuple[object, ...]]


def dsc(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph.  ``options`` and ``mode`` of torch.compile arrive as keywords.

    Raises:
        DscError: an option, target or pass that does not exist; a graph that a pass broke.
    """
    options = opt.parse(kwargs.pop("options", None) or kwargs or None, kwargs.pop("mode", None), os.environ)
    return compile_graph(gm, example_inputs, options)


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """A Dynamo graph to a function with eager's calling convention."""
    pool = Pool()
    target = find_target(options, example_inputs)
    joint, graph = pipelines(options)

    def partition(joint_gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        joint.run(joint_gm, target)
        return default_partition(joint_gm, inputs, **kwargs)

    def compiler(kind: str) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        return lambda g, _: compile_aten(g, kind, graph, target, options, pool)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)
    return compiled


def compile_aten(
    gm: GraphModule, kind: str, passes: PassPipeline, target: Target, options: Options, pool: Pool
) -> Compiled:
    """One ATen graph to a boxed function."""
    start = time.perf_counter()
    device = device_of(gm)
    emitter = kernels.emitter(options, device)
    reports: tuple[tuple[str, Report], ...] = ()
    if emitter != "aten" and not (emitter == "cpp" and kernels.compiler(options) is None):
        reports = passes.run(gm, target)
    program, skipped = link.link(gm, options, pool, kind)
    call = run.load(program, kind)
    if options.on_compile is not None:
        reports = (*reports, ("link", Report(True, skipped)))
        seconds = time.perf_counter() - start
        options.on_compile(Compilation(kind, program, reports, text.show(gm.graph), seconds))
    return call


def pipelines(options: Options) -> tuple[PassPipeline, PassPipeline]:
    """Passes on the joint graph, and on the graphs after the split."""
    joint: tuple[Pass, ...] = passlist.JOINT
    graph: tuple[Pass, ...] = passlist.GRAPH
    if options.passes is not None:
        chosen = manager.parse(options.passes, passlist.KNOWN)
        names = {p.name for p in passlist.JOINT}
        joint = tuple(p for p in chosen if p.name in names)
        graph = tuple(p for p in chosen if p.name in {q.name for q in passlist.GRAPH})
    return PassPipeline(joint, verify=options.verify), PassPipeline(graph, verify=options.verify)


def find_target(options: Options, inputs: Sequence[Any]) -> Target:
    if options.target is not None:
        return targets.find(options.target)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return targets.for_device(tensors[0].device if tensors else torch.device("cpu"))


def device_of(gm: GraphModule) -> torch.device:
    """Where the graph's tensors live: that of most of its nodes, so that a scalar on the CPU does not count."""
    counts: dict[torch.device, int] = {}
    for n in gm.graph.nodes:
        v = n.meta.get("val")
        if isinstance(v, torch.Tensor):
            counts[v.device] = counts.get(v.device, 0) + 1
    return max(counts, key=lambda d: counts[d]) if counts else torch.device("cpu")
