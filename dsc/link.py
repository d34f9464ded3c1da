"""A graph with noted groups to a Program: groups become kernel launches, everything else calls ATen."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dsc import bind, domain, kernels, ops
from dsc.codegen import cpp
from dsc.codegen.kernel import Kernel
from dsc.codegen.lower import Bound, Unlowerable
from dsc.domain import Extent
from dsc.manager import Remark
from dsc.options import Options
from dsc.program import Program, Slot
from dsc.runtime import guards, pool
from dsc.steps import Step, aliases, last_uses, steps, storage_of
from dsc.torch_shim import optimization_hint, python_expr

INDENT = "        "
OUT_VARIANTS = {
    "mm.default": torch.ops.aten.mm.out,
    "addmm.default": torch.ops.aten.addmm.out,
    "bmm.default": torch.ops.aten.bmm.out,
    "baddbmm.default": torch.ops.aten.baddbmm.out,
}
"""Calls that may write into the pool."""


def link(
    gm: GraphModule, options: Options, arenas: pool.Pool, kind: str, prefix: str = "k", build: bool = True
) -> tuple[Program, dict[str, Bound], tuple[Remark, ...]]:
    """The program of a graph, the kernel of each group, and what could not become a kernel.

    Without ``build`` nothing is compiled: the program is there to be read.
    """
    bound, remarks = bind_all(gm, options, prefix)
    refused = frozenset(r.node for r in remarks)
    writer = Writer(gm, steps(gm, refused), bound, options, kind)
    writer.write()
    launches, code = build_launches(writer, options, build)
    return writer.program(launches, code, arenas), bound, tuple(remarks)


def bind_all(gm: GraphModule, options: Options, prefix: str) -> tuple[dict[str, Bound], list[Remark]]:
    """Group -> its kernel; groups that no kernel computes get a remark named after them."""
    binder, bound, remarks = bind.Binder(options.numerics, prefix), {}, []
    for step in steps(gm):
        if step.group is None:
            continue
        try:
            bound[step.group] = binder.bind(step)
        except Unlowerable as why:
            remarks.append(Remark(step.group, "skipped", bind.refused(step, why)))
    return bound, remarks


def build_launches(writer: Writer, options: Options, build: bool) -> tuple[list[kernels.Launch], str]:
    distinct = list(
        {b.kernel.name: b.kernel for b in writer.bound.values() if b.kernel.name in writer.launched}.values()
    )
    if not distinct:
        return [], ""
    emitter = kernels.emitter(options, writer.device)
    if not build:
        return [], kernels.source(emitter, distinct, writer.sequences, on_gpu=writer.device.type == "cuda")
    if emitter == "triton":
        return kernels.triton_launches(distinct, writer.sequences, writer.device.type == "cuda")
    cxx = kernels.compiler(options)
    assert cxx is not None, "the backend asks for kernels only where they can be built"
    return kernels.cpp_launches(distinct, writer.sequences, options, cxx)


@dataclass
class Pending:
    """Kernel calls not yet written: they go out as one sequence before the next call that may depend on them."""

    calls: list[cpp.Call] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)
    checked: Step | None = None


@dataclass
class Writer:
    """Writes the Python of one program, line by line."""

    gm: GraphModule
    order: list[Step]
    bound: dict[str, Bound]
    options: Options
    kind: str

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.head: list[str] = []
        self.namespace: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "math": math, "device": torch.device}
        self.sequences: list[kernels.Sequenced] = []
        self.launched: dict[str, int] = {}
        self.replays: dict[str, Any] = {}
        self.slots: list[Slot] = []
        self.bindings: dict[str, str] = {}
        self.early: set[str] = set()
        self.pending = Pending()
        self.aten_calls = 0
        self.bytes = 0.0
        self.last = last_uses(self.order)
        self.output = next(n for n in reversed(self.gm.graph.nodes) if n.op == "output")
        self.placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.read_by_kernels = {n for b in self.bound.values() for n in b.nodes}
        self.escaping = self._escaping()
        self.real = self._real()
        self.names = _names(self.gm.graph.nodes)
        self.device = next((ops.tensor(n).device for b in self.bound.values() for n in b.nodes), torch.device("cpu"))

    # --- what is needed where ------------------------------------------------------------------------------------------

    def _escaping(self) -> set[Node]:
        """Storages that outlive the call, or that ATen may hand on under another name."""
        out = {storage_of(n) for n in self.output.all_input_nodes}
        for step in self.order:
            if step.group is None and not (ops.is_view(step.node) or ops.is_split(step.node)):
                out.update(storage_of(a) for a in aliases(step.node))
        return out

    def _real(self) -> set[Node]:
        """Nodes that must exist as Python values: views that only kernels read through do not."""
        out = set(self.output.all_input_nodes)
        for step in reversed(self.order):
            if step.group is not None:
                out.update(self.bound[step.group].nodes)
                continue
            n = step.node
            if n in out or not (ops.is_view(n) or ops.is_split(n)):
                out.add(n)
                out.update(n.all_input_nodes)
        return out

    # --- lines ------------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        for n in self.placeholders:
            self.bind_symbols(n)
            if n in self.read_by_kernels and self.kind == "backward":
                self.expect(n)
        self.free(-1, [n for n in self.placeholders if n not in self.last and n not in self.escaping])
        for i, step in enumerate(self.order):
            if step.group is not None:
                self.kernel(i, step)
            elif step.node in self.real:
                self.call(i, step.node)
            else:  # a view that nothing reads any more may still be the last to touch its storage
                self.leave(self.dead(i))
        self.flush()
        results = self.output.args[0]
        assert isinstance(results, (list, tuple))
        self.lines.append(f"return ({''.join(self.word(r) + ', ' for r in results)})")

    def bind_symbols(self, n: Node) -> None:
        """Remembers where size symbols can be read from, the first time that they show."""
        v = n.meta.get("val")
        if isinstance(v, torch.SymInt):
            e = domain.extent(v)
            if isinstance(e, sympy.Symbol):
                self.bindings.setdefault(e.name, self.names[n])
                self._define(e.name, n.op == "placeholder")
        if isinstance(v, torch.Tensor):
            for d, e in enumerate(domain.shape(v)):
                if isinstance(e, sympy.Symbol):
                    self.bindings.setdefault(e.name, f"{self.names[n]}.size({d})")
                    self._define(e.name, n.op == "placeholder")

    def _define(self, symbol: str, at_entry: bool) -> None:
        text = self.bindings[symbol]
        if at_entry:
            self.early.add(symbol)
        if text != symbol:
            line, lines = f"{symbol} = {text}", self.head if at_entry else self.lines
            if line not in self.head and line not in self.lines:
                lines.append(line)

    def expect(self, n: Node) -> None:
        """ATen results may come in other strides or dtypes than the trace foresaw: kernels get what they were made for."""
        strides = tuple(map(python_expr, map(domain.extent, ops.tensor(n).stride())))
        self.namespace["expect"] = guards.expect
        name = self.names[n]
        self.lines.append(f"{name} = expect({name}, ({''.join(s + ', ' for s in strides)}), {ops.tensor(n).dtype})")

    def kernel(self, i: int, step: Step) -> None:
        assert step.group is not None
        b = self.bound[step.group]
        outputs = b.nodes[len(b.nodes) - sum(x.role != "in" for x in b.kernel.buffers) :]
        for n in outputs:
            self.allocate(i, n)
        p = self.pending
        slots = tuple(p.tensors.setdefault(self.names[n], len(p.tensors)) for n in b.nodes)
        sizes = tuple(p.sizes.setdefault(s, len(p.sizes)) for s in b.kernel.sizes)
        p.calls.append(cpp.Call(b.kernel.name, slots, sizes))
        self.launched[b.kernel.name] = self.launched.get(b.kernel.name, 0) + 1
        self.bytes += sum(count for _, count in bind.accessed(b))
        p.after += self.dead(i)
        if b.kernel.checks:
            p.checked = step
            self.flush()

    def allocate(self, i: int, n: Node) -> None:
        t, name = ops.tensor(n), self.names[n]
        if n not in self.escaping and _symbols(t) <= self.early:
            self.slots.append(
                Slot(name, domain.shape(t), tuple(map(domain.extent, t.stride())), t.dtype, t.device, i, self.last[n])
            )
            return
        self.namespace["empty_strided"] = torch.empty_strided
        shape, stride = (", ".join(map(python_expr, map(domain.extent, x))) for x in (t.shape, t.stride()))
        comma = "," if t.dim() == 1 else ""
        self.lines.append(
            f"{name} = empty_strided(({shape}{comma}), ({stride}{comma}), dtype={t.dtype}, device={_device(t.device)})"
        )

    def flush(self) -> None:
        p, self.pending = self.pending, Pending()
        if not p.calls:
            return
        name = f"run_{len(self.sequences)}"
        self.sequences.append(kernels.Sequenced(tuple(p.calls)))
        tensors, sizes = ("".join(x + ", " for x in xs) for xs in (p.tensors, p.sizes))
        titles = ", ".join(c.kernel for c in p.calls)
        if p.checked is None:
            self.lines.append(f"{name}(({tensors}), ({sizes}))  # {titles}")
        else:
            replay, arguments = self.replay(p.checked)
            self.lines.append(f"if {name}(({tensors}), ({sizes})):  # {titles}")
            self.lines.append(
                f"    {replay}({', '.join(arguments)})  # an index out of range: ATen raises its own error"
            )
        self.lines += p.after

    def replay(self, step: Step) -> tuple[str, list[str]]:
        """A function that runs the group's nodes on ATen, and the names of its arguments."""
        name = f"replay_{len(self.replays)}"
        function, inputs = guards.as_function(step.nodes)
        self.replays[name] = function
        self.namespace[name] = function
        return name, [self.names[n] for n in inputs]

    def call(self, i: int, n: Node) -> None:
        name, view = self.names[n], ops.is_view(n) or ops.is_split(n)
        if n.op == "get_attr":
            self.namespace[name] = _attribute(self.gm, str(n.target))
            return
        if not view and n.target is not operator.getitem:
            self.flush()
            if isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)):
                self.aten_calls += 1
                self.bytes += sum(_nbytes(a) for a in {*ops.tensor_operands(n), n})
        args = [self.word(a) for a in n.args]
        kwargs = [f"{k}={self.word(a)}" for k, a in n.kwargs.items()]
        out = OUT_VARIANTS.get(ops.name_of(n))
        if n.target is operator.getitem:
            self.bytes += _nbytes(n) if not view else 0
            self.lines.append(f"{name} = {args[0]}[{args[1]}]")
            if not view:
                self.bind_symbols(n)
        elif out is not None and n not in self.escaping and self.poolable(n):
            self.allocate(i, n)
            self.lines.append(f"{self.target(out)}({', '.join([*args, *kwargs])}, out={name})")
        else:
            self.lines.append(f"{name} = {self.target(n.target)}({', '.join([*args, *kwargs])})")
            if not view:
                self.bind_symbols(n)
        if n in self.read_by_kernels and not view and out is None:
            self.expect(n)
        self.leave(self.dead(i))

    def leave(self, lines: list[str]) -> None:
        """Lines that must not run before the kernels that wait."""
        (self.pending.after if self.pending.calls else self.lines).extend(lines)

    def poolable(self, n: Node) -> bool:
        """Whether the out= form computes the same: no operand is of another dtype."""
        t = ops.tensor(n)
        return t.layout == torch.strided and all(ops.tensor(a).dtype == t.dtype for a in ops.tensor_operands(n))

    def target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            return str(target)
        name = f"op_{getattr(target, '__name__', 'call')}".replace(".", "_").replace("<", "").replace(">", "")
        while self.namespace.get(name, target) is not target:
            name += "_"
        self.namespace[name] = target
        return name

    def dead(self, i: int) -> list[str]:
        """``del`` of what nobody touches after step i."""
        step = self.order[i]
        seen: dict[Node, None] = {}
        for n in step.nodes:
            for x in (*n.all_input_nodes, n):
                seen[storage_of(x)] = None
        done = [s for s in seen if self.last.get(s) == i and s not in self.escaping]
        return self.free_lines(done)

    def free(self, i: int, nodes: Sequence[Node]) -> None:
        self.lines += self.free_lines(nodes)

    def free_lines(self, storages: Iterable[Node]) -> list[str]:
        names = []
        pooled = {s.name for s in self.slots}
        for s in storages:
            for n in self.family(s):
                if self.names[n] not in pooled and (n in self.real or n.op == "placeholder") and self.written(n):
                    names.append(self.names[n])
        return [f"del {', '.join(names)}"] if names else []

    def written(self, n: Node) -> bool:
        """Whether a line has defined the variable (get_attr constants stay in the namespace)."""
        return n.op != "get_attr" and not (n.op == "placeholder" and isinstance(n.meta.get("val"), torch.SymInt))

    def family(self, storage: Node) -> list[Node]:
        out, stack = [], [storage]
        while stack:
            n = stack.pop()
            out.append(n)
            # a view may also take a size: that is no part of it
            stack += [u for u in n.users if (ops.is_view(u) or ops.is_split(u)) and ops.operand(u, 0) is n]
        return out

    def word(self, a: object) -> str:
        """An argument as source."""
        match a:
            case Node():
                return self.names[a]
            case None | bool() | int() | str():
                return repr(a)
            case float():
                return repr(a) if math.isfinite(a) else f"float('{a}')"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(a)
            case torch.device():
                return _device(a)
            case list() | tuple():
                inner = ", ".join(map(self.word, a))
                if isinstance(a, list) or type(a) is not tuple:
                    return f"[{inner}]"
                return f"({inner},)" if len(a) == 1 else f"({inner})"
            case slice():
                return f"slice({self.word(a.start)}, {self.word(a.stop)}, {self.word(a.step)})"
            case _:
                name = f"const_{len(self.namespace)}"
                self.namespace[name] = a
                return name

    # --- the program -----------------------------------------------------------------------------------------------------

    def program(self, launches: Sequence[kernels.Launch], code: str, arenas: pool.Pool) -> Program:
        symbols = sorted(
            {s.name for x in self.slots for e in (*x.shape, *x.stride) for s in sympy.sympify(e).free_symbols}
        )
        namespace = dict(self.namespace)
        for i, run in enumerate(launches):
            namespace[f"run_{i}"] = run
        body = [*self.head, *self.lines]
        if self.slots:
            buffers = pool.Buffers(self.slots, symbols, arenas)
            namespace["take"], namespace["give"] = buffers.take, arenas.give
            names = "".join(s.name + ", " for s in self.slots)
            start = [*self.head, f"arena, ({names}) = take({', '.join(symbols)})", "try:"]
            body = [*start, *(f"    {x}" for x in self.lines), "finally:", "    give(arena)"]
        inputs = "".join(self.names[n] + ", " for n in self.placeholders)
        head = ["def call(args):", f"    {inputs.rstrip() or '()'} = args", "    args.clear()"]
        source = "\n".join([*head, *(f"    {x}" for x in body)]) + "\n"
        distinct = {b.kernel.name: b.kernel for b in self.bound.values() if b.kernel.name in self.launched}
        return Program(
            source, namespace, tuple(self.slots), tuple(symbols), tuple(distinct.values()), code, self.numbers()
        )

    def numbers(self) -> dict[str, float]:
        return {
            "kernels": float(sum(self.launched.values())),
            "distinct_kernels": float(len(self.launched)),
            "aten_calls": float(self.aten_calls),
            "bytes": self.bytes,
        }


def _symbols(t: torch.Tensor) -> set[str]:
    """Size symbols that the tensor's layout depends on; those that only show while the program runs have no slot."""
    return {s.name for e in map(domain.extent, (*t.shape, *t.stride())) for s in sympy.sympify(e).free_symbols}


def _nbytes(n: Node) -> int:
    """Bytes of a tensor in memory: broadcast dimensions count once."""
    t = n.meta.get("val")
    if not isinstance(t, torch.Tensor):
        return 0
    stored = [optimization_hint(s) for s, step in zip(t.shape, t.stride()) if not (isinstance(step, int) and step == 0)]
    return math.prod(stored) * t.element_size()


def _device(d: torch.device) -> str:
    return f"device('{d}')"


def _names(nodes: Iterable[Node]) -> dict[Node, str]:
    return {
        n: f"{n.name}_" if keyword.iskeyword(n.name) or n.name in ("aten", "torch", "math", "device") else n.name
        for n in nodes
    }


def _attribute(gm: GraphModule, path: str) -> Any:
    out: Any = gm
    for part in path.split("."):
        out = getattr(out, part)
    return out


__all__ = ["Extent", "Kernel", "link"]
