"""A formula at every index of broadcast operands: how pointwise operators promote, broadcast and round."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from dsc import ops
from dsc.codegen.builder import Unlowerable
from dsc.codegen.formulas import Formula
from dsc.codegen.indexing import Index
from dsc.codegen.kernel import COMPUTE
from dsc.codegen.lower import Lowering, Value
from dsc.domain import Extent, shape

Places = Collection[int]


def broadcast(index: Index, s: Sequence[Extent]) -> Index:
    """Index of the element of a tensor of shape ``s`` that broadcasting puts at ``index``."""
    tail = index[len(index) - len(s) :] if s else ()
    return tuple(0 if isinstance(e, int) and e == 1 else i for i, e in zip(tail, s))


def out_dtype(n: Node) -> str:
    return ops.SHORT[ops.tensor(n).dtype]


def on_cpu(n: Node) -> bool:
    return ops.tensor(n).device.type == "cpu"


def common_dtype(n: Node, args: Sequence[object]) -> str:
    """The dtype to which eager promotes the operands before it computes."""
    found: torch.dtype | None = None
    values = [ops.tensor(a) if isinstance(a, Node) and isinstance(a.meta.get("val"), torch.Tensor) else a for a in args]
    values = [(1 if isinstance(v, Node) else v) for v in values]
    first: object = values[0]
    if len(values) == 1:
        found = first.dtype if isinstance(first, torch.Tensor) else None
    for other in values[1:]:
        found = torch.result_type(first, other)  # type: ignore[call-overload]
        dims = max((v.dim() for v in (first, other) if isinstance(v, torch.Tensor)), default=0)
        first = torch.empty((1,) * dims, dtype=found, device="meta")
    if found is None or found not in ops.SHORT:
        raise Unlowerable(f"dtype {found}")
    return ops.SHORT[found]


def elementwise(
    low: Lowering, n: Node, args: Sequence[object], formula: Formula, *, inner: str = "", opmath: Places = ()
) -> Value:
    """``formula`` of the operands at the same (broadcast) index, in compute dtype ``inner``.

    0-dim operands at places ``opmath`` are taken in the wider compute dtype, all others first in the promoted one.
    """
    b = low.build
    values = [low.of(a) for a in args]
    common = inner or common_dtype(n, args)
    result = out_dtype(n)

    def at(index: Index) -> str:
        taken = []
        for place, v in enumerate(values):
            x = v.at(broadcast(index, v.shape))
            if (place in opmath and not v.shape) or v.dtype == common:
                taken.append(b.cast(x, COMPUTE[common]))
            else:
                taken.append(b.rounded(x, common))
        return b.result(formula(b, *taken), result)

    return Value(shape(ops.tensor(n)), result, at)
