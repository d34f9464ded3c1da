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

from dsc import cost, flash_attention, ops
from dsc.target import Target
from dsc.torch_shim import optimization_hint

SHARES: Mapping[str, float] = {"flash": 1.0, "cudnn": 1.0, "efficient": 0.5, "triton": 0.7}
"""Kernel -> share of ``cost.EFFICIENCY["attention"]``."""
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
    products, launches = _products(kernel, _hint(query.shape[-1])), LAUNCHES.get(kernel, (1, 2))
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


@dataclass(frozen=True)
class Packed:
    """Attention over sequences of any length that lie one after the other."""

    query: tuple[int, int, int]
    """All tokens, heads, width of a head."""
    key: tuple[int, int, int]
    dtype: torch.dtype
    mean: int
    """Keys of a sequence, if all are as long as the others."""
    longest: int
    """Keys of the longest one."""
    causal: bool
    band: int | None
    """Keys that a query sees at most, if not all."""
    backward: bool


def packed(kernel: str, p: Packed, keys: int, target: Target) -> Spent:
    """One kernel and its backward, of sequences that have ``keys`` keys.

    ATen's flash kernel adds the gradient of its queries in memory, in fp32: that is cleared, added to and rounded.  It has
    keys' gradients for every head of queries, which are summed afterwards where heads are shared.  Triton's kernels
    read queries twice instead.  The memory-efficient kernel: as in ``fused``.  All count as many launches as Triton's:
    what is gained has to be gained in the kernels.
    """
    tokens, heads, width = p.query
    pairs = tokens * heads * (min(keys, p.band) if p.band is not None else keys) / (2 if p.causal else 1)
    q, k = (float(math.prod(size) * p.dtype.itemsize) for size in (p.query, p.key))
    sums, wide, shared = 4.0 * tokens * heads, 4.0 * tokens * heads * width, heads // p.key[1]
    moved = [2 * q + 2 * k + sums]
    if kernel == "flash":
        summed = 2 * k * (shared + 1) if shared > 1 else 0.0
        moved.append(5 * q + 4 * wide + 2 * k + 2 * k * shared + 3 * sums + summed)
    elif kernel == "triton":
        again = 2 * q + 2 * k + sums if _apart(width) else 0.0
        moved.append(7 * q + 6 * k + 5 * sums + again)
    else:
        moved.append(4 * q + 4 * k + 3 * sums)
    rate = _rate(p.dtype, target) * cost.EFFICIENCY["attention"] * SHARES[kernel]
    bandwidth = target.bandwidth * cost.BANDWIDTH_EFFICIENCY
    parts = list(zip(_products(kernel, width), moved, LAUNCHES["triton"]))[: 2 if p.backward else 1]
    seconds = sum(
        max(2.0 * n * pairs * width / rate, m / bandwidth) + calls * cost.LAUNCH_SECONDS["cuda"]
        for n, m, calls in parts
    )
    return Spent(seconds, sum(m for _, m, _ in parts))


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


def _products(kernel: str, width: int) -> tuple[int, int]:
    """Of [T, S] by D forward and backward: Triton's two loops make the scores twice, three loops thrice."""
    return (2, 5) if kernel != "triton" else (2, 8) if _apart(width) else (2, 7)


def _apart(width: int) -> bool:
    """Whether the gradients of keys and values have a launch each."""
    return width > flash_attention.APART // 2


def _rate(dtype: torch.dtype, target: Target) -> float:
    return next((target.peak[n] for n in cost.RATES[dtype] if n in target.peak), target.peak["fp32"])


def _hint(n: int | torch.SymInt) -> int:
    return n if isinstance(n, int) else optimization_hint(n)
