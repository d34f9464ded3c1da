"""In which order a kernel walks through a value: the views between the value and its reader that change the order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.fx import Node

from dsc import ops
from dsc.steps import view_chain

Step = tuple[Hashable, ...]
Walk = tuple[Step, ...]
"""From the value to its reader; () is row-major order, as the value lies."""

STRAIGHT: frozenset[Walk] = frozenset({()})

MANY = 4
"""Walks through one value that are told apart."""

_PERMUTES = frozenset("permute.default transpose.int t.default".split())
_SHUFFLES = frozenset(
    "slice.Tensor select.int as_strided.default diagonal.default unfold.default movedim.int getitem".split()
)


def walk_of(node: Node) -> tuple[Node, Walk]:
    """The node whose storage an operand looks at, and the walk from there."""
    *views, root = view_chain(node)
    walk: Walk = ()
    for view in reversed(views):
        if ops.name_of(view) in _PERMUTES:
            walk = then(walk, _permutation(view))
        elif ops.is_split(view) or ops.name_of(view) in _SHUFFLES:
            before = ops.value(ops.operand(view, 0))
            shape = _shape(before) if isinstance(before, torch.Tensor) else ()
            walk = (*walk, (ops.name_of(view), str(view.args[1:]), shape))
    return root, walk


def then(first: Walk, second: Walk) -> Walk:
    """One walk after the other; permutations of the same axes become one, and go where one undoes the other."""
    if not (first and second and first[-1][0] == second[0][0] == "permute"):
        return first + second
    (_, shape, one), (_, between, two) = first[-1], second[0]
    assert isinstance(shape, tuple) and isinstance(one, tuple) and isinstance(two, tuple)
    if tuple(shape[d] for d in one) != between:
        return first + second
    return then(then(first[:-1], _step(shape, tuple(one[d] for d in two))), second[1:])


def through(walks: frozenset[Walk], onwards: Iterable[Walk]) -> frozenset[Walk]:
    """Every walk followed by every walk onwards."""
    found = {then(w, o) for o in onwards for w in walks}
    return frozenset(sorted(found, key=repr)[:MANY])


def _permutation(view: Node) -> Walk:
    before = ops.tensor(ops.operand(view, 0))
    return _step(_shape(before), tuple(ops.axes(view, before.dim())))


def _step(shape: tuple[Hashable, ...], order: tuple[int, ...]) -> Walk:
    """Nothing, where the axes that have more than one place stay in order."""
    wide = [d for d in order if shape[d] != "1"]
    return () if wide == sorted(wide) else (("permute", shape, order),)


def _shape(t: torch.Tensor) -> tuple[str, ...]:
    return tuple(map(str, t.shape))
