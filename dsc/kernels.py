"""Kernels to functions that Python can call: C++ sequences for CPU tensors, Triton launches for CUDA tensors.

Where no kernels can be built (no compiler, no cache folder) the caller links the graph on ATen instead.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from dsc import errors
from dsc import target as targets
from dsc.codegen import build
from dsc.codegen.kernel import Call, Kernel
from dsc.codegen.schedule import Schedule
from dsc.options import Options, default_cache_dir
from dsc.program import Program
from dsc.runtime import pages
from dsc.runtime.run import Launch

WITHOUT_TRITON = frozenset("offload offloaded fetch fetched rng_state set_rng_state narrow8 widen8 keep".split())
"""Operators of dsc's that are made of ATen's, or copies."""
THREADS = 8
"""That compile Triton kernels at once."""


def emitter(options: Options, device: torch.device) -> str:
    """cpp, triton or aten for tensors on this device."""
    if options.emit != "auto":
        return options.emit
    return {"cpu": "cpp", "cuda": "triton"}.get(device.type, "aten")


def compiler(options: Options) -> str | None:
    """The C++ compiler, or None after a warning.  One that the user names is used, or none."""
    found = shutil.which(options.cxx) if options.cxx else build.find_compiler()
    if found is None:
        tried = (options.cxx,) if options.cxx else ("g++", "clang++", "c++")
        warnings.warn(str(errors.CompilerMissing(tried)), errors.DscWarning, stacklevel=2)
    return found


def source(
    emitter: str,
    kernels: Sequence[Kernel],
    sequences: Sequence[Sequence[Call]],
    on_gpu: bool,
    schedules: Mapping[str, Schedule] | None = None,
) -> str:
    """The C++ or Triton of the kernels; nothing where all is left to ATen.

    ``schedules``: those of launched Triton kernels that do not have the default one.
    """
    if emitter == "cpp":
        from dsc.codegen import cpp  # each emitter is imported where it is wanted

        return cpp.emit_unit(kernels, sequences)
    if emitter == "triton":
        from dsc.codegen import triton, triton_plan

        plans = [triton_plan.plan(k, interpreter=not on_gpu).with_schedules(schedules or {}) for k in kernels]
        return "\n".join(triton.emit(p.kernel, p.schedule) for plan in plans for p in plan.parts)
    return ""


def launches(program: Program, options: Options) -> list[Launch]:
    """A function for each sequence of the program, built or found built.

    Raises:
        CompileFailed: the compiler refused what was emitted.
        TritonMissing: it is wanted, and not installed.
    """
    if torch.cuda.is_available() and any(map(by_triton, program.externals.values())):
        register()
    match program.emitter:
        case "cpp":
            cxx = compiler(options)
            assert cxx is not None, "the backend asks for kernels only where they can be built"
            pages.keep()
            library = build_somewhere(program.code, options, cxx)
            return [cpp_launch(library.function(f"run_{i}"), s) for i, s in enumerate(program.sequences)]
        case "triton":
            on_gpu = program.device.type == "cuda"
            schedules = measured(program, options) if on_gpu and options.tune else program.schedules
            return triton_launches(program.kernels, program.sequences, on_gpu, schedules)
        case _:
            return []


def by_triton(operator: object) -> bool:
    """Whether it is an operator of dsc's whose CUDA kernel is Triton's: nothing else runs it there."""
    if getattr(operator, "namespace", "") != "dsc":
        return False
    return str(getattr(operator, "__name__", "")).split(".")[0] not in WITHOUT_TRITON


def needs_triton(gm: GraphModule) -> bool:
    """Whether a graph on CUDA has such an operator."""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and by_triton(n.target)]
    return any(isinstance(v := n.meta.get("val"), torch.Tensor) and v.device.type == "cuda" for n in results(found))


def results(nodes: Sequence[Node]) -> list[Node]:
    """The nodes and the items that are taken of them."""
    return [x for n in nodes for x in (n, *n.users)]


def register() -> None:
    """The CUDA kernels of dsc's operators.

    Raises:
        TritonMissing: it is not installed.
    """
    try:
        from dsc.codegen.templates import (  # noqa: F401
            embedding_ops,
            flash_ops,
            grouped_ops,
            precision_ops,
            sparse_ops,
            varlen_ops,
        )
    except ModuleNotFoundError as why:
        raise errors.TritonMissing(str(why.name)) from why


def build_somewhere(source: str, options: Options, cxx: str) -> build.Library:
    """In the cache folder; if that cannot be used, in a temporary one, with a warning that says what to do."""
    folder = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    try:
        return build.build(source, folder, cxx)
    except build.CacheUnusable as problem:
        warnings.warn(str(errors.CacheUnusable(str(folder), str(problem))), errors.DscWarning, stacklevel=2)
        with tempfile.TemporaryDirectory(prefix="dsc-") as temporary:  # a loaded library needs its file no more
            return build.build(source, Path(temporary), cxx)


def cpp_launch(run: Callable[[object, object], int], sequence: Sequence[Call]) -> Launch:
    slots = 1 + max((b for c in sequence for b in c.buffers), default=-1)
    count = 1 + max((s for c in sequence for s in c.sizes), default=-1)
    pointers, longs = ctypes.c_void_p * slots, ctypes.c_long * max(count, 1)

    def launch(tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> int:
        return run(pointers(*[t.data_ptr() for t in tensors]), longs(*sizes))

    return launch


def triton_launches(
    kernels: Sequence[Kernel],
    sequences: Sequence[Sequence[Call]],
    on_gpu: bool,
    schedules: Mapping[str, Schedule] | None = None,
) -> list[Launch]:
    """On CPU tensors through Triton's interpreter: slow, to check kernels.  ``schedules``: as for ``source``.

    Raises:
        TritonMissing: it is not installed.
    """
    try:
        from dsc.codegen import triton_launch, triton_plan, triton_run
    except ModuleNotFoundError as why:
        raise errors.TritonMissing(str(why.name)) from why
    plans = {k.name: triton_plan.plan(k, interpreter=not on_gpu).with_schedules(schedules or {}) for k in kernels}
    if on_gpu:
        major, minor = torch.cuda.get_device_capability()
        triton_launch.precompile(plans.values(), 10 * major + minor, THREADS)
        return [triton_launch.sequence(plans, s) for s in sequences]
    prepared = {k.name: (k, triton_run.prepare_plan(plans[k.name])) for k in kernels}

    def launcher(sequence: Sequence[Call]) -> Launch:
        def launch(tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...]) -> int:
            for i, c in enumerate(sequence):
                k, run = prepared[c.kernel]
                try:
                    run([tensors[b] for b in c.buffers], dict(zip(k.sizes, (sizes[s] for s in c.sizes))), None)
                except triton_run.CheckFailed:
                    return i + 1
            return 0

        return launch

    return [launcher(s) for s in sequences]


def measured(program: Program, options: Options) -> dict[str, Schedule]:
    """Launched kernel -> the schedule that was measured to be the fastest here, now or by an earlier process.

    Raises:
        TritonMissing: it is not installed.
    """
    try:
        from dsc.codegen import triton_plan, triton_time, tune
    except ModuleNotFoundError as why:
        raise errors.TritonMissing(str(why.name)) from why
    folder = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    plans = [triton_plan.plan(k) for k in program.kernels]
    choices = tune.tuned(plans, targets.for_device(program.device), folder, triton_time.timer)
    return {**program.schedules, **{name: choice.chosen for name, choice in choices.items()}}
