"""Which formats a product may have on a target, and what it then costs: a roofline of products and of rounding operands.

The constants are those of torchao's roofline (``roofline_utils``): 78 % of the tensor cores' peak rate, 90 % of that for
kernels that scale inside, 92 % of the memory's bandwidth.  Operands are taken to lie in memory in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dsc import ops
from dsc.cost import LAUNCH_SECONDS
from dsc.passes.precision_sites import Operand, Site
from dsc.precision.formats import BLOCK, FORMATS, Format, dtype_of
from dsc.target import Target, find

PEAK_SHARE = 0.78
SCALED_SHARE = 0.9
BANDWIDTH_SHARE = 0.92
ALIGNED = 16
"""Elements of 8 bits that one access moves: rows must begin at multiples of it."""
FLOATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
WIDE = ("fp32", "tf32")


def planned_for(target: Target) -> Target:
    """The machine that times are modelled for: a CPU only emulates, for an H100 unless a GPU is named."""
    return target if target.kind == "cuda" else find("h100")


def available(f: Format, target: Target) -> bool:
    """Whether the target computes in the format: a CPU does all, by emulation."""
    return target.kind == "cpu" or f.rate in target.peak


def own(site: Site) -> str:
    """The name of the format that a product is in; empty if that is none of ours."""
    return FLOATS.get(ops.tensor(site.node).dtype, "")


def refusal(site: Site, f: Format, target: Target) -> str | None:
    """Why a product cannot or should not have a format on a target; None if it can."""
    reason = dtype_refusal(site, f)
    return _misfit(site, f, target) if reason is None and f.scaled and target.kind == "cuda" else reason


def dtype_refusal(site: Site, f: Format) -> str | None:
    """The same, whatever its sizes are."""
    if not (name := own(site)):
        return f"{str(ops.tensor(site.node).dtype).removeprefix('torch.')} products stay as they are"
    if any(site.node.kwargs.values()):
        return "it scales its result"
    if f.name == name:
        return f"it is in {name} already"
    if f.name == "tf32" and name != "fp32":
        return f"it is in {name} already, which is faster than tf32"
    if f.scaled and ops.tensor(site.node).dim() == 3:
        return "batched products have no 8-bit kernel"
    return None


def _misfit(site: Site, f: Format, target: Target) -> str | None:
    """Shapes whose rows are not aligned, or for which tiles of 128 waste more than 8 bits gain."""
    shape = (site.m, site.n, site.k)
    if odd := [s for s in shape if s % ALIGNED]:
        return f"shape {odd[0]} not a multiple of {ALIGNED}: rows of 8 bits would not be aligned"
    ours, theirs = seconds([site], {site.name: f}, target), seconds([site], {site.name: FORMATS["bf16"]}, target)
    if ours < theirs:
        return None
    if ragged := [s for s in shape if s % BLOCK]:
        return f"shape {ragged[0]} not a multiple of {BLOCK}: padding costs more than it gains"
    return f"to round its operands costs more than it gains ({ours * 1e6:.1f} us, {theirs * 1e6:.1f} us in bf16)"


@dataclass(frozen=True, slots=True)
class Rounded:
    """One matrix in one 8-bit form: what is shared between the products that read it."""

    key: object
    dtype: str
    grain: str
    elements: float


def rounded(o: Operand, f: Format, elements: float) -> Rounded:
    return Rounded(o.base, dtype_of(f, o.gradient), grain(o, f), elements)


def grain(o: Operand, f: Format) -> str:
    """Of an operand: blocks of a weight are tiles, so that both of its directions share them."""
    if f.grain == "block":
        return "128x128" if o.weight else "1x128"
    assert f.grain is not None
    return f.grain


def seconds(sites: Iterable[Site], formats: Mapping[str, Format], target: Target, scale: float = 1.0) -> float:
    """Modelled time of all products, each with its format (bf16 if none), operands that several read rounded once.

    ``scale`` is that of every side: 8 models layers of eight times the width with eight times the tokens.
    """
    target = planned_for(target)
    total, wanted = 0.0, dict[Rounded, set[bool]]()
    for s in sites:
        f = formats.get(s.name, FORMATS["bf16"])
        m, n, k = s.m * scale, s.n * scale, s.k * scale
        total += product_seconds(m, n, k, f, target) * s.batch
        if f.scaled:
            for o, elements in ((s.left, m * k), (s.right, n * k)):
                wanted.setdefault(rounded(o, f, elements), set()).add(o.turned)
    return total + sum(rounding_seconds(r, turns, target) for r, turns in wanted.items())


def product_seconds(m: float, n: float, k: float, f: Format, target: Target) -> float:
    """Of the product alone, tiles of 128 counted whole for 8-bit formats."""
    if f.scaled:
        m, n, k = (-(-x // BLOCK) * BLOCK for x in (m, n, k))
    rate = target.peak.get(f.rate, target.peak["fp32"]) * PEAK_SHARE * (SCALED_SHARE if f.scaled else 1.0)
    moved = (m * k + n * k) * f.nbytes + m * n * (4 if f.name in WIDE else 2)
    return max(2 * m * n * k / rate, moved / (target.bandwidth * BANDWIDTH_SHARE)) + LAUNCH_SECONDS[target.kind]


def rounding_seconds(r: Rounded, turns: set[bool], target: Target) -> float:
    return rounding_bytes(r, turns) * r.elements / (target.bandwidth * BANDWIDTH_SHARE) + LAUNCH_SECONDS[target.kind]


def rounding_bytes(r: Rounded, turns: set[bool]) -> float:
    """Bytes an element: 16 bits are read, again where a maximum must be known first, and 8 written for each direction."""
    reads = {"tensor": 2, "row": len(turns)}.get(r.grain, 1)
    scales = {"1x128": 4 / BLOCK, "128x128": 4 / BLOCK**2}.get(r.grain, 0.0)
    return 2 * reads + (1 + scales) * len(turns)
