"""What a pass changed in the text of a graph, line by line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph

from dsc import text

Kind = Literal["same", "gone", "new", "noted", "hunk"]
MARK: dict[Kind, str] = {"same": " ", "gone": "-", "new": "+", "noted": "~", "hunk": ""}
NOTES = "  {"
"""What separates a line of the canonical text from the notes that passes left on the node."""


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"{MARK[self.kind]}{self.text}"


def graphs(before: Graph, after: Graph, context: int = 3) -> list[Line]:
    """The difference of two graphs; empty if they read the same."""
    return lines(text.show(before).splitlines(), text.show(after).splitlines(), context)


def lines(before: Sequence[str], after: Sequence[str], context: int = 3) -> list[Line]:
    """A unified diff, in which a node that merely got other notes is one line: ``~relu: f32[8] = relu(x)  {group=k0}``.

    Hunks start with ``@@ -first,count +first,count @@``, as those of other tools; a noted line is on both sides.
    """
    every = list(_every(before, after))
    changed = [k for k, line in enumerate(every) if line.kind != "same"]
    wanted = sorted({k for c in changed for k in range(max(0, c - context), min(len(every), c + context + 1))})
    out: list[Line] = []
    for first, end in _runs(wanted):
        sides = [
            _range(sum(x.kind != other for x in every[:first]), sum(x.kind != other for x in every[first:end]))
            for other in ("new", "gone")
        ]
        out += [Line("hunk", f"@@ -{sides[0]} +{sides[1]} @@"), *every[first:end]]
    return out


def _every(before: Sequence[str], after: Sequence[str]) -> Iterator[Line]:
    old, new = ([line.split(NOTES)[0] for line in side] for side in (before, after))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from (Line("same" if x == y else "noted", y) for x, y in zip(before[a:b], after[c:d]))
        else:
            yield from (Line("gone", x) for x in before[a:b])
            yield from (Line("new", y) for y in after[c:d])


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sorted numbers -> half-open runs."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], numbers[i - 1] + 1
            start = i


def _range(start: int, count: int) -> str:
    """Lines count from 1; an empty side names the line before it."""
    return f"{start + 1 if count else start},{count}"
