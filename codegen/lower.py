"""Groups of graph nodes to kernels.

A value is a function from an index to the name of a let: views change the index and cost nothing, pointwise ops ask
their operands at the same index, reductions ask at the reduce axes.  Equal lets are made once, so asking twice is free.
Outputs of a group are never loaded in it: who needs one asks its function again.
The meaning of each operator stands in ``lower_pointwise.py``, ``lower_reduce.py`` and ``lower_view.py``, a row each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from dsc import domain, ops, products
from dsc.codegen import indexing
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE, Axis, Buffer, Kernel, Let, Store
from dsc.domain import Extent, Space, product, runs_over, same, shape
from dsc.steps import storage_of


class Unlowerable(Exception):
    """The group does not fit one kernel; the reason is for a remark, and the caller has another way."""


@dataclass(frozen=True)
class Value:
    """A tensor inside a kernel: shape, storage dtype (short name), and its let at an index."""

    shape: tuple[Extent, ...]
    dtype: str
    at: Callable[[Index], str]


@dataclass(frozen=True, slots=True)
class Bound:
    """A kernel and the graph nodes behind its buffers, in order."""

    kernel: Kernel
    nodes: tuple[Node, ...]


LOW = frozenset({"bf16", "f16"})
NARROW = frozenset({"i32", "i16", "i8", "u8"})
EXACT_OPS = frozenset({"neg", "abs", "max", "min", "where", "peak"})
"""Give a value of their operands' format: nothing to round."""


@dataclass
class Builder:
    """Collects the lets and stores of one kernel."""

    space: Space
    numerics: str
    axes: tuple[Axis, ...] = ()
    lets: list[Let] = field(default_factory=list)
    by_name: dict[str, Let] = field(default_factory=dict)
    seen: dict[tuple[object, ...], str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    buffers: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = tuple(
            Axis(f"{'r' if d.reduce else 'p'}{i}", sympy.sympify(d.extent), d.reduce)
            for i, d in enumerate(self.space.dims)
        )
        self.symbols = tuple(sympy.Symbol(a.name, integer=True, nonnegative=True) for a in self.axes)
        self.ranges = {s: d.extent for s, d in zip(self.symbols, self.space.dims)}
        self.reduced = frozenset(s for s, d in zip(self.symbols, self.space.dims) if d.reduce)

    def let(self, op: str, args: tuple[str, ...] = (), attr: Any = None, dtype: str = "") -> str:
        dtype = dtype or self.by_name[args[1 if op == "where" else 0]].dtype
        key = (op, args, repr(attr) if isinstance(attr, float) else attr, type(attr), dtype)
        if key in self.seen:
            return self.seen[key]
        axes = frozenset().union(*(self.by_name[a].axes for a in args))
        if isinstance(attr, tuple):
            axes |= self._axes_of(attr[1])
        elif isinstance(attr, sympy.Expr):
            axes |= self._axes_of(attr)
        if op in ("reduce", "dot"):
            axes -= {s.name for s in self.reduced}
        if op == "peak":
            axes -= {self.innermost.name}
        if op == "collect":
            axes &= {s.name for s in self.reduced}
        name = f"v{len(self.lets)}"
        made = Let(name, op, args, attr, dtype, axes)
        self.lets.append(made)
        self.by_name[name] = made
        self.seen[key] = name
        if op in EXACT_OPS and not (op in ("neg", "abs") and dtype == "i64"):  # -(-128) is no i8
            formats = {self.exact.get(a, "") for a in args if self.by_name[a].dtype == dtype}
            if len(formats) == 1 and (only := formats.pop()):
                self.exact[name] = only
        return name

    def _axes_of(self, e: sympy.Expr) -> frozenset[str]:
        out: set[str] = set()
        for s in e.free_symbols:
            if s in self.ranges:
                out.add(s.name)
            elif s.name in self.by_name:
                out |= self.by_name[s.name].axes
        return frozenset(out)

    def const(self, number: float | int | bool, dtype: str) -> str:
        """A constant of a compute dtype."""
        match dtype:
            case "b1":
                return self.let("const", attr=bool(number), dtype="b1")
            case "i64":
                return self.let("const", attr=int(number), dtype="i64")
            case _:
                return self.let("const", attr=float(number), dtype=dtype)

    def index(self, e: Extent, dtype: str = "i64") -> str:
        """The integer ``e`` itself, in a compute dtype."""
        if isinstance(e, int) or e.is_number:
            return self.const(int(e), dtype)
        return self.cast(self.let("index", attr=sympy.sympify(e), dtype="i64"), dtype)

    def cast(self, v: str, dtype: str) -> str:
        """To another compute dtype."""
        old = self.by_name[v]
        if old.dtype == dtype:
            return v
        if old.op == "const":
            assert isinstance(old.attr, (int, float, bool))
            # a number of 32 bits stays one in 64: 2.7f is not 2.7
            narrow = old.dtype == "f32" and dtype == "f64"
            return self.const(torch.tensor(old.attr, dtype=torch.float32).item() if narrow else old.attr, dtype)
        return self.let("cast", (v,), dtype=dtype)

    def rounded(self, v: str, dtype: str) -> str:
        """To the values of a storage dtype."""
        v = self.cast(v, COMPUTE[dtype])
        if (dtype not in LOW and dtype not in NARROW) or self.exact.get(v) == dtype:
            return v
        out = self.let("round", (v,), dtype, COMPUTE[dtype])
        self.exact[out] = dtype
        return out

    def result(self, v: str, dtype: str) -> str:
        """What an op hands on: rounded as eager stores it, unless ``numerics="fast"`` keeps the wider value."""
        if self.numerics == "fast" and dtype in LOW:
            return self.cast(v, "f32")
        return self.rounded(v, dtype)

    def load(self, buffer: str, dtype: str, index: Extent) -> str:
        e = sympy.sympify(index)
        indirect = tuple(sorted(s.name for s in e.free_symbols if s.name in self.by_name))
        out = self.let("load", indirect, (buffer, e), COMPUTE[dtype])
        if dtype in LOW or dtype in NARROW:
            self.exact[out] = dtype
        return out

    def reduce(self, kind: str, v: str) -> str:
        if not self.reduced:
            return v
        return self.let("reduce", (v,), kind, self.by_name[v].dtype)

    def collect(self, kind: str, v: str) -> str:
        """Over the parallel axes."""
        if kind != "sum":
            raise Unlowerable(f"{kind} over rows and columns at once")
        return self.let("collect", (v,), kind, self.by_name[v].dtype)

    @property
    def innermost(self) -> sympy.Symbol:
        """The last parallel axis."""
        return next(s for s in reversed(self.symbols) if s not in self.reduced)

    def off_row(self, index: Index, across: bool = False) -> bool:
        """Whether the index moves with the reduce axes, or the others where a node reduces ``across``."""
        return any(not isinstance(i, int) and bool(i.free_symbols & self.over(across)) for i in index)

    def over(self, across: bool) -> frozenset[sympy.Symbol]:
        return frozenset(self.symbols) - self.reduced if across else self.reduced

    def reduce_index(self, extents: Sequence[Extent], across: bool = False) -> Index:
        """Index into the reduced dimensions of a tensor, as the kernel's reduce axes run (or the parallel ones)."""
        mine = [(s, self.ranges[s]) for s in self.symbols if s in self.over(across)]
        if not same(product(extents), product(e for _, e in mine)):
            raise Unlowerable("reduces over other elements than its kernel")
        return indexing.reshape(tuple(s for s, _ in mine), [e for _, e in mine], extents, self.ranges)


@dataclass
class Lowering:
    """What a rule may ask for: the builder, the values of operands, sizes as expressions."""

    build: Builder
    group: frozenset[Node]
    rules: Mapping[str, Rule]
    across: frozenset[Node] = frozenset()
    """Nodes that sum over the parallel axes."""
    peaks: frozenset[Node] = frozenset()
    """Nodes that take the maximum over the innermost parallel axis, of a product's columns."""
    values: dict[tuple[Node, int | None], Value] = field(default_factory=dict)

    def of(self, arg: object) -> Value:
        """The value of an operand: a node, or a python number as a 0-dim value."""
        if isinstance(arg, Node):
            if isinstance(arg.meta.get("val"), torch.Tensor):
                return self.node(arg)
            e = size(arg)
            return Value((), "i64", lambda _: self.build.index(e))
        for kind, dtype in ((bool, "b1"), (int, "i64"), (float, "f64")):
            if isinstance(arg, kind):
                return self.number(arg, dtype)
        raise Unlowerable(f"operand {arg!r}")

    def number(self, n: float, dtype: str) -> Value:
        """A python number as a 0-dim value."""
        return Value((), dtype, lambda _: self.build.const(n, dtype))

    def node(self, n: Node) -> Value:
        if (n, None) in self.values:
            return self.values[n, None]
        kind = ops.info(n).kind if n.op == "call_function" else "opaque"
        if kind == "item" and n.args[0] in self.group:
            out = self.results(ops.operand(n, 0))[n.args[1]]  # type: ignore[index]
        elif n in self.group or (ops.is_view(n) and self.inside(n)):
            out = self.results(n)[0]
        else:
            out = self.external(n)
        self.values[n, None] = memoised(out)
        return self.values[n, None]

    def inside(self, n: Node) -> bool:
        """Whether a chain of views starts from a value that this kernel computes."""
        root = storage_of(n)
        return root in self.group or (ops.info(root).kind == "item" and root.args[0] in self.group)

    def results(self, n: Node) -> tuple[Value, ...]:
        rule = self.rules.get(ops.name_of(n))
        if rule is None:
            raise Unlowerable(f"no rule for {ops.name_of(n)}")
        if n in self.across and not domain.sums_columns(n):
            raise Unlowerable(f"{ops.name_of(n)} over rows and columns at once")
        made = rule(self, n)
        return made if isinstance(made, tuple) else (made,)

    def external(self, n: Node) -> Value:
        """A buffer in memory, read through the strides of its views."""
        root = storage_of(n)
        t, base = ops.tensor(n), ops.tensor(root)
        if t.dtype not in ops.SHORT:
            raise Unlowerable(f"dtype {t.dtype}")
        if root not in self.build.buffers:
            self.build.buffers[root] = f"b{len(self.build.buffers)}"
        buffer, dtype = self.build.buffers[root], ops.SHORT[t.dtype]
        strides = tuple(domain.extent(s) for s in t.stride())
        offset = domain.extent(t.storage_offset()) - domain.extent(base.storage_offset())
        return Value(
            shape(t), dtype, lambda index: self.build.load(buffer, dtype, indexing.linear(index, strides, offset))
        )


Rule = Callable[[Lowering, Node], Value | tuple[Value, ...]]


def memoised(v: Value) -> Value:
    cache: dict[Index, str] = {}

    def at(index: Index) -> str:
        if index not in cache:
            cache[index] = v.at(index)
        return cache[index]

    return Value(v.shape, v.dtype, at)


def size(arg: object) -> Extent:
    """A size argument: a number, a SymInt, or a node of one."""
    if isinstance(arg, Node):
        arg = arg.meta["val"]
    if isinstance(arg, (int, torch.SymInt)):
        return domain.extent(arg)
    raise Unlowerable(f"size {arg!r}")


def lower(
    name: str,
    group: Sequence[Node],
    outputs: Sequence[Node],
    space: Space,
    rules: Mapping[str, Rule],
    numerics: str = "eager",
    origin: str = "",
) -> Bound:
    """One kernel that computes ``outputs`` (tensor nodes, in that order) of ``group`` in ``space``.

    Raises:
        Unlowerable: the group does not fit one kernel.
    """
    build = Builder(space, numerics)
    across = frozenset(n for n in group if domain.across(n, space))
    late = domain.follow(group, across)
    multiplied = next((p for p in map(products.of, group) if p is not None), None)
    rows = product((multiplied.batch, multiplied.m)) if multiplied is not None else None
    peaks = frozenset(n for n in group if multiplied is not None and products.peaks(n, multiplied))
    low = Lowering(build, frozenset(group), rules, across, peaks)
    stores: list[tuple[Node, Extent, str]] = []
    for out in outputs:
        t = ops.tensor(out)
        if out in peaks:
            index = block_index(build, shape(t))
        else:
            index = column_index(build, shape(t)) if out in late else output_index(build, shape(t), rows)
        v = low.node(out)
        dtype = ops.SHORT[t.dtype]
        strides = tuple(domain.extent(s) for s in t.stride())
        stores.append((out, indexing.linear(index, strides), build.cast(v.at(index), COMPUTE[dtype])))
    in_place = written_inputs(build, stores)
    inputs = tuple(Buffer(b, ops.SHORT[ops.tensor(n).dtype]) for n, b in build.buffers.items() if b not in in_place)
    targets = tuple(Buffer(f"o{i}", ops.SHORT[ops.tensor(n).dtype], "out") for i, (n, _, _) in enumerate(stores))
    made = Kernel(
        name,
        build.axes,
        inputs + targets,
        live(build.lets, [v for _, _, v in stores]),
        tuple(Store(f"o{i}", sympy.sympify(e), v) for i, (_, e, v) in enumerate(stores)),
        origin,
    )
    check_nest(made)
    kept = tuple(n for n, b in build.buffers.items() if b not in in_place and _read(made, b))
    return Bound(collapse(drop_idle(drop_unread(renamed(made, in_place)))), kept + tuple(outputs))


def written_inputs(build: Builder, stores: Sequence[tuple[Node, Extent, str]]) -> dict[str, str]:
    """Buffers of inputs that the kernel also writes to -> the buffers of those stores.

    Raises:
        Unlowerable: such an input is read at another place than the one that is written.
    """
    out = {}
    for i, (n, place, _) in enumerate(stores):
        for target in ops.mutated(n):
            buffer = build.buffers.get(storage_of(target))
            if buffer is None:
                continue
            if any(v.op == "load" and v.access[0] == buffer and not same(v.access[1], place) for v in build.lets):
                raise Unlowerable("reads elsewhere what it writes")
            out[buffer] = f"o{i}"
    return out


def renamed(k: Kernel, buffers: Mapping[str, str]) -> Kernel:
    """Loads of some buffers come from others, which the kernel writes to."""
    if not buffers:
        return k
    lets = tuple(
        replace(v, attr=(buffers.get(v.access[0], v.access[0]), v.access[1])) if v.op == "load" else v for v in k.lets
    )
    loaded = {v.access[0] for v in lets if v.op == "load"}
    made = tuple(replace(b, role="inout") if b.role == "out" and b.name in loaded else b for b in k.buffers)
    return replace(k, lets=lets, buffers=made)


def _read(k: Kernel, buffer: str) -> bool:
    return any(v.op == "load" and v.access[0] == buffer for v in k.lets)


def drop_unread(k: Kernel) -> Kernel:
    kept = tuple(b for b in k.buffers if b.role != "in" or _read(k, b.name))
    return Kernel(k.name, k.axes, kept, k.lets, k.stores, k.origin)


def drop_idle(k: Kernel) -> Kernel:
    """Reduce axes along which nothing varies and nothing is reduced (a loss picks one element a row)."""
    along = {a for v in k.lets for a in v.axes} | {s.name for x in k.stores for s in x.index.free_symbols}
    if any(v.op in ("reduce", "dot") for v in k.lets):
        return k
    return replace(k, axes=tuple(a for a in k.axes if not a.reduce or a.name in along))


def output_index(build: Builder, s: tuple[Extent, ...], rows: Extent | None = None) -> Index:
    """Index of an output, from the axes of the nest: an element each, or a row each; of a product's ``rows``, too."""
    whole = runs_over(s, build.space)
    if whole is None and rows is not None and (chosen := operand_axes(build, s, rows)):
        return indexing.reshape(tuple(a for a, _ in chosen), [e for _, e in chosen], s, build.ranges)
    if whole is None:
        raise Unlowerable(f"output {list(map(str, s))} does not run over {build.space}")
    chosen = [(a, d.extent) for a, d in zip(build.symbols, build.space.dims) if whole or not d.reduce]
    return indexing.reshape(tuple(a for a, _ in chosen), [e for _, e in chosen], s, build.ranges)


def operand_axes(build: Builder, s: tuple[Extent, ...], count: Extent) -> list[tuple[sympy.Symbol, Extent]]:
    """Axes of what has an element for each of a product's ``count`` rows, or of its rows and terms."""
    axes = list(zip(build.symbols, (d.extent for d in build.space.dims)))
    summed = [(a, e) for a, e in axes if a in build.reduced]
    rest = [(a, e) for a, e in axes if a not in build.reduced]
    for i in range(1, len(rest)):
        rows = rest[:i]
        if same(product(e for _, e in rows), count):
            chosen = (c for c in (rows, [*rows, *summed]) if same(product(s), product(e for _, e in c)))
            return next(chosen, [])
    return []


def column_index(build: Builder, s: tuple[Extent, ...]) -> Index:
    """Index of what follows from sums over rows: an element a column."""
    chosen = [(a, build.ranges[a]) for a in build.symbols if a in build.reduced]
    if not same(domain.product(s), domain.product(e for _, e in chosen)):
        raise Unlowerable(f"output {list(map(str, s))} has not an element a column")
    return indexing.reshape(tuple(a for a, _ in chosen), [e for _, e in chosen], s, build.ranges)


def block_index(build: Builder, s: tuple[Extent, ...]) -> Index:
    """Index of what has an element for each block of a product's columns: all parallel axes but the innermost."""
    chosen = [(a, build.ranges[a]) for a in build.symbols if a not in build.reduced and a != build.innermost]
    if build.ranges[build.innermost] != products.PEAK or not same(product(s), product(e for _, e in chosen)):
        raise Unlowerable("blocks of columns that are cut in other pieces")
    return indexing.reshape(tuple(a for a, _ in chosen), [e for _, e in chosen], s, build.ranges)


def live(lets: Sequence[Let], roots: Sequence[str]) -> tuple[Let, ...]:
    """The lets that ``roots`` need, and every check: an error is part of the answer."""
    needed = set(roots)
    kept: list[Let] = []
    for v in reversed(lets):
        if v.name in needed or v.op == "check":
            needed.update(v.args)
            kept.append(v)
    return tuple(reversed(kept))


def check_nest(k: Kernel) -> None:
    """Every reduce sums something of this nest: no reduce of a value that was itself read off its row."""
    reduced = {a.name for a in k.reduced}
    late: set[str] = set()
    for v in k.lets:
        if v.op == "reduce" and v.axes & reduced:
            raise Unlowerable("reduction read off its row")
        if v.op != "collect" and not late & {*v.args}:
            continue
        if v.op in ("reduce", "check", "load") or v.axes - reduced or (v.op == "collect" and late & {*v.args}):
            raise Unlowerable("sums over rows are read before all rows are done")
        late.add(v.name)
    needed = late_operands(k, late)
    if any(v.op == "reduce" or v.axes - reduced for v in k.lets if v.name in needed):
        raise Unlowerable("what follows from sums over rows needs the rows again")


def late_operands(k: Kernel, late: set[str]) -> set[str]:
    """Values beside the sums that what follows from them needs."""
    wanted = {a for v in k.lets if v.name in late and v.op != "collect" for a in v.args} - late
    for v in reversed(k.lets):
        if v.name in wanted:
            wanted.update(v.args)
    return wanted


def collapse(k: Kernel) -> Kernel:
    """Joins neighbouring axes of one kind wherever every index walks them as one: ``i*8 + j -> p``."""
    place = 0
    while place + 1 < len(k.axes):
        outer, inner = k.axes[place], k.axes[place + 1]
        joined = _join(k, outer, inner) if outer.reduce == inner.reduce else None
        if joined is None:
            place += 1
        else:
            k = joined
    return k


def _join(k: Kernel, outer: Axis, inner: Axis) -> Kernel | None:
    a, b = (sympy.Symbol(x.name, integer=True, nonnegative=True) for x in (outer, inner))
    swaps: dict[sympy.Expr, sympy.Expr] = {}
    for e in _indices(k):
        if e in swaps or not e.free_symbols & {a, b}:
            continue
        ca, cb = _coefficient(e, a), _coefficient(e, b)
        if ca is None or cb is None or not same(ca, cb * inner.extent):
            return None
        swaps[e] = sympy.expand(e - ca * a)
    names = {outer.name: inner.name}
    axes = tuple(
        Axis(inner.name, inner.extent * outer.extent, inner.reduce) if x == inner else x for x in k.axes if x != outer
    )

    def attr(v: Let) -> Any:
        if isinstance(v.attr, tuple):
            return (v.attr[0], swaps.get(v.attr[1], v.attr[1]))
        return swaps.get(v.attr, v.attr) if isinstance(v.attr, sympy.Expr) else v.attr

    lets = tuple(
        Let(v.name, v.op, v.args, attr(v), v.dtype, frozenset(names.get(x, x) for x in v.axes)) for v in k.lets
    )
    stores = tuple(Store(s.buffer, swaps.get(s.index, s.index), s.value) for s in k.stores)
    return Kernel(k.name, axes, k.buffers, lets, stores, k.origin)


def _indices(k: Kernel) -> list[sympy.Expr]:
    return [
        *(v.attr[1] if isinstance(v.attr, tuple) else v.attr for v in k.lets if v.op in ("load", "index")),
        *(s.index for s in k.stores),
    ]


def _coefficient(e: sympy.Expr, s: sympy.Symbol) -> sympy.Expr | None:
    """Factor of ``s`` if the expression is affine in it."""
    total = sympy.Integer(0)
    for t in sympy.Add.make_args(e):
        if s not in t.free_symbols:
            continue
        factor = sympy.cancel(t / s)
        if s in factor.free_symbols:
            return None
        total += factor
    return total
