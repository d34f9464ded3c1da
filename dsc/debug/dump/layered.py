"""One level of boxes in layers from top to bottom: ranks, order within a rank, coordinates.  No torch, plain numbers.

After Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures", 1981:
1. Edges that close a cycle are turned around.
2. Ranks by longest path; what has more readers than operands moves down to them.
3. Edges over several ranks pass through points; medians order each rank, and the order with fewest crossings stays.
4. x: each rank in turn moves to where its neighbours are, the least squares under the distances that boxes need.
   That is isotonic regression, solved exactly by pooling neighbours that would overlap.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 10
GAP_X, GAP_Y = 18.0, 26.0
POINT = 10.0
"""Room that an edge takes where it passes a rank."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something with a size.  ``rank``: -1 must be at the top, 1 at the bottom, 0 anywhere."""

    width: float
    height: float
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """From item to item, and where it touches them, as offsets from their centres."""

    source: int
    target: int
    leaves: float = 0.0
    enters: float = 0.0


@dataclass(frozen=True)
class Layers:
    at: list[tuple[float, float]]
    """Centre x and top y of each item."""
    paths: list[list[tuple[float, float]]]
    """Points of each edge, from its source to its target."""
    width: float
    height: float


def place(items: Sequence[Item], edges: Sequence[Edge]) -> Layers:
    """Coordinates for all items, from (0, 0) on."""
    turned = back_edges(len(items), edges)
    directed = [Edge(e.target, e.source, e.enters, e.leaves) if i in turned else e for i, e in enumerate(edges)]
    ranks = rank(items, directed)
    nodes, links, chains = with_points(items, directed, ranks)
    rows = order(nodes, links)
    xs = spread(nodes, rows, links)
    return _assembled(items, edges, turned, nodes, rows, chains, xs)


def back_edges(count: int, edges: Sequence[Edge]) -> set[int]:
    """Edges that a depth-first walk finds to close a cycle."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for i, e in enumerate(edges):
        out[e.source].append((i, e.target))
    state = [0] * count  # 0 not seen, 1 on the way, 2 done
    turned = {i for i, e in enumerate(edges) if e.source == e.target}
    for start in range(count):
        if state[start]:
            continue
        state[start] = 1
        stack = [(start, 0)]
        while stack:
            node, k = stack.pop()
            if k == len(out[node]):
                state[node] = 2
                continue
            stack.append((node, k + 1))
            index, target = out[node][k]
            if state[target] == 1:
                turned.add(index)
            elif state[target] == 0:
                state[target] = 1
                stack.append((target, 0))
    return turned


def rank(items: Sequence[Item], edges: Sequence[Edge]) -> list[int]:
    """Longest paths from the top; then items with more readers than operands come as near to the readers as they can."""
    count = len(items)
    ins: list[list[int]] = [[] for _ in range(count)]
    outs: list[list[int]] = [[] for _ in range(count)]
    for e in edges:
        if e.source != e.target:
            ins[e.target].append(e.source)
            outs[e.source].append(e.target)
    waiting = [len(x) for x in ins]
    ready = [i for i in range(count) if not waiting[i]]
    sequence: list[int] = []
    for i in ready:
        sequence.append(i)
        for j in outs[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    lowest = int(any(i.rank < 0 for i in items))
    ranks = [0 if items[i].rank < 0 else lowest for i in range(count)]
    for i in sequence:
        if items[i].rank >= 0:
            ranks[i] = max([ranks[i], *(ranks[j] + 1 for j in ins[i])])
    for i in reversed(sequence):
        if items[i].rank == 0 and outs[i] and len(outs[i]) > len(ins[i]):
            ranks[i] = max(ranks[i], min(ranks[j] for j in outs[i]) - 1)
    last = max((r for i, r in enumerate(ranks) if items[i].rank <= 0), default=-1) + 1
    return [max(r, last) if items[i].rank > 0 else r for i, r in enumerate(ranks)]


@dataclass(slots=True)
class Node:
    """An item, or a point of an edge."""

    rank: int
    width: float
    height: float
    point: bool


@dataclass(frozen=True, slots=True)
class Link:
    """Between neighbouring ranks."""

    above: int
    below: int
    leaves: float
    enters: float


def with_points(
    items: Sequence[Item], edges: Sequence[Edge], ranks: Sequence[int]
) -> tuple[list[Node], list[Link], list[list[int]]]:
    """Items and points, links between neighbouring ranks, and the points of each edge from top to bottom."""
    nodes = [Node(r, i.width, i.height, False) for i, r in zip(items, ranks)]
    links: list[Link] = []
    chains: list[list[int]] = []
    for e in edges:
        chain: list[int] = []
        if e.source != e.target:
            previous, leaves = e.source, e.leaves
            for r in range(ranks[e.source] + 1, ranks[e.target]):
                nodes.append(Node(r, POINT, 0.0, True))
                links.append(Link(previous, len(nodes) - 1, leaves, 0.0))
                previous, leaves = len(nodes) - 1, 0.0
                chain.append(previous)
            links.append(Link(previous, e.target, leaves, e.enters))
        chains.append(chain)
    return nodes, links, chains


def order(nodes: Sequence[Node], links: Sequence[Link]) -> list[list[int]]:
    """The nodes of each rank from left to right."""
    rows: list[list[int]] = [[] for _ in range(max((n.rank for n in nodes), default=-1) + 1)]
    up: list[list[tuple[int, float]]] = [[] for _ in nodes]
    down: list[list[tuple[int, float]]] = [[] for _ in nodes]
    for link in links:
        up[link.below].append((link.above, link.leaves / max(nodes[link.above].width, 1.0)))
        down[link.above].append((link.below, link.enters / max(nodes[link.below].width, 1.0)))
    for i in _depth_first(nodes, down, up):
        rows[nodes[i].rank].append(i)
    best, fewest = [list(r) for r in rows], crossings(rows, links, nodes)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        forward = sweep % 2 == 0
        near = up if forward else down
        place_of = {i: float(k) for row in rows for k, i in enumerate(row)}
        for row in rows if forward else reversed(rows):
            wanted = {i: _middle([place_of[j] + shift for j, shift in near[i]], place_of[i]) for i in row}
            row.sort(key=wanted.__getitem__)
            place_of.update((i, float(k)) for k, i in enumerate(row))
        if (now := crossings(rows, links, nodes)) < fewest:
            best, fewest = [list(r) for r in rows], now
    return best


def _depth_first(
    nodes: Sequence[Node], down: Sequence[Sequence[tuple[int, float]]], up: Sequence[Sequence[tuple[int, float]]]
) -> list[int]:
    """A first order in which chains stay side by side."""
    seen, out = set(), []
    for start in sorted(range(len(nodes)), key=lambda i: nodes[i].rank):
        stack = [start]
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            out.append(i)
            stack += [j for j, _ in reversed(up[i]) if j not in seen]
            stack += [j for j, _ in reversed(down[i]) if j not in seen]
    return out


def _middle(places: list[float], otherwise: float) -> float:
    return sum(places) / len(places) if places else otherwise


def crossings(rows: Sequence[Sequence[int]], links: Sequence[Link], nodes: Sequence[Node]) -> int:
    """How many pairs of links cross."""
    place_of = {i: k for row in rows for k, i in enumerate(row)}
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for link in links:
        top = place_of[link.above] + link.leaves / max(nodes[link.above].width, 1.0)
        bottom = place_of[link.below] + link.enters / max(nodes[link.below].width, 1.0)
        by_rank.setdefault(nodes[link.above].rank, []).append((top, bottom))
    total = 0
    for ends in by_rank.values():
        seen: list[float] = []
        for _, bottom in sorted(ends):
            total += len(seen) - bisect_right(seen, bottom)
            insort(seen, bottom)
    return total


def spread(nodes: Sequence[Node], rows: Sequence[Sequence[int]], links: Sequence[Link]) -> list[float]:
    """Centre x of every node."""
    xs = [0.0] * len(nodes)
    up: list[list[tuple[int, float, float]]] = [[] for _ in nodes]
    down: list[list[tuple[int, float, float]]] = [[] for _ in nodes]
    for link in links:
        weight = (4.0 if nodes[link.above].point else 1.0) * (4.0 if nodes[link.below].point else 1.0)
        up[link.below].append((link.above, link.leaves - link.enters, weight))
        down[link.above].append((link.below, link.enters - link.leaves, weight))
    for row in rows:
        x = 0.0
        for i in row:
            xs[i] = x + nodes[i].width / 2
            x += nodes[i].width + GAP_X
    for sweep in range(2 * SWEEPS):
        forward = sweep % 2 == 0
        for row in rows if forward else reversed(rows):
            near = [up[i] if forward else down[i] for i in row]
            if sweep >= 2 * SWEEPS - 2:
                near = [up[i] + down[i] for i in row]
            wanted = [_wanted(i, n, xs) for i, n in zip(row, near)]
            gaps = [
                (nodes[a].width + nodes[b].width) / 2 + (POINT if nodes[a].point and nodes[b].point else GAP_X)
                for a, b in pairwise(row)
            ]
            for i, x in zip(row, apart([w for w, _ in wanted], [m for _, m in wanted], gaps)):
                xs[i] = x
    left = min((xs[i] - nodes[i].width / 2 for i in range(len(nodes))), default=0.0)
    return [x - left for x in xs]


def _wanted(i: int, near: Sequence[tuple[int, float, float]], xs: Sequence[float]) -> tuple[float, float]:
    """Where a node would like to be, and how much."""
    weight = sum(w for _, _, w in near)
    return (sum((xs[j] + shift) * w for j, shift, w in near) / weight, weight) if near else (xs[i], 0.05)


def apart(wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """The nearest places to ``wanted``, by weighted squares, at least ``gaps`` from one to the next."""
    shift, shifts = 0.0, [0.0]
    for gap in gaps:
        shift += gap
        shifts.append(shift)
    pools: list[list[float]] = []  # mean, weight, count
    for w, weight, s in zip(wanted, weights, shifts):
        pools.append([w - s, weight, 1.0])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, weight_, count = pools.pop()
            below = pools[-1]
            below[0] = (below[0] * below[1] + mean * weight_) / (below[1] + weight_)
            below[1] += weight_
            below[2] += count
    flat = [mean for mean, _, count in pools for _ in range(int(count))]
    return [x + s for x, s in zip(flat, shifts)]


def _assembled(
    items: Sequence[Item],
    edges: Sequence[Edge],
    turned: set[int],
    nodes: Sequence[Node],
    rows: Sequence[Sequence[int]],
    chains: Sequence[Sequence[int]],
    xs: Sequence[float],
) -> Layers:
    tops, heights, y = [], [], 0.0
    for row in rows:
        tops.append(y)
        heights.append(max((nodes[i].height for i in row), default=0.0))
        y += heights[-1] + GAP_Y
    read = {e.target for e in edges}
    at = []
    for i, item in enumerate(items):  # near what it reads, or if that is nothing, near who reads it
        room = heights[nodes[i].rank] - item.height
        at.append((xs[i], tops[nodes[i].rank] + (min(room / 2, GAP_Y) if i in read and item.rank <= 0 else room)))
    paths = []
    for k, (e, chain) in enumerate(zip(edges, chains)):
        points = [
            (xs[i], y) for i in chain for y in (tops[nodes[i].rank], tops[nodes[i].rank] + heights[nodes[i].rank])
        ]
        points = list(dict.fromkeys(points))
        if k in turned:
            points.reverse()
        start = (xs[e.source] + e.leaves, at[e.source][1] + items[e.source].height)
        end = (xs[e.target] + e.enters, at[e.target][1])
        if k not in turned:  # down its own column, so that it does not run across a taller neighbour
            below = tops[nodes[e.source].rank] + heights[nodes[e.source].rank]
            points = [(start[0], below), *points, (end[0], tops[nodes[e.target].rank])]
        paths.append(list(dict.fromkeys([start, *points, end])))
    width = max((xs[i] + nodes[i].width / 2 for i in range(len(nodes))), default=0.0)
    return Layers(at, paths, width, max(y - GAP_Y, 0.0))
