"""Words of a program's Python: names of values, devices and arguments; which nodes a line stands for."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from dsc import domain, ops
from dsc.runtime.run import WORDS
from dsc.torch_shim import optimization_hint

TAKEN = frozenset({*WORDS, "take", "give", "arena", "args", "call"})
"""Names that mean something else in every program: what it may mention, and what ``dsc.emit`` writes."""

_TAKEN = re.compile(r"(run|replay|const)_\d+_*|op_\w+|(s|u|zf|zuf)\d+")
"""What a program numbers or names after something: calls of kernels, replays, constants, operators, sizes."""


def names_of(nodes: Iterable[Node]) -> dict[Node, str]:
    """A variable for each node: its own name, unless a program means something else by it.

    Operators may have any name: ``aten.empty_strided``, ``aten.take``, and whatever users give to theirs.
    """
    listed = list(nodes)
    used = {n.name for n in listed}
    out = {}
    for n in listed:
        name, size = n.name, isinstance(n.meta.get("val"), torch.SymInt)
        while keyword.iskeyword(name) or name in TAKEN or (not size and _TAKEN.fullmatch(name)):
            name = f"{name}_of"
            while name in used:
                name += "_"
        used.add(name)
        out[n] = name
    return out


def device(d: torch.device) -> str:
    return f"device('{d}')"


def word(a: object, names: dict[Node, str], externals: dict[str, Any]) -> str:
    """An argument as source; what has no literal gets a name among ``externals``."""
    match a:
        case Node():
            return names[a]
        case None | bool() | int() | str():
            return repr(a)
        case float():
            return repr(a) if math.isfinite(a) else f"float('{a}')"
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(a)
        case torch.device():
            return device(a)
        case list() | tuple():
            inner = ", ".join(word(x, names, externals) for x in a)
            if isinstance(a, list) or type(a) is not tuple:
                return f"[{inner}]"
            return f"({inner},)" if len(a) == 1 else f"({inner})"
        case slice():
            parts = (word(x, names, externals) for x in (a.start, a.stop, a.step))
            return f"slice({', '.join(parts)})"
        case _:
            name = f"const_{len(externals)}"
            externals[name] = a
            return name


def closure(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """``nodes`` with the views between them, in the order to run them, and the nodes outside that they read."""
    inside, order, inputs = set(nodes), [], []
    seen: set[Node] = set()

    def visit(n: Node) -> None:
        if n in seen:
            return
        seen.add(n)
        if not (n in inside or ops.is_alias(n)):
            inputs.append(n)
            return
        for a in n.all_input_nodes:
            visit(a)
        order.append(n)

    for n in nodes:
        visit(n)
    return order, inputs


def symbols(t: torch.Tensor) -> set[str]:
    """Size symbols that the tensor's layout depends on; those that only show while the program runs have no slot."""
    return named(map(domain.extent, (*t.shape, *t.stride())))


def named(extents: Iterable[domain.Extent]) -> set[str]:
    return {s.name for e in extents if not isinstance(e, int) for s in e.free_symbols}


def nbytes(n: Node) -> int:
    """Bytes of a tensor in memory: broadcast dimensions count once."""
    t = n.meta.get("val")
    if not isinstance(t, torch.Tensor):
        return 0
    stored = [optimization_hint(s) for s, step in zip(t.shape, t.stride()) if not (isinstance(step, int) and step == 0)]
    return math.prod(stored) * t.element_size()
