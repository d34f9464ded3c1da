"""The boxes around boxes: modules inside modules, and a kernel inside the module that holds all of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import networkx as nx

from dsc.debug.dump.picture import Box, Picture, Wire, common

By = Literal["both", "module", "kernel", "none"]
Path = tuple[str, ...]


@dataclass
class Cluster:
    id: str
    title: str
    kind: Literal["root", "module", "kernel", "layers"]
    boxes: list[Box] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)


def tree(picture: Picture, by: By = "both") -> Cluster:
    """All boxes of a picture in their clusters.

    1. A kernel whose nodes lie in several modules stands in the module that holds them all: such nodes leave their own.
       At the border of repeated layers, which are drawn once, the kernel is cut.  Views between its nodes belong to it.
    2. An input that only kernels read stands beside them.
    3. A module that is left with inputs alone, or that would be part of a cycle, is not drawn.
    """
    home: dict[str, Path] = {b.id: b.module if by in ("both", "module") else () for b in picture.boxes}
    members: dict[tuple[str, Path], list[Box]] = {}
    if by in ("both", "kernel"):
        kernel_of = within(picture)
        for b in picture.boxes:
            if b.id in kernel_of:
                members.setdefault((kernel_of[b.id], _layer(home[b.id], picture)), []).append(b)
    where = {key: common([home[b.id] for b in boxes]) for key, boxes in members.items()}
    root = Cluster("", "", "root")
    modules: dict[Path, Cluster] = {(): root}
    for (kernel, layer), boxes in members.items():
        name = picture.kernels.get(kernel, "")
        made = Cluster(" ".join(["kernel", kernel, *layer]), f"{kernel}  {name}" if name else kernel, "kernel", boxes)
        _module(modules, where[kernel, layer], picture).clusters.append(made)
    in_kernel = {b.id: where[key] for key, boxes in members.items() for b in boxes}
    readers: dict[str, list[str]] = {}
    for w in picture.wires:
        readers.setdefault(w.source, []).append(w.target)
    for b in picture.boxes:
        if b.id in in_kernel:
            continue
        users = readers.get(b.id, [])
        if b.op == "placeholder" and users and all(u in in_kernel for u in users):
            near = common([in_kernel[u] for u in users])
            b = replace(b, title=_longer(b, near)) if b.decision == "parameter" else b
            _module(modules, near, picture).boxes.append(b)
        else:
            _module(modules, home[b.id], picture).boxes.append(b)
    return _without_cycles(_without_chains(_without_hulls(root)), picture.wires)


def within(picture: Picture) -> dict[str, str]:
    """Box -> the kernel that it stands in: computed by it, or a view from one of its nodes to others."""
    out = {b.id: b.kernel for b in picture.boxes if b.kernel}
    sources: dict[str, list[str]] = {}
    readers: dict[str, list[str]] = {}
    for w in picture.wires:
        sources.setdefault(w.target, []).append(w.source)
        readers.setdefault(w.source, []).append(w.target)
    views = [b for b in picture.boxes if b.decision == "view" and not b.kernel]
    ahead = dict(out)
    for b in reversed(views):
        kernels = {ahead.get(r, "") for r in readers.get(b.id, ())}
        if len(kernels) == 1:
            ahead[b.id] = kernels.pop()
    for b in views:
        kernel = ahead.get(b.id, "")
        if kernel and all(out.get(s) == kernel for s in sources.get(b.id, ())):
            out[b.id] = kernel
    return out


def _layer(path: Path, picture: Picture) -> Path:
    """The innermost of the repeated layers that a module lies in."""
    return max((p for p in picture.layers if path[: len(p)] == p), key=len, default=())


def _longer(box: Box, near: Path) -> str:
    """The name of a parameter as seen from another module."""
    inside = common([box.module, near])
    return ".".join([*box.module[len(inside) :], box.title])


def _module(modules: dict[Path, Cluster], path: Path, picture: Picture) -> Cluster:
    if path not in modules:
        parent = _module(modules, path[:-1], picture)
        repeated = picture.layers.get(path)
        made = Cluster("module " + ".".join(path), repeated or path[-1], "layers" if repeated else "module")
        modules[path] = made
        parent.clusters.append(made)
    return modules[path]


def _without_hulls(cluster: Cluster) -> Cluster:
    """Modules that hold inputs alone give them to the module around."""
    kept = []
    for c in map(_without_hulls, cluster.clusters):
        if c.kind == "module" and not c.clusters and all(b.op == "placeholder" for b in c.boxes):
            cluster.boxes += [replace(b, title=f"{c.title}.{b.title}") for b in c.boxes]
        else:
            kept.append(c)
    cluster.clusters = kept
    return cluster


def _without_chains(cluster: Cluster) -> Cluster:
    """A module that holds nothing but one module is drawn as one box named ``outer.inner``."""
    cluster.clusters = [_without_chains(c) for c in cluster.clusters]
    if cluster.kind == "module" and not cluster.boxes and len(cluster.clusters) == 1:
        inner = cluster.clusters[0]
        if inner.kind != "kernel":
            inner.title = f"{cluster.title}.{inner.title}"
            return inner
    return cluster


def _without_cycles(cluster: Cluster, wires: Sequence[Wire]) -> Cluster:
    """Modules that read what they themselves have led to are taken apart, into the module around."""
    while True:
        at = _children(cluster)
        graph = nx.DiGraph()
        graph.add_edges_from((at[w.source], at[w.target]) for w in wires if w.source in at and w.target in at)
        rings = [ring for ring in nx.strongly_connected_components(graph) if len(ring) > 1]
        turning = [c for c in cluster.clusters if c.kind == "module" and any(c.id in ring for ring in rings)]
        if not turning:
            break
        for c in turning:
            cluster.clusters.remove(c)
            cluster.boxes += c.boxes
            for inner in c.clusters:
                if inner.kind != "kernel":
                    inner.title = f"{c.title}.{inner.title}"
                cluster.clusters.append(inner)
    cluster.clusters = [_without_cycles(c, wires) for c in cluster.clusters]
    return cluster


def _children(cluster: Cluster) -> Mapping[str, str]:
    """Box anywhere inside -> the child that it is or lies in."""
    at = {b.id: b.id for b in cluster.boxes}
    for c in cluster.clusters:
        at.update(dict.fromkeys(_boxes(c), c.id))
    return at


def _boxes(cluster: Cluster) -> list[str]:
    return [b.id for b in cluster.boxes] + [b for c in cluster.clusters for b in _boxes(c)]
