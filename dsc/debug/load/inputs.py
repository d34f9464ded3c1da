"""Inputs as a user writes them on a command line: ``f32[4,128]``, ``i64[4,16]<1000``, ``0.5``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from dsc.errors import BadInput, nearest
from dsc.text import SHORT

TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:<(?P<below>\d+))?")
DTYPES = {
    **{short: dtype for dtype, short in SHORT.items()},
    **{str(dtype).removeprefix("torch."): dtype for dtype in SHORT},
}
WORDS = {"true": True, "false": False, "none": None}


def parse(texts: Sequence[str], *, grad: bool = False, seed: int = 0) -> tuple[object, ...]:
    """Each text to a value; the same texts give the same values.

    1. ``f32[4,128]``: standard normal; ``b1[4]``: true or false; ``i64[4,16]<1000``: from 0 to 999, else 0 and 1.
    2. ``3``, ``0.5``, ``true``, ``none``: plain values of Python.
    3. ``grad``: floating-point tensors take part in the backward.

    Raises:
        BadInput: anything else.
    """
    generator = torch.Generator().manual_seed(seed)
    return tuple(one(t.strip(), grad, generator) for t in texts)


def one(text: str, grad: bool, generator: torch.Generator) -> object:
    """The value of one text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    m = TENSOR.fullmatch(text)
    if m is None:
        raise BadInput(text, "it is neither a tensor nor a number")
    dtype = DTYPES.get(m["dtype"])
    if dtype is None:
        raise BadInput(text, f"{m['dtype']!r} is no dtype, {nearest(m['dtype'], DTYPES).rstrip('.')}")
    shape = [int(n) for n in m["shape"].split(",") if n.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        if m["below"]:
            raise BadInput(text, "a range is for whole numbers only")
        exact = dtype.is_complex or dtype.itemsize > 1
        made = torch.randn(shape, generator=generator, dtype=dtype if dtype.is_complex else torch.float32)
        return made.to(dtype).requires_grad_(grad and exact)
    high = int(m["below"]) if m["below"] else 2
    if high < 1 or (m["below"] and dtype is torch.bool):
        raise BadInput(text, "the range is empty" if high < 1 else "a range is for whole numbers only")
    return torch.randint(high, shape, generator=generator, dtype=torch.int64).to(dtype)
