"""Repeated layers drawn once: modules of one list whose parts look alike become one, with a count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dsc.debug.dump.picture import Box, Picture, Wire

Path = tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Modules that look alike: the one that is drawn, and all of them."""

    drawn: Path
    all: tuple[Path, ...]


def collapse(picture: Picture) -> Picture:
    """``blocks.0`` to ``blocks.11`` drawn as one where they are isomorphic; nested lists too.

    Values that one of these layers hands to the next are not drawn; what comes in first and goes out last is.
    """
    depth = max((len(b.module) for b in picture.boxes), default=0)
    for level in range(depth):
        for run in runs(picture, level):
            picture = merge(picture, run)
    return picture


def runs(picture: Picture, level: int) -> list[Run]:
    """Numbered modules at one depth of the tree that look alike, neighbours by number, two or more."""
    members: dict[Path, list[Box]] = {}
    for box in picture.boxes:
        if len(box.module) > level and box.module[level].isdecimal():
            members.setdefault(box.module[: level + 1], []).append(box)
    parents: dict[Path, list[Path]] = {}
    for path in members:
        parents.setdefault(path[:-1], []).append(path)
    reads = _reads(picture.wires)
    order = {b.id: i for i, b in enumerate(picture.boxes)}
    found = []
    for siblings in parents.values():
        siblings.sort(key=lambda p: int(p[-1]))
        looks = {p: signature(members[p], level + 1, reads) for p in siblings}
        for same in _stretches(siblings, looks):
            drawn = min(same, key=lambda p: min(order[b.id] for b in members[p] if b.op != "placeholder"))
            found.append(Run(drawn, tuple(same)))
    return found


def _stretches(paths: Sequence[Path], looks: Mapping[Path, object]) -> list[list[Path]]:
    out: list[list[Path]] = []
    for p in paths:
        if out and looks[out[-1][-1]] == looks[p]:
            out[-1].append(p)
        else:
            out.append([p])
    return [s for s in out if len(s) > 1]


def signature(boxes: Sequence[Box], depth: int, reads: Mapping[str, Sequence[str]]) -> tuple[object, ...]:
    """What a layer looks like: operators, types, decisions and wires inside, whatever the names."""
    computed = [b for b in boxes if b.op not in ("placeholder", "output")]
    place = {b.id: i for i, b in enumerate(computed)}
    inner = tuple(
        (
            b.op,
            b.type,
            b.module[depth:],
            b.decision,
            b.keep,
            tuple(sorted(place.get(r, -1) for r in reads.get(b.id, ()))),
        )
        for b in computed
    )
    around = sorted(
        (b.op, b.type, b.module[depth:], b.decision, b.title if b.decision != "input" else "")
        for b in boxes
        if b.id not in place
    )
    return inner, tuple(around)


def merge(picture: Picture, run: Run) -> Picture:
    """The picture with all layers of the run mapped onto the drawn one."""
    level = len(run.drawn)
    members: dict[Path, list[Box]] = {p: [] for p in run.all}
    for box in picture.boxes:
        if box.module[:level] in members:
            members[box.module[:level]].append(box)
    drawn = _aligned(members[run.drawn], level)
    to = {}
    for boxes in members.values():
        for box, stand_in in zip(_aligned(boxes, level), drawn):
            to[box.id] = stand_in.id
    layer = {b.id: path for path, boxes in members.items() for b in boxes}
    wires: dict[tuple[str, str], Wire] = {}
    for w in picture.wires:
        a, b = layer.get(w.source), layer.get(w.target)
        if a != b and a is not None and b is not None:
            continue  # from one layer to the next
        if a == b and a is not None and a != run.drawn:
            continue
        end = to.get(w.source, w.source), to.get(w.target, w.target)
        wires.setdefault(end, replace(w, source=end[0], target=end[1]))
    counts: dict[str, int] = {}
    for box in picture.boxes:
        counts[to.get(box.id, box.id)] = counts.get(to.get(box.id, box.id), 0) + box.count
    kept = [replace(b, count=counts[b.id]) for b in picture.boxes if to.get(b.id, b.id) == b.id]
    layers = {**picture.layers, run.drawn: _title(run)}
    merged = replace(picture, boxes=tuple(kept), wires=tuple(wires.values()), layers=layers)
    return _merge_outside(merged, {b.id for b in drawn})


def _aligned(boxes: Sequence[Box], level: int) -> list[Box]:
    """Computed boxes in order, then inputs and results by what they are: layers that look alike line up."""
    computed = [b for b in boxes if b.op not in ("placeholder", "output")]
    rest = [b for b in boxes if b.op in ("placeholder", "output")]
    # inputs that look alike keep the order of the graph
    return computed + sorted(
        rest, key=lambda b: (b.op, b.type, b.module[level:], b.decision, b.title if b.decision != "input" else "")
    )


def _merge_outside(picture: Picture, drawn: set[str]) -> Picture:
    """Inputs and results of merged layers that nothing drawn tells apart become one, such as a saved tensor a layer."""
    readers: dict[str, set[str]] = {}
    makers: dict[str, set[str]] = {}
    for w in picture.wires:
        readers.setdefault(w.source, set()).add(w.target)
        makers.setdefault(w.target, set()).add(w.source)
    first: dict[object, Box] = {}
    to: dict[str, str] = {}
    counts: dict[str, int] = {}
    for b in picture.boxes:
        near = readers.get(b.id, set()) | makers.get(b.id, set())
        if b.decision not in ("input", "result") or b.id in drawn or not near & drawn:
            continue
        key = (b.op, b.type, b.module, frozenset(readers.get(b.id, ())), frozenset(makers.get(b.id, ())))
        stands = first.setdefault(key, b)
        to[b.id] = stands.id
        counts[stands.id] = counts.get(stands.id, 0) + b.count
    boxes = [replace(b, count=counts.get(b.id, b.count)) for b in picture.boxes if to.get(b.id, b.id) == b.id]
    wires: dict[tuple[str, str], Wire] = {}
    for w in picture.wires:
        end = to.get(w.source, w.source), to.get(w.target, w.target)
        wires.setdefault(end, replace(w, source=end[0], target=end[1]))
    return replace(picture, boxes=tuple(boxes), wires=tuple(wires.values()))


def _reads(wires: Iterable[Wire]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for w in wires:
        out.setdefault(w.target, []).append(w.source)
    return out


def _title(run: Run) -> str:
    numbers = [int(p[-1]) for p in run.all]
    return f"{run.drawn[-1]} × {len(run.all)}  ({min(numbers)} … {max(numbers)})"
