"""Layouts that AOTAutograd loses when it makes a Dynamo graph functional, put right in that graph.

1. Random numbers that an in-place call draws go to the elements in the order of memory; made functional, the call draws
   in the order of indices.  It gets a view of its operand in which both are one.
2. A write keeps the layout of what it writes to; made functional, ``tril_`` gives the layout of ``tril``.  Where they differ
   the result is computed apart and copied.
3. What is written into memory with gaps has none once it is functional, and views of it are made anew by the strides
   that they then have, which are not theirs (other sizes may come: no other way is left).  The write happens in a copy
   without gaps, which is then copied back: a copy keeps the strides of what it is copied to.
4. The gradient of a result is taken in the strides of that result, and elements of one place in memory overwrite one
   another (a result of ``unfold``).  AOTAutograd knows better where what the result is a view of is given out as well.
5. Eager lays some results out by themselves, which AOTAutograd computes from their operand, and lays out like it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dsc.dynamo import DRAWS, LAYS_OUT, is_named_as_write, name_of, tensor_of, written
from dsc.ops.layout import has_no_gaps
from dsc.torch_shim import memory, optimization_hint

DRAWS_IN_PLACE = frozenset("bernoulli_ dropout_ alpha_dropout_".split())
"""By the functional ``bernoulli``, in the order of indices."""


def draw_in_order_of_memory(gm: GraphModule) -> None:
    """Case 1: ``x.bernoulli_(p)`` -> ``x.permute(order).bernoulli_(p)``, and likewise dropout in place."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.op not in ("call_function", "call_method") or not draws_in_place(node):
            continue
        source = node.args[0] if node.args else node.kwargs.get("input")
        value = tensor_of(source)
        order = memory_order(value) if value is not None else []
        if order == sorted(order):
            continue
        assert isinstance(source, Node)
        write_instead(node, source, called_before(node, "permute", source, order))
        changed = True
    if changed:
        gm.recompile()


def called_before(node: Node, method: str, source: Node, *arguments: object) -> Node:
    """A call of a method of ``source``, put in front of a node."""
    with node.graph.inserting_before(node):
        made = node.graph.call_method(method, (source, *arguments))  # type: ignore[arg-type]  # numbers
    made.meta["example_value"] = getattr(source.meta["example_value"], method)(*arguments)
    return made


def write_instead(node: Node, source: Node, other: Node) -> None:
    """A call that writes to ``source``, and gives it back, writes to ``other``; those who read the call read ``source``."""
    node.replace_all_uses_with(source)
    node.replace_input_with(source, other)
    node.meta["example_value"] = other.meta["example_value"]


def draws_in_place(node: Node) -> bool:
    """Calls that fill or scale their operand by the functional ``bernoulli``, and give the operand back."""
    name = name_of(node)
    if name in ("dropout", "alpha_dropout"):
        return written(node) is not None
    if name == "bernoulli_" and any(isinstance(a, Node) for a in (*node.args[1:], *node.kwargs.values())):
        return False  # probabilities of their own: drawn in the order of memory, functional or not
    return name in DRAWS_IN_PLACE


def memory_order(t: torch.Tensor) -> list[int]:
    """Dimensions, that of the largest step first."""
    strides = t.stride()
    return sorted(range(t.dim()), key=lambda d: -hint(strides[d]))


def keep_layout_of_writes(gm: GraphModule) -> None:
    """Case 2: ``x.tril_()`` -> ``x.copy_(x.tril())`` where ``x`` is dense and laid out otherwise than ``x.tril()``."""
    changed = False
    for node in list(gm.graph.nodes):
        name = name_of(node)
        if node.op != "call_method" or not is_named_as_write(name) or name in DRAWS | LAYS_OUT or name == "copy_":
            continue
        source = node.args[0]
        value = tensor_of(source)
        if value is None or value.is_contiguous() or not is_dense(value):
            continue
        apart = functional(node, value, name[:-1])
        if apart is None or apart.shape != value.shape or apart.stride() == value.stride():
            continue
        with gm.graph.inserting_before(node):
            made = gm.graph.call_method(name[:-1], node.args, node.kwargs)
        made.meta["example_value"] = apart
        node.target, node.args, node.kwargs = "copy_", (source, made), {}
        changed = True
    if changed:
        gm.recompile()


def keep_gaps(gm: GraphModule) -> None:
    """Case 3: ``x.mul_(y)`` -> ``c = x.clone(); c.mul_(y); x.copy_(c)`` where ``x`` and the whole that it is of have gaps."""
    wholes: dict[int | None, torch.Tensor] = {}
    changed = False
    for node in list(gm.graph.nodes):
        if (value := tensor_of(node)) is not None:
            wholes.setdefault(memory(value), value)
        target = written(node)
        value = tensor_of(target)
        if target is None or value is None or name_of(node) == "copy_" or (place := memory(value)) is None:
            continue
        if is_dense(value) or is_dense(wholes[place]) or overlaps(value) or repeats(value):
            continue
        copy = called_before(node, "clone", target)
        with gm.graph.inserting_after(node):
            back = gm.graph.call_method("copy_", (target, copy))
        back.meta["example_value"] = value
        write_instead(node, target, copy)
        changed = True
    if changed:
        gm.recompile()


def repeats(t: torch.Tensor) -> bool:
    """Some element stands for several, as after ``expand``: what writes to it is refused, or left to eager."""
    return any(hint(d) == 0 and hint(n) > 1 for n, d in zip(t.shape, t.stride()))


def functional(node: Node, value: torch.Tensor, name: str) -> torch.Tensor | None:
    """What the method that does not write would give, as a fake tensor."""

    def known(a: object) -> object:
        return a.meta["example_value"] if isinstance(a, Node) else a

    if not hasattr(value, name):
        return None
    rest = pytree.tree_map(known, (node.args[1:], node.kwargs))
    try:
        with torch.no_grad():
            out = getattr(value.detach(), name)(*rest[0], **rest[1])
    except Exception:  # it writes what it cannot compute apart, or its operands have no fake values
        return None
    return out if isinstance(out, torch.Tensor) and out.dtype == value.dtype else None


def is_dense(t: torch.Tensor) -> bool:
    """No gaps and no overlap, with the sizes of this call: adds no guard."""
    return has_no_gaps([*map(hint, t.shape)], [*map(hint, t.stride())])


LAID_OUT_ANEW = {
    **dict.fromkeys(("one_hot", "rrelu"), range(8)),
    **dict.fromkeys(("interpolate", "upsample", "upsample_nearest"), (3,)),
}
"""What gives contiguous results, whatever its operand of so many dimensions is like."""


def read_in_order(gm: GraphModule) -> None:
    """Case 5: ``one_hot(x)`` -> ``one_hot(x.contiguous())``."""
    changed = False
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and name_of(n) in LAID_OUT_ANEW]:
        source = node.args[0] if node.args else node.kwargs.get("input")
        value = tensor_of(source)
        if not isinstance(source, Node) or value is None or value.is_contiguous():
            continue
        if value.dim() not in LAID_OUT_ANEW[name_of(node)] or written(node) is not None:
            continue
        node.replace_input_with(source, called_before(node, "contiguous", source))
        changed = True
    if changed:
        gm.recompile()


def sources_of_overlaps(gm: GraphModule) -> Iterator[Node]:
    """Case 4: what results with overlapping elements are views of, where the graph computes it."""
    results = set(gm.graph.output_node().all_input_nodes)
    found: set[Node] = set()
    for r in results:
        value = tensor_of(r)
        if value is None or not value.requires_grad or not overlaps(value):
            continue
        source = next(n for n in gm.graph.nodes if shares(n.meta.get("example_value"), value))
        if source.op != "placeholder" and source not in results | found:
            found.add(source)
            yield source


def overlaps(t: torch.Tensor) -> bool:
    """Some place in memory stands for several elements that are not those of an expanded dimension."""
    steps = sorted((hint(d), hint(n)) for n, d in zip(t.shape, t.stride()) if hint(n) > 1 and hint(d) > 0)
    reach = 0
    for step, count in steps:
        if step <= reach:
            return True
        reach += step * (count - 1)
    return False


def shares(a: object, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and (place := memory(a)) is not None and place == memory(b)


def reads(node: Node, whole: torch.Tensor) -> bool:
    """Whether a value, or one of several, lies in the memory of ``whole``."""
    value = node.meta.get("example_value")
    return any(shares(v, whole) for v in (value if isinstance(value, (tuple, list)) else (value,)))


def hint(n: int | torch.SymInt) -> int:
    """A size as it is in this call."""
    return n if isinstance(n, int) else int(optimization_hint(n))
