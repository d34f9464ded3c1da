"""Saved values in fewer bits between forward and backward: the casts, put into both graphs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dsc import cost, liveness, narrow, ops
from dsc.notes import set_keep
from dsc.passes.memory_offload import AWAY, may_leave
from dsc.passes.solve import compress
from dsc.passes.solve.compress import Item
from dsc.steps import Step, last_uses, steps, storage_of
from dsc.target import Target

aten = torch.ops.aten
SHORT = "dsc_short"
"""Key of ``node.meta``: the format planned for a saved value, until the graphs are split."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST = 1 / 4000
"""Share of the peak below which a value is not worth a cast."""
FEW = 4 * narrow.SHARED
"""Elements below which it is not either."""


def short_bytes(n: Node, format: str) -> int:
    """Bytes of a value in a format, with its scales."""
    t = ops.tensor(n)
    nbytes = t.numel() * narrow.element_bytes(format)
    if format in narrow.EIGHT:
        dims = narrow.shared_dims(t.shape)
        nbytes += t.numel() // max(math.prod(t.shape[dims[0] :]), 1) * t.element_size()
    return nbytes


def may_shrink(n: Node, format: str) -> bool:
    """Whether a value is of floats wider than the format, not small, with known sizes and no holes."""
    t = ops.value(n)
    if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or not may_leave(n):
        return False
    return t.element_size() > narrow.element_bytes(format) and t.numel() >= FEW


# --- the graphs --------------------------------------------------------------------------------------------------------


def install(
    forward: GraphModule, backward: GraphModule, formats: Mapping[str, str], results: int, saved: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, str]]:
    """Put the casts into both graphs; the new ``saved``, and name of a value -> name of its short form.

    In the forward the short form, and the scales behind it, are handed over in place of the value; in the backward every
    reader casts it back, where it reads it.  ``results``: how many of the forward's results are not saved values.
    """
    behind = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    output = forward.graph.output_node()
    handed: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    names: dict[int, list[str]] = {}
    for name, place in saved.items():
        names.setdefault(place, []).append(name)
    new: list[Any] = handed[:results]
    places = {name: at for at in range(results) for name in names.get(at, ())}
    short: dict[str, str] = {}
    for place, x in enumerate(handed[results:], results):
        old = behind.get(x.name) if isinstance(x, Node) and x.name in formats else None
        if old is None:
            places |= dict.fromkeys(names.get(place, ()), len(new))
            new.append(x)
            continue
        pieces = _shorten(forward, x, formats[x.name])
        short[x.name] = pieces[0].name
        for n in pieces:
            places[n.name] = len(new)
            new.append(n)
        _lengthen(backward, old, pieces, formats[x.name])
    output.args = (tuple(new),)
    return places, short


def install_noted(forward: GraphModule, backward: GraphModule, results: int) -> None:
    """``install`` for what the plan left on the nodes of the forward."""
    noted = {n.name: n for n in forward.graph.nodes if SHORT in n.meta}
    if not noted:
        return
    formats = {name: n.meta.pop(SHORT) for name, n in noted.items()}
    _, short = install(forward, backward, formats, results, {})
    ahead = {n.name: n for n in forward.graph.nodes}
    for name, new in short.items():
        if (away := noted[name].meta.pop(AWAY, None)) is not None:  # what moves is the short form
            ahead[new].meta[AWAY] = (replace(away[0], name=new), away[1])
            set_keep(ahead[new], "offload")
    forward.recompile()
    backward.recompile()


def leave_notes(node: Node, format: str) -> None:
    """Mark a node of the forward, for ``install_noted``."""
    node.meta[SHORT] = format
    set_keep(node, "compress")


def _shorten(gm: GraphModule, x: Node, format: str) -> list[Node]:
    """The short form of a value, right behind it, and its scales if it has any."""
    t = ops.tensor(x)
    with gm.graph.inserting_after(x):
        if format == "bf16":
            return [_call(gm, f"{x.name}_bf16", aten._to_copy.default, (x,), {"dtype": torch.bfloat16}, "is_forward")]
        size = _call(gm, f"{x.name}_size", aten.abs.default, (x,), {}, "is_forward")
    with gm.graph.inserting_after(size):
        dims = list(narrow.shared_dims(t.shape))
        amax = _call(gm, f"{x.name}_amax", aten.amax.default, (size, dims, True), {}, "is_forward")
    with gm.graph.inserting_after(amax):
        bits = torch.ops.dsc.narrow8.default
        return [_call(gm, f"{x.name}_{format}", bits, (x, amax, format), {}, "is_forward"), amax]


def _lengthen(gm: GraphModule, old: Node, pieces: Sequence[Node], format: str) -> None:
    """Inputs for the pieces in place of the value's, and a cast back for each reader."""
    graph, dtype = gm.graph, ops.tensor(old).dtype
    inputs = []
    with graph.inserting_before(old):
        for n in pieces:
            inputs.append(graph.placeholder(n.name))
            inputs[-1].meta = {"val": n.meta["val"]}
    for chain in _reads(old):
        at = chain[-1]
        with graph.inserting_before(at):
            if format == "bf16":
                y = _call(gm, f"{old.name}_wide", aten._to_copy.default, (inputs[0],), {"dtype": dtype}, "is_backward")
            else:
                operands = (*inputs, format, dtype)
                y = _call(gm, f"{old.name}_wide", torch.ops.dsc.widen8.default, operands, {}, "is_backward")
        chain[0].replace_input_with(old, y)
        for view in chain[:-1]:
            at.prepend(view)  # made where it is read
    graph.erase_node(old)


def _reads(n: Node) -> Iterator[list[Node]]:
    """For each user the views through which it reads, and at their end the first reader behind them."""
    order = {m: i for i, m in enumerate(n.graph.nodes)}
    for user in list(n.users):
        chain = [user]
        while ops.is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1 and chain[-1].users:
            several = len(chain[-1].users) > 1
            chain.append(min(chain[-1].users, key=order.__getitem__))
            if several:
                break
        yield chain


def _call(gm: GraphModule, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tag: str) -> Node:
    node = gm.graph.create_node("call_function", target, args, kwargs, name=name)
    values = [ops.tensor(a) if isinstance(a, Node) else a for a in args]
    with torch.no_grad():
        node.meta = {"val": target(*values, **kwargs), "partitioner_tag": tag}
    return node


# --- what to compress --------------------------------------------------------------------------------------------------


def plan(
    forward: GraphModule,
    backward: GraphModule,
    saved: Mapping[str, int],
    results: int,
    budget: int,
    target: Target,
    format: str,
    pinned: Collection[str],
) -> tuple[str, ...] | None:
    """Names of the values to compress so that a fused, split step stays within ``budget`` bytes; None if all do not do.

    ``pinned``: values that the user wants saved as they are.
    """
    first, second = steps(forward), steps(backward)
    profile = liveness.profile_step(forward, backward, saved)
    found = items(forward, first, second, saved, results, profile.peak, target, format)
    chosen = compress.choose([n for _, n in profile.timeline], [i for i in found if i.name not in pinned], budget)
    return None if chosen is None else tuple(sorted(i.name for i in chosen))


def items(
    forward: GraphModule,
    first: Sequence[Step],
    second: Sequence[Step],
    saved: Mapping[str, int],
    results: int,
    peak: int,
    target: Target,
    format: str,
) -> list[Item]:
    """Saved values that may be compressed: made by the forward, not returned by it, see ``may_shrink``."""
    out: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    held = {storage_of(n) for n in out[:results] if isinstance(n, Node)}
    born = {n: i for i, s in enumerate(first) for n in s.nodes}
    last = last_uses(first)
    readers: dict[str, list[int]] = {}
    for i, s in enumerate(second):
        if s.group is None and ops.is_view(s.node):
            continue
        for name in dict.fromkeys(storage_of(a).name for n in s.nodes for a in n.all_input_nodes):
            readers.setdefault(name, []).append(i)
    ahead: dict[Node, list[int]] = {}
    for i, s in enumerate(first):
        for a in dict.fromkeys(storage_of(a) for n in s.nodes for a in n.all_input_nodes):
            ahead.setdefault(a, []).append(i)
    found = []
    for name, place in saved.items():
        n = out[place]
        if not isinstance(n, Node) or storage_of(n) is not n or n in held or n not in born or name not in readers:
            continue
        if not may_shrink(n, format) or liveness.nbytes(n) < peak * SMALLEST:
            continue
        uses = tuple(len(first) + i for i in readers[name])
        whole = tuple(len(first) + i for i in readers[name] if second[i].group is None)
        nbytes, small = liveness.nbytes(n), short_bytes(n, format)
        elsewhere = [i for i in ahead.get(n, ()) if i != born[n]]
        moved = _forward_bytes(first, born[n], elsewhere, nbytes, small)
        moved += sum(small + nbytes if at in whole else small - nbytes for at in uses)
        launches = len(whole) + (first[born[n]].group is None)
        seconds = moved / (target.bandwidth * cost.BANDWIDTH_EFFICIENCY) + launches * cost.LAUNCH_SECONDS[target.kind]
        found.append(Item(name, nbytes, small, born[n], max(last.get(n, 0), born[n]), uses, whole, seconds))
    return found


def _forward_bytes(first: Sequence[Step], born: int, elsewhere: Sequence[int], nbytes: int, small: int) -> int:
    """What the cast adds to what the forward moves."""
    if first[born].group is not None:
        return small if elsewhere else small - nbytes  # a kernel writes both forms, or the short one alone
    return small if any(first[i].group is not None for i in elsewhere) else small + nbytes
