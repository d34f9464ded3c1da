"""What attention costs on a GPU: as products and a softmax, as one of ATen's fused kernels, as Triton's.

Rates are estimates and were not measured: of ``cost.EFFICIENCY["attention"]``, the share that a flash kernel reaches.
Dao, "FlashAttention-2" (2023), section 4.1, has it 1.3 to 2.5 times as fast as Triton's form of it, and about twice as
fast as the kernels that ATen's memory-efficient attention comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from dsc import cost, ops
from dsc.target import Target
from dsc.torch_shim import optimization_hint

SHARES: Mapping[str, float] = {"flash": 1.0, "cudnn": 1.0, "efficient": 0.5, "triton": 0.7}
"""Kernel -> share of ``cost.EFFICIENCY["attention"]``."""
PRODUCTS: Mapping[str, tuple[int, int]] = {"triton": (2, 7)}
"""Products of [T, S] by D forward and backward: Triton's two loops make the scores twice.  Others: 2 and 5."""
LAUNCHES: Mapping[str, tuple[int, int]] = {"triton": (1, 3)}
"""Others: 1 and 2."""


@dataclass(frozen=True)
class Spent:
    """Of one attention, forward and backward together."""

    seconds: float
    bytes: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.bytes + other.bytes)

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:,.0f} us and {self.bytes / 1e6:,.1f} MB"


def fused(
    kernel: str, query: torch.Tensor, key: torch.Tensor, others: Iterable[torch.Tensor], causal: bool, backward: bool,
    target: Target,
) -> Spent:  # fmt: skip
    """One fused kernel and its backward.  ``others``: masks, which forward and each loop of the backward read."""
    pairs = math.prod(map(_hint, query.shape[:-1])) * _hint(key.shape[-2]) / (2 if causal else 1)
    products, launches = PRODUCTS.get(kernel, (2, 5)), LAUNCHES.get(kernel, (1, 2))
    rate = _rate(query.dtype, target) * cost.EFFICIENCY["attention"] * SHARES[kernel]
    masks = sum(map(cost.stored_bytes, others))
    q, k = (float(math.prod(map(_hint, t.shape)) * t.element_size()) for t in (query, key))
    sums = q / query.element_size() / max(_hint(query.shape[-1]), 1) * 4
    moved = [2 * q + 2 * k + sums + masks]
    if backward:
        moved.append(4 * q + 4 * k + 3 * sums + 2 * masks)
    flops = [2.0 * n * pairs * _hint(query.shape[-1]) for n in products]
    bandwidth = target.bandwidth * cost.BANDWIDTH_EFFICIENCY
    total = sum(
        max(f / rate, m / bandwidth) + n * cost.LAUNCH_SECONDS["cuda"] for f, m, n in zip(flops, moved, launches)
    )
    return Spent(total, sum(moved))


def apart(nodes: Sequence[Node], target: Target) -> Spent:
    """The nodes as they run without it: products alone, runs of all else between two of them as one kernel each."""
    spent, run = Spent(0.0, 0.0), list[Node]()
    for n in [*nodes, None]:
        if n is not None and cost.unit(n) != "matmul":
            run.append(n)
            continue
        if computing := [r for r in run if not (ops.is_view(r) or ops.info(r).kind == "item")]:
            moved = float(cost.bytes_of_group(computing))
            spent += Spent(cost.roofline({r: cost.flops(r) for r in computing}, moved, target), moved)
        run = []
        if n is not None:
            spent += Spent(cost.seconds(n, target), float(cost.bytes_moved(n)))
    return spent


def _rate(dtype: torch.dtype, target: Target) -> float:
    return next((target.peak[n] for n in cost.RATES[dtype] if n in target.peak), target.peak["fp32"])


def _hint(n: int | torch.SymInt) -> int:
    return n if isinstance(n, int) else optimization_hint(n)
