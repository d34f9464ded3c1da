"""A picture into a file, by what the file's name ends in."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from dsc.debug.capture import Session
from dsc.debug.dump import dot, layout, picture, svg
from dsc.debug.dump.clusters import By
from dsc.debug.dump.collapse import collapse
from dsc.debug.dump.layout import Layout
from dsc.debug.dump.picture import Picture
from dsc.debug.stages import Picked
from dsc.errors import DscError

Engine = Literal["auto", "dsc", "graphviz"]
BY_GRAPHVIZ = 250
"""Boxes up to which Graphviz, where it is installed, lays out by default: it takes long for more."""
LARGEST_PNG = 16_000
"""Pixels of the longer side."""


class CannotDump(DscError):
    """A file that cannot be written."""


def lay_out(picture: Picture, by: By, engine: Engine) -> Layout:
    """By Graphviz where it is wanted and there, else by our own layout."""
    small = len(picture.boxes) <= BY_GRAPHVIZ
    if engine == "graphviz" or (engine == "auto" and small and dot.installed()):
        try:
            return dot.lay_out(picture, by)
        except dot.NoGraphviz:
            if engine == "graphviz":
                raise
    return layout.lay_out(picture, by)


NEEDS = {".png": ("resvg_py", "write an .svg instead"), ".onnx": ("onnx", "write .json or .dot instead")}
"""Kind of file -> the package that writes it, and what to do without."""


def check(kind: str) -> None:
    """Before a long capture: whether a kind of file can be written here.

    Raises:
        CannotDump: a package is missing.
    """
    package, instead = NEEDS.get(kind, ("json", ""))
    if importlib.util.find_spec(package) is None:
        raise CannotDump(f"{kind} files need {package}: pip install 'dsc-compiler[dumps]', or {instead}.")


def content(
    kind: str, session: Session, picked: Picked, title: str, expand: bool, by: By, engine: Engine
) -> str | bytes:
    """What a file of that kind holds.  JSON and ONNX hold every node."""
    region = session.regions[picked.region]
    if kind == ".onnx":
        from dsc.debug.dump import onnx

        return onnx.model_bytes(session, region, picked.stage)
    if kind == ".html":
        from dsc.debug.report import page

        return page.graph_alone(session, picked, title)
    whole = picture.of(session, region, picked.stage)
    if kind == ".json":
        return json_text(whole)
    shown = whole if expand else collapse(whole)
    if kind == ".dot":
        return dot.text(shown, by)
    placed = lay_out(shown, by, engine)
    drawn = svg.document(placed, title)
    return png_bytes(drawn, max(placed.width, placed.height)) if kind == ".png" else drawn


def png_bytes(drawn: str, longer: float) -> bytes:
    """An SVG as PNG, twice its size where that is not too large."""
    import resvg_py

    zoom = min(2.0, LARGEST_PNG / max(longer, 1.0))
    return bytes(resvg_py.svg_to_bytes(svg_string=drawn, zoom=zoom, font_family="DejaVu Sans Mono"))


def json_text(picture: Picture) -> str:
    """The picture as JSON.

    ``{"graph", "stage", "kernels": {group: kernel}, "nodes": [...], "edges": [...]}``.  A node has ``id``, ``op``,
    ``title``, ``type``, ``text`` (its line of canonical text), ``module`` (path), ``decision`` (kernel, aten, open, view,
    input, parameter, result), ``kernel`` (group), ``keep`` (save, recompute, ... or empty), ``result``, ``line``
    ({file, number, text} or null), ``flops``, ``bytes`` (moved by it alone), ``seconds`` (on the target, alone), ``made``
    (bytes of its results) and ``count`` (nodes that it stands for).  An edge has ``source``, ``target``, ``type``,
    ``bytes``, and ``inside`` if it stays in a kernel's registers.
    """
    value = {
        "graph": picture.graph,
        "stage": picture.stage,
        "kernels": dict(picture.kernels),
        "layers": {".".join(path): title for path, title in picture.layers.items()},
        "nodes": [asdict(b) for b in picture.boxes],
        "edges": [asdict(w) for w in picture.wires],
    }
    return json.dumps(value, indent=1) + "\n"


def write(path: Path, content: str | bytes) -> None:
    """Write a file; its folder is made.

    Raises:
        CannotDump: the place cannot be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as why:
        raise CannotDump(f"{path} cannot be written: {why.strerror or why}; give another -o FILE.") from why
