"""A wrong node in the words of the user: where it comes from, and the change around it."""

from __future__ import annotations

import difflib

from torch.fx import Node

from dsc.debug import origin
from dsc.debug.bisect.align import Alignment, plain

CONTEXT = 2
"""Unchanged lines around a change."""


def origin_of(node: Node, counterpart: Node | None) -> tuple[str, str]:
    """The user's line and module behind the node, or else behind what stood for it."""
    found = [origin.of(n) for n in (node, counterpart) if n is not None]
    line = next((f"{o.frame.place}: {o.frame.code}" for o in found if o.frame is not None), "")
    return line, next((o.module for o in found if o.module), "")


def diff_around(alignment: Alignment, about: set[str]) -> str:
    """The change of the whole graph, limited to the places where the nodes ``about`` stand."""
    before, after = ([plain(n) for n in gm.graph.nodes] for gm in (alignment.before, alignment.after))
    lines = list(difflib.unified_diff(before, after, n=CONTEXT, lineterm=""))[2:]
    hunks: list[list[str]] = []
    for line in lines:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line)
    wanted = [h for h in hunks if any(x[0] in "+-" and x[1:].split(":")[0] in about for x in h)]
    if not wanted:  # nothing changed there but what it reads
        names = [n.name for n in alignment.after.graph.nodes]
        at = min((i for i, name in enumerate(names) if name in about), default=0)
        wanted = [[f" {x}" for x in after[max(at - CONTEXT, 0) : at + CONTEXT + 1]]]
    return "  ...\n".join("".join(f"{x}\n" for x in h) for h in wanted)
