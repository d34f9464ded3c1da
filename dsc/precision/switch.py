"""A product whose format is looked up when it runs: it changes without compiling again, and without asking the device.

    dsc::mm_switch(a, b, slot, formats, grains, gradients) -> ([M, N] in the dtype of ``a``, what was seen: fp32 [8])

``a`` [M, K] and ``b`` [N, K] run along the contraction, as strides have it.  ``slot`` lies on the host: the place of the
format among ``formats`` (names joined by commas), and whether this call measures its own noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsc.precision import emulate, ops
from dsc.precision.formats import FORMATS, SEEN, Format, dtype_of

ROWS = 64
"""Rows on which noise is measured."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

torch.library.define(
    "dsc::mm_switch",
    "(Tensor a, Tensor b, Tensor slot, str formats, str grains, str gradients) -> (Tensor, Tensor)",
)


def mm_switch(a: Tensor, b: Tensor, slot: Tensor, formats: str, grains: str, gradients: str) -> tuple[Tensor, Tensor]:
    """The product in the format of the moment.  ``grains``: of blocks of each side; ``gradients``: 1 where a side is one."""
    code, measure = slot.tolist()
    f = FORMATS[formats.split(",")[code]]
    seen = torch.full((len(SEEN),), torch.nan, device=a.device)
    if f.scaled:
        product = _scaled(a, b, f, grains.split(","), [g == "1" for g in gradients], seen, bool(measure))
    elif f.name == "tf32":
        product = ops.tf32(a.float(), b.float().t())
    else:
        product = a.to(DTYPES[f.name]) @ b.to(DTYPES[f.name]).t()
    if measure:
        step = max(1, a.shape[0] // ROWS)
        exact = a[::step].float() @ b.float().t()
        seen[0] = (product[::step].float() - exact).norm() / exact.norm().clamp_min(1e-30)
    seen[5] = torch.linalg.vector_norm(product, dtype=torch.float32)
    seen[6] = (~torch.isfinite(seen[5])).float()
    seen[7] = code
    return product.to(a.dtype), seen


def _scaled(
    a: Tensor, b: Tensor, f: Format, grains: list[str], gradients: list[bool], seen: Tensor, measure: bool
) -> Tensor:
    sides = []
    for i, (x, blocks, gradient) in enumerate(zip((a, b), grains, gradients)):
        dtype = dtype_of(f, gradient)
        q, s = ops.quantise(x, dtype, blocks if f.grain == "block" else str(f.grain))
        seen[1 + i] = s.max() * emulate.LIMIT[dtype]
        if measure:
            seen[3 + i] = ((q.float() == 0) & (x != 0)).float().mean()
        sides += [q, s]
    product: Tensor = ops.mm8(*sides, torch.float16 if a.dtype == torch.float16 else torch.bfloat16)
    return product


def fake_mm_switch(
    a: Tensor, b: Tensor, slot: Tensor, formats: str, grains: str, gradients: str
) -> tuple[Tensor, Tensor]:
    return a.new_empty((a.shape[0], b.shape[0])), a.new_empty((len(SEEN),), dtype=torch.float32)


torch.library.impl("dsc::mm_switch", "CompositeExplicitAutograd", mm_switch)
torch.library.register_fake("dsc::mm_switch", fake_mm_switch)
switch = torch.ops.dsc.mm_switch.default
