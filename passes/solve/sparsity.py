"""What sparsity decides, on plain numbers: masks, the decay of pruned weights, and how dense each layer may stay.

Arrays are NumPy's; nothing here knows of graphs or devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]

SIDE = 4
"""Of the tiles in which a transposable 2:4 mask is searched."""


def tile_patterns() -> tuple[tuple[bool, ...], ...]:
    """The 90 ways to keep 2 of 4 in every row and every column of a 4 x 4 tile, row by row.

    The count is that of Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", 2024, section 5.2.
    """
    rows = [row for row in itertools.product((True, False), repeat=SIDE) if sum(row) == 2]
    tiles = itertools.product(rows, repeat=SIDE)
    return tuple(sum(t, ()) for t in tiles if all(sum(row[j] for row in t) == 2 for j in range(SIDE)))


PATTERNS = tile_patterns()


def nm_mask(score: Floats, n: int, m: int) -> Bools:
    """Keep the ``n`` largest of every ``m`` along the last dimension; of equal scores the earlier one.

    ``score`` is [rows, columns], columns a multiple of ``m``.
    """
    groups = score.reshape(score.shape[0], -1, m)
    order = np.argsort(-groups, axis=-1, kind="stable")
    kept = np.zeros(groups.shape, dtype=bool)
    np.put_along_axis(kept, order[..., :n], True, axis=-1)
    return kept.reshape(score.shape)


def transposable_mask(score: Floats) -> Bools:
    """The 2:4 mask of the largest total score that is 2:4 along rows and along columns: exact, tile by tile.

    ``score`` is [rows, columns], both multiples of 4.  Of equal totals the first pattern wins.
    """
    rows, columns = score.shape
    tiles = score.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE).swapaxes(1, 2).reshape(-1, SIDE * SIDE)
    table = np.array(PATTERNS)
    best = table[(tiles @ table.T.astype(score.dtype)).argmax(axis=1)]
    found = best.reshape(rows // SIDE, columns // SIDE, SIDE, SIDE).swapaxes(1, 2)
    return np.ascontiguousarray(found.reshape(rows, columns))


# The decay of pruned weights.

SETTLED = 0.75
"""A flip rate has fallen if its last third is, on average, at most this share of its early peak."""


def settles(flips: Sequence[float]) -> bool:
    """Whether the share of mask entries that change a step falls after an early peak."""
    third = max(1, len(flips) // 3)
    return sum(flips[-third:]) / third <= SETTLED * max(flips[: 2 * third])


def choose_decay(curves: Mapping[float, Sequence[float]]) -> float:
    """The smallest decay whose flip rate settles; if none does, the one whose rate ends lowest.

    ``curves``: decay -> flip rate of each step of a short run.  The idea is that of Hu et al. 2024, section 4: too
    little decay lets masks flip without end, too much freezes them.
    """
    for decay in sorted(curves):
        if settles(curves[decay]):
            return decay
    return min(sorted(curves), key=lambda d: sum(curves[d][-max(1, len(curves[d]) // 3) :]))


# Density by layer.


@dataclass(frozen=True)
class Allocation:
    """How much of the kept work each layer gets."""

    shares: tuple[float, ...]
    """Of all kept operations, by layer; they sum to 1."""
    densities: tuple[float, ...]
    """Share of a layer's own operations that it keeps, from ``floor`` to 1."""
    entropy: float
    """Of the shares, over that of equal shares: 0 (one layer gets all) to 1."""
    temperature: float


def allocate(
    sensitivity: Sequence[float],
    work: Sequence[float],
    density: float,
    balance: float,
    floor: float = 0.0,
) -> Allocation:
    """Densities that favour sensitive layers, as far as a bound on their entropy lets them.

    1. Shares follow ``sensitivity ** (1 / t)`` at the smallest temperature t at which their entropy is at least
       ``balance`` times its largest value (by bisection; entropy grows with t).
    2. A layer's density is its share of the kept work over its own work, within [``floor``, 1]; what that cuts off
       goes to the other layers in the same proportions, so that ``density`` of all work is kept.

    ``sensitivity``: loss that pruning a layer costs, any unit; ``work``: its operations; all above 0.
    """
    shares, temperature = _tempered([max(s, 1e-30) for s in sensitivity], balance)
    densities = _fill([p / w for p, w in zip(shares, work)], work, density, floor)
    return Allocation(tuple(shares), tuple(densities), _entropy(shares), temperature)


def _tempered(scores: Sequence[float], balance: float) -> tuple[list[float], float]:
    low, high = 1e-2, 1e4
    if _entropy(_shares(scores, low)) >= balance:
        return _shares(scores, low), low
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _entropy(_shares(scores, middle)) < balance else (low, middle)
    return _shares(scores, high), high


def _shares(scores: Sequence[float], temperature: float) -> list[float]:
    logs = [math.log(s) / temperature for s in scores]
    top = max(logs)
    weights = [math.exp(x - top) for x in logs]
    return [w / sum(weights) for w in weights]


def _entropy(shares: Sequence[float]) -> float:
    if len(shares) < 2:
        return 1.0
    return -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))


def _fill(rates: Sequence[float], work: Sequence[float], density: float, floor: float) -> list[float]:
    """Densities in the proportions of ``rates``, within [floor, 1], that keep ``density`` of all work."""
    wanted = density * sum(work)
    rates = [max(r, 1e-12 * max(rates)) for r in rates]
    low, high = 0.0, 1.0 / min(rates)

    def at(scale: float) -> list[float]:
        return [min(1.0, max(floor, scale * r)) for r in rates]

    for _ in range(120):
        middle = (low + high) / 2
        kept = sum(d * w for d, w in zip(at(middle), work))
        low, high = (middle, high) if kept < wanted else (low, middle)
    return at(high)


def kept_of_groups(densities: Sequence[float], work: Sequence[float], density: float, m: int) -> list[int]:
    """How many of every ``m`` each layer keeps: densities rounded down, then up where the budget allows most.

    The kept work stays at or below ``density`` of all work, unless densities rounded down, but to one of ``m`` at
    least, are more already.
    """
    kept = [max(1, math.floor(d * m + 1e-9)) for d in densities]
    budget = density * sum(work) * m - sum(k * w for k, w in zip(kept, work))
    for i in sorted(range(len(kept)), key=lambda i: kept[i] - densities[i] * m):
        if kept[i] < m and work[i] <= budget + 1e-9:
            kept[i], budget = kept[i] + 1, budget - work[i]
    return kept


def dense_layers(shares: Sequence[float], work: Sequence[float], density: float) -> list[bool]:
    """With 2:4 alone to choose from: which layers stay dense, so that at most ``density`` of all work is kept.

    The layers with the largest share times work come first (greedy).
    """
    budget = (density - 0.5) * sum(work)
    dense = [False] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -shares[i] * work[i]):
        if work[i] / 2 <= budget + 1e-9:
            dense[i], budget = True, budget - work[i] / 2
    return dense
