"""A layout as SVG: boxes coloured by what was decided about them, frames for modules and kernels, labelled wires."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from dsc.debug.dump.layout import BOX_HEIGHT, Frame, Layout, Line, Placed, label
from dsc.debug.dump.layout import Point as Point

PALETTE = 8
"""Colours of kernels, one after the other."""
HEAVY = 1 << 20
"""Bytes from which on a wire is drawn thick."""
MARK = '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
ARROW = f'<defs>{MARK}<path d="M0,0.5 L8,4 L0,7.5 z" fill="#7d8899"/></marker></defs>'
MARKS = (
    ("save", "saved for the backward"),
    ("recompute", "computed again"),
    ("offload", "offloaded"),
    ("compress", "compressed"),
)
"""What may be decided of a value, and its words in the legend."""
KEY = (
    ("kernel c0", "in a kernel, one colour each"),
    ("aten", "left to ATen"),
    ("view", "view: moves nothing"),
    ("open", "not decided yet"),
    ("input", "input or saved tensor"),
    ("parameter", "parameter"),
    ("result", "result"),
)
LEGEND_WIDTH, LEGEND_HEIGHT = 900.0, 78.0


def style() -> str:
    """The style sheet of a drawn graph."""
    return resources.files("dsc.debug.dump").joinpath("picture.css").read_text(encoding="utf-8")


def document(layout: Layout, title: str) -> str:
    """A file of its own, with a legend above the graph."""
    width, height = max(layout.width, LEGEND_WIDTH), layout.height + LEGEND_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<style>{style()}</style>\n{ARROW}\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{legend(title)}\n'
        f'<g transform="translate({(width - layout.width) / 2:.0f},{LEGEND_HEIGHT:.0f})">\n{body(layout)}\n</g>\n</svg>\n'
    )


def body(layout: Layout) -> str:
    """The graph alone, for a place that has the style sheet and the arrow."""
    colours = {k: i % PALETTE for i, k in enumerate(dict.fromkeys(b.box.kernel for b in layout.boxes if b.box.kernel))}
    saved = {b.box.id for b in layout.boxes if b.box.keep == "save"}
    labelled = {w.wire.source for w in layout.lines}
    parts = [
        *map(_frame, layout.frames),
        *(_wire(line, line.wire.source in saved) for line in layout.lines),
        *(_box(p, colours, p.box.id in labelled) for p in layout.boxes),
    ]
    return "\n".join(parts)


def legend(title: str) -> str:
    """What the colours mean, below the title."""
    parts = [f'<g class="legend"><text class="heading" x="14" y="22">{escape(title)}</text>']
    x = 14.0
    for kind, words in KEY:
        parts.append(f'<g class="box {kind}"><rect x="{x:.0f}" y="33" width="14" height="11" rx="2"/></g>')
        parts.append(f'<text x="{x + 19:.0f}" y="42">{words}</text>')
        x += 32 + len(words) * 6.02
    x = 14.0
    for kind, words in MARKS:
        parts.append(f'<g class="box"><rect class="mark {kind}" x="{x + 4:.0f}" y="52" width="5" height="12"/></g>')
        parts.append(f'<text x="{x + 19:.0f}" y="62">{words}</text>')
        x += 32 + len(words) * 6.02
    parts.append(
        f'<path class="wire inside" d="M{x:.0f},58h24"/><text x="{x + 31:.0f}" y="62">stays in registers</text>'
    )
    parts.append("</g>")
    return "".join(parts)


def _frame(f: Frame) -> str:
    kind = {"kernel": "frame kernel-frame", "layers": "frame layers"}.get(f.cluster.kind, "frame")
    return (
        f'<g class="{kind}" data-frame="{escape(f.cluster.id)}">'
        f'<rect x="{f.x:.0f}" y="{f.y:.0f}" width="{f.width:.0f}" height="{f.height:.0f}" rx="8"/>'
        f'<text x="{f.x + 9:.0f}" y="{f.y + 15:.0f}">{escape(f.cluster.title)}</text></g>'
    )


def _wire(line: Line, saved: bool) -> str:
    w = line.wire
    kinds = ["wire"]
    kinds += ["heavy"] if w.bytes >= HEAVY else []
    kinds += ["inside"] if w.inside else ["saved"] if saved else []
    ends = f'data-a="{escape(w.source)}" data-b="{escape(w.target)}"'
    return f'<path class="{" ".join(kinds)}" {ends} d="{"".join(curve(line.points))}"/>'


def curve(points: Sequence[Point]) -> Iterator[str]:
    """Vertical where it touches a point; upward pieces swing around."""
    x, y = points[0]
    yield f"M{x:.0f},{y:.0f}"
    for a, b in points[1:]:
        if abs(a - x) < 1:
            yield f"L{a:.0f},{b:.0f}"
        elif b >= y:
            middle = (y + b) / 2
            yield f"C{x:.0f},{middle:.0f} {a:.0f},{middle:.0f} {a:.0f},{b:.0f}"
        else:
            yield f"C{x:.0f},{y + 40:.0f} {a:.0f},{b - 40:.0f} {a:.0f},{b:.0f}"
        x, y = a, b


def _box(p: Placed, colours: dict[str, int], labelled: bool) -> str:
    b = p.box
    kind = f"kernel c{colours[b.kernel]}" if b.kernel in colours else b.decision
    many = f" ×{b.count}" if b.count > 1 else ""
    parts = [
        f'<g class="box {kind}" data-n="{escape(b.id)}" transform="translate({p.x:.0f},{p.y:.0f})">',
        f"<title>{escape(b.text)}</title>",
        f'<rect width="{p.width:.0f}" height="{BOX_HEIGHT:.0f}" rx="5"/>',
    ]
    if b.keep:
        parts.append(f'<rect class="mark {b.keep}" x="3" y="5" width="4" height="{BOX_HEIGHT - 10:.0f}" rx="2"/>')
    parts.append(f'<text class="title" x="11" y="15">{escape(b.title + many)}</text>')
    if b.title != b.id:
        parts.append(f'<text class="name" x="11" y="29">{escape(b.id)}</text>')
    if b.kernel:
        parts.append(f'<text class="badge" x="{p.width - 7:.0f}" y="15">{escape(b.kernel)}</text>')
    if labelled:
        words = escape(label(b.type, b.made))
        parts.append(f'<text class="label" x="{p.width / 2:.0f}" y="{BOX_HEIGHT + 11:.0f}">{words}</text>')
    return "".join([*parts, "</g>"])
