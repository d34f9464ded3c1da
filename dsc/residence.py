"""Where values of a program live: which exist as Python values, which outlive the call, which share memory with a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dsc import domain, ops
from dsc.codegen.lower import Bound
from dsc.notes import notes
from dsc.steps import Step, Storages, aliases, last_uses

OUT_VARIANTS = {
    "mm.default": torch.ops.aten.mm.out,
    "addmm.default": torch.ops.aten.addmm.out,
    "bmm.default": torch.ops.aten.bmm.out,
    "baddbmm.default": torch.ops.aten.baddbmm.out,
}
"""Calls that may write into the pool."""
IN_PLACE = {"addmm.default": "aten.addmm_.default", "dsc.embedding_add.default": "dsc.embedding_add_.default"}
"""Calls that add to their first operand -> the same in its memory."""


@dataclass(frozen=True)
class Residence:
    """Facts about the values of one program."""

    storages: Storages
    last: dict[Node, int]
    """Storage -> the step that touches it last."""

    escaping: frozenset[Node]
    """Storages that outlive the call, that ATen may hand on under another name, or that it indexes as a whole."""

    real: frozenset[Node]
    """Nodes that must exist as Python values: views that only kernels read through do not."""

    sums: dict[Node, Node]
    """What is added to a value (see ``IN_PLACE``) -> that value, where it dies of it: the sum lies in its memory."""


def settle(order: Sequence[Step], bound: Mapping[str, Bound], output: Node) -> Residence:
    """Where the values of these steps live."""
    storages = Storages()
    last = last_uses(order, storages)
    escaping = _escaping(order, storages, output)
    sums = _sums(order, storages, last, escaping)
    for n, have in reversed(sums.items()):
        last[have] = last[n]
        if n in escaping:
            escaping.add(have)
    for n in sums:
        last.pop(n, None)
    return Residence(storages, last, frozenset(escaping), _real(order, bound, output), sums)


def poolable(n: Node) -> bool:
    """Whether the out= form computes the same: no operand is of another dtype."""
    t = ops.tensor(n)
    return t.layout == torch.strided and all(ops.tensor(a).dtype == t.dtype for a in ops.tensor_operands(n))


def _escaping(order: Sequence[Step], storages: Storages, output: Node) -> set[Node]:
    out = {storages[n] for n in output.all_input_nodes}
    for step in order:
        if step.group is None and not (ops.is_view(step.node) or ops.is_split(step.node)):
            out.update(storages[a] for a in aliases(step.node))
        if step.group is None and ops.name_of(step.node).startswith("as_strided"):
            out.add(storages[ops.operand(step.node, 0)])  # its offset counts from the start of the storage
    return out


def _real(order: Sequence[Step], bound: Mapping[str, Bound], output: Node) -> frozenset[Node]:
    out = set(output.all_input_nodes)
    for step in reversed(order):
        if step.group is not None:
            out.update(bound[step.group].nodes)
            continue
        n = step.node
        if n in out or not ops.is_alias(n):
            out.add(n)
            out.update(n.all_input_nodes)
    return frozenset(out)


def _sums(order: Sequence[Step], storages: Storages, last: Mapping[Node, int], escaping: set[Node]) -> dict[Node, Node]:
    """A product is only added to another one that ATen makes; rows of a table to whatever is made here."""
    out: dict[Node, Node] = {}
    for i, step in enumerate(order):
        n = step.node
        if step.group is not None or ops.name_of(n) not in IN_PLACE or n.kwargs:
            continue
        have = ops.operand(n, 0)
        if ops.name_of(n) == "addmm.default":
            made_here = ops.name_of(have) in OUT_VARIANTS and notes(have).group is None and poolable(n)
        else:
            made_here = storages[have] is have and not ops.mutated(have)
        if have.op != "call_function" or not made_here or have in escaping or last[have] != i or set(have.users) != {n}:
            continue
        a, b = ops.tensor(have), ops.tensor(n)
        if domain.shape(a) == domain.shape(b) and a.stride() == b.stride():
            out[n] = have
    return out
