"""A graph with noted groups to a Program: groups become kernel launches, everything else calls ATen."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dsc import bind, cost, domain, kernels, ops, products, recordable
from dsc.codegen.builder import Unlowerable
from dsc.codegen.kernel import Call
from dsc.codegen.lower import Bound
from dsc.manager import Remark
from dsc.notes import notes, set_notes
from dsc.options import Options
from dsc.program import Program, Slot
from dsc.runtime.state import Entry, is_attribute
from dsc.steps import Step, Storages, aliases, last_uses, steps, storage_of
from dsc.torch_shim import optimization_hint, python_expr

INDENT = "        "
OUT_VARIANTS = {
    "mm.default": torch.ops.aten.mm.out,
    "addmm.default": torch.ops.aten.addmm.out,
    "bmm.default": torch.ops.aten.bmm.out,
    "baddbmm.default": torch.ops.aten.baddbmm.out,
}
"""Calls that may write into the pool."""
IN_PLACE = {"addmm.default": "aten.addmm_.default", "dsc.embedding_add.default": "dsc.embedding_add_.default"}
"""Calls that add to their first operand -> the same in its memory."""


def link(
    gm: GraphModule, options: Options, kind: str, prefix: str = "k"
) -> tuple[Program, dict[str, Bound], tuple[Remark, ...]]:
    """The program of a graph, the kernel of each group, and what could not become a kernel.  Nothing is built."""
    order = steps(gm)
    bound, remarks = bind_all(order, options, prefix)
    if remarks:  # what was refused runs node by node
        order = steps(gm, frozenset(r.node for r in remarks))
    writer = Writer(gm, order, bound, kind, pooled=options.memory_budget is None)
    writer.write()
    return writer.program(options), bound, tuple(remarks)


def bind_all(order: Sequence[Step], options: Options, prefix: str) -> tuple[dict[str, Bound], list[Remark]]:
    """Group -> its kernel; groups that no kernel computes get a remark named after them.

    A product of matrices that does not fit its group goes back to ATen, with a remark named after it.
    """
    binder, bound, remarks = bind.Binder(options.numerics, prefix), {}, []
    for step in order:
        if step.group is None:
            continue
        made = _bound(binder, step, options)
        rest = [step]
        if isinstance(made, Unlowerable) and any(products.of(n) is not None for n in step.nodes):
            rest = without_products(step)
            kept = {n for s in rest for n in s.nodes}
            remarks += [Remark(n.name, "skipped", f"ATen multiplies: {made}") for n in step.nodes if n not in kept]
        for step_ in rest:
            made = made if step_ is step else _bound(binder, step_, options)
            if isinstance(made, Unlowerable):
                remarks.append(Remark(str(step_.group), "skipped", bind.refused(step_, made)))
            else:
                bound[str(step_.group)] = made
    return bound, remarks


def _bound(binder: bind.Binder, step: Step, options: Options) -> Bound | Unlowerable:
    try:
        made = binder.bind(step)
    except Unlowerable as why:
        return why
    only = bind.only_triton(made.kernel) if _emitter(made, options) == "cpp" else None
    return made if only is None else Unlowerable(f"only Triton kernels {only}")


def without_products(step: Step) -> list[Step]:
    """The group without its products, which are taken out of it: what they need of it, and the rest, as two groups."""
    taken = {n for n in step.nodes if products.of(n) is not None}
    early: set[Node] = set()
    todo = [storage_of(a) for n in taken for a in n.all_input_nodes]
    while todo:
        n = todo.pop()
        if n in step.nodes and n not in early and n not in taken:
            early.add(n)
            todo += [storage_of(a) for a in n.all_input_nodes]
    early |= {n for n in step.nodes if ops.info(n).kind == "item" and n.args[0] in early}
    groups = ((early, f"{step.group}_rows"), ({*step.nodes} - taken - early, str(step.group)))
    for n in taken:
        set_notes(n, replace(notes(n), group=None))
    found = []
    for members, name in groups:
        for n in members:
            set_notes(n, replace(notes(n), group=name))
        if members:
            found.append(Step(tuple(n for n in step.nodes if n in members), name))
    return found


def _emitter(bound: Bound, options: Options) -> str:
    return kernels.emitter(options, ops.tensor(bound.nodes[0]).device)


@dataclass
class Pending:
    """Kernel calls not yet written: they go out as one sequence before the next call that may depend on them."""

    calls: list[Call] = field(default_factory=list)
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
    kind: str
    pooled: bool
    """Temporaries share an arena that is kept; else each has its own memory, freed after its last use."""

    def __post_init__(self) -> None:
        self.lines: list[str] = []
        self.head: list[str] = []
        self.externals: dict[str, Any] = {}
        self.sequences: dict[tuple[Call, ...], int] = {}
        self.launched: dict[str, int] = {}
        self.replays: list[str] = []
        self.slots: list[Slot] = []
        self.in_slots: set[str] = set()
        self.bindings: dict[str, str] = {}
        self.early: set[str] = set()
        self.pending = Pending()
        self.aten_calls = 0
        self.bytes = 0.0
        self.storages = Storages()
        self.touched: dict[str, tuple[int, ...]] = {}
        self.last = last_uses(self.order, self.storages)
        self.output = next(n for n in reversed(self.gm.graph.nodes) if n.op == "output")
        self.placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.read_by_kernels = {n for b in self.bound.values() for n in b.nodes}
        self.escaping = self._escaping()
        self.real = self._real()
        self.names = _names(self.gm.graph.nodes)
        self.sums = self._sums()
        for n in self.read_by_kernels:
            for target in ops.mutated(n):  # a kernel writes into an input: that is where the result lies
                self.names[n] = self.names[target]
        tensors = [*(n for b in self.bound.values() for n in b.nodes), *self.placeholders]
        devices = [n.meta["val"].device for n in tensors if isinstance(n.meta.get("val"), torch.Tensor)]
        self.device = devices[0] if devices else torch.device("cpu")

    # --- what is needed where ------------------------------------------------------------------------------------------

    def _escaping(self) -> set[Node]:
        """Storages that outlive the call, that ATen may hand on under another name, or that it indexes as a whole."""
        out = {self.storages[n] for n in self.output.all_input_nodes}
        for step in self.order:
            if step.group is None and not (ops.is_view(step.node) or ops.is_split(step.node)):
                out.update(self.storages[a] for a in aliases(step.node))
            if step.group is None and ops.name_of(step.node).startswith("as_strided"):
                out.add(self.storages[ops.operand(step.node, 0)])  # its offset counts from the start of the storage
        return out

    def _real(self) -> set[Node]:
        """Nodes that must exist as Python values: views that only kernels read through do not."""
        out = set(self.output.all_input_nodes)
        for step in reversed(self.order):
            if step.group is not None:
                out.update(self.bound[step.group].nodes)
                continue
            n = step.node
            if n in out or not ops.is_alias(n):
                out.add(n)
                out.update(n.all_input_nodes)
        return out

    def _sums(self) -> dict[Node, Node]:
        """What is added to a value (see ``IN_PLACE``) -> that value, where it dies of it: the sum lies in its memory.

        A product is only added to another one that ATen makes; rows of a table to whatever is made here.
        """
        out: dict[Node, Node] = {}
        for i, step in enumerate(self.order):
            n = step.node
            if step.group is not None or ops.name_of(n) not in IN_PLACE or n.kwargs:
                continue
            have = ops.operand(n, 0)
            if ops.name_of(n) == "addmm.default":
                made_here = ops.name_of(have) in OUT_VARIANTS and notes(have).group is None and self.poolable(n)
            else:
                made_here = self.storages[have] is have and not ops.mutated(have)
            if (
                have.op != "call_function"
                or not made_here
                or have in self.escaping
                or self.last[have] != i
                or set(have.users) != {n}
            ):
                continue
            a, b = ops.tensor(have), ops.tensor(n)
            if domain.shape(a) == domain.shape(b) and a.stride() == b.stride():
                out[n] = have
        for n, have in reversed(out.items()):
            self.last[have] = self.last[n]
            if n in self.escaping:
                self.escaping.add(have)
        for n, have in out.items():
            self.names[n] = self.names[have]
            self.last.pop(n, None)
        return out

    # --- lines ------------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        for n in self.placeholders:
            self.bind_symbols(n)
            if n in self.read_by_kernels and self.kind in ("backward", "dgrad", "wgrad"):
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
        p.calls.append(Call(b.kernel.name, slots, sizes))
        self.launched[b.kernel.name] = self.launched.get(b.kernel.name, 0) + 1
        if b.kernel.name not in self.touched:
            self.touched[b.kernel.name] = bind.touched(b.kernel)
        self.bytes += sum(count for _, count in bind.accessed(b, self.touched[b.kernel.name]))
        if b.kernel.checks:
            p.checked = step
        self.leave(self.dead(i))
        if b.kernel.checks:
            self.flush()

    def allocate(self, i: int, n: Node) -> None:
        if ops.mutated(n):
            return
        t, name = ops.tensor(n), self.names[n]
        if self.pooled and n not in self.escaping and _symbols(t) <= self.early:
            self.in_slots.add(name)
            self.slots.append(
                Slot(name, domain.shape(t), tuple(map(domain.extent, t.stride())), t.dtype, t.device, i, self.last[n])
            )
            return
        shape, stride = (", ".join(map(python_expr, map(domain.extent, x))) for x in (t.shape, t.stride()))
        comma = "," if t.dim() == 1 else ""
        self.lines.append(
            f"{name} = empty_strided(({shape}{comma}), ({stride}{comma}), dtype={t.dtype}, device={_device(t.device)})"
        )

    def flush(self) -> None:
        p, self.pending = self.pending, Pending()
        if not p.calls:
            return
        name = f"run_{self.sequences.setdefault(tuple(p.calls), len(self.sequences))}"  # like layers have like ones
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
        """A function that runs the group's nodes on ATen, views on the way included; the names of its arguments."""
        order, inputs = closure(step.nodes)
        name, arguments = f"replay_{len(self.replays)}", [self.names[n] for n in inputs]
        body = "\n".join(f"    {self.names[n]} = {self.calling(n)}" for n in order)
        self.replays.append(f"def {name}({', '.join(arguments)}):\n{body}\n")
        return name, arguments

    def calling(self, n: Node, out: str | None = None) -> str:
        """The call of one node as source; with ``out`` it writes there."""
        args = [self.word(a) for a in n.args]
        if n.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        args += [f"{k}={self.word(a)}" for k, a in n.kwargs.items()]
        if out is not None:
            return f"{OUT_VARIANTS[ops.name_of(n)]}({', '.join([*args, f'out={out}'])})"
        return f"{self.target(n.target)}({', '.join(args)})"

    def call(self, i: int, n: Node) -> None:
        name, view = self.names[n], ops.is_alias(n)
        if n.op == "get_attr":
            known = is_attribute(n.target)
            self.externals[name] = Entry(str(n.target)) if known else operator.attrgetter(str(n.target))(self.gm)
            return
        if not view and n.target is not operator.getitem:
            self.flush()
            if isinstance(n.meta.get("val"), (torch.Tensor, tuple, list)):
                self.aten_calls += 1
                rows = n in self.sums and ops.name_of(n) != "addmm.default"
                moved = cost.bytes_moved(n) if rows else sum(_nbytes(a) for a in {*ops.tensor_operands(n), n})
                self.bytes += moved
        if n in self.sums:
            self.lines.append(f"{self.in_place_call(n)}({', '.join(map(self.word, n.args))})")
            self.leave(self.dead(i))
            return
        out = ops.name_of(n) in OUT_VARIANTS
        if out and self.pooled and n not in self.escaping and self.poolable(n):
            self.allocate(i, n)
            self.lines.append(self.calling(n, name))
        else:
            self.bytes += _nbytes(n) if n.target is operator.getitem and not view else 0
            self.lines.append(f"{name} = {self.calling(n)}")
            if not view:
                self.bind_symbols(n)
        if n in self.read_by_kernels and not view and not out:
            self.expect(n)
        self.leave(self.dead(i))

    def in_place_call(self, n: Node) -> str:
        namespace, packet, overload = IN_PLACE[ops.name_of(n)].split(".")
        return self.target(getattr(getattr(getattr(torch.ops, namespace), packet), overload))

    def leave(self, lines: list[str]) -> None:
        """Lines that must not run before the kernels that wait."""
        (self.pending.after if self.pending.calls else self.lines).extend(lines)
        if lines and not self.pooled:
            self.flush()

    def poolable(self, n: Node) -> bool:
        """Whether the out= form computes the same: no operand is of another dtype."""
        t = ops.tensor(n)
        return t.layout == torch.strided and all(ops.tensor(a).dtype == t.dtype for a in ops.tensor_operands(n))

    def target(self, target: Any) -> str:
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
            return str(target)
        name = f"op_{getattr(target, '__name__', 'call')}".replace(".", "_").replace("<", "").replace(">", "")
        while self.externals.get(name, target) is not target:
            name += "_"
        self.externals[name] = target
        return name

    def dead(self, i: int) -> list[str]:
        """``del`` of what nobody touches after step i."""
        step = self.order[i]
        seen: dict[Node, None] = {}
        for n in step.nodes:
            for x in (*n.all_input_nodes, n):
                storage = self.storages[x]
                while storage in self.sums:
                    storage = self.sums[storage]
                seen[storage] = None
        done = [s for s in seen if self.last.get(s) == i and s not in self.escaping and not self.in_place(s)]
        return self.free_lines(done)

    def in_place(self, n: Node) -> bool:
        """Whether a kernel's result is an input of the graph."""
        return n in self.read_by_kernels and bool(ops.mutated(n))

    def free(self, i: int, nodes: Sequence[Node]) -> None:
        self.lines += self.free_lines(nodes)

    def free_lines(self, storages: Iterable[Node]) -> list[str]:
        names = []
        for s in storages:
            for n in self.family(s):
                if self.names[n] not in self.in_slots and (n in self.real or n.op == "placeholder") and self.written(n):
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
            stack += [u for u in n.users if ops.is_alias(u) and ops.operand(u, 0) is n]
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
                name = f"const_{len(self.externals)}"
                self.externals[name] = a
                return name

    # --- the program -----------------------------------------------------------------------------------------------------

    def program(self, options: Options) -> Program:
        symbols = sorted({s for x in self.slots for s in _named((*x.shape, *x.stride))})
        body = [*self.head, *self.lines]
        if self.slots:
            names = "".join(s.name + ", " for s in self.slots)
            start = [*self.head, f"arena, ({names}) = take({', '.join(symbols)})", "try:"]
            body = [*start, *(f"    {x}" for x in self.lines), "finally:", "    give(arena)"]
        inputs = "".join(self.names[n] + ", " for n in self.placeholders)
        head = ["def call(args):", f"    {inputs.rstrip() or '()'} = args", "    args.clear()"]
        source = "\n".join([*self.replays, *head, *(f"    {x}" for x in body)]) + "\n"
        distinct = {b.kernel.name: b.kernel for b in self.bound.values() if b.kernel.name in self.launched}
        emitter = kernels.emitter(options, self.device) if distinct else "aten"
        launched = tuple(distinct.values())
        code = kernels.source(emitter, launched, tuple(self.sequences), on_gpu=self.device.type == "cuda")
        return Program(
            source, self.externals, tuple(self.slots), tuple(symbols), launched, tuple(self.sequences), emitter,
            self.device, code, self.numbers(), {}, recordable.written(self.gm), self.unrecordable(options),
        )  # fmt: skip

    def unrecordable(self, options: Options) -> tuple[str, ...] | None:
        return recordable.refusals(self.gm, self.device.type) if options.cuda_graphs else None

    def numbers(self) -> dict[str, float]:
        return {
            "kernels": float(sum(self.launched.values())),
            "distinct_kernels": float(len(self.launched)),
            "aten_calls": float(self.aten_calls),
            "bytes": self.bytes,
        }


def closure(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """``nodes`` with the views between them, in the order to run them, and the nodes outside that they read."""
    inside, order, inputs = set(nodes), [], []
    seen: set[Node] = set()

    def visit(n: Node) -> None:
        if n in seen:
            return
        seen.add(n)
        if not (n in inside or ops.is_alias(n)):
            inputs.append(n)
            return
        for a in n.all_input_nodes:
            visit(a)
        order.append(n)

    for n in nodes:
        visit(n)
    return order, inputs


def _symbols(t: torch.Tensor) -> set[str]:
    """Size symbols that the tensor's layout depends on; those that only show while the program runs have no slot."""
    return _named(map(domain.extent, (*t.shape, *t.stride())))


def _named(extents: Iterable[domain.Extent]) -> set[str]:
    return {s.name for e in extents if not isinstance(e, int) for s in e.free_symbols}


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
