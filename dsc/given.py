"""Terms of gradients that no used result stands behind are zero, whatever their factors are.

Autograd gives the backward of a graph zeros for results that the loss does not use.  Eager does not compute what follows
from those; a compiled backward does, and zero times infinity is NaN, in every gradient that such a term is added to.

    dsc::given(tangent, numbers) -> bool: whether the loss uses one of the results with these numbers

``guard`` puts ``where(given, term, 0)`` around terms that meet others which depend on other results.  Which results are
used is told by ``used``, around each call of a backward graph, in the thread that makes the call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dsc.torch_shim import FakeTensor

aten = torch.ops.aten


class _Unused(threading.local):
    """Numbers of the results without a gradient, in the backward graph that this thread runs."""

    numbers: frozenset[int] = frozenset()


_UNUSED = _Unused()


def tell(unused: frozenset[int]) -> None:
    """Before a backward graph runs, and after it, with nothing."""
    _UNUSED.numbers = unused


def given(tangent: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.full((), not _UNUSED.numbers.issuperset(numbers), dtype=torch.bool, device=tangent.device)


def _fake_given(tangent: Tensor, numbers: Sequence[int]) -> Tensor:
    return torch.empty((), dtype=torch.bool, device=tangent.device)


LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("given(Tensor tangent, int[] numbers) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("given", given, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("dsc::given", _fake_given, lib=LIBRARY)


def guard(joint: GraphModule, masks: Mapping[Node, int], tangents: Sequence[Node]) -> bool:
    """Guard the terms of a joint graph; ``masks``: what each node depends on, a bit a tangent.  Whether there were any.

    Not a tangent itself, which is zeros then, nor what is neither a float nor complex.
    """
    start = next((n for n in joint.graph.nodes if n.op == "call_function" and masks.get(n, 0)), None)
    flags: dict[int, Node] = {}
    made: dict[Node, Node] = {}
    for n in list(joint.graph.nodes):
        terms = [a for a in n.all_input_nodes if masks.get(a, 0)] if n.op == "call_function" else []
        if len({masks[a] for a in terms}) < 2:
            continue
        for a in terms:
            value = a.meta.get("val")
            if (
                masks[a] == masks[n]
                or a in tangents
                or not isinstance(value, FakeTensor)
                or value.layout != torch.strided
            ):
                continue
            if not (value.dtype.is_floating_point or value.dtype.is_complex):
                continue
            if a not in made:
                assert start is not None
                made[a] = _guarded(a, value, masks[a], tangents, flags, start)
            n.replace_input_with(a, made[a])
    if made:
        joint.recompile()
    return bool(made)


def _guarded(
    a: Node, value: FakeTensor, mask: int, tangents: Sequence[Node], flags: dict[int, Node], start: Node
) -> Node:
    graph = a.graph
    if mask not in flags:
        numbers = [i for i in range(len(tangents)) if mask >> i & 1]
        first = tangents[numbers[0]]
        # with the backward: partitioners count as forward what stands before the end of the forward
        with graph.inserting_before(start):
            flags[mask] = graph.call_function(torch.ops.dsc.given.default, (first, numbers))
        with value.fake_mode:
            flags[mask].meta["val"] = _fake_given(first.meta["val"], numbers)
        _as(flags[mask], a)
    with graph.inserting_after(a):
        zero = graph.call_function(aten.scalar_tensor.default, (0.0,), {"dtype": value.dtype, "device": value.device})
    with graph.inserting_after(zero):
        out = graph.call_function(aten.where.self, (flags[mask], a, zero))
    with value.fake_mode:
        zero.meta["val"] = torch.scalar_tensor(0.0, dtype=value.dtype, device=value.device)
        out.meta["val"] = torch.where(flags[mask].meta["val"], value, zero.meta["val"])
    _as(zero, a)
    _as(out, a)
    return out


def _as(made: Node, a: Node) -> None:
    """It belongs where ``a`` does: to the backward, and to a line of the user's."""
    for key in ("partitioner_tag", "stack_trace", "nn_module_stack", "seq_nr", "autograd_backward"):
        if key in a.meta:
            made.meta[key] = a.meta[key]
