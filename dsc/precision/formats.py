"""The formats that a matrix product can have, and which of them a target's hardware has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsc.errors import UnknownFormat

Role = Literal["forward", "dgrad", "wgrad"]
"""y = x W^T; the gradient of x; the gradient of W."""
ROLES: tuple[Role, ...] = ("forward", "dgrad", "wgrad")

Grain = Literal["tensor", "row", "block"]
"""What shares a scale: all elements; a row along the contraction; 1 x 128 of a row, or 128 x 128 of a weight."""
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Format:
    """How the operands of one product are rounded, and in what unit it is computed."""

    name: str
    rate: str
    """Row of ``Target.peak``."""
    nbytes: int
    """Of an element of an operand."""
    grain: Grain | None = None
    """None: a cast, without scales."""

    @property
    def scaled(self) -> bool:
        return self.grain is not None

    @property
    def integer(self) -> bool:
        return self.rate == "int8"


RECIPES: Mapping[str, Grain] = {"tensorwise": "tensor", "rowwise": "row", "blockwise": "block"}
CASTS = tuple(Format(n, n, b) for n, b in (("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp16", 2)))
SCALED = tuple(Format(f"{n}-{r}", n, 1, g) for n in ("fp8", "int8") for r, g in RECIPES.items())
FORMATS: Mapping[str, Format] = {f.name: f for f in (*CASTS, *SCALED)}
DEFAULT_RECIPE = "blockwise"
SEEN = ("noise", "largest left", "largest right", "lost left", "lost right", "norm", "not finite", "format")
"""What a product whose format is switched reports.  ``noise``: relative error of its result, on some rows; ``lost``: share of values rounded to 0,
though they are not; ``norm`` of the result.  NaN where it was not measured."""
NAMES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
"""What a user writes; fp8 and int8 mean that of the recipe."""


def find(name: str, recipe: str = DEFAULT_RECIPE) -> Format:
    """``bf16``, ``fp8`` (of the recipe), ``int8-rowwise``.

    Raises:
        UnknownFormat: no format has this name.
    """
    found = FORMATS.get(name) or FORMATS.get(f"{name}-{recipe}")
    if found is None:
        raise UnknownFormat(name, (*NAMES, *(f.name for f in SCALED)))
    return found


def dtype_of(f: Format, gradient: bool) -> str:
    """The dtype in which an operand is kept: tensorwise fp8 takes e5m2, which has more range, for gradients."""
    if f.integer:
        return "int8"
    return "e5m2" if gradient and f.grain == "tensor" else "e4m3"
