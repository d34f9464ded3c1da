"""C++ of kernels: one static function each, and whole sequences of calls as one C entry.

The code includes nothing and leans on GCC and Clang vector extensions; compile it with the flags of ``build``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsc.codegen.cpp_axes import tidy
from dsc.codegen.cpp_body import body
from dsc.codegen.cpp_expr import known
from dsc.codegen.cpp_nest import PRELUDE, RESERVED, Nest, identifier
from dsc.codegen.cpp_ops import STORAGE
from dsc.codegen.cpp_schedule import schedule
from dsc.codegen.cpp_split import Pieces, split
from dsc.codegen.kernel import NBYTES, Buffer, Call, Kernel

STACK = 1 << 16
"""Bytes up to which a temporary lies on the stack."""


def emit(kernel: Kernel) -> str:
    """``static void name(buffers..., sizes..., int* fail)``; ``fail`` only where the kernel checks indices.

    A long reduction comes as several such functions, the last of which calls the others.
    """
    tidied = tidy(kernel)
    pieces = split(tidied)
    if pieces is None:
        n = Nest(schedule(tidied), kernel)
        body(n)
        return _function(kernel, n, n.lines)
    return "\n".join([*(_piece(k) for k in pieces.kernels), _caller(kernel, tidied, pieces)])


def _piece(k: Kernel) -> str:
    k = replace(tidy(k), name=k.name)
    n = Nest(schedule(k), k)
    body(n)
    return _function(k, n, n.lines)


def _function(k: Kernel, n: Nest, lines: Sequence[str]) -> str:
    return "\n".join([*_comment(k), f"{signature(k, n)} {{", *lines, "}"]) + "\n"


def _caller(kernel: Kernel, tidied: Kernel, pieces: Pieces) -> str:
    n = Nest(schedule(tidied), kernel)
    names = dict(n.buffers)
    taken = set(n.taken)
    lines = []
    for t in pieces.temporaries:
        names[t.buffer] = identifier(t.buffer, taken)
        size, kind = known(t.size), STORAGE[t.dtype]
        if size is not None and size * NBYTES[t.dtype] <= STACK:
            lines.append(f"  alignas(64) {kind} {names[t.buffer]}[{max(1, size)}];")
        else:
            bytes_ = f"({n.text(t.size)}) * sizeof({kind})"
            lines.append(f"  {kind}* {names[t.buffer]} = ({kind}*)__builtin_malloc({bytes_});")
    for k in map(tidy, pieces.kernels):
        args = [names[b.name] for b in k.buffers] + [n.names[s] for s in k.sizes] + (["fail"] if k.checks else [])
        lines.append(f"  {function_name(k)}({', '.join(args)});")
    heap = [names[t.buffer] for t in pieces.temporaries if any(f"* {names[t.buffer]} = " in x for x in lines)]
    lines += [f"  __builtin_free({name});" for name in heap]
    return _function(kernel, n, lines)


def emit_unit(kernels: Sequence[Kernel], sequences: Sequence[Sequence[Call]]) -> str:
    """One translation unit: every kernel once, and ``int run_<i>(void** buffers, const long* sizes)`` for every sequence.

    A run returns 0, or k + 1 when call k of the sequence met an index out of range; it stops there.
    """
    by_name = {k.name: k for k in kernels}
    for k in kernels:
        if by_name[k.name] != k:
            raise ValueError(f"two kernels named {k.name}")
    parts = [PRELUDE, *(emit(k) for k in by_name.values())]
    parts += [_run(i, calls, by_name) for i, calls in enumerate(sequences)]
    return "\n".join(parts)


def function_name(kernel: Kernel) -> str:
    return identifier(kernel.name, set(RESERVED))


def signature(kernel: Kernel, n: Nest) -> str:
    args = [f"{_pointer(b)}__restrict {n.buffers[b.name]}" for b in kernel.buffers]
    args += [f"long {n.names[s]}" for s in kernel.sizes]
    args += ["int* fail"] if kernel.checks else []
    return f"static void {function_name(kernel)}({', '.join(args)})"


def _pointer(b: Buffer) -> str:
    return f"{'const ' if b.role == 'in' else ''}{STORAGE[b.dtype]}* "


def _comment(kernel: Kernel) -> list[str]:
    return [f"// {line}".rstrip().rstrip("\\") for line in kernel.origin.splitlines()]


def _run(number: int, calls: Sequence[Call], kernels: dict[str, Kernel]) -> str:
    lines = []
    for i, c in enumerate(calls):
        k = kernels[c.kernel]
        if len(c.buffers) != len(k.buffers) or len(c.sizes) != len(k.sizes):
            raise ValueError(
                f"call {i} of sequence {number}: {c.kernel} takes {len(k.buffers)} buffers, {len(k.sizes)} sizes"
            )
        args = [f"({_pointer(b).strip()})buffers[{slot}]" for b, slot in zip(k.buffers, c.buffers)]
        args += [f"sizes[{slot}]" for slot in c.sizes]
        args += ["&fail"] if k.checks else []
        lines.append(f"  {function_name(k)}({', '.join(args)});")
        if k.checks:
            lines.append(f"  if (fail) return {i + 1};")
    if any(kernels[c.kernel].checks for c in calls):
        lines.insert(0, "  int fail = 0;")
    head = f'extern "C" int run_{number}(void** buffers, const long* sizes) {{'
    return "\n".join([head, *lines, "  return 0;", "}"]) + "\n"
