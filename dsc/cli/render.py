"""Graph text and diffs in colour."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from torch.fx import Graph

    from dsc.debug.diff import Line

STYLES = {"gone": "red", "new": "green", "noted": "yellow", "hunk": "cyan", "same": ""}
NODE = re.compile(
    r"^(?P<name>[\w.]+)(?P<type>: [^=]*?)(?: = (?P<op>[\w.:<>]+)(?P<args>\(.*?\)))?(?P<notes>  \{[^{}]*\})?$"
)


def colored(line: str) -> Text:
    """One line of the canonical text: the name bold, the type dim, the operator blue, the notes magenta."""
    if line.startswith("#"):
        return Text(line, style="dim italic")
    m = NODE.match(line)
    if m is None:
        return Text(line, style="bold" if line.startswith("return") else "")
    parts: list[str | tuple[str, str]] = [(m["name"], "bold"), (m["type"], "dim cyan")]
    if m["op"]:
        parts += [" = ", (m["op"], "blue"), m["args"]]
    if m["notes"]:
        parts.append((m["notes"], "magenta"))
    return Text.assemble(*parts)


def diff_line(line: Line) -> Text:
    """One line of a diff, as a whole in the colour of its kind."""
    return Text(str(line), style=STYLES[line.kind])


def listing(graph: Graph, source: bool = False) -> list[str]:
    """The canonical text by line; with ``source`` a comment where the line of the user's program changes."""
    from dsc import text
    from dsc.debug import origin

    out: list[str] = []
    last = ""
    for node in graph.nodes:
        place = origin.of(node).text
        if source and place and place != last:
            out.append(f"# {place}")
            last = place
        out.append(text.line(node))
    return out
