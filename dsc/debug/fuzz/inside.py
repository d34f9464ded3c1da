"""Roundings inside of operators that take several steps, such as the backward of a softmax.

``dsc.debug.fuzz.noise`` disturbs what operators read.  What cancels within one of them, ``g - g * 1`` in the softmax of a
single number, still looks exact in float64, while neither eager nor a kernel is.  Under ``Stepwise`` such an operator runs
as the steps that PyTorch's own decomposition of it takes, and the result of each step is off by a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dsc.torch_shim import TorchDispatchMode, decomposition_table

CANCELS = tuple(
    getattr(torch.ops.aten, n).default
    for n in "gelu gelu_backward native_layer_norm native_group_norm _log_softmax".split()
)
"""Operators that PyTorch's own table keeps whole, and that lose digits within: ``1 + erf(x)``, a weight times a normalised
number near -1 and a bias like the weight, and the logarithm of a sum of exponentials near 1."""

SUMS = frozenset((torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList))
"""Added up one by one, a number at a time is rounded to the grain of what was added up by then."""


class Stepwise(TorchDispatchMode):
    """Runs operators as their decompositions, each step's floats off by up to ``grain`` of themselves.

    Views, writes and random draws are left as they are, and so is what a write could reach through a view.
    """

    def __init__(self, grain: float, gen: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.grain, self.gen = grain, gen
        steps: Mapping[Any, Callable[..., Any]] = torch.export.default_decompositions()
        self.steps = {**steps, **{op: decomposition_table[op] for op in CANCELS}}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _plain(func) and func in self.steps:
            with self:
                out = self.steps[func](*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        if func in SUMS and out.is_floating_point():
            out = out + self.order(args[0], args[1] if len(args) > 1 else None, out)
        return pytree.tree_map_only(torch.Tensor, self.off, out) if _plain(func) else out

    def order(self, x: torch.Tensor, dims: Sequence[int] | None, out: torch.Tensor) -> torch.Tensor:
        """How far another order of a sum may move it: partial sums in the order of the elements, each off by a grain."""
        rank = x.dim()
        over = {d % rank for d in dims} if dims and rank else set(range(rank))
        rows = x.permute([*(d for d in range(rank) if d not in over), *sorted(over)]).reshape(*(out.numel(),), -1)
        spread = rows.cumsum(1).square().sum(1).sqrt().reshape(out.shape)
        return self.grain * spread * (torch.rand(out.shape, generator=self.gen, dtype=torch.float64) * 2 - 1)

    def off(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        return x * (1 + self.grain * (torch.rand(x.shape, generator=self.gen, dtype=torch.float64) * 2 - 1)).to(x.dtype)


def _plain(func: Any) -> bool:
    """Whether an operator makes new values, and the same ones each time."""
    schema = func._schema
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
