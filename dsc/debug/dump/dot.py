"""A picture as Graphviz text, and Graphviz's own layout of it where ``dot`` is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from dsc.debug.dump.clusters import By, Cluster, tree
from dsc.debug.dump.layout import BOX_HEIGHT, LABEL_HEIGHT, Frame, Layout, Line, Placed, Point, box_width, label
from dsc.debug.dump.picture import Box, Picture, Wire
from dsc.errors import DscError

FILL = {
    "aten": "#dfe3ea", "view": "#ffffff", "open": "#ffffff", "input": "#e2f0ff", "parameter": "#e6f6e4", "result": "#c9d2e0",
}  # fmt: skip
KERNELS = ("#ffe2c7", "#d3efe3", "#ddddf8", "#fbd9e8", "#e5f2c4", "#fdedb5", "#d0edf6", "#f3d9cf")
BORDER = {"save": "#e8890c", "recompute": "#8b3fd1", "offload": "#0a8f8f", "compress": "#2a9d6f"}
PER_INCH = 72.0
SECONDS = 60.0
"""After which ``dot`` is stopped: on thousands of nodes it may take hours."""


class NoGraphviz(DscError):
    """Graphviz cannot lay this graph out."""


def installed() -> bool:
    return shutil.which("dot") is not None


def text(picture: Picture, by: By = "both") -> str:
    """A digraph with clusters, which any tool that reads DOT can draw."""
    kernels = list(dict.fromkeys(b.kernel for b in picture.boxes if b.kernel))
    colours = {k: KERNELS[i % len(KERNELS)] for i, k in enumerate(kernels)}
    lines = [
        f"digraph {quoted(f'{picture.graph} after {picture.stage}')} {{",
        '  graph [fontname="DejaVu Sans Mono", fontsize=11, style=rounded, color="#9aa5b5", ranksep=0.4, nodesep=0.25];',
        '  node [fontname="DejaVu Sans Mono", fontsize=10, shape=box, style="filled,rounded"];',
        '  edge [fontname="DejaVu Sans Mono", fontsize=8, color="#7d8899", arrowsize=0.6];',
        *_cluster(tree(picture, by), colours, 1, iter(range(1 << 30))),
        *(f"  {_edge(w)}" for w in picture.wires),
        "}",
    ]
    return "\n".join(lines) + "\n"


def quoted(words: str) -> str:
    return '"' + words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _cluster(c: Cluster, colours: dict[str, str], depth: int, numbers: Iterator[int]) -> Iterator[str]:
    pad = "  " * depth
    if c.kind != "root":
        yield f"{pad}subgraph cluster_{next(numbers)} {{"
        yield f"{pad}  label={quoted(c.title)}; labeljust=l; id={quoted(c.id)};"
        if c.kind == "kernel":
            yield f'{pad}  style="rounded,dashed"; color="#b07a3c";'
    inner = pad if c.kind == "root" else pad + "  "
    for b in c.boxes:
        yield f"{inner}{_node(b, colours)}"
    for sub in c.clusters:
        yield from _cluster(sub, colours, depth if c.kind == "root" else depth + 1, numbers)
    if c.kind != "root":
        yield f"{pad}}}"


def _node(b: Box, colours: dict[str, str]) -> str:
    many = f" ×{b.count}" if b.count > 1 else ""
    words = [f"{b.title}{many}", *([b.id] if b.id != b.title else []), *([b.kernel] if b.kernel else [])]
    fill = colours.get(b.kernel, FILL.get(b.decision, "#ffffff"))
    border = f', color="{BORDER[b.keep]}", penwidth=2.5' if b.keep in BORDER else ""
    dashed = ', style="filled,rounded,dashed"' if b.decision == "view" else ""
    return f'{quoted(b.id)} [label={quoted(chr(10).join(words))}, fillcolor="{fill}", tooltip={quoted(b.text)}{border}{dashed}];'


def _edge(w: Wire) -> str:
    dotted = ", style=dotted" if w.inside else ""
    return f"{quoted(w.source)} -> {quoted(w.target)} [label={quoted(label(w.type, w.bytes))}{dotted}];"


def lay_out(picture: Picture, by: By = "both") -> Layout:
    """The places that ``dot`` gives to boxes of the same sizes as in our own layout.

    Raises:
        NoGraphviz: ``dot`` is not installed, fails, or takes more than a minute.
    """
    root = tree(picture, by)
    readers = {w.source for w in picture.wires}
    numbers: dict[str, Cluster] = {}
    lines = [
        "digraph g {",
        "ranksep=0.35; nodesep=0.2;",
        'node [shape=box, fixedsize=true, label=""];',
        'edge [label="", headport=n, tailport=s];',
    ]
    lines += _sized(root, readers, numbers)
    lines += [f"{quoted(w.source)} -> {quoted(w.target)};" for w in picture.wires]
    found = _run("\n".join([*lines, "}"]))
    left, bottom, right, top = map(float, found["bb"].split(","))
    boxes, frames, paths = [], [], {}
    by_id = {b.id: b for b in picture.boxes}
    names: list[str] = [o["name"] for o in found.get("objects", ())]
    for o in found.get("objects", ()):
        if "bb" in o and o["name"] in numbers:
            x, y, a, b = map(float, o["bb"].split(","))
            frames.append(Frame(numbers[o["name"]], x, top - b, a - x, b - y, 0))
        elif o["name"] in by_id:
            x, y = map(float, o["pos"].split(","))
            box = by_id[o["name"]]
            below = LABEL_HEIGHT if box.id in readers else 0
            width = box_width(box)
            boxes.append(Placed(box, x - width / 2, top - y - (BOX_HEIGHT + below) / 2, width, BOX_HEIGHT))
    for e in found.get("edges", ()):
        paths[names[e["tail"]], names[e["head"]]] = _points(e["pos"], top)
    drawn = [Line(w, tuple(paths[w.source, w.target])) for w in picture.wires]
    frames.sort(key=lambda f: -f.width * f.height)
    return Layout(picture, tuple(boxes), tuple(frames), tuple(drawn), right - left, top - bottom)


def _sized(c: Cluster, readers: set[str], numbers: dict[str, Cluster]) -> list[str]:
    out = []
    for b in c.boxes:
        labelled = b.id in readers
        wide = max(box_width(b), len(label(b.type, b.made)) * 6.02 if labelled else 0)
        high = BOX_HEIGHT + (LABEL_HEIGHT if labelled else 0)
        out.append(f"{quoted(b.id)} [width={wide / PER_INCH:.3f}, height={high / PER_INCH:.3f}];")
    for sub in c.clusters:
        name = f"cluster_{len(numbers)}"
        numbers[name] = sub
        out += [f"subgraph {name} {{", f"label={quoted(sub.title)}; fontsize=11;", *_sized(sub, readers, numbers), "}"]
    return out


def _run(dot: str) -> dict[str, Any]:
    program = shutil.which("dot")
    if program is None:
        raise NoGraphviz("Graphviz is not installed; install it, or leave --layout out.")
    try:
        done = subprocess.run(
            [program, "-Tjson"], input=dot, capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise NoGraphviz(f"Graphviz took more than {SECONDS:.0f} s on this graph; use --layout dsc.") from None
    except (OSError, subprocess.CalledProcessError) as why:
        raise NoGraphviz(f"Graphviz failed on this graph ({why}); use --layout dsc.") from why
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _points(spline: str, top: float) -> list[Point]:
    """Every third point of a B-spline, which are those that it goes through."""
    pairs = [tuple(map(float, p.split(","))) for p in re.findall(r"(?<!e,)(?<!s,)\S+", re.sub(r"[es],\S+", "", spline))]
    end = re.search(r"e,(\S+)", spline)
    through: Sequence[tuple[float, ...]] = pairs[::3]
    points = [(x, top - y) for x, y in through]
    if end is not None:
        x, y = map(float, end[1].split(","))
        points.append((x, top - y))
    return points
