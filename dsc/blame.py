"""Which node an exception is about, and which line of the user's program a node comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from torch.fx import GraphModule, Node

from dsc.errors import InvalidGraph

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str
    code: str

    @property
    def place(self) -> str:
        """``models/gpt.py:43``, from the folder that the user is in where the file lies below it."""
        near = os.path.relpath(self.file)
        return f"{self.file if near.startswith('..') else near}:{self.line}"


def stack_frames(trace: str) -> tuple[Frame, ...]:
    """The frames of a stack trace as Python prints it; each with the first line of its code."""
    out: list[Frame] = []
    lines = trace.splitlines()
    for i, line in enumerate(lines):
        if (m := FRAME.search(line)) is not None:
            code = lines[i + 1].strip() if i + 1 < len(lines) and not FRAME.search(lines[i + 1]) else ""
            out.append(Frame(m["file"], int(m["line"]), m["function"].strip(), code))
    return tuple(out)


def node_of(error: BaseException, gm: GraphModule) -> Node | None:
    """The node that ``error`` names; else the one at which the innermost function that has a node was looking.

    Of several local variables that hold nodes, ``node`` and ``n`` go first, then the one bound last.
    """
    if isinstance(error, InvalidGraph):
        return next((n for n in gm.graph.nodes if n.name == error.node), None)
    found = None
    for names in frames(error.__traceback__):
        held = {name: value for name, value in names.items() if isinstance(value, Node)}
        if held:
            found = held.get("node") or held.get("n") or list(held.values())[-1]
    return found


def frames(trace: TracebackType | None) -> list[dict[str, object]]:
    """The local variables of each frame, outermost first, without those of the pass manager itself."""
    out = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") != "dsc.manager":
            out.append(dict(trace.tb_frame.f_locals))
        trace = trace.tb_next
    return out


def first_line_of(gm: GraphModule) -> str:
    """``forward (model.py:12)``: the function of a Dynamo graph, and its first line there; empty where none is known."""
    for node in gm.graph.nodes:
        for frame in stack_frames(node.meta.get("stack_trace") or ""):
            return f"{frame.function} ({Path(frame.file).name}:{frame.line})"
    return ""


def line_of(node: Node) -> str:
    """``model.py:12, in forward: y = x @ w``: the innermost line that is not torch's; empty where none is known."""
    found = [f for f in stack_frames(node.meta.get("stack_trace") or "") if "/torch/" not in f.file]
    if not found:
        return ""
    frame = found[-1]
    code = f": {frame.code}" if frame.code else ""
    return f"{Path(frame.file).name}:{frame.line}, in {frame.function}{code}"
