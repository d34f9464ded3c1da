"""Kernels, ATen calls and bytes of a train step, dsc against torch's default compiler: ``python benchmarks/fusion.py``.

Nothing is built or run: both compilers decide what they would launch, for forward and backward, and that is counted by
one convention, which is this file's own for both sides:

1. A launch is a kernel that the compiler wrote or a call of ATen (matrix products, convolutions, attention, whatever it
   did not write a kernel for).  Views and allocations are none.  Several kernels in one C++ function are several.
2. A launch reads each input buffer once and writes each output buffer once, however often the code mentions it: what a
   cache or registers could keep is not counted twice.  Values that live and die inside of a kernel count nothing.
3. Of an input, what is touched counts: a slice counts its elements, an embedding the rows looked up (as many as there
   are indices, and no more than the table has), an expanded dimension once.  Accesses that start at different offsets
   are different slices and add up, never beyond the buffer's size.  Of an output, likewise.
4. A call of ATen reads its operands and writes its results that someone uses; what it does inside is not counted.
5. A buffer updated in place is read and written.  Symbolic sizes count by their hints.

``--check`` counts graphs that leave no choice (one add, one matrix product, ...) and compares with counts made by hand.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import common
import sympy
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from dsc import compiler, emit, ops
from dsc.steps import storage_of
from dsc.torch_shim import optimization_hint


@dataclass(frozen=True)
class Launch:
    graph: str
    title: str
    ours: bool
    """A kernel that the compiler wrote; else a call of ATen."""
    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass
class Count:
    """All launches of one train step, and the text of the graphs that they come from."""

    launches: list[Launch] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        return sum(x.ours for x in self.launches)

    @property
    def calls(self) -> int:
        return len(self.launches) - self.kernels

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.launches)

    @property
    def kernel_bytes(self) -> int:
        return sum(x.bytes for x in self.launches if x.ours)


@dataclass
class Touched:
    """Elements of one buffer that a launch touches: the largest access at each start, added up, within the buffer."""

    whole: int
    itemsize: int
    slices: dict[object, int] = field(default_factory=dict)

    def add(self, start: object, count: int) -> None:
        self.slices[start] = max(self.slices.get(start, 0), count)

    @property
    def bytes(self) -> int:
        return min(self.whole, sum(self.slices.values())) * self.itemsize


class Counted(Exception):
    """Raised in place of running what was counted."""


def stop(*_: object) -> Any:
    raise Counted


def hint(size: Any) -> int:
    return int(optimization_hint(size))


def product(sizes: Iterable[Any]) -> int:
    out = 1
    for s in sizes:
        out *= hint(s)
    return out


def distinct(shape: Iterable[Any], stride: Iterable[Any]) -> int:
    """Elements of a view, those of expanded dimensions once."""
    return product(s for s, t in zip(shape, stride) if t != 0)


# dsc


@contextlib.contextmanager
def dsc_counted(count: Count) -> Iterator[None]:
    """Compiling with dsc inside builds no kernels, and adds what would be launched to ``count``."""

    def kernel(writer: emit.Writer, i: int, step: Any) -> None:
        bound = writer.bound[step.group]
        reads, writes = dsc_kernel(bound.kernel, bound.nodes)
        count.launches.append(Launch(writer.kind, bound.kernel.name, True, reads, writes))
        old_kernel(writer, i, step)

    def call(writer: emit.Writer, i: int, n: Any) -> None:
        before = writer.aten_calls
        old_call(writer, i, n)
        if writer.aten_calls > before:
            reads, writes = dsc_call(n)
            count.launches.append(Launch(writer.kind, ops.name_of(n), False, reads, writes))

    with (
        common.replaced(emit.Writer, "kernel", kernel) as old_kernel,
        common.replaced(emit.Writer, "call", call) as old_call,
        common.replaced(compiler, "loaded", lambda program, kind, made: boxed(stop)),
    ):
        yield


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(args: list[object]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def dsc_kernel(kernel: Any, nodes: Any) -> tuple[dict[str, int], dict[str, int]]:
    extents = {a.name: hint(a.extent) for a in kernel.axes}
    varies = {v.name: v.axes for v in kernel.lets}
    buffers = {b.name: (b, n, Touched(hint(ops.tensor(n).numel()), ops.tensor(n).element_size()))
               for b, n in zip(kernel.buffers, nodes)}  # fmt: skip
    for v in kernel.lets:
        if v.op == "load":
            name, index = v.access
            free = {s.name for s in sympy.sympify(index).free_symbols}
            axes = (free & extents.keys()).union(*(varies[s] for s in free if s in varies))
            buffers[name][2].add(start(index, free), product(extents[a] for a in axes))
    reads = {n.name: t.bytes for b, n, t in buffers.values() if b.role != "out"}
    writes = {n.name: t.whole * t.itemsize for b, n, t in buffers.values() if b.role != "in"}
    return reads, writes


def start(index: Any, variables: Iterable[str]) -> str:
    """The offset of an access; the integers that it looks up count as zero."""
    return str(sympy.sympify(index).subs({sympy.Symbol(v): 0 for v in variables} | zeros(index)))


def zeros(index: Any) -> dict[Any, int]:
    return {s: 0 for s in sympy.sympify(index).free_symbols if not s.name.startswith(("s", "u"))}


def dsc_call(node: Any) -> tuple[dict[str, int], dict[str, int]]:
    reads: dict[str, Touched] = {}
    for a in ops.tensor_operands(node):
        t, root = ops.tensor(a), storage_of(a)
        held = ops.tensor(root).numel() if isinstance(root.meta.get("val"), torch.Tensor) else t.numel()
        touched = reads.setdefault(root.name, Touched(hint(held), t.element_size()))
        touched.add((str(t.storage_offset()), tuple(map(str, t.shape))), distinct(t.shape, t.stride()))
    results = [node] if isinstance(node.meta["val"], torch.Tensor) else [u for u in node.users if u.users]
    writes = {r.name: hint(ops.tensor(r).numel()) * ops.tensor(r).element_size() for r in results}
    return {k: t.bytes for k, t in reads.items()}, writes


# torch's default compiler


@contextlib.contextmanager
def inductor_counted(count: Count) -> Iterator[None]:
    """Compiling with Inductor inside stops before C++ is built, and adds what would be launched to ``count``."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def compile_to_module(graph: Any) -> Any:
        code, _ = graph.codegen()
        count.texts.append(code.value)
        kind = "inference" if graph.is_inference else "backward" if graph.is_backward else "forward"
        with V.set_graph_handler(graph):
            count.launches.extend(inductor_launches(graph, kind))
        return SimpleNamespace(call=stop, runner=None, __file__="counted")

    with (
        common.replaced(GraphLowering, "compile_to_module", compile_to_module),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def inductor_launches(graph: Any, kind: str) -> Iterator[Launch]:
    from torch._inductor import ir, scheduler

    for node in graph.scheduler.nodes:
        if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, (ir.MultiOutput, ir.NopKernel)):
            continue
        if isinstance(node, scheduler.ExternKernelSchedulerNode):
            reads, writes = inductor_extern(graph, node)
            yield Launch(
                kind, str(getattr(node.node, "op_overload", None) or node.node.get_kernel_name()), False, reads, writes
            )
        else:
            reads, writes = inductor_kernel(graph, node)
            origins = {o.name for n in node.get_nodes() for o in n.node.get_origins()}
            yield Launch(kind, f"{node.get_name()}: {' '.join(sorted(origins))}", True, reads, writes)


def inductor_buffer(graph: Any, name: str) -> Touched:
    return Touched(hint(graph.get_numel(name)), graph.get_dtype(name).itemsize)


def inductor_kernel(graph: Any, node: Any) -> tuple[dict[str, int], dict[str, int]]:
    from torch._inductor.dependencies import MemoryDep, WeakDep

    inside = set(node.get_nodes())
    made = {d.name for n in inside for d in n.read_writes.writes}
    updated = {m for name in made for m in graph.scheduler.name_to_buf[name].get_mutations()}
    lost = {b for b in made if not inductor_wanted(graph, b, inside)}
    reads: dict[str, Touched] = {}
    writes: dict[str, Touched] = {}
    for n in node.get_nodes():
        ranges = [s for group in n.get_ranges() for s in group]
        for deps, out in ((n.read_writes.reads, reads), (n.read_writes.writes, writes)):
            for d in deps:
                if isinstance(d, WeakDep) or d.name in lost or (out is reads and d.name in made):
                    continue
                if out is reads and d.name in updated and not isinstance(d, MemoryDep):
                    continue  # says only that it comes after; what is updated is added below
                touched = out.setdefault(d.name, inductor_buffer(graph, d.name))
                if not isinstance(d, MemoryDep):
                    touched.add("all", touched.whole)
                elif d.is_indirect():
                    touched.add("looked up", product(ranges))
                else:
                    touched.add(start(d.index, ()), hint(d.get_numel()))
                if out is writes and (d.mode or "").startswith("atomic"):
                    reads[f"{d.name} before"] = touched
    return {k: t.bytes for k, t in reads.items()}, {k: t.bytes for k, t in writes.items()}


def inductor_wanted(graph: Any, name: str, inside: set[Any]) -> bool:
    """Whether a buffer is read outside of the kernel that makes it, or is a result, or an input updated in place."""
    buffer = graph.scheduler.name_to_buf[name]
    return bool(buffer.get_mutations()) or any(u.node not in inside for u in buffer.users if not u.is_weak)


def inductor_extern(graph: Any, node: Any) -> tuple[dict[str, int], dict[str, int]]:
    from torch._inductor import ir

    reads: dict[str, Touched] = {}
    for x in tree_leaves(node.node.inputs):
        if not isinstance(x, ir.IRNode) or x.maybe_get_layout() is None:
            continue
        layout, name = x.get_layout(), x.get_name()
        if isinstance(layout, ir.MultiOutputLayout):
            continue
        touched = reads.setdefault(name, inductor_buffer(graph, name))
        touched.add((str(layout.offset), tuple(map(str, layout.size))), distinct(layout.size, layout.stride))
    layout = node.node.layout
    writes: dict[str, int] = {}
    mutated = set(node.node.get_mutation_names())
    if isinstance(layout, ir.MultiOutputLayout):
        pieces = [u.node for b in node.get_outputs() for u in b.users if hasattr(u.node, "node")]
        made = [p for p in pieces if isinstance(p.node, ir.MultiOutput) and any(b.users for b in p.get_outputs())]
        writes = {p.node.get_name(): product(p.node.get_size()) * p.node.get_dtype().itemsize for p in made}
    elif isinstance(layout, ir.NoneLayout) or mutated:
        for m in mutated:
            b = inductor_buffer(graph, m)
            writes[m] = b.whole * b.itemsize
    else:
        writes[node.node.get_name()] = product(layout.size) * layout.dtype.itemsize
    return {k: t.bytes for k, t in reads.items()}, writes


# both


def count(way: str, case: common.Case) -> Count:
    """What a train step would launch."""
    out = Count()
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as cache, torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        if way == "dsc":
            options = {
                "cache_dir": cache,
                "on_compile": lambda r: (out.texts.append(r.text), out.remarks.extend(remarks(r))),
            }
            forward, counted = torch.compile(case.model, backend="dsc", options=options), dsc_counted(out)
        else:
            forward, counted = torch.compile(case.model), inductor_counted(out)
        with counted, common.autocast(case.dtype):
            try:
                forward(*case.inputs)
            except Counted:
                return out
    raise AssertionError("the graph was run, not counted")


def remarks(record: Any) -> list[str]:
    return [f"{record.kind} {p}: {m.verdict} {m.node}: {m.why}" for p, report in record.reports for m in report.remarks]


def show(c: Count) -> str:
    """All launches, largest first."""
    lines = []
    for x in sorted(c.launches, key=lambda x: -x.bytes):
        lines.append(f"{x.bytes / 1e6:9.3f} MB  {x.graph:9}  {'kernel' if x.ours else 'ATen  '}  {x.title}")
        lines += [
            f"{'':16}{way} {v / 1e6:9.3f}  {k}" for way, m in (("r", x.reads), ("w", x.writes)) for k, v in m.items()
        ]
    return "\n".join(lines)


# graphs that leave no choice

CHECKS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], int, int, int]] = {
    # function, shapes of its inputs, kernels, calls, bytes: forward without gradients
    "add": (lambda x, y: x + y, ((64, 32), (64, 32)), 1, 0, 4 * 3 * 64 * 32),
    "add of a row": (lambda x, y: x + y, ((64, 32), (32,)), 1, 0, 4 * (2 * 64 * 32 + 32)),
    "mm": (lambda x, y: x @ y, ((64, 32), (32, 16)), 0, 1, 4 * (64 * 32 + 32 * 16 + 64 * 16)),
    "mm, then relu": (
        lambda x, y: F.relu(x @ y), ((64, 32), (32, 16)), 1, 1, 4 * (64 * 32 + 32 * 16 + 3 * 64 * 16)
    ),
    "softmax": (lambda x: x.softmax(-1), ((64, 32),), 1, 0, 4 * 2 * 64 * 32),
    "half of a sum": (lambda x, y: x[:, :16] + y, ((64, 32), (64, 16)), 1, 0, 4 * 3 * 64 * 16),
    "two halves": (lambda x: x[:, :16] * x[:, 16:], ((64, 32),), 1, 0, 4 * (64 * 32 + 64 * 16)),
    "linear": (lambda x, w, b: F.linear(x, w, b), ((64, 32), (16, 32), (16,)), 0, 1, 4 * (64 * 32 + 16 * 32 + 16 + 64 * 16)),
    "bmm": (torch.bmm, ((3, 64, 32), (3, 32, 16)), 0, 1, 4 * 3 * (64 * 32 + 32 * 16 + 64 * 16)),
    "attention": (F.scaled_dot_product_attention, ((2, 3, 64, 32),) * 3, 0, 1, 4 * (4 * 2 * 3 * 64 * 32)),
}  # fmt: skip


def check() -> bool:
    rows, right = [], True
    for name, (function, shapes, kernels, calls, size) in CHECKS.items():
        inputs = tuple(torch.randn(s) for s in shapes)
        for way in ("dsc", "inductor"):
            c = count(way, common.Case(function, inputs))  # type: ignore[arg-type]
            same = (c.kernels, c.calls, c.bytes) == (kernels, calls, size)
            right &= same
            rows.append(
                (
                    name,
                    way,
                    c.kernels,
                    c.calls,
                    c.bytes,
                    "as by hand" if same else f"by hand: {kernels} {calls} {size}",
                )
            )
    print(common.table(("graph", "compiler", "kernels", "ATen", "bytes", ""), rows))
    return right


def main() -> None:
    p = common.parser(__doc__, ",".join(common.FAMILIES))
    p.add_argument("--tiny", action="store_true", help="the small variants")
    p.add_argument(
        "--check", action="store_true", help="count graphs that leave no choice, and compare with counts by hand"
    )
    p.add_argument("--detail", metavar="FOLDER", default=None, help="write every launch, graph and remark there")
    args = p.parse_args()
    if args.check:
        sys.exit(0 if check() else 1)
    rows, results = [], {}
    for name in args.models.split(","):
        name = f"{name}-tiny" if args.tiny and not name.endswith("-tiny") else name
        both = {way: count(way, common.case(name, args.dtype)) for way in ("dsc", "inductor")}
        d, i = both["dsc"], both["inductor"]
        rows.append((name, d.kernels, i.kernels, d.calls, i.calls, d.bytes / 1e6, i.bytes / 1e6,
                     d.kernel_bytes / 1e6, i.kernel_bytes / 1e6, d.bytes / i.bytes))  # fmt: skip
        results[name] = {k: {"kernels": c.kernels, "aten_calls": c.calls, "bytes": c.bytes, "kernel_bytes": c.kernel_bytes,
                             "launches": [asdict(x) for x in c.launches]} for k, c in both.items()}  # fmt: skip
        if args.detail:
            detail(args.detail, name, both)
        print(common.table(HEAD, rows[-1:]), flush=True)
    print("\n" + common.table(HEAD, rows))
    common.write_json(args.json, results)


HEAD = (
    "train step",
    "kernels",
    "Inductor",
    "ATen",
    "Inductor",
    "MB",
    "Inductor",
    "MB of kernels",
    "Inductor",
    "MB ratio",
)


def detail(folder: str, name: str, both: dict[str, Count]) -> None:
    from pathlib import Path

    Path(folder).mkdir(parents=True, exist_ok=True)
    for way, c in both.items():
        base = Path(folder) / f"{name}.{way}"
        Path(f"{base}.launches").write_text(show(c) + "\n")
        Path(f"{base}.text").write_text("\n\n".join(c.texts) + "\n")
        Path(f"{base}.remarks").write_text("\n".join(c.remarks) + "\n")


if __name__ == "__main__":
    main()
