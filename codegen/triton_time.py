"""How long a kernel takes on the GPU that is here."""

from __future__ import annotations

import sympy
import torch
import triton.testing

from dsc.codegen.kernel import Call, Kernel
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_index import bound
from dsc.codegen.triton_launch import sequence
from dsc.codegen.triton_nest import evaluate
from dsc.codegen.triton_plan import Part, Plan, of_product
from dsc.ops.kinds import SHORT

WARM, TIMED = 5, 20
"""Milliseconds of launches before the timing, and of those that are timed."""


def timer(kernel: Kernel, schedule: Schedule) -> float:
    """Median seconds of its launches on fresh tensors, the second-level cache emptied before each.

    Raises:
        ValueError: an index whose range is not known.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    plan = of_product(kernel, schedule) if schedule.KB else Plan(kernel, (Part(kernel, schedule),))
    run = sequence({kernel.name: plan}, [Call(kernel.name, tuple(range(len(kernel.buffers))))])
    tensors = tuple(arguments(kernel, device))
    once = lambda: run(tensors, ())  # noqa: E731
    milliseconds = triton.testing.do_bench(once, warmup=WARM, rep=TIMED, return_mode="median")
    return float(milliseconds) * 1e-3


def arguments(kernel: Kernel, device: torch.device) -> list[torch.Tensor]:
    """A tensor for each buffer, as long as the kernel's indices reach: random floats, and zeros, which are valid indices.

    Raises:
        ValueError: an index whose range is not known.
    """
    dtypes = {name: dtype for dtype, name in SHORT.items()}
    generator = torch.Generator().manual_seed(0)
    out = []
    for b in kernel.buffers:
        shape, dtype = (length(kernel, b.name),), dtypes[b.dtype]
        t = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.zeros(shape)
        out.append(t.to(device, dtype))
    return out


def length(kernel: Kernel, buffer: str) -> int:
    """Elements of a buffer that the kernel may touch."""
    extents = {a.name: evaluate(a.extent, {}) for a in kernel.axes}
    limits = {v.args[0]: evaluate(sympy.sympify(v.attr), {}) for v in kernel.lets if v.op == "check"}
    limits |= {v.name: evaluate(sympy.sympify(v.attr), {}) for v in kernel.lets if v.op == "check"}
    known = {**{v.name: limits.get(v.name, 1) for v in kernel.lets}, **extents}
    indices = [v.access[1] for v in kernel.lets if v.op == "load" and v.access[0] == buffer]
    indices += [s.index for s in kernel.stores if s.buffer == buffer]
    reach = [bound(sympy.sympify(e), known) for e in indices]
    if not reach or any(r is None for r in reach):
        raise ValueError(f"the range of {buffer} is not known")
    return 1 + max(r for r in reach if r is not None)
