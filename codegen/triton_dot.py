"""The body of a kernel that multiplies matrices: the tile of a program, what is read of its rows, the main loop, the rest.

Three nests share the names of a kernel: rows by contraction (A), contraction by columns (B), rows by columns (C).  A
value of an operand is written with A or B, in the loop if it varies along the contraction, before it if not; all that
follows from the sums is written with C, by the same emitter as any pointwise kernel.  Reductions of rows that A
needs (the moments of a norm) are loops of their own before the main one, as in a kernel that reduces rows.

    for k0 in range(0, K, KB):
        k = k0 + tl.arange(0, KB)[None, :]
        a = tl.load(...)
        k = k0 + tl.arange(0, KB)[:, None]
        b = tl.load(...)
        c = tl.dot(a, b, c)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import sympy

from dsc.codegen.kernel import Index, Let, Store, product, stages
from dsc.codegen.triton_index import text
from dsc.codegen.triton_nest import extent
from dsc.codegen.triton_value import TYPES, Values, grouped

if TYPE_CHECKING:
    from dsc.codegen.triton import Emitter

PRECISION = {"f32": "ieee", "tf32": "tf32"}
"""Of products of fp32."""


def body(c: Emitter) -> None:
    """Writes all lines with ``c``, the emitter of rows by columns."""
    n, dot = c.n, product(c.n.kernel)
    assert dot is not None
    a, b = sides(c)
    done: set[str] = set()
    summed = {x.name for x in n.summed}
    kept = [s for s in n.kernel.stores if summed & {str(x) for x in sympy.sympify(s.index).free_symbols}]
    ends = [s for s in n.kernel.stores if s not in kept]
    reached = c.needed(c.named(ends), stop_at={dot.name})
    moments = [v.name for v in n.kernel.lets if v.op == "reduce" and v.name in reached]
    program = c.start()
    row, column = c.values.fresh("row"), c.values.fresh("column")
    corner = (f"{row} * XB", f"{column} * RB")
    tiles = {} if kept else descriptors(a, b, dot, corner)
    place(c, program, row, column)
    a.depth = b.depth = c.depth
    fixed = _fixed(a, [dot.args[0], *moments], "r") or _fixed(b, [dot.args[1]], "x")
    walks = bool(c.schedule.programs) and not fixed
    if not walks:
        spread(c, "x", corner[0])
        spread(c, "r", corner[1])
    rows(a, [dot.args[0], *moments], done)
    before(b, dot.args[1], done)
    first = f"({column} == 0)"
    loop(a, b, c, dot, done, kept, first, tiles, corner if walks else None)
    if walks:
        spread(c, "x", corner[0])
        spread(c, "r", corner[1])
    done.add(dot.name)
    wanted = c.needed(c.named(ends), stop_at=done)
    drawn = c.needed([v.name for v in n.kernel.lets if v.op == "random" and v.name in wanted], stop_at=done)
    c.compute(v for v in n.kernel.lets if v.name in drawn)
    c.compute(v for v in n.kernel.lets if v.name in wanted - drawn and v.op != "peak")
    c.barrier()
    peaks = {v.name: v for v in n.kernel.lets if v.op == "peak"}
    for s in ends:
        if s.value in peaks:
            peak(c, s, peaks[s.value], column)
            continue
        c.write([s], "" if "r" in c.values.along(s.index) else first)
    c.drop_unread_axes()


def peak(c: Emitter, s: Store, v: Let, column: str) -> None:
    """Stores the largest of each block of columns of a tile, which has whole blocks."""
    values, (outer, inner) = c.values, c.n.reduced
    width, block = int(inner.extent), values.fresh("block")
    tile = values.arg(v.args[0])
    if values.sides[v.args[0]] != frozenset("xr"):
        tile = f"tl.broadcast_to({tile}, [XB, RB])"
    c.w(f"{block} = {column} * (RB // {width}) + tl.arange(0, RB // {width})[None, :]")
    c.w(f"{v.name} = tl.reduce(tl.reshape({tile}, [XB, RB // {width}, {width}]), 2, {values.combine(v)})")
    index = sympy.sympify(s.index)
    names = {x.name: x for x in index.free_symbols}
    place = values.place(
        s.buffer, index.xreplace({names[outer.name]: sympy.Symbol(block, integer=True, nonnegative=True)})
    )
    masks = values.masks(frozenset("x"))
    if values.masked["r"]:
        masks.append(f"({block} < {text(sympy.sympify(outer.extent))})")
    mask = f", mask={' & '.join(masks)}" if masks else ""
    c.w(f"tl.store({place}, {v.name}.to({TYPES[c.n.kernel.buffer(s.buffer).dtype]}){mask})")


def sides(c: Emitter) -> tuple[Emitter, Emitter]:
    """The emitters of the two operands, on the lines of ``c``."""
    n, s = c.n, c.schedule
    left = replace(n, parallel=n.parallel, reduced=n.summed, tiled=False)
    right = replace(n, parallel=n.summed, reduced=n.reduced)
    made = []
    for side, nest, schedule, tile in (
        ("r", left, replace(s, RB=s.KB), {"x": "XB", "r": "KB"}),
        ("x", right, replace(s, XB=s.KB), {"x": "KB", "r": "RB"}),
    ):
        v = Values(nest, schedule, used=c.values.used, tile=tile)
        k = n.summed[0].name if len(n.summed) == 1 else c.values.fresh("k")
        v.mask[side] = c.values.fresh("km")
        v.r0 = v.fresh("k0")
        if side == "r":
            v.x, v.r, v.mask["x"] = c.values.x, k, c.values.mask["x"]
        else:
            v.x, v.r, v.mask["r"] = k, c.values.r, c.values.mask["r"]
        made.append(replace(c, n=nest, schedule=schedule, values=v))
    return made[0], made[1]


def place(c: Emitter, program: str, row: str, column: str) -> None:
    """The tile of a program as ``row`` and ``column`` of tiles, and its point of the batch.

    With ``Schedule.programs`` so many programs walk the tiles: all that follows is in a loop, which Triton makes one with
    the main loop, so that a tile's first operands are on the way while the tile before is finished and stored.
    """
    n, v, s = c.n, c.values, c.schedule
    down, across = _counts(c)
    number = v.program
    if s.programs:
        number = v.fresh("tile") if n.batch else v.program
        points = [grouped(text(extent(n.batch)))] if n.batch else []
        every = " * ".join([*points, *(t if t.isdecimal() else f"({t})" for t in (down, across))])
        c.w(f"for {number} in tl.range({program}, {every}, {s.programs}, flatten=True):")
        c.depth += 1
    else:
        c.w(f"{v.program} = {program}")
    find(c, number, row, column)


def _counts(c: Emitter) -> tuple[str, str]:
    """Rows and columns of tiles."""
    n, s = c.n, c.schedule
    down, across = (grouped(text((e + t - 1) // t)) if e.is_number else f"({text(e)} + {name} - 1) // {name}"
                    for e, t, name in ((n.xn, s.XB, "XB"), (n.rn, s.RB, "RB")))  # fmt: skip
    return down, across


def find(c: Emitter, number: str, row: str, column: str) -> None:
    """The tile of a number: its row and column of tiles, and its point of the batch."""
    n, v = c.n, c.values
    down, across = _counts(c)
    inside = number
    if n.batch:
        inside = v.fresh("place") if c.schedule.streams else v.program
        one, stride = f"{number} // ({down} * {across})", sympy.S.One
        for i, axis in reversed(list(enumerate(n.batch))):
            e = one if stride == 1 else f"{one} // {grouped(text(stride))}"
            c.w(f"{axis.name} = {e} % {grouped(text(sympy.sympify(axis.extent)))}" if i else f"{axis.name} = {e}")
            stride *= sympy.sympify(axis.extent)
        c.w(f"{inside} = {number} % ({down} * {across})")
    c.w(f"{row}, {column} = {v.helper('_tile')}({inside}, {down}, {across})")


def spread(e: Emitter, side: str, start: str) -> None:
    """The points of a tile along one side, from ``start`` on, with their axes and mask."""
    e.w(f"{e.values.x if side == 'x' else e.values.r} = {start} + {e.values.arange(side)}")
    e.decode(side)


def _fixed(e: Emitter, wanted: Iterable[str], along: str) -> bool:
    """Whether an operand needs something, beside constants, that stays the same ``along`` the contraction."""
    needed = e.needed(list(wanted))
    return any(v.name in needed and along not in e.values.sides[v.name] and v.op != "const" for v in e.n.kernel.lets)


def rows(a: Emitter, wanted: list[str], done: set[str]) -> None:
    """What belongs to a row as a whole, reductions stage by stage, also those that nothing but a result asks for."""
    needed = a.needed(wanted)  # constants are written where they are used, by each emitter
    live = [v for v in a.n.kernel.lets if v.name in needed]
    level = stages(a.n.kernel)
    last = max((level[v.name] for v in live if v.op == "reduce"), default=0)
    for stage in range(last + 1):
        own = [v for v in live if "r" not in a.values.sides[v.name] and v.op != "reduce" and level[v.name] == stage]
        a.compute(own)
        found = [v for v in live if v.op == "reduce" and level[v.name] == stage + 1]
        a.loop(live, found, [], [])
        done.update(v.name for v in (*own, *found) if v.op != "const")


def before(b: Emitter, wanted: str, done: set[str]) -> None:
    """What belongs to a column as a whole."""
    needed = b.needed([wanted])
    own = [v for v in b.n.kernel.lets if v.name in needed - done and "x" not in b.values.sides[v.name]]
    b.compute(own)
    done.update(v.name for v in own if v.op != "const")


def loop(
    a: Emitter, b: Emitter, c: Emitter, dot: Let, done: set[str], kept: Sequence[Store], first: str,
    tiles: Mapping[str, str], corner: tuple[str, str] | None, steps: str = "",
) -> None:  # fmt: skip
    """The sum of products, as ``dot``.  What is ``kept`` of the rows is stored by the ``first`` of their tiles.

    ``tiles``: operands that are loaded by descriptors, and how.  ``corner``: the first row and column of the tile, where
    its rows and columns are written out in the loop: Triton does not see that they lie next to each other if it has to
    carry them from one step of a joined loop to the next, and would load one element at a time.  ``steps``: where the loop
    begins and ends, if not with the whole contraction.
    """
    start = a.values.r0
    c.w(f"{dot.name} = tl.full([XB, RB], 0.0, tl.float32)")
    c.w(f"for {start} in range({steps or f'0, {text(extent(c.n.summed))}'}, KB):")
    operands = []
    for e, side, name in ((a, "r", dot.args[0]), (b, "x", dot.args[1])):
        e.depth = c.depth + 1
        if name in tiles:
            e.w(f"{name} = {tiles[name].format(k=start)}")
            operands.append(name)
            continue
        if corner is not None:
            own = "x" if e is a else "r"
            spread(e, own, corner[0] if e is a else corner[1])
        e.w(f"{e.values.r if side == 'r' else e.values.x} = {start} + {e.values.arange(side)}")
        e.decode(side)
        mine = kept if e is a else []
        needed = e.needed([name, *e.named(mine)], stop_at=done)
        inside = [v for v in e.n.kernel.lets if v.name in needed - done]
        raw = _read_as_it_lies(e, inside, name, str(dot.attr)) if not mine else None
        e.compute(v for v in inside if v is not raw)
        e.write(mine, first)
        operands.append(_operand(e, name, str(dot.attr), raw))
    precision = f', input_precision="{PRECISION[str(dot.attr)]}"' if dot.attr in PRECISION else ""
    a.w(f"{dot.name} = tl.dot({operands[0]}, {operands[1]}, {dot.name}{precision})")


def descriptors(a: Emitter, b: Emitter, dot: Let, corner: tuple[str, str]) -> dict[str, str]:
    """Operands that are plain matrices -> how a step of the loop at ``{k}`` loads them; writes their descriptors.

    A matrix of whole 16 bytes a row, from a start that is a multiple of 16 bytes (launches see to it), with no batch.
    What lies outside of it is loaded as zero.
    """
    if not a.schedule.tma or a.n.batch or a.n.sizes or dot.attr not in ("bf16", "f16"):
        return {}
    if any(len(axes) != 1 for axes in (a.n.parallel, b.n.reduced, a.n.summed)):
        return {}
    found = {}
    (k,) = a.n.summed
    for e, name, axis, tile, at in (
        (a, dot.args[0], a.n.parallel[0], "XB", corner[0]),
        (b, dot.args[1], b.n.reduced[0], "RB", corner[1]),
    ):
        (v,) = (v for v in e.n.kernel.lets if v.name == name)
        if v.op != "load" or e.n.kernel.buffer(v.access[0]).dtype != dot.attr:
            continue
        lies = _as_rows(v.access[1], axis.name, k.name)
        if lies is None:
            continue
        inner_k, stride, offset = lies
        sides = [(axis, tile, at), (k, "KB", "{k}")]
        rows, columns = sides if inner_k else sides[::-1]
        shape, blocks, start = ([text(sympy.sympify(rows[0].extent)), text(sympy.sympify(columns[0].extent))],
                                f"[{rows[1]}, {columns[1]}]", f"[{rows[2]}, {columns[2]}]")  # fmt: skip
        made = e.values.fresh(f"{v.access[0]}_tiles")
        first = v.access[0] if offset == 0 else f"{v.access[0]} + {offset}"
        e.w(f"{made} = tl.make_tensor_descriptor({first}, [{', '.join(shape)}], [{stride}, 1], {blocks})")
        load = f"{made}.load({start})"
        # the left operand has the contraction along its columns, the right one along its rows
        found[name] = load if inner_k == (e is a) else f"tl.trans({load})"
    return found


def _as_rows(index: Index, axis: str, k: str) -> tuple[bool, int, int] | None:
    """Of a matrix with rows of whole 16 bytes: whether they lie along the contraction, their stride, and the first element."""
    index = sympy.expand(sympy.sympify(index))
    symbols = {s.name: s for s in index.free_symbols}
    if symbols.keys() != {axis, k}:
        return None
    steps = [index.coeff(symbols[name]) for name in (axis, k)]
    offset = index - sum(c * symbols[name] for c, name in zip(steps, (axis, k)))
    if not all(e.is_Integer for e in (*steps, offset)) or 1 not in steps:
        return None
    inner_k = bool(steps[1] == 1)
    stride = int(steps[0] if inner_k else steps[1])
    return (inner_k, stride, int(offset)) if stride > 1 and stride % 8 == 0 and int(offset) % 8 == 0 else None


def _read_as_it_lies(e: Emitter, inside: Iterable[Let], name: str, form: str) -> Let | None:
    """A load that only the product reads, in the product's format: it need not be widened."""
    (found,) = (v for v in e.n.kernel.lets if v.name == name)
    alone = not any(name in v.args for v in inside)
    same = found.op == "load" and e.n.kernel.buffer(found.access[0]).dtype == form
    return found if alone and same else None


def _operand(e: Emitter, name: str, form: str, raw: Let | None) -> str:
    """The tile to multiply: zero where a row or column of the matrix ends, in the product's format."""
    v = e.values
    if raw is not None:
        e.w(f"{name} = {v.load(raw, widen=False)}")
        return name
    tile = f"{v.arg(name)}"
    masks = v.masks(frozenset("xr"))
    k = v.mask["r" if e.n.reduced == e.n.summed else "x"]
    if k in masks:  # what was computed of nothing need not be zero
        tile = f"tl.where({k}, {tile}, 0.0)"
    missing = v.sides[name] != frozenset("xr")
    tile = f"tl.broadcast_to({tile}, {v.shape(frozenset('xr'))})" if missing else tile
    return tile if form in PRECISION else f"{grouped(tile)}.to({TYPES[form]})"
