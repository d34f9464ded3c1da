"""When two results count as different.

A value may be off from what is wanted by

    unit * (|exact| + rms(exact))  +  8 * largest |eager - exact|

where ``exact`` is the same value in float64, computed the way that eager went (same indices, same random numbers): the
second part is the noise that eager's own roundings make at this value.  Another order of operations makes noise of that
size too; a wrong rewrite makes far more.  ``unit`` depends on the dtype (``UNIT``).  A value of few elements is a poor
sample of its noise: there the unit is that of the coarsest dtype of the graph.  Integers and bools must be equal, and
infinities and nans must lie at the same places, unless eager and float64 disagree about these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dsc.debug.bisect.run import Twin

UNIT = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
NOISE = 8.0
FEW = 64
"""Elements below which a value says little of its noise."""

Kind = Literal["values", "nonfinite", "dtype", "shape", "strides", "missing", "raises"]


@dataclass(frozen=True)
class Rule:
    """``unit`` in place of that of the dtype, if given; ``strict`` makes all room so many times smaller."""

    unit: float | None = None
    against: Literal["eager", "float64"] = "eager"
    coarsest: torch.dtype = torch.float32
    strict: float = 1.0

    def unit_of(self, t: torch.Tensor) -> float:
        if self.unit is not None:
            return self.unit
        own = UNIT.get(t.dtype, 0.0)
        return max(own, UNIT.get(self.coarsest, 0.0)) if t.numel() < FEW else own

    def room(self, value: torch.Tensor, exact: torch.Tensor, noise: float) -> torch.Tensor:
        """How far each element may be off, float64."""
        size = exact.abs().nan_to_num(0, 0, 0)
        rms = float(size.square().mean().sqrt()) if size.numel() else 0.0
        return (self.unit_of(value) * (size + rms) + NOISE * noise) / self.strict

    def stricter(self, times: float) -> Rule:
        return replace(self, strict=self.strict * times)


@dataclass(frozen=True)
class Difference:
    """How a result differs from the one that is wanted."""

    kind: Kind
    text: str
    """``0.51 instead of 0.23 at (3, 1), 12 of 64 differ``."""
    largest: float = 0.0
    """The largest absolute difference."""
    times: float = 0.0
    """That many times what the tolerance allows; infinite where it allows nothing."""


def coarsest(gm: GraphModule) -> torch.dtype:
    """The float dtype of the graph that rounds most."""
    vals = (v for n in gm.graph.nodes for v in pytree.tree_leaves(n.meta.get("val")))
    found = {v.dtype for v in vals if isinstance(v, torch.Tensor) and v.dtype in UNIT}
    return max(found, key=UNIT.__getitem__, default=torch.float32)


def noise_of(t: Twin) -> float:
    """The largest distance of one eager value from float64, where both are finite."""
    if not isinstance(t.value, torch.Tensor) or not t.value.is_floating_point() or not t.value.numel():
        return 0.0
    return float((t.value.double() - t.exact.double()).abs().nan_to_num(0, 0, 0).max())


def compare(got: Any, want: Twin, rule: Rule, strides: bool = False) -> Difference | None:
    """Of two values, or of two lists of them item by item: what nobody computed (None) on either side is left out."""
    if isinstance(want.value, (list, tuple)) and isinstance(got, (list, tuple)) and len(got) == len(want.value):
        pairs = [(g, Twin(v, e)) for g, v, e in zip(got, want.value, want.exact) if g is not None and v is not None]
        return worst(compare(g, w, rule) for g, w in pairs)
    if not isinstance(want.value, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(got) is type(want.value) and got == want.value
        return None if same else Difference("missing", f"{_short(got)} instead of {_short(want.value)}")
    return _tensors(got, want, rule, strides)


def worst(found: Iterable[Difference | None]) -> Difference | None:
    return max((d for d in found if d is not None), key=lambda d: (d.kind != "values", d.times), default=None)


def _tensors(got: torch.Tensor, want: Twin, rule: Rule, strides: bool) -> Difference | None:
    value: torch.Tensor = want.value
    if got.dtype != value.dtype:
        return Difference("dtype", f"{_short(got)} instead of {_short(value)}")
    if got.shape != value.shape:
        return Difference("shape", f"{_short(got)} instead of {_short(value)}")
    if strides and any(a != b for n, a, b in zip(value.shape, got.stride(), value.stride()) if n > 1):
        return Difference("strides", f"strides {got.stride()} instead of {value.stride()}")
    if torch.equal(got, value):
        return None
    if not value.is_floating_point():
        return _exact(got, value)
    a, b, c = got.double(), value.double(), want.exact.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        if not torch.equal(b.isfinite(), c.isfinite()):
            return None  # overflow on the way: where it falls depends on the order of operations
        return Difference("nonfinite", f"finite elsewhere: {_first(got, value, a.isfinite() != b.isfinite())}")
    wanted = c if rule.against == "float64" else b
    off = (a - wanted).nan_to_num(0, 0, 0).abs()
    room = rule.room(value, c, noise_of(want))
    wrong = off > room
    if not bool(wrong.any()):
        return None
    ratio = off / room
    at = int(torch.where(wrong, off, -1.0).argmax())
    text = _at(got, wanted, at) + f", {int(wrong.sum())} of {wrong.numel()} differ"
    return Difference("values", text, float(off.max()), float(torch.where(wrong, ratio, 0.0).max()))


def _exact(got: torch.Tensor, value: torch.Tensor) -> Difference:
    wrong = got != value
    largest = float((got.double() - value.double()).abs().max()) if not got.is_complex() else 0.0
    text = f"{_first(got, value, wrong)}, {int(wrong.sum())} of {wrong.numel()} differ"
    return Difference("values", text, largest, float("inf"))


def _first(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor) -> str:
    return _at(got, want, int(wrong.flatten().int().argmax()))


def _at(got: torch.Tensor, want: torch.Tensor, flat: int) -> str:
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)) if got.dim() else ()
    a, b = got[where].item(), want[where].item()
    shown = (f"{a:.6g}", f"{b:.6g}") if isinstance(a, float) else (str(a), str(b))
    if shown[0] == shown[1]:
        shown = (repr(a), repr(b))
    place = f" at {where}" if where else ""
    return f"{shown[0]} instead of {shown[1]}{place}"


def _short(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)[:60]
