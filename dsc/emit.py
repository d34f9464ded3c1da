"""The Python of one program, line by line, over a pool of buffers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from dsc import bind, cost, domain, kernels, ops, recordable
from dsc.codegen.kernel import Call
from dsc.codegen.lower import Bound
from dsc.options import Options
from dsc.program import Program, Slot
from dsc.residence import IN_PLACE, OUT_VARIANTS, poolable, settle
from dsc.runtime.state import Entry, is_attribute
from dsc.steps import Step
from dsc.torch_shim import python_expr
from dsc.words import closure, device, named, names_of, nbytes, symbols, word


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
        self.touched: dict[str, tuple[int, ...]] = {}
        self.output = next(n for n in reversed(self.gm.graph.nodes) if n.op == "output")
        self.placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self.read_by_kernels = {n for b in self.bound.values() for n in b.nodes}
        self.names = names_of(self.gm.graph.nodes)
        self.home = settle(self.order, self.bound, self.output)
        for n, have in self.home.sums.items():
            self.names[n] = self.names[have]
        for n in self.read_by_kernels:
            for target in ops.mutated(n):  # a kernel writes into an input: that is where the result lies
                self.names[n] = self.names[target]
        tensors = [*(n for b in self.bound.values() for n in b.nodes), *self.placeholders]
        devices = [n.meta["val"].device for n in tensors if isinstance(n.meta.get("val"), torch.Tensor)]
        self.device = devices[0] if devices else torch.device("cpu")

    def write(self) -> None:
        for n in self.placeholders:
            self.bind_symbols(n)
            if n in self.read_by_kernels and self.kind in ("backward", "dgrad", "wgrad"):
                self.expect(n)
        self.free(-1, [n for n in self.placeholders if n not in self.home.last and n not in self.home.escaping])
        for i, step in enumerate(self.order):
            if step.group is not None:
                self.kernel(i, step)
            elif step.node in self.home.real:
                self.call(i, step.node)
            else:  # a view that nothing reads any more may still be the last to touch its storage
                self.leave(self.dead(i))
        self.flush()
        results = self.output.args[0]
        assert isinstance(results, (list, tuple))
        self.lines.append(f"return ({''.join(word(r, self.names, self.externals) + ', ' for r in results)})")

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
        if self.pooled and n not in self.home.escaping and symbols(t) <= self.early:
            self.in_slots.add(name)
            self.slots.append(
                Slot(
                    name,
                    domain.shape(t),
                    tuple(map(domain.extent, t.stride())),
                    t.dtype,
                    t.device,
                    i,
                    self.home.last[n],
                )
            )
            return
        shape, stride = (", ".join(map(python_expr, map(domain.extent, x))) for x in (t.shape, t.stride()))
        comma = "," if t.dim() == 1 else ""
        self.lines.append(
            f"{name} = empty_strided(({shape}{comma}), ({stride}{comma}), dtype={t.dtype}, device={device(t.device)})"
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
        args = [word(a, self.names, self.externals) for a in n.args]
        if n.target is operator.getitem:
            return f"{args[0]}[{args[1]}]"
        args += [f"{k}={word(a, self.names, self.externals)}" for k, a in n.kwargs.items()]
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
                rows = n in self.home.sums and ops.name_of(n) != "addmm.default"
                moved = cost.bytes_moved(n) if rows else sum(nbytes(a) for a in {*ops.tensor_operands(n), n})
                self.bytes += moved
        if n in self.home.sums:
            self.lines.append(
                f"{self.in_place_call(n)}({', '.join(word(a, self.names, self.externals) for a in n.args)})"
            )
            self.leave(self.dead(i))
            return
        out = ops.name_of(n) in OUT_VARIANTS
        if out and self.pooled and n not in self.home.escaping and poolable(n):
            self.allocate(i, n)
            self.lines.append(self.calling(n, name))
        else:
            self.bytes += nbytes(n) if n.target is operator.getitem and not view else 0
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
                storage = self.home.storages[x]
                while storage in self.home.sums:
                    storage = self.home.sums[storage]
                seen[storage] = None
        done = [s for s in seen if self.home.last.get(s) == i and s not in self.home.escaping and not self.in_place(s)]
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
                if (
                    self.names[n] not in self.in_slots
                    and (n in self.home.real or n.op == "placeholder")
                    and self.written(n)
                ):
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

    def program(self, options: Options) -> Program:
        symbols = sorted({s for x in self.slots for s in named((*x.shape, *x.stride))})
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
