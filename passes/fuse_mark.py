"""Groups as notes on their nodes, and the reasons why what could have joined did not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch.fx import Node

from dsc import domain, ops
from dsc.manager import Remark
from dsc.notes import notes, set_notes
from dsc.passes.fuse_space import joined_space, shuffles
from dsc.passes.fuse_web import Unit, Web, computing, moved

ATEN_IS_AS_GOOD = frozenset(
    "clone.default copy_.default cat.default stack.default full.default full_like.default zeros.default zeros_like.default ones.default "
    "ones_like.default new_zeros.default new_ones.default new_full.default arange.default arange.start "
    "arange.start_step scalar_tensor.default flip.default".split()
)


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
    third = next((s for s in sorted(maker.succs) if s != reader.id and web.below[s] & web.bits[reader.id]), None)
    if third is not None:
        return f"{web.units[third].nodes[0].name} runs between the two"
    return "together they would not move fewer bytes"


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
