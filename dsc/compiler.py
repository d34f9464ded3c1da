"""From AOTAutograd's graphs to programs: the steps of every compilation, whoever asks for it."""

from __future__ import annotations

import importlib
import operator
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from dsc import collector, defaults, errors, foretell, kernels, live, snapshot, watch
from dsc.compilation import Compilation
from dsc.manager import Pass, PassPipeline, Remark, Report
from dsc.notes import notes
from dsc.options import Options
from dsc.partition import partition
from dsc.program import Program
from dsc.runtime import graphs, run
from dsc.runtime.graphs import Recorder
from dsc.runtime.pool import Pool
from dsc.runtime.state import State
from dsc.target import Target
from dsc.torch_shim import RNG_CALLS, detect_fake_mode, donate_nothing, make_boxed_func
from dsc.watch import Watcher

Compiled = Callable[[list[object]], tuple[object, ...]]
Keep = Callable[[GraphModule, str, errors.PassFailed, "Compiler"], object]
"""Saves the graph before a failed pass, given the graph before all passes, and says where."""


@dataclass(frozen=True)
class Compiler:
    """All that the graphs of one captured function have in common."""

    options: Options
    target: Target
    joint: tuple[Pass, ...]
    """Passes on the joint graph."""
    graph: tuple[Pass, ...]
    """Passes on each graph after the split."""
    pool: Pool
    watchers: tuple[Watcher, ...] = ()
    keep: Keep | None = None
    left_to_aten: list[str] = field(default_factory=list)
    """Kinds of the graphs for which something failed, or was missing."""
    state: State = field(default_factory=State)
    """What lives between steps."""
    recorded: Pool = field(default_factory=Pool)
    """Temporaries of programs that are recorded."""
    recorder: Callable[[torch.device], Recorder] | None = None
    """What records programs for a device, where not CUDA graphs do."""

    def pipeline(self, stage: str) -> PassPipeline:
        passes = self.joint if stage == "joint" else self.graph
        return PassPipeline(passes, watch.observers(self.watchers, stage), self.options.verify)

    def ahead(self, kind: str) -> PassPipeline:
        """Passes that change what is computed: inference graphs, which see no joint pass, get them first of all."""
        passes = tuple(p for p in self.joint if p.on_inference and kind == "inference")
        return PassPipeline(passes, watch.observers(self.watchers, kind), self.options.verify)


def make(
    options: Options,
    target: Target,
    watchers: Sequence[Watcher] = (),
    keep: Keep | None = None,
    sample: Sequence[object] | None = None,
) -> Compiler:
    """A compiler with the passes that the options name.  ``sample``: what the graph is called with first.

    Raises:
        UnknownPass, UnknownOption, BadOption, BadPassOrder: of ``options.passes``.
    """
    state = state_of(options)
    joint, graph = defaults.joint(target, options), defaults.GRAPH
    if not defaults.suffice(options):
        from dsc import passlist  # all passes that there are

        joint, graph = passlist.asked(options, target, state, sample)
    compiler = Compiler(options, target, joint, graph, Pool(), tuple(watchers), keep, state=state)
    for stage in ("joint", "forward"):
        compiler.pipeline(stage)  # a bad order raises now
    for w in watchers:
        w.begins(options, target)
    return compiler


def state_of(options: Options) -> State:
    """What lives between steps: given, the controller's, or new."""
    if options.controller is None:
        return State() if options.state is None else options.state
    if options.state is not None:
        options.controller.state = options.state
    return options.controller.state


def warn_of_nothing_sparse(report: Report) -> None:
    """The user asked for sparse layers, and the graph has linear layers of which none can be."""
    numbers = dict(report.numbers)
    if numbers["linear layers"] and not numbers["sparse layers"]:
        reasons = tuple(f"{r.node}: {r.why}" for r in report.remarks if r.verdict == "skipped")
        warnings.warn(str(errors.NothingSparse(reasons)), errors.DscWarning, stacklevel=4)


def split(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """The forward and the backward graph of a joint one.  Takes what AOTAutograd gives to a partitioner."""
    forward, backward = live.split(joint, partition, inputs, **kwargs)
    complete(forward)
    complete(backward)
    keeps = {notes(n).keep for n in forward.graph.nodes}
    if keeps & {"compress", "offload"}:
        importlib.import_module("dsc.passes.memory_compress").install_noted(
            forward, backward, kwargs["num_fwd_outputs"]
        )
    if "offload" in keeps:
        move_saved(forward, backward, kwargs["num_fwd_outputs"])
    return forward, backward


def move_saved(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """Put in the copies of saved values that the memory pass has noted.  What runs them is imported for them alone."""
    importlib.import_module("dsc.runtime.offload")
    importlib.import_module("dsc.passes.memory_offload").install_noted(forward, backward, results)


def plan_joint(gm: GraphModule, compiler: Compiler) -> GraphModule:
    """The joint graph after its passes, in place."""
    foretell.correct(gm)
    for w in compiler.watchers:
        w.traced("joint", gm)
    for name, report in compiler.pipeline("joint").run(gm, compiler.target):
        if name == "sparsify":
            warn_of_nothing_sparse(report)
    return gm


def run_joint(gm: GraphModule, compiler: Compiler) -> GraphModule:
    """The joint graph after its passes, or as it was, after a warning, where one of them fails."""
    before = snapshot.take(gm)
    try:
        return plan_joint(gm, compiler)
    except Exception as why:
        asked = (errors.InfeasibleBudget, errors.BadPlan, errors.PrecisionError)
        if isinstance(why, errors.PassFailed) and isinstance(why.cause, asked):
            raise why.cause from why  # what the user asked for cannot be had: no other way around it
        kept = before.restored()
        leave("joint", saved(kept, "joint", why, compiler), compiler)
        return kept


@collector.paused()
def compile_aten(gm: GraphModule, kind: str, compiler: Compiler) -> tuple[Compiled, Program | None]:
    """One ATen graph to a boxed function: kernels and ATen, or ATen alone where kernels cannot be had.

    The program comes along where it is worth keeping: what was left to ATen for want of something is not.
    """
    if kind == "forward":
        donate_nothing()
    live.bind(gm, compiler.state)
    before = snapshot.take(gm)
    try:
        record = plan(gm, kind, compiler)
        call = loaded(record.program, kind, compiler)
    except errors.DscWarning:
        raise
    except Exception as why:
        if isinstance(why, errors.PassFailed) and isinstance(why.cause, errors.PrecisionError):
            raise why.cause from why  # what the user asked for cannot be had: no other way around it
        kept = before.restored()
        if isinstance(why, errors.TritonMissing) and kernels.needs_triton(kept):
            raise  # what the user asked for has no kernels of ATen
        leave(kind, saved(kept, kind, why, compiler), compiler)
        aten = (Remark("", "skipped", f"the whole graph stays with ATen: {first_line(why)}"),)
        try:
            compiler.ahead(kind).run(kept, compiler.target)
            record = linked(kept, kind, compiler, (), aten)
            call = loaded(record.program, kind, compiler)
        except Exception:
            kept.recompile()
            return make_boxed_func(kept.forward), None
    if isinstance(call, graphs.Replayer):
        record = replace(record, replayer=call)
    tell(record, compiler)
    return call, None if compiler.left_to_aten else record.program


def loaded(program: Program, kind: str, compiler: Compiler) -> Compiled:
    """The program as a function, its kernels built; one that records and replays its launches, where that is wanted."""
    launches = kernels.launches(program, compiler.options)
    call = run.load(program, launches, compiler.pool, kind, compiler.state)
    if program.unrecordable != () or not records(program, compiler):
        return call
    again = run.load(program, launches, compiler.recorded, f"{kind}, recorded", compiler.state)
    return graphs.Replayer(
        call, again, recorder_of(program, compiler), frozenset(program.written), compiler.recorded.blocks
    )


def records(program: Program, compiler: Compiler) -> bool:
    """Whether there is what could record the program."""
    return compiler.recorder is not None or program.device.type == "cuda"


def recorder_of(program: Program, compiler: Compiler) -> Recorder:
    if compiler.recorder is not None:
        return compiler.recorder(program.device)
    from dsc.runtime.graphs_cuda import CudaRecorder

    return CudaRecorder(program.device)


def plan(gm: GraphModule, kind: str, compiler: Compiler, build: bool = True) -> Compilation:
    """The passes on ``gm``, in place, and its program.

    With ``build`` the kernels will be wanted here: without a C++ compiler the graph is left to ATen.
    """
    start = time.perf_counter()
    if kind == "inference":  # forward and backward were put right as one graph
        foretell.correct(gm)
    for w in compiler.watchers:
        w.traced(kind, gm)
    emitter = kernels.emitter(compiler.options, device_of(gm))
    reports = compiler.ahead(kind).run(gm, compiler.target)
    if build and emitter == "cpp" and kernels.compiler(compiler.options) is None:
        compiler.left_to_aten.append(kind)
    elif emitter != "aten":
        reports = (*reports, *compiler.pipeline(kind).run(gm, compiler.target))
    return linked(gm, kind, compiler, reports, start=start)


def linked(
    gm: GraphModule,
    kind: str,
    compiler: Compiler,
    reports: tuple[tuple[str, Report], ...],
    remarks: tuple[Remark, ...] = (),
    start: float | None = None,
) -> Compilation:
    """The graph as it is, with its noted groups, to a program."""
    from dsc import link  # a graph that was kept needs none of it

    start = time.perf_counter() if start is None else start
    program, bound, skipped = link.link(gm, compiler.options, kind)
    reports = (*reports, ("link", Report(True, (*remarks, *skipped))))
    if program.unrecordable is not None:
        reasons = program.unrecordable
        if not records(program, compiler):
            reasons = ("its tensors are on the CPU: only launches on a GPU are recorded",)
        why = tuple(Remark("", "skipped", reason) for reason in reasons)
        reports = (
            *reports,
            ("cuda_graphs", Report(False, why or (Remark("", "did", "its launches can be replayed"),))),
        )
    return Compilation(kind, program, reports, gm, time.perf_counter() - start, bound, compiler.state)


def tell(record: Compilation, compiler: Compiler) -> None:
    """Hand the record to whoever asked for it."""
    if compiler.options.on_compile is not None:
        compiler.options.on_compile(record)
    for w in compiler.watchers:
        w.compiled(record)


def saved(gm: GraphModule, stage: str, why: Exception, compiler: Compiler) -> Exception:
    """A failed pass together with where the graph before it was saved, if it could be; other errors as they are."""
    if compiler.keep is None or not isinstance(why, errors.PassFailed):
        return why
    try:
        where = str(compiler.keep(gm, stage, why, compiler))
    except Exception:  # a full disk must not stop the model
        return why
    found = replace(why, saved=where)
    found.__cause__ = why.cause
    return found


def leave(kind: str, why: Exception, compiler: Compiler) -> None:
    """Say that a graph stays with ATen: a warning, and a word to the watchers."""
    compiler.left_to_aten.append(kind)
    for w in compiler.watchers:
        w.left(kind, first_line(why))
    warnings.warn(str(errors.LeftToATen(kind, first_line(why))), errors.DscWarning, stacklevel=3)


def first_line(why: Exception) -> str:
    """``ValueError: no such thing``; of our own errors their sentence."""
    words = str(why).strip().split("\n")[0].rstrip(".")
    return words if isinstance(why, errors.DscError) else f"{type(why).__name__}: {words}"


def copied(gm: GraphModule) -> GraphModule:
    """The graph as it is now; nodes keep their meta, each its own copy."""
    return snapshot.take(gm).restored()


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


def device_of(gm: GraphModule) -> torch.device:
    """Where the graph's tensors live: that of most of its nodes, so that a scalar on the CPU does not count."""
    counts: dict[torch.device, int] = {}
    for n in gm.graph.nodes:
        v = n.meta.get("val")
        if isinstance(v, torch.Tensor):
            counts[v.device] = counts.get(v.device, 0) + 1
    return max(counts, key=lambda d: counts[d]) if counts else torch.device("cpu")
