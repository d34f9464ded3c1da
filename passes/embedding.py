"""Gradients of tables that are looked up by index, in the form that moves the fewest bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.fx import GraphModule, Node

from dsc import cost, embedding, ops  # noqa: F401  # registers the operators
from dsc.domain import shape
from dsc.manager import Pass, Remark, Report
from dsc.passes.canonicalize import Rewriter, drop_dead
from dsc.passes.triton_missing import without_triton
from dsc.products import FORMATS
from dsc.target import Target
from dsc.torch_shim import optimization_hint

BACKWARD = "embedding_dense_backward.default"
BY_FEATURE = 3072
"""Indices up to which ATen's CUDA kernel does not sort them: a program walks all of them for each 32 columns."""
WALK = 1.4e-6
"""Seconds of such a program for 32 indices, an estimate: two loads, one after the other, of 0.7 us each."""
SORT = {"cuda": 8, "cpu": 0}
"""Launches of a sort."""
EACH = {"cuda": 0.0, "cpu": 1e-7}
"""Seconds to sort an index."""


@dataclass(frozen=True)
class Embedding(Pass):
    """``embedding_dense_backward`` -> what touches only the rows that were looked up, where that is modelled faster.

    1. ``x + embedding_dense_backward(grad, index, ..)``, x a gradient of the same table that nothing else reads (a head
       that shares it) -> ``dsc::embedding_add``, in the memory of x: no matrix of zeros, and no sum of two whole ones.
    2. On CUDA, alone, of few indices -> ``dsc::embedding_grad``: ATen does not sort so few, and walks them with few programs.
    3. Does not fire: on CUDA without Triton; ``scale_grad_by_freq``, dtypes or strides that differ, sums with a factor, and where ``gain`` is
       not reached.
    """

    name: ClassVar[str] = "embedding"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"

    gain: float = 1.1

    def run(self, gm: GraphModule, target: Target) -> Report:
        rw = Rewriter(gm)
        found = [n for n in gm.graph.nodes if n.op == "call_function" and ops.name_of(n) == BACKWARD]
        if found and target.kind == "cuda" and (missing := without_triton()) is not None:
            return Report(False, (missing,))
        remarks = [r for n in found if (r := self.decide(rw, n, target)) is not None]
        return Report(any(r.verdict == "did" for r in remarks), tuple(remarks))

    def decide(self, rw: Rewriter, node: Node, target: Target) -> Remark | None:
        padding_idx, scaled = node.args[3], node.args[4]
        if scaled is not False or not isinstance(padding_idx, int):
            return Remark(node.name, "skipped", "stays with ATen: rows are scaled by how often they are looked up")
        if target.kind == "cuda" and ops.tensor(node).dtype not in FORMATS:
            return None
        if (pair := sum_of(node)) is not None:
            at, other = pair
            apart = cost.seconds(node, target) + filling(node, target) + cost.seconds_of_group([at], target)
            return self.put(rw, at, node, apart, target, torch.ops.dsc.embedding_add.default, other)
        if target.kind == "cuda" and count(node) <= BY_FEATURE:
            apart = filling(node, target) + WALK * -(-count(node) // 32) + 2 * cost.LAUNCH_SECONDS["cuda"]
            return self.put(rw, node, node, apart, target, torch.ops.dsc.embedding_grad.default)
        return None

    def put(
        self, rw: Rewriter, at: Node, node: Node, apart: float, target: Target, operator: Any, *first: Node
    ) -> Remark:
        """``operator`` in place of ``at``, if it is modelled to be faster than ``apart``."""
        grad, index, rows, padding_idx, _ = node.args
        mine = summing(node, target) + (0.0 if first else filling(node, target))
        words = f"modelled {mine * 1e6:,.1f} us for the rows of {count(node)} indices, {apart * 1e6:,.1f} us by ATen"
        if mine * self.gain > apart:
            return Remark(node.name, "skipped", f"stays with ATen: {words}")
        with rw.gm.graph.inserting_before(at):
            made = rw.call(at, operator, *first, grad, index, *(() if first else (rows,)), padding_idx)
        at.replace_all_uses_with(made)
        rw.gm.graph.erase_node(at)
        if at is not node:
            rw.gm.graph.erase_node(node)
        drop_dead(rw.gm)  # views of the other one
        into = f"added to {first[0].name} in place, " if first else ""
        return Remark(made.name, "did", f"{into}{words}")


def sum_of(node: Node) -> tuple[Node, Node] | None:
    """The sum of the gradient and another one of the same form, if nothing else reads either; and that other one."""
    if len(node.users) != 1:
        return None
    (at,) = node.users
    if ops.name_of(at) != "add.Tensor" or at.kwargs or len(at.args) != 2:
        return None
    read = [a for a in at.args if isinstance(a, Node) and a is not node]
    if len(read) != 1:
        return None
    other, reader = read[0], at
    while other.op == "call_function" and ops.is_view(other) and set(other.users) == {reader}:
        other, reader = ops.operand(other, 0), other  # a transpose of a transpose
    if other.op != "call_function" or ops.is_view(other) or set(other.users) != {reader}:
        return None
    if not isinstance(ops.value(other), torch.Tensor):
        return None
    forms = [ops.tensor(n) for n in (other, read[0], node, at)]
    alike = len({t.dtype for t in forms}) == 1 and all(shape(t) == shape(forms[0]) for t in forms)
    whole = all(t.is_contiguous() and ops.is_plain(t) for t in forms[:2])
    return (at, other) if alike and whole else None


def count(node: Node) -> int:
    """Indices."""
    return math.prod(int(optimization_hint(e)) for e in shape(ops.tensor(ops.operand(node, 1))))


def filling(node: Node, target: Target) -> float:
    """Seconds in which ATen fills the matrix with zeros, before anything is added."""
    written = cost.stored_bytes(ops.tensor(node))
    return written / (target.bandwidth * cost.BANDWIDTH_EFFICIENCY) + cost.LAUNCH_SECONDS[target.kind]


def summing(node: Node, target: Target) -> float:
    """Seconds of the sort and of the sums: each gradient is read once, each row that was looked up read and written."""
    t = ops.tensor(node)
    rows, width = (int(optimization_hint(e)) for e in shape(t))
    moved = (count(node) + 2 * min(count(node), rows)) * width * t.element_size()
    launches = (SORT[target.kind] + 1) * cost.LAUNCH_SECONDS[target.kind]
    return moved / (target.bandwidth * cost.BANDWIDTH_EFFICIENCY) + launches + count(node) * EACH[target.kind]
