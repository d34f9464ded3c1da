"""Which nodes are products of matrices, and over what they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from dsc import domain, ops
from dsc.domain import Dim, Extent, Space
from dsc.torch_shim import optimization_hint

FORMATS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
"""Dtypes of operands that kernels multiply, accumulating in fp32."""
_ADDED = frozenset({"addmm.default", "baddbmm.default"})
_PLAIN = frozenset({"mm.default", "bmm.default"})
_TF32 = "dsc.mm_tf32.default"


@dataclass(frozen=True)
class Product:
    """``beta * bias + alpha * (a @ b)``: a is [.., m, k], b is [.., k, n], with one dimension of a batch or none."""

    node: Node
    a: Node
    b: Node
    bias: Node | None
    alpha: float
    beta: float
    form: str
    """What operands are rounded to: bf16, f16, tf32, f32."""

    @property
    def batch(self) -> Extent:
        s = domain.shape(ops.tensor(self.a))
        return s[0] if len(s) == 3 else 1

    @property
    def m(self) -> Extent:
        return domain.shape(ops.tensor(self.a))[-2]

    @property
    def n(self) -> Extent:
        return domain.shape(ops.tensor(self.b))[-1]

    @property
    def k(self) -> Extent:
        return domain.shape(ops.tensor(self.a))[-1]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Batch, m, n, k; hints for symbols."""
        batch, m, n, k = (int(optimization_hint(e)) for e in (self.batch, self.m, self.n, self.k))
        return batch, m, n, k


def of(node: Node) -> Product | None:
    """The product that a node computes, if kernels can: all operands of one dtype, dense."""
    if node.op != "call_function":
        return None
    name = ops.name_of(node)
    if name not in _ADDED | _PLAIN and name != _TF32:
        return None
    tensors = [*ops.tensor_operands(node), node]
    if any(not isinstance(ops.value(t), torch.Tensor) or not ops.is_plain(ops.tensor(t)) for t in tensors):
        return None
    dtypes = {ops.tensor(t).dtype for t in tensors}
    form = FORMATS.get(dtypes.pop()) if len(dtypes) == 1 else None
    if form is None or len({ops.tensor(t).device for t in tensors}) != 1:
        return None
    if name in _ADDED:
        bias, a, b = (ops.operand(node, i) for i in range(3))
        beta, alpha = (node.kwargs.get(k, 1) for k in ("beta", "alpha"))
        if len(node.args) != 3 or not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            return None
        return Product(node, a, b, bias, float(alpha), float(beta), form)
    if len(node.args) != 2 or node.kwargs:
        return None
    return Product(node, ops.operand(node, 0), ops.operand(node, 1), None, 1.0, 1.0, "tf32" if name == _TF32 else form)


PEAK = 64
"""Columns of a product of which one kernel finds the largest: every tile of a format with a matrix unit has whole ones."""


def peaks(node: Node, p: Product) -> bool:
    """Whether a node takes the maximum of every ``PEAK`` columns, side by side, of values that lie as the product's result."""
    if node.op != "call_function" or ops.name_of(node) != "amax.default" or p.form == "f32":
        return False
    x = ops.tensor(ops.operand(node, 0))
    s, blocks = domain.shape(x), domain.divide(p.n, PEAK)
    if len(s) < 3 or s[-1] != PEAK or ops.reduced_dims(node) != (len(s) - 1,) or not isinstance(blocks, int):
        return False
    return (
        blocks > 1
        and domain.same(s[-2], blocks)
        and domain.same(domain.product(s), domain.product((p.batch, p.m, p.n)))
    )


def space_of(node: Node, p: Product | None) -> Space:
    """Where a node of a product's kernel runs: of ``peaks`` at all that is compared."""
    if p is not None and peaks(node, p):
        return domain.plain(ops.tensor(ops.operand(node, 0)))
    return domain.of(node)


def space(p: Product) -> Space:
    """The nest that computes it: rows and columns, and the contraction, which it reduces."""
    return Space(domain.without_ones((Dim(p.batch), Dim(p.m), Dim(p.n), Dim(p.k, True))))
