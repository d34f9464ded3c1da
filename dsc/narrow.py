"""Saved values in fewer bits: the formats, and the operators that cast to 8 bits and back.

    dsc::narrow8(x, amax, format) -> uint8, the bits of an e4m3 or e5m2 number for each element
    dsc::widen8(q, amax, format, dtype) -> the numbers again

1. ``amax`` holds the largest magnitude of each group of elements that share a scale; it broadcasts to ``x``, in ``x``'s
   dtype.  ``x`` is multiplied by ``limit / amax``, so that nothing overflows and the largest keeps its value to rounding.
2. Rounding is to nearest, ties to even.  A group that is all zero stays so; one with an infinity or a NaN becomes NaN.
3. Bits are stored as uint8, so that kernels need no 8-bit float unit: any GPU, and a CPU, can store them.

bf16 needs no operator: it is a cast.  Importing this module registers the operators.
Source of the formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsc.errors import BadOption


@dataclass(frozen=True, slots=True)
class Eight:
    """An 8-bit format: a sign, exponent bits, and ``mantissa`` bits."""

    stored: torch.dtype
    limit: float
    mantissa: int
    lowest: int
    """Exponent of the smallest number with all bits of the mantissa."""


EIGHT: Mapping[str, Eight] = {
    "e4m3": Eight(torch.float8_e4m3fn, 448.0, 3, -6),
    "e5m2": Eight(torch.float8_e5m2, 57344.0, 2, -14),
}
NAMES: Mapping[str, str] = {"bf16": "bf16", "fp8": "e4m3", "e4m3": "e4m3", "e5m2": "e5m2"}
"""What a user may ask for -> the format."""
EXPECTED = f"one of {', '.join(map(repr, NAMES))}, or None"
SHARED = 128
"""Elements that share a scale, at least: the last dimension, and those before it while it takes them."""
NOT_A_NUMBER = 0x7F


def parse(text: object, name: str = "compress") -> str:
    """The format that a user asks for.

    Raises:
        BadOption: there is no such format.
    """
    if not isinstance(text, str) or text not in NAMES:
        raise BadOption(name, text, EXPECTED)
    return NAMES[text]


def element_bytes(format: str) -> int:
    return 2 if format == "bf16" else 1


def shared_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions, counted from the end, over which elements share a scale."""
    count, together = 0, 1
    while count < len(shape) and together < SHARED:
        count += 1
        together *= shape[-count]
    return tuple(range(-count, 0))


def narrow8(x: Tensor, amax: Tensor, format: str) -> Tensor:
    f = EIGHT[format]
    top = amax.float()
    inverse = torch.full_like(top, f.limit) / top  # a number over a tensor would round twice
    inverse.clamp_(max=torch.finfo(torch.float32).max)
    scaled = (x.float() * torch.where(amax == 0, 0.0, inverse)).clamp_(-f.limit, f.limit)
    out = _fake_narrow8(x, amax, format)
    return out.copy_(scaled.to(f.stored).view(torch.uint8))


def widen8(q: Tensor, amax: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    f = EIGHT[format]
    out = _fake_widen8(q, amax, format, dtype)
    return out.copy_(q.view(f.stored).float() * (amax.float() * (1 / f.limit)))


def _fake_narrow8(x: Tensor, amax: Tensor, format: str) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8, device=x.device)


def _fake_widen8(q: Tensor, amax: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=q.device)


LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("narrow8(Tensor x, Tensor amax, str format) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "widen8(Tensor q, Tensor amax, str format, ScalarType dtype) -> Tensor"
)
LIBRARY.impl("narrow8", narrow8, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("widen8", widen8, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("dsc::narrow8", _fake_narrow8, lib=LIBRARY)
torch.library.register_fake("dsc::widen8", _fake_widen8, lib=LIBRARY)
