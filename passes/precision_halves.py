"""What a plan errs on other data, seen on one batch: its two halves, each taken twice, are batches of the same shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from dsc import ops
from dsc.errors import BadCalibration
from dsc.passes.precision_measure import Measured, norm, reality

TRIED = 3
"""Sizes that may be that of the batch."""
SAME = 0.05
"""Relative change of a gradient that is still rounding: 16-bit sums in another order."""


def halves(measured: Measured) -> tuple[Measured, ...]:
    """The graph on the first and on the second half of its batch; nothing where the inputs' batch cannot be told."""
    with reality():
        inputs = batched(measured)
        if not inputs:
            return ()
        size = len(measured.values[inputs[0]])
        part = torch.arange(size) % ((size + 1) // 2)
        return tuple(taken(measured, inputs, rows) for rows in (part, part + size // 2))


def batched(measured: Measured) -> list[Node]:
    """The inputs that have a row for each sample: those whose rows can be turned round and the gradient stays.

    Frozen weights and tables have rows too; turned round they give another gradient.
    """
    found: dict[int, list[Node]] = {}
    for n in measured.data:
        value = measured.values[n]
        if isinstance(value, Tensor) and value.dim() and len(value) > 1:
            found.setdefault(len(value), []).append(n)
    first = sorted(found.values(), key=lambda ns: all(measured.values[n].is_floating_point() for n in ns))
    for inputs in first[:TRIED]:
        size = len(measured.values[inputs[0]])
        try:
            turned = taken(measured, inputs, torch.arange(size - 1, -1, -1))
        except BadCalibration:
            continue
        far = norm([a.float() - b.float() for a, b in zip(turned.gradient, measured.gradient)])
        if float(far) <= SAME * measured.norm:
            return inputs
    return []


def taken(measured: Measured, inputs: list[Node], rows: Tensor) -> Measured:
    """The graph on some rows of its batch."""
    given = [
        measured.values[n][rows.to(measured.values[n].device)] if n in inputs else measured.values[n]
        for n in measured.gm.graph.find_nodes(op="placeholder")
        if not ops.is_tangent(n)
    ]
    return Measured(measured.gm, tuple(measured.sites.values()), given)
