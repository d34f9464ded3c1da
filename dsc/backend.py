"""The torch.compile entry point: ``torch.compile(model, backend="dsc", options={...})``."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import absent, aliases, blame, collector, compiler, errors, traps, warm, watch
from dsc import options as opt
from dsc import target as targets
from dsc.dynamo import spell_alike
from dsc.options import Options
from dsc.python_numbers import in_full
from dsc.repair import buried, for_eager, repair
from dsc.target import Target
from dsc.torch_shim import TorchDynamoException, compile_id, joint_compiler, recompile_reason, structured_logging
from dsc.watch import Watcher

LOG = logging.getLogger("dsc")


def dsc(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile one Dynamo graph.  ``options`` and ``mode`` of torch.compile arrive as keywords.

    Raises:
        DscError: an option, target or pass that does not exist; a graph that a pass broke.
    """
    options = opt.parse(kwargs.pop("options", None) or kwargs or None, kwargs.pop("mode", None), os.environ)
    return compile_graph(gm, example_inputs, options)


@collector.paused()
def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """A Dynamo graph to a function with eager's calling convention.

    Graphs that AOTAutograd cannot trace, or traces wrongly, run in eager after a warning.
    """
    watchers = watch.captured(listeners(options), gm, example_inputs)
    spell_alike(gm)
    example_inputs = in_full(gm, example_inputs)
    report_recompile(gm)
    if (trap := traps.find(gm) or buried(gm)) is not None:
        return in_eager(gm, trap, watchers)
    restored = repair(gm)
    if (trap := aliases.left(gm)) is not None:
        return restored(in_eager(gm, trap, watchers))
    make = compiler.make(options, find_target(options, example_inputs), watchers, keep, example_inputs)
    key = warm.key_of(gm, example_inputs, make)
    if key is not None and (kept := warm.find(key, example_inputs, make)) is not None:
        return restored(absent.restore(*kept))
    depends: list[absent.Depends] = []

    def compile_as(kind: str) -> Callable[[GraphModule, Sequence[Any]], compiler.Compiled]:
        return warm.compile_as(kind, make) if key else lambda g, _: compiler.compile_aten(g, kind, make)[0]

    def partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        depends[:] = [absent.depends(joint, kwargs["num_fwd_outputs"])]
        return compiler.split(compiler.run_joint(joint, make), inputs, **kwargs)

    def reach() -> absent.Reach | None:
        return absent.reach(*depends) if depends else None

    aot = joint_compiler(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        partition_fn=partition,
        keep_inference_input_mutations=traps.keeps_writes(gm),
    )
    try:
        compiled: Callable[..., Any] = (
            warm.compiled(key, gm, example_inputs, aot, make, reach) if key else aot(gm, example_inputs)
        )
    except (errors.DscError, errors.DscWarning, TorchDynamoException):
        raise  # warnings that the user made errors
    except Exception as why:
        return restored(in_eager(gm, f"AOTAutograd raised {compiler.first_line(why)}", watchers))
    return restored(absent.restore(compiled, reach()))


def listeners(options: Options) -> tuple[Watcher, ...]:
    """Who hears of this compilation.  What records is imported only where something is to be recorded."""
    asked = (*options.watchers, *watch.active())
    if options.trace is None and not structured_logging():
        return asked
    from dsc.debug import tracing

    return (*asked, *tracing.listeners(options))


def keep(gm: GraphModule, stage: str, failed: errors.PassFailed, made: compiler.Compiler) -> object:
    """Save the graph that a pass failed on."""
    from dsc.debug import crash

    return crash.save(gm, stage, failed, made)


def report_recompile(gm: GraphModule) -> None:
    """One line, at level INFO, if this function was compiled before: the guard that failed."""
    if (guard := recompile_reason()) is not None:
        LOG.info("Recompiling %s (%s): %s", blame.first_line_of(gm) or "a function", compile_id(), guard)


def in_eager(gm: GraphModule, why: str, watchers: Sequence[Watcher]) -> Callable[..., Any]:
    """Errors that the user's own code raises come from eager then, as they should."""
    for w in watchers:
        w.left("dynamo", why)
    warnings.warn(str(errors.LeftToEager(why)), errors.DscWarning, stacklevel=2)
    for_eager(gm)
    return gm.forward


def find_target(options: Options, inputs: Sequence[Any]) -> Target:
    if options.target is not None:
        return targets.find(options.target)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return targets.for_device(tensors[0].device if tensors else torch.device("cpu"))
