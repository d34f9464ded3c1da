"""Group nodes into kernels, by the bytes that it saves to compute them together."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from dsc import domain, ops
from dsc.domain import Space
from dsc.manager import Pass, Remark, Report
from dsc.notes import notes, set_notes
from dsc.passes import epilogue
from dsc.passes.walks import STRAIGHT, Walk, through, walk_of
from dsc.steps import storage_of
from dsc.target import Target
from dsc.torch_shim import optimization_hint

NEAR = 64
"""Nodes between two groups that share an input and join (case 9)."""

LITTLE = 100
"""Groups that only share an input of so many times fewer bytes than either moves do not join for it (case 9)."""

LAUNCH_SECONDS = 4e-6
"""Of one CUDA kernel; calls of C++ kernels in one sequence cost nothing worth counting."""


@dataclass(frozen=True)
class Fuse(Pass):
    """Note ``group`` on every node that a kernel of ours computes.

    1. Pointwise, creating, reducing and rowwise nodes start as groups of one; everything else stays with ATen.
    2. Two groups join, best saving first, if they read or write fewer bytes as one: a value passed on inside is not
       read again, nor written if nobody else wants it; an input that both read in the same order is read once.
    3. Only groups with a common loop nest join (``domain.meet``): reductions over other axes do not; a group that is
       merely read by the other, at any index, joins if it reduces nothing (it is computed where it is read).
    4. Groups do not join if a path between them leaves and comes back: that would be a cycle.
    5. A producer that costs fewer bytes to compute again in each reader than to write and read is copied into them.
    6. Whole reductions with nothing parallel left do not join what follows them: that would run on one core.
    7. Two small groups over the same space join to save a launch, on targets where launches cost.
    8. A lone copy, cat or fill that ATen does as well stays with ATen.
    9. Groups that only share an input join if they stand near each other: of two layers, they would keep the operands
       of both alive, and if the input is no trifle.
    10. A sum of all rows (``columns``; None: on CUDA) joins a group that reduces these rows and reads the same, if rows
        fit the registers of a program and are many: partial sums are kept there and added up by a second launch.
    11. A write into an input (``copy_``) joins the group that computes the value, which then stores it there, if the
        group reduces nothing and reads that input in no other order.
    12. On CUDA a product of matrices takes what follows it into its kernel where that is modelled to be faster than the
        library's product and a kernel (``gemm=false``: never; see ``dsc.passes.epilogue``).
    """

    name: ClassVar[str] = "fuse"
    gives: ClassVar[frozenset[str]] = frozenset({"group"})

    max_nodes: int = 64
    """Larger groups are not made, to bound compile time and registers."""
    columns: bool | None = None
    """Whether kernels that reduce rows may sum over all rows too; None: on CUDA."""
    gemm: bool = True
    """Whether products of matrices may be generated on CUDA."""

    def run(self, gm: GraphModule, target: Target) -> Report:
        web = build(gm)
        web.columns = self.columns if self.columns is not None else target.kind == "cuda"
        remarks = list(web.remarks)
        grow(web, self.max_nodes)
        if target.kind == "cuda":
            join_small(web, self.max_nodes, LAUNCH_SECONDS * target.bandwidth)
        parted = list(apart(web, self.max_nodes))
        duplicate(gm, web, self.max_nodes)
        remarks += mark(web)
        remarks += explain(web, parted)
        if self.gemm and target.kind == "cuda":
            remarks += epilogue.absorb(gm, target, self.max_nodes)
        kernels = {group for n in gm.graph.nodes if (group := notes(n).group) is not None}
        return Report(bool(web.live()), tuple(remarks), (("kernels", float(len(kernels))),))


@dataclass
class Unit:
    """A node with its results, or a group of them: what runs at one place."""

    id: int
    nodes: list[Node]
    space: Space | None
    """None: ATen computes it."""
    preds: set[int] = field(default_factory=set)
    succs: set[int] = field(default_factory=set)
    reads: dict[Node, frozenset[Walk]] = field(default_factory=dict)
    """Value -> the orders in which it is read."""
    makes: list[Node] = field(default_factory=list)
    low: int = 0
    writes: frozenset[Node] = frozenset()
    """Inputs of the graph that it writes to (case 11)."""


@dataclass
class Web:
    """Units, and who reads which value."""

    units: dict[int, Unit]
    maker: dict[Node, int]
    readers: dict[Node, set[int]]
    size: dict[Node, int]
    pinned: set[Node]
    """Values that must exist in memory whatever the groups: results of the graph, operands of ATen."""
    remarks: list[Remark]
    order: dict[Node, int]
    columns: bool = False
    """Whether case 10 is wanted."""
    below: dict[int, int] = field(default_factory=dict)
    """Unit -> those that a path leads to, as a set of bits, until groups stop growing."""

    def live(self) -> list[Unit]:
        return sorted((u for u in self.units.values() if u.space is not None), key=lambda u: u.low)

    def outside(self, value: Node, unit_ids: set[int]) -> bool:
        """Whether a value is wanted outside of these units."""
        return value in self.pinned or not self.readers.get(value, set()) <= unit_ids


def bytes_of(value: Node) -> int:
    t = value.meta.get("val")
    if not isinstance(t, torch.Tensor):
        return 0
    return int(optimization_hint(t.numel())) * t.element_size()


def computing(value: Node) -> Node:
    """The node that computes a value: itself, or the op with several results that it is one of."""
    while value.op == "call_function" and ops.info(value).kind == "item" and isinstance(value.args[0], Node):
        value = value.args[0]
    return value


def is_transparent(node: Node) -> bool:
    """Nodes that are no units: views, pieces and results of others."""
    return ops.is_split(node) or ops.is_view(node) or ops.info(node).kind == "item"


def build(gm: GraphModule) -> Web:
    web = Web({}, {}, {}, {}, set(), [], {n: i for i, n in enumerate(gm.graph.nodes)})
    last_write: dict[Node, int] = {}
    touched: dict[Node, set[int]] = {}
    last_ordered: int | None = None
    # what a backward is given may come in other strides than the trace foresaw, and in memory of its own
    forward = not any(n.name.startswith("tangents") for n in gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if node.op == "output":
            web.pinned.update(storage_of(a) for a in node.all_input_nodes)
        if node.op != "call_function":
            continue
        if ops.info(node).kind == "item" and not ops.is_view(node):
            unit = web.units[web.maker[computing(node)]]
            unit.nodes.append(node)
            unit.makes.append(node)
            web.maker[node] = unit.id
            web.size[node] = bytes_of(node)
            continue
        if is_transparent(node):
            continue
        place = web.order[node]
        in_place = forward and writes_input(node)
        why = None if in_place else ops.why_not_fused(node)
        unit = Unit(place, [node], None if why else domain.of(node), makes=[node], low=place)
        if in_place:
            unit.writes = frozenset(ops.mutated(node))
        web.units[place] = unit
        web.maker[node] = place
        web.size[node] = bytes_of(node)
        if why and not why.endswith(" op"):
            web.remarks.append(Remark(node.name, "skipped", why))
        written = {storage_of(n) for n in ops.mutated(node)}
        for arg in node.all_input_nodes:
            value, walk = walk_of(arg)
            if value not in unit.writes:
                read(web, unit, value, frozenset({walk}))
            if unit.space is None:
                web.pinned.add(value)
            # writes in place: after every earlier reader of the storage, before every later one
            if value in last_write:
                link(web, last_write[value], place)
            if value in written:
                for other in touched.get(value, ()):
                    link(web, other, place)
            touched.setdefault(value, set()).add(place)
        for value in written:
            last_write[value] = place
        if ops.is_ordered(node):
            if last_ordered is not None:
                link(web, last_ordered, place)
            last_ordered = place
    find_below(web)
    return web


def writes_input(node: Node) -> bool:
    """Case 11: ``copy_(input, value)``, of dtypes and layouts that a kernel can store."""
    if ops.name_of(node) != "copy_.default" or node.users or len(node.args) != 2 or node.kwargs:
        return False
    target, source = node.args
    if not (isinstance(target, Node) and isinstance(source, Node) and target.op == "placeholder"):
        return False
    t, v = target.meta.get("val"), source.meta.get("val")
    if not (isinstance(t, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    return ops.is_plain(t) and ops.is_plain(v) and t.dtype == v.dtype and t.shape == v.shape and t.device == v.device


def read(web: Web, unit: Unit, value: Node, walks: frozenset[Walk]) -> None:
    unit.reads[value] = unit.reads.get(value, frozenset()) | walks
    web.readers.setdefault(value, set()).add(unit.id)
    web.size.setdefault(value, bytes_of(value))
    made_by = web.maker.get(value)
    if made_by is not None:
        link(web, made_by, unit.id)


def link(web: Web, before: int, after: int) -> None:
    if before != after:
        web.units[before].succs.add(after)
        web.units[after].preds.add(before)


# --- joining -----------------------------------------------------------------------------------------------------------


def shuffles(unit: Unit, values: Iterable[Node]) -> bool:
    """Whether the group reads one of the values in another order than it lies in."""
    return any(not unit.reads[v] <= STRAIGHT for v in values if v in unit.reads)


def onwards(maker: Unit, reader: Unit) -> frozenset[Walk]:
    """The walks by which one group reads what the other makes."""
    return frozenset(w for v in maker.makes for w in reader.reads.get(v, ()))


def saving(web: Web, a: Unit, b: Unit) -> int:
    """Bytes not moved if the two run as one."""
    both = {a.id, b.id}
    saved = sum(
        web.size[v] for v, w in a.reads.items() if w & b.reads.get(v, frozenset()) and web.maker.get(v) not in both
    )
    for x, y in ((a, b), (b, a)):
        for v in x.makes:
            if v in y.reads:
                saved += web.size[v] * (1 if web.outside(v, both) else 2)
    return saved


def joined_space(web: Web, a: Unit, b: Unit) -> Space | None:
    """The nest of the two as one, or None."""
    assert a.space is not None and b.space is not None
    if a.writes or b.writes:
        return joined_in_place(a, b)
    if any(v in y.reads for x, y in ((a, b), (b, a)) for v in x.makes):
        first, second = (a, b) if any(v in b.reads for v in a.makes) else (b, a)
        met = None if shuffles(second, first.makes) else meet(web, first, second)
        if met is not None:
            return met if enough_parallel(met) else None
        internal = all(not web.outside(v, {first.id, second.id}) for v in first.makes)
        return second.space if internal and not first.space.reduces else None  # type: ignore[union-attr]
    if abs(a.low - b.low) > NEAR or saving(web, a, b) * LITTLE < min(moved(web, a), moved(web, b)):
        return None
    met = meet(web, a, b)
    return met if met is not None and enough_parallel(met) else None


def meet(web: Web, a: Unit, b: Unit) -> Space | None:
    """The nest of the two, sums of columns included."""
    assert a.space is not None and b.space is not None
    met = domain.meet(a.space, b.space)
    if met is None and web.columns:
        met = domain.cross(a.space, b.space)
    if met is None or not met.columns:
        return met
    return met if columns_fit(met, sorted({*a.nodes, *b.nodes}, key=web.order.__getitem__)) else None


MANY_ROWS, LONGEST = 1024, 16384
"""Case 10: rows that make partial sums worth it, and points of a row times sums that fit the registers of a program."""


def columns_fit(space: Space, nodes: Sequence[Node]) -> bool:
    """Case 10: rows that fit, and nothing but what has an element a column needs the sums."""
    row, rows = domain.product(d.extent for d in space.dims if d.reduce), domain.product(space.parallel)
    across = frozenset(n for n in nodes if domain.across(n, space))
    sums = sum(2 if ops.info(n).kind == "rowwise" else 1 for n in across)
    if not isinstance(row, int) or row * sums > LONGEST or int(optimization_hint(rows)) < MANY_ROWS:
        return False
    if not all(domain.sums_columns(n) for n in across):
        return False
    late = domain.follow(nodes, across)
    inside = set(nodes)
    for n in late:
        roots = {storage_of(a) for a in n.all_input_nodes} & inside
        if n in across:
            if roots & late:
                return False
        elif ops.info(n).kind != "item":
            apart = {r for r in roots - late if ops.info(r).kind != "create"}
            t = n.meta.get("val")
            if ops.info(n).kind != "pointwise" or apart or not isinstance(t, torch.Tensor):
                return False
            if not domain.same(domain.product(domain.shape(t)), row):
                return False
    return True


def joined_in_place(a: Unit, b: Unit) -> Space | None:
    """Case 11: what is written has been read at the same index, if at all."""
    assert a.space is not None and b.space is not None
    if a.space.reduces or b.space.reduces or any(shuffles(x, a.writes | b.writes) for x in (a, b)):
        return None
    if shuffles(a, b.makes) or shuffles(b, a.makes):
        return None
    return domain.meet(a.space, b.space)


def enough_parallel(space: Space) -> bool:
    """Case 6: rows to share between cores, unless the whole is small."""
    whole = int(optimization_hint(domain.product(space.extents)))
    rows = int(optimization_hint(domain.product(space.parallel)))
    return rows >= 16 or whole <= 1 << 15 or not space.reduces


def cyclic(web: Web, a: Unit, b: Unit) -> bool:
    """Whether a path leads from one to the other through a third."""
    return _path(web, a, b) or _path(web, b, a)


def _path(web: Web, start: Unit, end: Unit) -> bool:
    return any(s != end.id and web.below[s] >> end.id & 1 for s in start.succs)


def find_below(web: Web) -> None:
    """As built, units stand in an order in which each comes before those below it."""
    for i in sorted(web.units, reverse=True):
        web.below[i] = 0
        for s in web.units[i].succs:
            web.below[i] |= 1 << s | web.below[s]


def join_below(web: Web, a: Unit, gone: int) -> None:
    """What ``a`` now reaches, and that everything above the two reaches it."""
    web.below[a.id] = (web.below[a.id] | web.below.pop(gone)) & ~(1 << a.id | 1 << gone)
    reached = web.below[a.id] | 1 << a.id
    stack = list(a.preds)
    while stack:
        i = stack.pop()
        if web.below[i] | reached != web.below[i]:
            web.below[i] |= reached
            stack += web.units[i].preds


def join(web: Web, a: Unit, b: Unit, space: Space) -> Unit:
    """Makes ``b`` part of ``a``; what the maker of a value reads is walked through in the order of the value's reader."""
    a_reads, b_reads = (
        {v: through(w, to) for v, w in x.reads.items()} if (to := onwards(x, y)) else x.reads
        for x, y in ((a, b), (b, a))
    )
    a.reads, b.reads = a_reads, b_reads
    a.nodes = sorted({*a.nodes, *b.nodes}, key=web.order.__getitem__)
    a.makes += b.makes
    for v in b.makes:
        web.maker[v] = a.id
    for v, walks in b.reads.items():
        a.reads[v] = a.reads.get(v, frozenset()) | walks
        web.readers[v].discard(b.id)
        web.readers[v].add(a.id)
    for p in b.preds:
        web.units[p].succs.discard(b.id)
        link(web, p, a.id)
    for s in b.succs:
        web.units[s].preds.discard(b.id)
        link(web, a.id, s)
    a.succs.discard(b.id)
    a.preds.discard(b.id)
    a.space, a.low, a.writes = space, min(a.low, b.low), a.writes | b.writes
    for v in a.makes:
        if v in a.reads and not web.outside(v, {a.id}):
            web.readers[v].discard(a.id)
            del a.reads[v]
    del web.units[b.id]
    join_below(web, a, b.id)
    return a


def neighbours(web: Web, unit: Unit) -> Iterator[Unit]:
    """Groups that share a value with this one: readers of what it makes, makers of what it reads, next readers."""
    found: dict[int, None] = {}
    for v in unit.makes:
        found.update(dict.fromkeys(sorted(web.readers.get(v, ()))))
    for v in unit.reads:
        if (m := web.maker.get(v)) is not None:
            found[m] = None
        others = sorted(web.readers[v])
        place = others.index(unit.id)
        found.update(dict.fromkeys(others[max(0, place - 4) : place + 5]))
    found.pop(unit.id, None)
    for i in found:
        if web.units[i].space is not None:
            yield web.units[i]


def grow(web: Web, limit: int) -> None:
    version = dict.fromkeys(web.units, 0)
    heap: list[tuple[int, int, int, int, int]] = []

    def offer(a: Unit, b: Unit) -> None:
        a, b = (a, b) if a.id < b.id else (b, a)
        gain = saving(web, a, b)
        if gain > 0:
            heapq.heappush(heap, (-gain, a.id, b.id, version[a.id], version[b.id]))

    for unit in web.live():
        for other in neighbours(web, unit):
            if unit.id < other.id:
                offer(unit, other)
    while heap:
        _, i, j, vi, vj = heapq.heappop(heap)
        if i not in web.units or j not in web.units or version[i] != vi or version[j] != vj:
            continue
        a, b = web.units[i], web.units[j]
        if len(a.nodes) + len(b.nodes) > limit:
            continue
        space = joined_space(web, a, b)
        if space is None or cyclic(web, a, b):
            continue
        merged = join(web, a, b, space)
        version[merged.id] += 1
        for other in neighbours(web, merged):
            offer(merged, other)


def join_small(web: Web, limit: int, launch_bytes: float) -> None:
    """Case 7: neighbours in order over one space, both cheaper than a launch."""
    previous: Unit | None = None
    for unit in web.live():
        if (
            previous is not None
            and previous.space == unit.space
            and max(moved(web, previous), moved(web, unit)) < launch_bytes
            and len(previous.nodes) + len(unit.nodes) <= limit
            and not cyclic(web, previous, unit)
            and not any(v in unit.reads for v in previous.makes)
            and not (previous.writes or unit.writes or (unit.space is not None and unit.space.columns))
        ):
            assert unit.space is not None
            previous = join(web, previous, unit, unit.space)
        else:
            previous = unit


def apart(web: Web, limit: int) -> Iterator[tuple[Node, int, str]]:
    """Value, group that reads it, and why that group and the one that makes it did not join."""
    for unit in web.live():
        for v in unit.makes:
            for reader in sorted(web.readers.get(v, set()) - {unit.id}):
                if web.units[reader].space is not None:
                    yield v, reader, why_apart(web, unit, web.units[reader], limit)


def why_apart(web: Web, maker: Unit, reader: Unit, limit: int) -> str:
    """In a few words, by the same tests as those that ``grow`` makes."""
    count = len(maker.nodes) + len(reader.nodes)
    if count > limit:
        return f"{count} nodes together, more than max_nodes={limit}"
    if joined_space(web, maker, reader) is None:
        if shuffles(reader, maker.makes):
            return f"it is read in another order than {maker.space} writes it"
        if domain.meet(maker.space, reader.space) is None:  # type: ignore[arg-type]  # both are kernels
            return f"loops over {maker.space} and {reader.space} do not meet"
        return f"{maker.space} leaves a few numbers: what follows would run on one core"
    third = next((s for s in sorted(maker.succs) if s != reader.id and web.below[s] >> reader.id & 1), None)
    if third is not None:
        return f"{web.units[third].nodes[0].name} runs between the two"
    return "together they would not move fewer bytes"


def moved(web: Web, unit: Unit) -> int:
    written = sum(web.size[v] for v in unit.makes if web.outside(v, {unit.id}))
    written += sum(bytes_of(w) for w in unit.writes)
    return written + sum(web.size[v] for v in unit.reads if web.maker.get(v) != unit.id)


# --- duplicating -------------------------------------------------------------------------------------------------------


def duplicate(gm: GraphModule, web: Web, limit: int) -> None:
    """Case 5, from the last producer to the first, so that chains move as a whole."""
    for unit in reversed(web.live()):
        if unit.space is None or unit.space.reduces or unit.writes or any(v in unit.reads for v in unit.makes):
            continue
        readers = sorted({r for v in unit.makes for r in web.readers.get(v, ())} - {unit.id})
        homes = [web.units[r] for r in readers if web.units[r].space is not None]
        if not homes:
            continue
        needed = any(v in web.pinned for v in unit.makes) or len(homes) < len(readers)
        cost = sum(web.size[v] for h in homes for v in unit.reads if v not in h.reads)
        again = sum(web.size[v] for h in homes for v in unit.makes if v in h.reads)
        written = 0 if needed else sum(web.size[v] for v in unit.makes)
        if cost > again + written or (needed and cost >= again):
            continue
        if any(h.writes for h in homes):
            continue
        if any(len(h.nodes) + len(unit.nodes) > limit for h in homes) or len(unit.nodes) > limit // 4:
            continue
        for home in homes:
            copy_into(gm, web, unit, home)
        if not needed:
            drop(gm, web, unit)


def copy_into(gm: GraphModule, web: Web, unit: Unit, home: Unit) -> None:
    """Clones a group's nodes, and the views between, in front of the reader."""
    clones: dict[Node, Node] = {}
    compute = [n for n in home.nodes if computing(n) is n]
    for n in unit.nodes:
        with gm.graph.inserting_before(n.next):
            for arg in n.all_input_nodes:
                if storage_of(arg) in clones:
                    _clone_chain(gm, arg, clones)
            clones[n] = gm.graph.node_copy(n, lambda x: clones.get(x, x))
        web.order[clones[n]] = web.order[n]
    made = [clones[n] for n in unit.nodes]
    for reader in compute:
        for arg in reader.all_input_nodes:
            if storage_of(arg) in clones:
                with gm.graph.inserting_before(reader):
                    reader.replace_input_with(arg, _clone_chain(gm, arg, clones))
    to = onwards(unit, home)
    for v in unit.makes:
        if home.reads.pop(v, None) is not None:
            web.readers[v].discard(home.id)
    web.units[unit.id].succs.discard(home.id)
    home.preds.discard(unit.id)
    home.nodes = sorted([*made, *home.nodes], key=web.order.__getitem__)
    for v, walks in unit.reads.items():
        read(web, home, v, through(walks, to))
    home.makes += [clones[v] for v in unit.makes]
    for v in unit.makes:
        web.maker[clones[v]] = home.id
        web.size[clones[v]] = web.size[v]


def _clone_chain(gm: GraphModule, arg: Node, clones: dict[Node, Node]) -> Node:
    if arg in clones:
        return clones[arg]
    parent = ops.operand(arg, 0)
    inner = _clone_chain(gm, parent, clones)
    clones[arg] = gm.graph.node_copy(arg, lambda x: inner if x is parent else x)
    return clones[arg]


def drop(gm: GraphModule, web: Web, unit: Unit) -> None:
    """Takes a group that nobody reads any more out of the graph."""
    for n in reversed(unit.nodes):
        erase_with_views(gm, n)
    for v in unit.reads:
        web.readers[v].discard(unit.id)
    for p in unit.preds:
        web.units[p].succs.discard(unit.id)
    for s in unit.succs:
        web.units[s].preds.discard(unit.id)
    del web.units[unit.id]


def erase_with_views(gm: GraphModule, node: Node) -> None:
    for user in list(node.users):
        erase_with_views(gm, user)
    gm.graph.erase_node(node)


# --- marking -----------------------------------------------------------------------------------------------------------

ATEN_IS_AS_GOOD = frozenset(
    "clone.default copy_.default cat.default stack.default full.default full_like.default zeros.default zeros_like.default ones.default "
    "ones_like.default new_zeros.default new_ones.default new_full.default arange.default arange.start "
    "arange.start_step scalar_tensor.default flip.default".split()
)


def mark(web: Web) -> Iterable[Remark]:
    count = 0
    for unit in web.live():
        computed = [n for n in unit.nodes if computing(n) is n]
        if len(computed) == 1 and ops.name_of(computed[0]) in ATEN_IS_AS_GOOD:
            yield Remark(computed[0].name, "skipped", "ATen does it as well alone")
            continue
        name = f"k{count}"
        count += 1
        for n in unit.nodes:
            set_notes(n, replace(notes(n), group=name))
        wanted = sum(web.outside(v, {unit.id}) for v in unit.makes)
        yield Remark(
            computed[0].name,
            "did",
            f"{len(computed)} nodes into {name} over {unit.space}: {wanted} results, {moved(web, unit)} bytes",
        )


def explain(web: Web, parted: Iterable[tuple[Node, int, str]]) -> Iterator[Remark]:
    """Values that still pass through memory from one kernel to another, and why."""
    for value, reader, why in parted:
        home = web.units.get(reader)
        if home is None or web.maker.get(value) not in web.units or value not in home.reads:
            continue
        first, second = (notes(web.units[i].nodes[0]).group for i in (web.maker[value], reader))
        if first is not None and second is not None and first != second:
            yield Remark(
                value.name, "skipped", f"{web.size[value]} bytes from {first} to {second} through memory: {why}"
            )
