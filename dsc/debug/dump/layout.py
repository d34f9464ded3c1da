"""Places for all boxes, clusters and wires of a picture: every cluster is laid out inside, then stands as one box outside.

A value that crosses the border of a cluster does so at a port, so that wires run around boxes and not across them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dsc.debug.dump import layered
from dsc.debug.dump.clusters import By, Cluster, tree
from dsc.debug.dump.layered import Edge, Item, Layers
from dsc.debug.dump.picture import Box, Picture, Wire

Point = tuple[float, float]

TITLE, SMALL = 12.0, 10.0
"""Sizes of the two fonts, monospaced, so that widths are known: 0.602 of the size a letter."""
LETTER = 0.602
BOX_HEIGHT, LABEL_HEIGHT, HEADER, PADDING = 36.0, 15.0, 20.0, 14.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A box: left, top, width and height, without the label of its value, which stands below."""

    box: Box
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Frame:
    """A cluster's border."""

    cluster: Cluster
    x: float
    y: float
    width: float
    height: float
    depth: int


@dataclass(frozen=True, slots=True)
class Line:
    wire: Wire
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    picture: Picture
    boxes: tuple[Placed, ...]
    frames: tuple[Frame, ...]
    """The outer ones first."""
    lines: tuple[Line, ...]
    width: float
    height: float


@dataclass
class Level:
    """The inside of one cluster."""

    cluster: Cluster
    layers: Layers
    items: dict[str, int]
    levels: list[Level]
    edges: dict[tuple[str, str, str], int]
    """Item, item, value -> its path."""
    width: float = 0.0
    height: float = 0.0
    top: float = 0.0
    """Room above the boxes."""
    ports: dict[str, float] = field(default_factory=dict)
    """Port -> its x."""


def lay_out(picture: Picture, by: By = "both") -> Layout:
    """Coordinates in pixels, from (0, 0) on."""
    root = tree(picture, by)
    chain = _chains(root)
    crossing = _crossing(picture.wires, chain)
    readers = {w.source for w in picture.wires}
    level = _level(root, crossing, readers)
    boxes: list[Placed] = []
    frames: list[Frame] = []
    segments: dict[tuple[str, str, str, str], list[Point]] = {}
    _collect(level, PADDING, PADDING, 0, boxes, frames, segments, readers)
    lines = [Line(w, tuple(_joined(w, chain, segments))) for w in picture.wires if w.source in chain]
    spread = _arrive_apart(lines, {p.box.id: p for p in boxes})
    return Layout(
        picture, tuple(boxes), tuple(frames), tuple(spread), level.width + 2 * PADDING, level.height + 2 * PADDING
    )


def box_width(box: Box) -> float:
    """Of the box itself: its title with count and kernel, and its name."""
    head = len(box.title) + (len(f" ×{box.count}") if box.count > 1 else 0) + (len(box.kernel) + 2 if box.kernel else 0)
    return max(head * TITLE * LETTER, len(box.id) * SMALL * LETTER) + 22


def label(type_: str, nbytes: int) -> str:
    """What stands at the beginning of a wire: ``f32[4,8] 128 B``."""
    words = type_ if len(type_) <= 44 else type_[:43] + "…"
    return f"{words} {size(nbytes)}" if nbytes else words


def size(nbytes: float) -> str:
    """``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError


def _chains(root: Cluster) -> dict[str, list[str]]:
    """Box -> the clusters around it, the outermost (the root) first."""
    out: dict[str, list[str]] = {}

    def walk(c: Cluster, above: list[str]) -> None:
        here = [*above, c.id]
        out.update((b.id, here) for b in c.boxes)
        for inner in c.clusters:
            walk(inner, here)

    walk(root, [])
    return out


def _crossing(wires: Sequence[Wire], chain: Mapping[str, list[str]]) -> dict[str, dict[tuple[str, str, str], None]]:
    """Cluster -> edges between its items: (item, item, value).  Items are boxes, clusters, and ports."""
    out: dict[str, dict[tuple[str, str, str], None]] = {}
    for w in wires:
        for cluster, a, b in _hops(w, chain):
            out.setdefault(cluster, {})[a, b, w.source] = None
    return out


def _hops(w: Wire, chain: Mapping[str, list[str]]) -> list[tuple[str, str, str]]:
    """The way of a wire: cluster by cluster, from which item to which."""
    up, down = chain[w.source], chain[w.target]
    shared = 0
    while shared < min(len(up), len(down)) and up[shared] == down[shared]:
        shared += 1
    ups, downs = [*up, w.source], [*down, w.target]
    hops = [(up[k], ups[k + 1], f"out {w.source}") for k in range(len(up) - 1, shared - 1, -1)]
    hops.append((up[shared - 1], ups[shared], downs[shared]))
    return hops + [(down[k], f"in {w.source}", downs[k + 1]) for k in range(shared, len(down))]


def _level(cluster: Cluster, crossing: Mapping[str, Mapping[tuple[str, str, str], None]], readers: set[str]) -> Level:
    levels = [_level(c, crossing, readers) for c in cluster.clusters]
    items: list[Item] = []
    index: dict[str, int] = {}

    def add(name: str, item: Item) -> None:
        index[name] = len(items)
        items.append(item)

    for b in cluster.boxes:
        below = LABEL_HEIGHT if b.id in readers else 0
        wide = len(label(b.type, b.made)) * SMALL * LETTER if below else 0
        add(b.id, Item(max(box_width(b), wide), BOX_HEIGHT + below))
    inner = {level.cluster.id: level for level in levels}
    for name, level in inner.items():
        add(name, Item(level.width, level.height))
    keys = list(crossing.get(cluster.id, {}))
    for source, target, value in keys:
        for name, side in ((source, -1), (target, 1)):
            if name == f"{'in' if side < 0 else 'out'} {value}" and name not in index:
                add(name, Item(layered.POINT, 0.0, side))

    def port(name: str, key: str) -> float:
        level = inner.get(name)
        return level.ports[key] - level.width / 2 if level else 0.0

    edges = [Edge(index[a], index[b], port(a, f"out {v}"), port(b, f"in {v}")) for a, b, v in keys]
    layers = layered.place(items, edges)
    level = Level(cluster, layers, index, levels, {k: i for i, k in enumerate(keys)})
    if cluster.kind == "root":
        level.width, level.height = layers.width, layers.height
        return level
    level.width = max(layers.width + 2 * PADDING, len(cluster.title) * SMALL * 1.1 * LETTER + 2 * PADDING)
    level.top = HEADER + (0 if any(i.rank < 0 for i in items) else PADDING)
    level.height = level.top + layers.height + (0 if any(i.rank > 0 for i in items) else PADDING)
    shift = (level.width - layers.width) / 2
    level.ports = {n: layers.at[i][0] + shift for n, i in index.items() if items[i].rank}
    return level


def _collect(
    level: Level,
    x: float,
    y: float,
    depth: int,
    boxes: list[Placed],
    frames: list[Frame],
    segments: dict[tuple[str, str, str, str], list[Point]],
    readers: set[str],
) -> None:
    """Level-relative coordinates to those of the picture."""
    c = level.cluster
    if c.kind != "root":
        frames.append(Frame(c, x, y, level.width, level.height, depth))
    left = x + (level.width - level.layers.width) / 2
    top = y + level.top
    for b in c.boxes:
        cx, by = level.layers.at[level.items[b.id]]
        width = box_width(b)
        boxes.append(Placed(b, left + cx - width / 2, top + by, width, BOX_HEIGHT))
    for inner in level.levels:
        cx, by = level.layers.at[level.items[inner.cluster.id]]
        _collect(inner, left + cx - inner.width / 2, top + by, depth + 1, boxes, frames, segments, readers)
    for (source, target, value), i in level.edges.items():
        segments[c.id, source, target, value] = [(left + px, top + py) for px, py in level.layers.paths[i]]


def _joined(
    w: Wire, chain: Mapping[str, list[str]], segments: Mapping[tuple[str, str, str, str], list[Point]]
) -> list[Point]:
    points: list[Point] = []
    for cluster, a, b in _hops(w, chain):
        points += segments[cluster, a, b, w.source]
    return points


def _arrive_apart(lines: Sequence[Line], placed: Mapping[str, Placed]) -> list[Line]:
    """Wires into one box end side by side, in the order in which they come; they begin below the label."""
    arriving: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        arriving.setdefault(line.wire.target, []).append(i)
    out = list(lines)
    for target, indices in arriving.items():
        box = placed[target]
        indices.sort(key=lambda i: lines[i].points[-2][0])
        step = min(box.width * 0.7 / max(len(indices), 1), 16.0)
        for k, i in enumerate(indices):
            x = box.x + box.width / 2 + (k - (len(indices) - 1) / 2) * step
            out[i] = replace(lines[i], points=(*lines[i].points[:-1], (x, box.y)))
    return out
