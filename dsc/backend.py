"""The torch.compile entry point: ``torch.compile(model, backend="dsc", options={...})``."""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from dsc import errors, kernels, link, manager, passlist, text, traps
from dsc import options as opt
from dsc import target as targets
from dsc.compilation import Compilation
from dsc.manager import Pass, PassPipeline, Remark, Report
from dsc.options import Options
from dsc.runtime import run
from dsc.runtime.pool import Pool
from dsc.target import Target
from dsc.torch_shim import (
    RNG_CALLS,
    TorchDynamoException,
    aot_autograd,
    default_partition,
    detect_fake_mode,
    make_boxed_func,
)

Compiled = Callable[[list[object]], tuple[object, ...]]


def dsc(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph.  ``options`` and ``mode`` of torch.compile arrive as keywords.

    Raises:
        DscError: an option, target or pass that does not exist; a graph that a pass broke.
    """
    options = opt.parse(kwargs.pop("options", None) or kwargs or None, kwargs.pop("mode", None), os.environ)
    return compile_graph(gm, example_inputs, options)


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """A Dynamo graph to a function with eager's calling convention.

    Graphs that AOTAutograd cannot trace, or traces wrongly, run in eager after a warning.
    """
    if (trap := traps.find(gm)) is not None:
        return in_eager(gm, trap)
    pool = Pool()
    target = find_target(options, example_inputs)
    joint, graph = pipelines(options)

    def partition(joint_gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        forward, backward = default_partition(run_joint(joint_gm, joint, target), inputs, **kwargs)
        complete(forward)
        complete(backward)
        return forward, backward

    def compiler(kind: str) -> Callable[[GraphModule, Sequence[Any]], Compiled]:
        return lambda g, _: compile_aten(g, kind, graph, target, options, pool)

    aot = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    try:
        compiled: Callable[..., Any] = aot(gm, example_inputs)
    except (errors.DscError, errors.DscWarning, TorchDynamoException):
        raise  # warnings that the user made errors
    except Exception as why:
        return in_eager(gm, f"AOTAutograd raised {first_line(why)}")
    return compiled


def in_eager(gm: GraphModule, why: str) -> Callable[..., Any]:
    """Errors that the user's own code raises come from eager then, as they should."""
    warnings.warn(str(errors.LeftToEager(why)), errors.DscWarning, stacklevel=2)
    return gm.forward


def run_joint(gm: GraphModule, passes: PassPipeline, target: Target) -> GraphModule:
    """The graph after the passes, or as it was, after a warning, where one of them fails."""
    kept = copied(gm)
    try:
        passes.run(gm, target)
    except Exception as why:
        warn_aten("joint", why)
        return kept
    return gm


def compile_aten(
    gm: GraphModule, kind: str, passes: PassPipeline, target: Target, options: Options, pool: Pool
) -> Compiled:
    """One ATen graph to a boxed function: kernels and ATen, or ATen alone where kernels cannot be had."""
    start = time.perf_counter()
    emitter = kernels.emitter(options, device_of(gm))
    kept = copied(gm)
    reports: tuple[tuple[str, Report], ...] = ()
    try:
        if emitter != "aten" and not (emitter == "cpp" and kernels.compiler(options) is None):
            reports = passes.run(gm, target)
        program, skipped = link.link(gm, options, pool, kind)
        call = run.load(program, kind)
    except errors.DscWarning:
        raise
    except Exception as why:
        warn_aten(kind, why)
        gm = kept
        reports, skipped = (), (Remark("", "skipped", f"the whole graph stays with ATen: {first_line(why)}"),)
        try:
            program, _ = link.link(gm, options, pool, kind)
            call = run.load(program, kind)
        except Exception:
            gm.recompile()
            return make_boxed_func(gm.forward)
    if options.on_compile is not None:
        reports = (*reports, ("link", Report(True, skipped)))
        seconds = time.perf_counter() - start
        options.on_compile(Compilation(kind, program, reports, text.show(gm.graph), seconds))
    return call


def warn_aten(kind: str, why: Exception) -> None:
    warnings.warn(str(errors.LeftToATen(kind, first_line(why))), errors.DscWarning, stacklevel=3)


def first_line(why: Exception) -> str:
    """``ValueError: no such thing``; of our own errors their sentence."""
    words = str(why).strip().split("\n")[0].rstrip(".")
    return words if isinstance(why, errors.DscError) else f"{type(why).__name__}: {words}"


def copied(gm: GraphModule) -> GraphModule:
    """The graph as it is now; nodes keep their meta, each its own copy."""
    graph = Graph()
    known: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    return GraphModule(gm, graph)


def complete(gm: GraphModule) -> None:
    """Fake values for what the split made without: random calls of checkpoint regions, made again in the backward."""
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    if not nodes:
        return
    mode = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    for n in nodes:
        if mode is None or not all("val" in a.meta for a in n.all_input_nodes):
            continue
        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda a: a.meta["val"])
        with mode:
            match RNG_CALLS.get(getattr(n.target, "__name__", "")):
                case "saves":
                    n.meta["val"] = (torch.get_rng_state(), args[0](*args[1:], **kwargs))
                case "restores":
                    n.meta["val"] = args[1](*args[2:], **kwargs)
                case _ if n.target is operator.getitem:
                    n.meta["val"] = args[0][args[1]]


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
