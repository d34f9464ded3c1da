"""The page: templates, styles, scripts and data in one file, which may fetch nothing."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from dsc.debug.capture import Session
from dsc.debug.dump import svg
from dsc.debug.report import data
from dsc.debug.stages import Picked

SCRIPTS = ("kit", "passes", "graph", "memory", "roofline", "kernels", "source", "main")
"""In the order in which they are read; each defines functions, and ``main`` starts."""


def whole(session: Session) -> str:
    """The report of a compilation."""
    return fill(f"{session.model.name} for {session.target.name}", data.of_session(session))


def graph_alone(session: Session, picked: Picked, title: str) -> str:
    """One graph to look around in."""
    return fill(title, data.of_stage(session, picked.region, picked.stage))


def fill(title: str, content: dict[str, Any]) -> str:
    """The template with everything put in.  The data is JSON with no ``<``, so that no name in it can end the script."""
    scripts = "\n".join(f"// --- {name}.js\n{static(f'{name}.js')}" for name in SCRIPTS)
    parts = {
        "title": escape(title),
        "style": static("page.css") + svg.style(),
        "arrow": svg.ARROW,
        "data": safe(content),
        "script": f'"use strict";\n(() => {{\n{scripts}}})();',
    }
    page = static("page.html")
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, _, rest in (p.partition("}}") for p in pieces[1:]))


def static(name: str) -> str:
    return resources.files("dsc.debug.report").joinpath("static", name).read_text(encoding="utf-8")


def safe(value: object) -> str:
    """JSON that may stand inside of a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
