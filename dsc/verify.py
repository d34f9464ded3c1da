"""What a legal graph is.  The pipeline checks it after every pass, so every check is cheap."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from dsc import text
from dsc.errors import InvalidGraph
from dsc.notes import KEY, Keep, Notes
from dsc.ops import written_places
from dsc.runtime.state import is_attribute
from dsc.torch_shim import OpOverload

KEEPS = (None, *get_args(Keep))


def verify(gm: GraphModule, where: str) -> None:
    """Raise InvalidGraph, at the first node that breaks one of these.

    1. Every node stands after its arguments, and the links of the graph are sound.
    2. Every input and every computed tensor has its fake value in ``meta["val"]``.
    3. Notes are Notes, and each field has a legal value.
    """
    seen: set[Node] = set()
    names: set[str] = set()
    plain = True
    for node in gm.graph.nodes:
        if not seen.issuperset(node.all_input_nodes):
            late = next(a for a in node.all_input_nodes if a not in seen)
            raise InvalidGraph(where, node.name, f"it uses {late.name!r} before that is computed")
        seen.add(node)
        names.add(node.name)
        plain = plain and node.graph is gm.graph and _is_plain(node)
        if problem := _value_problem(node) or _notes_problem(node):
            raise InvalidGraph(where, node.name, problem)
    if plain and len(names) == len(seen):
        return  # all that ``lint`` would look for, in half the time
    try:
        gm.graph.lint()
    except Exception as e:
        raise InvalidGraph(where, "", str(e).strip().rstrip(".")) from e


def _is_plain(node: Node) -> bool:
    """Nothing that ``lint`` has to look up in the module, and a target as it wants it."""
    if node.op == "call_function":
        return callable(node.target)
    return node.op in ("placeholder", "output") and isinstance(node.target, str)


def _value_problem(node: Node) -> str | None:
    if node.op not in ("placeholder", "call_function"):
        return None
    if "val" not in node.meta:
        return "it has no meta['val']; give a new node its fake value" if _gives_value(node) else None
    if isinstance(node.target, OpOverload) and _one_tensor(node.target):
        val = node.meta["val"]
        if val is not None and not isinstance(val, torch.Tensor):
            return f"its meta['val'] is {type(val).__name__}, but {node.target} gives a tensor"
    return None


def _gives_value(node: Node) -> bool:
    """False for an op that gives no tensor, an input that nothing reads, and higher-order ops: torch makes some without."""
    if node.op == "placeholder":
        return bool(node.users)
    return isinstance(node.target, OpOverload) and _any_tensor(node.target)


def _notes_problem(node: Node) -> str | None:
    n = node.meta.get(KEY)
    if n is None:
        return None
    if not isinstance(n, Notes):
        return f"its meta[{KEY!r}] is {type(n).__name__}, not Notes"
    if n.keep not in KEEPS:
        return f"its note keep={n.keep!r} is not one of {', '.join(KEEPS[1:])}"
    if n.stage is not None and (type(n.stage) is not int or n.stage < 0):
        return f"its note stage={n.stage!r} is not a number from 0 on"
    for name in ("precision", "sparsity", "group"):
        value = getattr(n, name)
        if value is not None and (not isinstance(value, str) or not value):
            return f"its note {name}={value!r} is not a name"
    return None


# What a pass must keep.


@dataclass(frozen=True, slots=True)
class Write:
    """A write to an input or attribute, and whether that tensor, or a view of it, is read later."""

    root: str
    op: str
    read_after: bool


@dataclass(frozen=True, slots=True)
class Promises:
    """What callers of a graph rely on: its outputs, and what it writes into its inputs."""

    outputs: tuple[object, ...]
    """The fake value of each; of constants, and where none is known, text."""
    writes: tuple[Write, ...]


def promises(gm: GraphModule) -> Promises:
    return Promises(_outputs(gm), mutation_order(gm))


def kept(before: Promises, after: Promises, where: str) -> None:
    """Raise InvalidGraph if a pass broke a promise.

    1. There are as many outputs, each with the dtype, shape, strides and device that it had.
    2. Each input gets the same writes, in the same order.  (Writes to different inputs may change places.)
    3. A written input is not read after the write, unless it was before.
    4. State is a pass's own: it may begin to write there, and read it anywhere; writes that were there stay.
    """
    if len(before.outputs) != len(after.outputs):
        raise InvalidGraph(where, "output", f"it had {len(before.outputs)} outputs and has {len(after.outputs)}")
    for i, (old, new) in enumerate(zip(before.outputs, after.outputs)):
        if old is not new and (was := _type(old)) != (now := _type(new)):
            raise InvalidGraph(where, "output", f"output {i} was {was} and is {now}")
    had = {w.root for w in before.writes}
    writes = [w for w in after.writes if w.root in had or not _is_state(w.root)]
    if [(w.root, w.op) for w in before.writes] != [(w.root, w.op) for w in writes]:
        raise InvalidGraph(where, "", f"its writes to inputs were {_spell(before)} and are {_spell(after)}")
    for was_write, now_write in zip(before.writes, writes):
        if not _is_state(now_write.root) and now_write.read_after and not was_write.read_after:
            raise InvalidGraph(
                where, "", f"{now_write.root} is read after {now_write.op} writes it, and was not before"
            )


def _is_state(root: str) -> bool:
    return is_attribute(root.removeprefix("self."))


def output_signature(gm: GraphModule) -> tuple[str, ...]:
    """The type of every output, in order."""
    return tuple(map(_type, _outputs(gm)))


def _outputs(gm: GraphModule) -> tuple[object, ...]:
    results = _flat(gm.graph.output_node().args[0])
    return tuple(r.meta.get("val", text.UNKNOWN) if isinstance(r, Node) else text.arg(r) for r in results)


def _type(output: object) -> str:
    return output if isinstance(output, str) else text.type_text(output)


def mutation_order(gm: GraphModule) -> tuple[Write, ...]:
    """The writes to inputs and attributes, by input, and in the order of the graph for each."""
    nodes = list(gm.graph.nodes)
    if not any(n.op == "call_function" and written_places(n.target) for n in nodes):
        return ()
    roots = _roots(nodes)
    last_use: dict[str, int] = {}
    writes: list[tuple[int, str, str]] = []
    for i, node in enumerate(nodes):
        written = (
            {id(a) for a in _arguments(node, written_places(node.target))} if node.op == "call_function" else set()
        )
        for a in node.all_input_nodes:
            root = roots.get(a)
            if root is None:
                continue
            if id(a) in written:
                writes.append((i, root, str(node.target)))
            elif not _is_view(node):
                last_use[root] = i
    found = [(root, i, Write(root, op, last_use.get(root, -1) > i)) for i, root, op in writes]
    return tuple(w for _, _, w in sorted(found, key=lambda f: (f[0], f[1])))


def _roots(nodes: list[Node]) -> dict[Node, str]:
    """Node -> the input or attribute whose memory it is, through views and results of writes."""
    roots: dict[Node, str] = {}
    inputs = 0
    for node in nodes:
        if node.op == "placeholder":
            roots[node] = f"input {inputs}"
            inputs += 1
        elif node.op == "get_attr":
            roots[node] = f"self.{node.target}"
        elif node.op == "call_function":
            bases = _arguments(node, _aliased(node.target)) or _item_of(node)
            base = next((roots[b] for b in bases if b in roots), None)
            if base is not None:
                roots[node] = base
    return roots


def _is_view(node: Node) -> bool:
    """A view touches no values: what reads the view does."""
    return node.op == "call_function" and bool(
        (_aliased(node.target) and not written_places(node.target)) or _item_of(node)
    )


def _item_of(node: Node) -> list[Node]:
    return (
        [a for a in node.args[:1] if isinstance(a, Node)] if getattr(node.target, "__name__", "") == "getitem" else []
    )


def _arguments(node: Node, names: tuple[tuple[int, str], ...]) -> list[Node]:
    """The nodes that ``node`` has for the named parameters; each is also given by its place."""
    given = (node.kwargs.get(name, node.args[i] if i < len(node.args) else None) for i, name in names)
    return [n for a in given for n in _flat(a) if isinstance(n, Node)]


def _flat(a: Argument) -> Iterator[Argument]:
    if isinstance(a, (list, tuple)):
        for x in a:
            yield from _flat(x)
    else:
        yield a


def _spell(p: Promises) -> str:
    return ", ".join(f"{w.op} to {w.root}" for w in p.writes) or "none"


# What the schema of an op says.  Cached, since a graph has many nodes and few ops.


@functools.cache
def _one_tensor(op: OpOverload) -> bool:
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


@functools.cache
def _any_tensor(op: OpOverload) -> bool:
    return any("Tensor" in str(r.type) for r in op._schema.returns)


@functools.cache
def _aliased(op: object) -> tuple[tuple[int, str], ...]:
    """Parameters whose memory the op gives back."""
    if not isinstance(op, OpOverload):
        return ()
    given = {name for r in op._schema.returns if r.alias_info for name in r.alias_info.before_set}
    given.add("*")  # what is given back in a list, as by split
    return tuple(
        (i, a.name)
        for i, a in enumerate(op._schema.arguments)
        if a.alias_info and (a.alias_info.before_set | a.alias_info.after_set) & given
    )
