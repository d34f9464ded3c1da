"""Launching compiled Triton kernels with little Python between them.

Triton's own call looks at every argument, which costs tens of microseconds a launch.  Here only what a kernel is
specialised on is looked at (which pointers are multiples of 16, and the sizes), and the compiled kernel is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import sympy
import torch
import triton

from dsc.codegen import cubin
from dsc.codegen.kernel import Call
from dsc.codegen.triton import emit
from dsc.codegen.triton_nest import evaluate, grid, tiles
from dsc.codegen.triton_plan import Part, Plan
from dsc.codegen.triton_run import DTYPES, LANGUAGE, CheckFailed, load_source, options
from dsc.torch_shim import raw_stream

LOG = logging.getLogger("dsc")

KEPT = 64
"""Combinations of sizes of one kernel whose grids are remembered."""

Sizes = tuple[int, ...]
Again = Callable[[int, Sequence[int], Sequence[torch.Tensor]], object]
"""A launch: of the stream, the addresses of the tensors, and the tensors."""


@dataclass
class Kernel:
    """One compiled kernel: a function of tensors and of its sizes, in the kernel's order."""

    part: Part
    fn: Any
    """What Triton calls a JITFunction."""
    constants: Mapping[str, int]
    ready: dict[tuple[object, ...], Again] = field(default_factory=dict)
    """By device, alignment of the pointers, and sizes."""
    unaligned: Kernel | None = None
    """Of a kernel with descriptors, which need pointers that are multiples of 16: the same without."""

    def launch(self, tensors: Sequence[torch.Tensor], pointers: Sequence[int], sizes: Sizes, device: int) -> None:
        """On the current stream of ``device``.  ``pointers`` are the tensors' addresses.

        Raises:
            CheckFailed: an index is looked up in nothing.
        """
        bits = 0
        for p in pointers:
            bits |= p
        if bits & 15 and self.unaligned is not None:
            self.unaligned.launch(tensors, pointers, sizes, device)
            return
        key = (device, tuple(p % 16 == 0 for p in pointers) if bits & 15 else True, sizes)
        run = self.ready.get(key)
        if run is None:
            if len(self.ready) >= KEPT:
                self.ready.clear()
            self.ready[key] = self.first(tensors, sizes)
            return
        try:
            if self.part.schedule.tma:
                copy_context().run(with_workspace, run, raw_stream(device), pointers, tensors)
            else:
                run(raw_stream(device), pointers, tensors)
        except TypeError:  # a Triton whose compiled kernels are called in another way
            self.ready[key] = slow = self.plainly(sizes)
            slow(0, pointers, tensors)

    def first(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> Again:
        """Compile, launch, and return how to launch again."""
        kernel = self.part.kernel
        known = dict(zip(kernel.sizes, sizes))
        programs = grid(kernel, self.part.schedule, known)
        if programs == 0:
            return lambda stream, pointers, tensors: None
        if any(evaluate(sympy.sympify(v.attr), known) <= 0 for v in kernel.lets if v.op == "check"):
            raise CheckFailed(kernel)
        made = self.plainly(sizes)(0, (), tensors)
        run, function, packed = made.run, made.function, made.packed_metadata  # type: ignore[attr-defined]
        rest = (*sizes, *self.constants.values())
        hooks = (None, None, None)  # of Triton's own profilers

        def again(stream: int, pointers: Sequence[int], _: Sequence[torch.Tensor]) -> None:
            run(programs, 1, 1, stream, function, packed, *hooks, *pointers, *rest)

        return again

    def plainly(self, sizes: Sizes) -> Again:
        """A launch by Triton's own call, which gives the compiled kernel."""
        kernel, schedule = self.part.kernel, self.part.schedule
        programs = grid(kernel, schedule, dict(zip(kernel.sizes, sizes)))

        def launch(_: int, __: Sequence[int], tensors: Sequence[torch.Tensor]) -> object:
            with LANGUAGE:
                call = partial(self.fn[(programs,)], *tensors, *sizes, **self.constants, **options(schedule))
                return copy_context().run(with_workspace, call) if schedule.tma else call()

        return launch


def with_workspace(call: Callable[..., object], *arguments: object) -> object:
    """A launch of a kernel that makes descriptors, for which Triton asks for memory; to be run in a context of its own."""
    triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device="cuda"))
    return call(*arguments)


def precompile(plans: Iterable[Plan], capability: int, threads: int) -> None:
    """Fill Triton's cache with the kernels of ``plans``, several at once: Triton lets other threads run meanwhile.

    Left to the first launch, which also tells what is wrong: kernels of unknown sizes, since Triton looks at those,
    and kernels that cannot be compiled.
    """
    parts = [part for plan in plans for part in plan.parts if not part.kernel.sizes]
    if len(parts) < 2:
        return

    def one(part: Part) -> bool:
        types, constants = cubin.signature(part.kernel, part.schedule)
        pointers = [i for i, t in enumerate(types) if t.startswith("*")]
        try:
            fn = load_source(emit(part.kernel, part.schedule))[part.kernel.name]
            cubin.compile_function(fn, types, constants, pointers, part.schedule, capability)
        except Exception as why:
            LOG.debug("Kernel %s is not compiled ahead: %s: %s", part.kernel.name, type(why).__name__, why)
            return False
        return True

    with LANGUAGE:
        with ThreadPoolExecutor(min(threads, len(parts))) as pool:
            done = list(pool.map(one, parts))
        for part, well in zip(parts, done):
            if not well:  # perhaps because of what ran beside it: Triton is not made for threads
                one(part)


def sequence(plans: Mapping[str, Plan], calls: Sequence[Call]) -> Callable[[tuple[torch.Tensor, ...], Sizes], int]:
    """The calls, one after the other, as a function of the tensors and sizes that they are numbered by.

    It returns 0, or k + 1 where call k looks up an index in nothing.  Any other index out of range stops the GPU
    later, as PyTorch's own kernels do.
    """
    steps = [(c, *_prepared(plans[c.kernel])) for c in calls]

    def run(tensors: tuple[torch.Tensor, ...], sizes: Sizes) -> int:
        device = tensors[0].device.index
        if device != torch.cuda.current_device():  # Triton compiles and launches for the current one
            with torch.cuda.device(device):
                return run(tensors, sizes)
        pointers = [t.data_ptr() for t in tensors]
        for i, (call, parts, temporaries) in enumerate(steps):
            given = tuple([sizes[s] for s in call.sizes])
            buffers = call.buffers
            try:
                if temporaries is None:
                    parts[0][0].launch([tensors[b] for b in buffers], [pointers[b] for b in buffers], given, device)
                else:
                    _all(parts, temporaries, [tensors[b] for b in buffers], given, device)
            except CheckFailed:
                return i + 1
        return 0

    return run


def _prepared(plan: Plan) -> tuple[list[tuple[Kernel, list[int]]], list[tuple[int, torch.dtype]] | None]:
    """The kernels of a plan, each with the places of its buffers among the plan's buffers and temporaries."""
    names = [b.name for b in plan.kernel.buffers] + [t.buffer for t in plan.temporaries]
    parts = []
    for p in plan.parts:
        made = _compiled(p)
        if p.schedule.tma:
            made.unaligned = _compiled(replace(p, schedule=replace(p.schedule, tma=False)))
        parts.append((made, [names.index(b.name) for b in p.kernel.buffers]))
    if len(parts) == 1:
        return parts, None
    return parts, [(evaluate(t.size, {}), DTYPES[t.dtype]) for t in plan.temporaries]


def _compiled(p: Part) -> Kernel:
    fn = load_source(emit(p.kernel, p.schedule))[p.kernel.name]
    return Kernel(p, fn, tiles(p.kernel, p.schedule))


def _all(
    parts: Sequence[tuple[Kernel, list[int]]],
    temporaries: Sequence[tuple[int, torch.dtype]],
    tensors: list[torch.Tensor],
    sizes: Sizes,
    device: int,
) -> None:
    where = tensors[0].device
    known = [*tensors, *(torch.empty(n, dtype=dtype, device=where) for n, dtype in temporaries)]
    for kernel, places in parts:
        given = [known[p] for p in places]
        kernel.launch(given, [t.data_ptr() for t in given], sizes, device)
