"""Groups of graph nodes to kernels.

A value is a function from an index to the name of a let: views change the index and cost nothing, pointwise ops ask
their operands at the same index, reductions ask at the reduce axes.  Equal lets are made once, so asking twice is free.
Outputs of a group are never loaded in it: who needs one asks its function again.
The meaning of each operator stands in ``lower_pointwise.py``, ``lower_create.py``, ``lower_eight.py``, ``lower_reduce.py`` and
``lower_view.py``, a row each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.fx import Node

from dsc import domain, ops, products
from dsc.codegen import indexing, tidy
from dsc.codegen.builder import Builder, Unlowerable
from dsc.codegen.indexing import QUOTIENTS, Index, may_be_negative
from dsc.codegen.kernel import COMPUTE, Buffer, Kernel, Store
from dsc.domain import Extent, Space, product, runs_over, same, shape
from dsc.steps import storage_of


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
        tidy.live(build.lets, [v for _, _, v in stores]),
        tuple(Store(f"o{i}", sympy.sympify(e), v) for i, (_, e, v) in enumerate(stores)),
        origin,
    )
    check_nest(made)
    kept = tuple(n for n, b in build.buffers.items() if b not in in_place and tidy.reads(made, b))
    kernel = tidy.collapse(tidy.drop_idle(tidy.drop_unread(renamed(made, in_place))))
    check_quotients(kernel)
    return Bound(kernel, kept + tuple(outputs))


def check_quotients(k: Kernel) -> None:
    """C and Triton round quotients towards zero: indices are made for the floor, which is the same from 0 on.

    Multiples of the divisor are taken out of a quotient, which may leave a negative rest (``flip`` of a ``cat``).
    """
    ranges = {sympy.Symbol(a.name, integer=True, nonnegative=True): a.extent for a in k.axes}
    attrs = (v.attr[1] if isinstance(v.attr, tuple) else v.attr for v in k.lets)
    for e in (*attrs, *(s.index for s in k.stores)):
        for x in e.atoms(sympy.Function) if isinstance(e, sympy.Expr) else ():
            if type(x).__name__ in QUOTIENTS and may_be_negative(x.args[0], ranges):
                raise Unlowerable("an index that may be negative is divided")


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
