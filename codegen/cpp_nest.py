"""One loop nest in C++: what the schedules have in common.

A nest is a text under construction: open loops, the values defined so far in each, and names for everything.
A point of the vector axis is a lane group ``u``: values that vary along the axis exist once for every group of the
unrolled body, all others once.
"""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files

import sympy

from dsc.codegen.cpp_expr import known, stride, text
from dsc.codegen.cpp_ops import COMPARE, INFIX, SCALAR, VECTOR, apply, const
from dsc.codegen.cpp_schedule import WIDTH, Schedule, closure, pass_roots, passes
from dsc.codegen.kernel import COMPUTE, Axis, Index, Kernel, Let, Store, indirect

PRELUDE = files("dsc.codegen").joinpath("prelude.h").read_text()
KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "alignas and asm auto bool break case catch char class const continue default delete do double else enum explicit "
        "export extern false float for friend goto if inline int long mutable namespace new not operator or private "
        "protected public register return short signed sizeof static struct switch template this throw true try typedef "
        "typename union unsigned using virtual void volatile while xor main l m t fail",
    )
)
RESERVED = KEYWORDS | frozenset(re.findall(r"[A-Za-z_]\w+", PRELUDE))  # its globals have two letters or more
PARALLEL_WORK = 16384
"""Points below which threads cost more than they bring."""


def identifier(name: str, taken: set[str]) -> str:
    """A C name as close to ``name`` as possible, then taken."""
    plain = re.sub(r"\W", "_", name)
    plain = plain if re.match(r"[A-Za-z]", plain) else f"v{plain}"
    while plain in taken:
        plain += "_"
    taken.add(plain)
    return plain


@dataclass(frozen=True, slots=True)
class Lanes:
    """One group of 16 lanes of a body: its number, and how many of them count (None: all)."""

    u: int
    limit: str | None = None


class Nest:
    def __init__(self, s: Schedule, original: Kernel) -> None:
        self.s, self.k = s, s.kernel
        self.lines: list[str] = []
        self.depth = 1
        self.env: ChainMap[tuple[str, int], str] = ChainMap()
        self.opened: set[str] = set()
        self.let = {v.name: v for v in self.k.lets}
        self.reduced = frozenset(a.name for a in self.k.reduced)
        self.passes = passes(self.k)
        self.counters = counters(s)
        self.turned_loads: dict[str, str] = {}
        self.turned_stores: dict[int, str] = {}
        taken = set(RESERVED)
        self.buffers = {b.name: identifier(b.name, taken) for b in self.k.buffers}
        self.names = {n: identifier(n, taken) for n in original.sizes}
        self.names |= {a.name: identifier(a.name, taken) for a in self.k.axes}
        self.names |= {v.name: identifier(v.name, taken) for v in self.k.lets}
        self.taken = taken

    # Text

    def add(self, line: str) -> None:
        self.lines.append(line if line.startswith("#") else "  " * self.depth + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """``head { ... }``: values defined inside are unknown after it."""
        self.add(f"{head} {{" if head else "{")
        self.depth += 1
        self.env = self.env.new_child()
        yield
        self.env = self.env.parents
        self.depth -= 1
        self.add("}")

    def text(self, e: Index | int, at: str | None = None) -> str:
        """``e``, perhaps at another place of the vector axis."""
        return text(e, self.names if at is None else {**self.names, self.s.vector or "": at})

    def place_at(self, e: Index, places: dict[str, str]) -> str:
        return text(e, {**self.names, **places})

    def axis(self, name: str) -> Axis:
        return next(a for a in self.k.axes if a.name == name)

    def vector(self, v: Let) -> bool:
        return self.s.vector is not None and self.s.vector in v.axes

    def at(self, u: int) -> str:
        assert self.s.vector is not None
        v = self.names[self.s.vector]
        return f"({v} + {WIDTH * u})" if u else v

    # Values

    def define(self, lets: Iterable[Let], groups: Sequence[Lanes]) -> None:
        for v in lets:
            for g in groups if self.vector(v) else [Lanes(0)]:
                if (v.name, g.u) not in self.env and v.name not in self.counters:
                    self._define(v, g)

    def _define(self, v: Let, g: Lanes) -> None:
        value = self._expression(v, g)
        if v.op != "const":
            name = self.names[v.name] + (f"_{g.u}" if g.u else "")
            self.add(f"const {(VECTOR if self.vector(v) else SCALAR)[v.dtype]} {name} = {value};")
            value = name
        self.env[v.name, g.u] = value

    def value(self, name: str, g: Lanes) -> str:
        return self.env[name, g.u if self.vector(self.let[name]) else 0]

    def wide(self, name: str, g: Lanes) -> str:
        """The value as a vector."""
        return self.value(name, g) if self.vector(self.let[name]) else f"splat({self.value(name, g)})"

    def _expression(self, v: Let, g: Lanes) -> str:
        vector = self.vector(v)
        match v.op:
            case "load":
                return self._load_vector(v, g) if vector else self._load(v)
            case "const":
                return const(v.attr, v.dtype)
            case "index":
                return self._index(v, g)
            case "check":
                size = self.text(sympy.sympify(v.attr))
                lanes = f", {g.limit}" if vector and g.limit else ""
                return f"check({self.value(v.args[0], g)}, {size}, fail{lanes})"
            case "random":
                seed, offset = v.args
                if offset in self.counters:
                    return f"uniform({self.value(seed, g)}, {self._start(offset, g)}, LANES)"
                mixed = vector and self.vector(self.let[offset])
                first = self.value(seed, g) if mixed or not vector else self.wide(seed, g)
                return f"uniform({first}, {self.wide(offset, g) if vector else self.value(offset, g)})"
            case _ if v.op in COMPARE and not self.counters.isdisjoint(v.args):
                return self._compare_counter(v, g)
            case _:
                of = self.let[v.args[-1]].dtype
                mixes = v.op in INFIX or (v.op in COMPARE and of != "b1")
                args = [self.value(a, g) if not vector or mixes else self.wide(a, g) for a in v.args]
                return apply(v.op, args, v.attr, v.dtype, of, vector)

    def _index(self, v: Let, g: Lanes) -> str:
        e = sympy.sympify(v.attr)
        if not self.vector(v):
            return self.text(e)
        assert self.s.vector is not None
        step = None if indirect(e, self.k) else stride(e, self.s.vector)
        if step is None:
            return f"lanes<vl>([&](int l) -> long {{ return {self._lane_text(e, g)}; }}{self._limit(g)})"
        size = self.text(step)
        lanes = "LONG_LANES" if step == 1 else f"LONG_LANES * {size if size.isalnum() else f'({size})'}"
        return f"({self.text(e, self.at(g.u))}) + {lanes}"

    def _start(self, name: str, g: Lanes) -> str:
        """What a counter is in lane 0."""
        v = self.let[name]
        if v.op == "index":
            return self._place(sympy.sympify(v.attr), g)
        a, b = (self._start(x, g) if x in self.counters else self.value(x, g) for x in v.args)
        return f"{a} {INFIX[v.op]} {b if v.op == 'add' else f'({b})'}"

    def _compare_counter(self, v: Let, g: Lanes) -> str:
        """``start + lane < b`` as ``lane < b - start``: long lanes would cost several times as much."""
        a, b = v.args
        if a in self.counters:
            return f"LANES {COMPARE[v.op]} near({self.value(b, g)} - ({self._start(a, g)}))"
        return f"near({self.value(a, g)} - ({self._start(b, g)})) {COMPARE[v.op]} LANES"

    def _limit(self, g: Lanes) -> str:
        return f", {g.limit}" if g.limit else ""

    def _lane_text(self, e: Index, g: Lanes) -> str:
        """``e`` in lane ``l`` of a group."""
        names = dict(self.names)
        if self.s.vector is not None:
            base = self.names[self.s.vector]
            names[self.s.vector] = f"({base} + {WIDTH * g.u} + l)" if g.u else f"({base} + l)"
        names |= self._indirect_names(e, g, "[l]")
        return text(e, names)

    def _indirect_names(self, e: Index, g: Lanes, lane: str) -> dict[str, str]:
        return {n: self.value(n, g) + (lane if self.vector(self.let[n]) else "") for n in indirect(e, self.k)}

    def _place(self, e: Index, g: Lanes) -> str:
        names = dict(self.names) | self._indirect_names(e, g, "")
        if self.s.vector is not None:
            names[self.s.vector] = self.at(g.u)
        return text(e, names)

    def _load(self, v: Let) -> str:
        buffer, index = v.access
        return self._get(buffer, self._place(sympy.sympify(index), Lanes(0)))

    def _get(self, buffer: str, place: str) -> str:
        name, half = self.buffers[buffer], self.k.buffer(buffer).dtype in ("bf16", "f16")
        return f"get({name} + {place})" if half else f"{name}[{place}]"

    def _contiguous(self, e: Index) -> bool:
        """Whether neighbours along the vector axis are neighbours in memory."""
        assert self.s.vector is not None
        return not any(self.vector(self.let[n]) for n in indirect(e, self.k)) and stride(e, self.s.vector) == 1

    def _load_vector(self, v: Let, g: Lanes) -> str:
        buffer, index = v.access
        e = sympy.sympify(index)
        if v.name in self.turned_loads:
            return self.turned_loads[v.name]
        if self._contiguous(e):
            return f"load({self.buffers[buffer]} + {self._place(e, g)}{self._limit(g)})"
        lane = self._get(buffer, self._lane_text(e, g))
        if v.dtype == "b1":
            return f"lanes_b1([&](int l) {{ return {lane}; }}{self._limit(g)})"
        return f"lanes<{VECTOR[v.dtype]}>([&](int l) -> {SCALAR[v.dtype]} {{ return {lane}; }}{self._limit(g)})"

    # Stores

    def store(self, number: int, groups: Sequence[Lanes]) -> None:
        s = self.k.stores[number]
        index, of = sympy.sympify(s.index), self.let[s.value].dtype
        dtype = self.k.buffer(s.buffer).dtype
        if COMPUTE[dtype] != of:
            raise ValueError(f"kernel {self.k.name}: {of} value {s.value} stored in {dtype} buffer {s.buffer}")
        moves = self.s.vector is not None and self.s.vector in {x.name for x in index.free_symbols}
        moves = moves or any(self.vector(self.let[n]) for n in indirect(index, self.k))
        if moves:
            for g in groups:
                self._store_vector(number, s, index, g)
        elif self.vector(self.let[s.value]):
            raise ValueError(
                f"kernel {self.k.name}: {s.buffer}[{s.index}] gets a value that varies with {self.s.vector}"
            )
        else:
            place, value = self._place(index, Lanes(0)), self.value(s.value, Lanes(0))
            plain = dtype in ("f32", "f64", "i64", "b1")
            self.add(self._put(s.buffer, place, value, plain))

    def _put(self, buffer: str, place: str, value: str, plain: bool) -> str:
        name = self.buffers[buffer]
        return f"{name}[{place}] = {value};" if plain else f"put({name} + {place}, {value});"

    def _store_vector(self, number: int, s: Store, index: Index, g: Lanes) -> None:
        value = self.wide(s.value, g)
        if number in self.turned_stores:
            self.add(f"{self.turned_stores[number]} = {value};")
        elif self._contiguous(index):
            if self.k.buffer(s.buffer).dtype == "bf16" and self._is_rounded(self.let[s.value]):
                value = f"rounded{{{value}}}"
            self.add(f"store({self.buffers[s.buffer]} + {self._place(index, g)}, {value}{self._limit(g)});")
        else:
            mask = " != 0" if self.let[s.value].dtype == "b1" else ""
            lane = f"{value}[l]{mask}" if self.vector(self.let[s.value]) else self.value(s.value, g)
            head = f"for (int l = 0; l < {g.limit or WIDTH}; l++) "
            self.add(head + self._put(s.buffer, self._lane_text(index, g), lane, plain=False))

    def _is_rounded(self, v: Let) -> bool:
        """Whether bf16 holds the value exactly, so that to store it is to cut it."""
        if v.op == "where":
            return all(self._is_rounded(self.let[a]) for a in v.args[1:])
        return v.op == "round" and v.attr == "bf16"

    # Loops

    def hoist(self, roots: Iterable[str]) -> None:
        """Define what the roots need and the open loops determine."""
        lets, _ = closure(self.k, roots)
        ready = [v for v in lets if v.axes <= self.opened and not self.vector(v)]
        self.define(self._computable(ready), [Lanes(0)])

    def _computable(self, lets: Sequence[Let]) -> list[Let]:
        """Without those that wait for a reduction."""
        done: set[str] = {name for name, _ in self.env} | self.counters
        out = []
        for v in lets:
            needs = {*v.args, *(n for n in indirect_of(v, self.k))}
            if v.name in done or needs <= done:
                done.add(v.name)
                out.append(v)
        return out

    @contextmanager
    def loops(self, axes: Sequence[Axis], roots: Sequence[str] = ()) -> Iterator[None]:
        """Plain loops, each starting with what it determines of ``roots``."""
        if not axes:
            yield
            return
        head, *rest = axes
        i = self.names[head.name]
        with self.block(f"for (long {i} = 0; {i} < {self.text(head.extent)}; {i}++)"):
            self.opened.add(head.name)
            self.hoist(roots)
            with self.loops(rest, roots):
                yield
            self.opened.discard(head.name)

    @contextmanager
    def threads(self, axes: Sequence[Axis], heads: Sequence[str] = ()) -> Iterator[None]:
        """Loops over parallel axes, then ``heads``, shared among threads as one."""
        all_heads = []
        for a in axes:
            i = self.names[a.name]
            all_heads.append(f"for (long {i} = 0; {i} < {self.text(a.extent)}; {i}++)")
        all_heads += heads
        self._pragma(len(all_heads))
        self.opened |= {a.name for a in axes}
        with self._nested(all_heads):
            yield
        self.opened -= {a.name for a in axes}

    @contextmanager
    def _nested(self, heads: Sequence[str]) -> Iterator[None]:
        if not heads:
            yield
            return
        with self.block(heads[0]), self._nested(heads[1:]):
            yield

    def _pragma(self, loops: int) -> None:
        n = known(self.s.work)
        if not loops or (n is not None and n <= PARALLEL_WORK):
            return
        collapse = f" collapse({loops})" if loops > 1 else ""
        when = f" if ({self.text(self.s.work)} > {PARALLEL_WORK})" if n is None else ""
        self.add(f"#pragma omp parallel for{collapse} schedule(static){when}")

    def parallel_axes(self) -> list[Axis]:
        return [a for a in self.k.parallel if a.name != self.s.vector]

    def roots(self, number: int) -> list[str]:
        return pass_roots(self.k, self.passes[number])

    def outer_stores(self) -> list[int]:
        """Stores outside the reduce axes, by number."""
        inside = {i for _, stores in self.passes for i in stores}
        return [i for i in range(len(self.k.stores)) if i not in inside]

    def outer_roots(self) -> list[str]:
        stores = [self.k.stores[i] for i in self.outer_stores()]
        return [n for s in stores for n in (s.value, *indirect(sympy.sympify(s.index), self.k))]


def counters(s: Schedule) -> frozenset[str]:
    """Integers that grow by one from lane to lane and never need to stand in a vector."""
    k, axis = s.kernel, s.vector
    vector = {v.name for v in k.lets if axis in v.axes}
    rising: set[str] = set()
    for v in k.lets:
        match v.op, [a in rising for a in v.args], [a in vector for a in v.args]:
            case "index", _, _ if axis and not indirect_of(v, k) and stride(sympy.sympify(v.attr), axis) == 1:
                rising.add(v.name)
            case "add", [True, _], [_, False]:
                rising.add(v.name)
            case "add", [_, True], [False, _]:
                rising.add(v.name)
            case "sub", [True, _], [_, False]:
                rising.add(v.name)
            case _:
                pass
    # From the last: a value stays if anything needs its lanes.
    needed = {st.value for st in k.stores} | {n for st in k.stores for n in indirect(sympy.sympify(st.index), k)}
    for v in reversed(k.lets):
        if v.op in COMPARE and sum(a in vector for a in v.args) == 1:
            continue
        if v.op == "random" and v.args[0] not in vector:
            continue
        if v.name in rising and v.name not in needed:
            continue
        needed.update(v.args)
    return frozenset(rising - needed)


def indirect_of(v: Let, k: Kernel) -> frozenset[str]:
    match v.attr:
        case (_, index):
            return indirect(sympy.sympify(index), k)
        case sympy.Expr():
            return indirect(v.attr, k)
        case _:
            return frozenset()
