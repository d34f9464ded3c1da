"""Running emitted Triton in the interpreter, on CPU tensors; ``dsc.codegen.triton_launch`` runs it on a GPU.

The interpreter works by replacing functions of ``triton.language`` while a kernel runs.  Here that is kept within one
launch, under a lock, together with what Triton 3.7 lacks: bf16 rounded to nearest even and widened exactly, ``fma``
rounded once, and reductions that combine whole slices (Triton combines element by element, in Python).
Setting ``TRITON_INTERPRET`` is neither needed nor harmful here; on a GPU it has to be unset.
"""

from __future__ import annotations

import hashlib
import linecache
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import sympy
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from dsc.codegen.kernel import Kernel
from dsc.codegen.triton import Schedule, emit, grid, tiles
from dsc.codegen.triton_nest import evaluate, extent
from dsc.codegen.triton_plan import Plan

Launcher = Callable[[int, Sequence[object], Mapping[str, int], Schedule], None]
"""(programs, positional arguments, tiles, schedule)"""

LANGUAGE = threading.RLock()
"""Held while ``triton.language`` is the interpreter's: nothing may be compiled meanwhile."""


class CheckFailed(RuntimeError):
    """A ``check`` of a kernel failed: an index was out of range."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(f"kernel {kernel.name}: index out of range")
        self.kernel = kernel


def launch(
    kernel: Kernel,
    schedule: Schedule,
    fn: Launcher,
    tensors: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
    fail: torch.Tensor | None = None,
) -> None:
    """Run ``kernel`` once; see ``prepare``."""
    prepare(kernel, schedule, fn)(tensors, sizes, fail)


def prepare(
    kernel: Kernel, schedule: Schedule, fn: Launcher
) -> Callable[[Sequence[torch.Tensor], Mapping[str, int], torch.Tensor | None], None]:
    """``kernel`` as a function of tensors, in the order of its buffers, of sizes, and of a flag for failed checks.

    A failed check raises ``CheckFailed``, or only sets the flag where the caller gave one (int32, one element), to
    look at it later: looking waits for the GPU.
    """
    constants, names = tiles(kernel, schedule), kernel.sizes
    limits = [sympy.sympify(v.attr) for v in kernel.lets if v.op == "check"]
    fixed = grid(kernel, schedule, {}) if extent(kernel.parallel).is_number else None

    def run(tensors: Sequence[torch.Tensor], sizes: Mapping[str, int], fail: torch.Tensor | None = None) -> None:
        programs = grid(kernel, schedule, sizes) if fixed is None else fixed
        if programs == 0:
            return
        arguments: list[object] = [*tensors, *(sizes[s] for s in names)]
        if not limits:
            fn(programs, arguments, constants, schedule)
            return
        flag = torch.zeros(1, dtype=torch.int32, device=tensors[0].device) if fail is None else fail
        if any(evaluate(e, sizes) <= 0 for e in limits) and evaluate(extent(kernel.axes), sizes) > 0:
            flag.fill_(1)  # against size 0, not even the load of index 0 would be in bounds
        else:
            fn(programs, [*arguments, flag], constants, schedule)
        if fail is None and flag.item():
            raise CheckFailed(kernel)

    return run


def prepare_plan(plan: Plan) -> Callable[[Sequence[torch.Tensor], Mapping[str, int], torch.Tensor | None], None]:
    """As ``prepare``, for all launches of a plan."""
    parts = [
        (p.kernel, prepare(p.kernel, p.schedule, interpreted(emit(p.kernel, p.schedule), p.kernel.name)))
        for p in plan.parts
    ]
    if len(parts) == 1:
        return parts[0][1]
    names = [b.name for b in plan.kernel.buffers]

    def run(tensors: Sequence[torch.Tensor], sizes: Mapping[str, int], fail: torch.Tensor | None = None) -> None:
        known = dict(zip(names, tensors))
        for t in plan.temporaries:
            known[t.buffer] = torch.empty(evaluate(t.size, sizes), dtype=DTYPES[t.dtype], device=tensors[0].device)
        for kernel, part in parts:
            part([known[b.name] for b in kernel.buffers], sizes, fail)

    return run


DTYPES = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "b1": torch.bool}
"""Of temporaries, which hold values as kernels compute them."""


def options(schedule: Schedule) -> dict[str, int | bool]:
    return {
        "num_warps": schedule.num_warps,
        "num_stages": schedule.num_stages,
        "enable_fp_fusion": schedule.fp_fusion,
        "debug": schedule.asserts,  # or assertions are left out
        "sanitize_overflow": False,  # integers wrap
    }


def interpreted(source: str, name: str) -> Launcher:
    """The kernel for CPU tensors, run by Triton's interpreter."""
    fn = _plain(load_source(source), {})[name]

    def run(programs: int, arguments: Sequence[object], constants: Mapping[str, int], schedule: Schedule) -> None:
        with _interpreting(fn):
            values = [interpreter._implicit_cvt(a) for a in arguments]
            interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
            for i in range(programs):
                interpreter.interpreter_builder.set_grid_idx(i, 0, 0)
                fn(*values, **constants)

    return run


def _plain(module: dict[str, Any], done: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The names of a file with its kernels as plain Python, and with those of other files that they call."""
    if id(module) in done:
        return done[id(module)]
    names = done[id(module)] = dict(module)
    for key, value in module.items():
        if not isinstance(value, (triton.JITFunction, interpreter.InterpretedFunction)):
            continue
        fn = value.fn
        if fn.__globals__ is not module:
            names[key] = _plain(fn.__globals__, done)[fn.__name__]
            continue
        copy = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
        copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
        names[key] = interpreter.FunctionRewriter(copy).rewrite_ast()
    return names


def load_source(source: str) -> dict[str, Any]:
    """The names that ``source`` defines. Triton reads a function's text, so Python has to know it by a file name."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    file = f"<dsc triton {digest}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": f"dsc_triton_{digest}"}
    exec(compile(source, file, "exec"), module)
    return module


# -- the interpreter, for the time of one launch


@contextmanager
def _interpreting(fn: Callable[..., None]) -> Iterator[None]:
    builder = interpreter.interpreter_builder
    with LANGUAGE, ExitStack() as undo:
        undo.enter_context(np.errstate(all="ignore"))
        scope = interpreter._patch_lang(fn)
        undo.callback(scope.restore)
        scope.set_attr(tl, "reduce", _reduce)
        scope.set_attr(tl.core.tensor, "__index__", _index)
        for name, method in (("cast_impl", _cast), ("create_fma", _fma), ("create_splat", _splat)):
            setattr(builder, name, method)  # on the one object, over the methods of its class
            undo.callback(delattr, builder, name)
        yield


def _index(value: Any) -> int:
    """A size as the bound of a loop: Triton 3.6 gives numpy an array of one element, which numpy 2.5 refuses."""
    return int(np.asarray(value.handle.data).item())


def _cast(source: Any, target: Any) -> Any:
    data, old, new = source.data, source.dtype.scalar, target.scalar
    if (old, new) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(data).view(np.uint32)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(data), np.uint16(0x7FC0), even), new)
    if (old, new) == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle((data.astype(np.uint32) << 16).view(np.float32), new)
    return interpreter.InterpreterBuilder.cast_impl(interpreter.interpreter_builder, source, target)


def _splat(target: Any, source: Any) -> Any:
    """A comparison of single numbers holds bools though it says that it is of their dtype: keep them bools."""
    if source.data.dtype == np.bool_:
        return interpreter.TensorHandle(np.full(target.shape, source.data.flat[0]), source.dtype.scalar)
    return interpreter.InterpreterBuilder.create_splat(interpreter.interpreter_builder, target, source)


def _fma(x: Any, y: Any, z: Any) -> Any:
    if z.data.dtype == np.float32:
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)
    return interpreter.InterpreterBuilder.create_fma(interpreter.interpreter_builder, x, y, z)


def _reduce(value: Any, axis: int, combine: Callable[[Any, Any], Any], keep_dims: bool = False) -> Any:
    """The upper half of the slices into the lower one until one is left, as threads do it."""
    data = value.handle.data
    while data.shape[axis] > 1:
        low, high = np.split(data, 2, axis=axis)
        data = combine(_tensor(low, value.dtype), _tensor(high, value.dtype)).handle.data
    if keep_dims or data.ndim > 1:
        return _tensor(data if keep_dims else data.squeeze(axis), value.dtype)
    return tl.core.tensor(interpreter.TensorHandle(data, value.dtype), value.dtype)


def _tensor(data: Any, dtype: Any) -> Any:
    return tl.core.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
