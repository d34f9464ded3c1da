"""Operators of N:M sparsity: masks, what is known of them, and products that skip rows of zeros.

They are functions of tensors without effects: what lives between steps goes in and comes out (``dsc.live``).
Importing this module registers them.  How many of every M stay is a tensor, so that it can change without recompilation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "nm_mask(Tensor score, Tensor keep, int m, bool transposable) -> Tensor",
    "nm_refresh(Tensor score, Tensor keep, Tensor old, Tensor step, int every, int m, bool transposable) -> Tensor",
    "nm_stats(Tensor weight, Tensor mask, Tensor old, Tensor stats) -> Tensor",
    "nm_keep(Tensor keep, Tensor step, Tensor dense_from, int m) -> Tensor",
    "alive_rows(Tensor x, Tensor threshold) -> Tensor",
    "mm_over_rows(Tensor g, Tensor x, Tensor alive) -> Tensor",
    "mm_of_rows(Tensor g, Tensor w, Tensor alive) -> Tensor",
):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]

STATS = ("flips", "all_flips", "refreshes", "kept", "magnitude", "kept_magnitude")
"""What ``nm_stats`` counts of one layer, in its order: of the last mask, but ``all_flips`` and ``refreshes``."""

FORM = ("n", "m", "transposable", "refresh", "importance")
"""What a state keeps of how a layer's masks are made, as whole numbers; importance is a place in IMPORTANCES."""
IMPORTANCES = ("magnitude", "wanda", "fisher", "taylor", "hessian")

DENSE_ROWS = 0.9
"""Share of rows that are not skipped from which on a product of all rows is the faster one."""


def nm_mask(score: Tensor, keep: Tensor, m: int, transposable: bool) -> Tensor:
    """Where the ``keep`` largest of every ``m`` along rows are: [rows, columns] bool; ties go to the earlier column.

    ``score`` [rows, columns], columns a multiple of ``m``; ``keep`` a whole number without dimensions: ``m`` keeps all.
    ``transposable``: the mask with 2 of 4 along rows and along columns that keeps the largest sum (``m`` is 4, rows a
    multiple of 4); any ``keep`` below 4 means 2.
    """
    if transposable:
        return tile_mask(score) | (keep >= m)
    rows, columns = score.shape
    parts = score.reshape(rows, columns // m, m).unbind(-1)
    out = torch.empty(rows, columns // m, m, dtype=torch.bool, device=score.device)
    for i, own in enumerate(parts):
        rank = torch.zeros(own.shape, dtype=torch.int8, device=score.device)
        for j, other in enumerate(parts):
            if i != j:
                rank += (other >= own) if j < i else (other > own)
        torch.lt(rank, keep, out=out[..., i])
    return out.view(rows, columns)


def nm_score(weight: Tensor, scale: Tensor | None, importance: str) -> Tensor:
    """What masks compare: [N, K], not negative.  ``scale``: squares of inputs [K], or statistics of gradients [N, K]."""
    size = weight.abs()
    if importance == "magnitude" or scale is None:
        return size
    if importance == "wanda":
        return size * scale.sqrt()
    return size * scale.abs() if importance == "taylor" else size * size * scale.clamp_min(0)


def tile_mask(score: Tensor) -> Tensor:
    """The transposable 2:4 mask of the largest sum, by trying all 90 patterns of every 4 x 4 tile."""
    rows, columns = score.shape
    patterns = tile_patterns(score.device)
    tiles = score.reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    wide = torch.promote_types(tiles.dtype, torch.float32)
    best = (tiles.to(wide) @ patterns.T.to(wide)).argmax(1)
    found = patterns[best].reshape(rows // 4, columns // 4, 4, 4).transpose(1, 2)
    return found.reshape(rows, columns)


@lru_cache
def tile_patterns(device: torch.device) -> Tensor:
    """[90, 16] bool: all tiles with 2 of 4 in every row and every column."""
    codes = torch.arange(1 << 16)
    tiles = (codes[:, None] >> torch.arange(15, -1, -1) & 1).bool().view(-1, 4, 4)
    fit = (tiles.sum(1) == 2).all(1) & (tiles.sum(2) == 2).all(1)
    return tiles[fit].view(-1, 16).flip(0).to(device)


def nm_refresh(
    score: Tensor, keep: Tensor, old: Tensor, step: Tensor, every: int, m: int, transposable: bool
) -> Tensor:
    """A new mask at every ``every``-th step, counted from 0 by ``step``, else the ``old`` one.

    Where ``old`` is not as dense as ``keep`` asks for, it is made anew at any step.  That looks at one group of it, for
    which a GPU is waited for.
    """
    if int(step) % every == 0 or not _as_dense(old, int(keep), m, transposable):
        return nm_mask(score, keep, m, transposable)
    return old.clone()


def _as_dense(mask: Tensor, keep: int, m: int, transposable: bool) -> bool:
    wanted = m if keep >= m else 2 if transposable else keep
    first = mask[:m, :m].sum() if transposable else mask[:1, :m].sum()
    return int(first) == wanted * (m if transposable else 1)


def nm_stats(weight: Tensor, mask: Tensor, old: Tensor, stats: Tensor) -> Tensor:
    """The six numbers of STATS after one more mask, float64, from those before."""
    magnitude = weight.abs()
    flips = (mask != old).sum() * (stats[2] > 0)  # the first mask has none before it
    kept = torch.where(mask, magnitude, 0)
    values = (
        flips, stats[1] + flips, stats[2] + 1, mask.sum(),
        magnitude.sum(dtype=torch.float32), kept.sum(dtype=torch.float32),
    )  # fmt: skip
    return torch.stack([v.to(torch.float64) for v in values])


def alive_rows(x: Tensor, threshold: Tensor) -> Tensor:
    """[M] bool: rows of ``x`` [M, N] whose largest element is above ``threshold`` times the root mean square of those.

    A threshold of 0 gates rows of zeros alone.  A row that is not a number counts as alive.
    """
    size = x.abs().amax(1).float()
    return ~(size <= threshold * size.square().mean().sqrt())


def mm_over_rows(g: Tensor, x: Tensor, alive: Tensor) -> Tensor:
    """``g.T @ x`` over the rows that are alive: [M, N], [M, K] -> [N, K]."""
    rows = alive.nonzero().squeeze(1)
    if len(rows) > DENSE_ROWS * len(alive):
        return (g if len(rows) == len(alive) else masked_rows(g, alive)).T @ x
    return g[rows].T @ x[rows]


def mm_of_rows(g: Tensor, w: Tensor, alive: Tensor) -> Tensor:
    """``g @ w``, zeros where a row is not alive: [M, N], [N, K] -> [M, K]."""
    rows = alive.nonzero().squeeze(1)
    if len(rows) > DENSE_ROWS * len(alive):
        return (g if len(rows) == len(alive) else masked_rows(g, alive)) @ w
    return g.new_zeros(g.shape[0], w.shape[1]).index_copy_(0, rows, g[rows] @ w)


def masked_rows(g: Tensor, alive: Tensor) -> Tensor:
    """``g`` with zeros in the rows that are not alive."""
    return torch.where(alive[:, None], g, 0)


def nm_keep(keep: Tensor, step: Tensor, dense_from: Tensor, m: int) -> Tensor:
    """``keep``, or ``m`` from step ``dense_from`` on (never, if that is negative): whole numbers on the CPU."""
    dense = 0 <= int(dense_from) <= int(step)
    return keep.new_tensor(m) if dense else keep.clone()


# On a GPU, counting rows would wait for it: gated rows are multiplied as zeros.
_OPS = {
    "nm_mask": (nm_mask, nm_mask),
    "nm_refresh": (nm_refresh, nm_refresh),
    "nm_stats": (nm_stats, nm_stats),
    "alive_rows": (alive_rows, alive_rows),
    "mm_over_rows": (mm_over_rows, lambda g, x, alive: masked_rows(g, alive).T @ x),
    "mm_of_rows": (mm_of_rows, lambda g, w, alive: masked_rows(g, alive) @ w),
    "nm_keep": (nm_keep, nm_keep),
}
_FAKES = {
    "nm_mask": lambda score, keep, m, transposable: score.new_empty(score.shape, dtype=torch.bool),
    "nm_refresh": lambda score, *_: score.new_empty(score.shape, dtype=torch.bool),
    "nm_stats": lambda weight, mask, old, stats: stats.new_empty(stats.shape),
    "alive_rows": lambda x, threshold: x.new_empty(x.shape[0], dtype=torch.bool),
    "mm_over_rows": lambda g, x, alive: g.new_empty(g.shape[1], x.shape[1]),
    "mm_of_rows": lambda g, w, alive: g.new_empty(g.shape[0], w.shape[1]),
    "nm_keep": lambda keep, *_: keep.new_empty(()),
}
for _name, (_cpu, _cuda) in _OPS.items():
    LIBRARY.impl(_name, _cpu, "CPU")  # type: ignore[no-untyped-call]
    LIBRARY.impl(_name, _cuda, "CUDA")  # type: ignore[no-untyped-call]
    LIBRARY.impl(_name, _FAKES[_name], "Meta")  # type: ignore[no-untyped-call]
