"""Tiles in which a GPU multiplies matrices, and which one suits a shape: the model behind schedules and decisions.

A tile of m rows and n columns is a program; a multiprocessor works on one at a time, as if all had one or none
(waves).  Of the rate that the largest tile reaches, another has the share

    useful points / points of all waves  x  square root of (m n / (m + n)) / 64

The second factor stands for the operands that a tile loads for each product; it is a rule of thumb, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SMS = 128
"""Multiprocessors in the model of schedules, which are the same for A100 (108) and H100 (132)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Points of each side, warps of a program, and how many steps ahead it loads."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that operands on the way take."""
        return self.stages * (self.m + self.n) * self.k * itemsize

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}, {self.warps} warps, {self.stages} stages"


def _tiles(k: int) -> tuple[Tile, ...]:
    """Of 64 rows at least: fewer leave sm_90's matrix unit unused."""
    return (Tile(128, 128, k, 8, 3), Tile(128, 64, k, 4, 3), Tile(64, 128, k, 4, 3), Tile(64, 64, k, 4, 4))


TILES: Mapping[str, tuple[Tile, ...]] = {
    "bf16": _tiles(64),
    "f16": _tiles(64),
    "tf32": _tiles(32),
    "f32": (Tile(64, 64, 16, 4, 2), Tile(64, 32, 16, 4, 2)),
}
"""Format of the operands -> candidates.  fp32 has no matrix unit: its sums lie in the registers of the threads."""
WIDE: Mapping[str, tuple[Tile, ...]] = {
    "bf16": (Tile(64, 256, 64, 8, 3), *_tiles(64)[:1]),
    "f16": (Tile(64, 256, 64, 8, 3), *_tiles(64)[:1]),
    "tf32": (Tile(64, 256, 32, 8, 3), *_tiles(32)[:1]),
    "f32": (Tile(64, 64, 16, 4, 2),),
}
"""The same where a tile computes its rows first: few columns of tiles compute them again.  Widest first."""
LEAN: Mapping[str, tuple[Tile, ...]] = {form: tuple(t for t in tiles if t.n <= 64) for form, tiles in TILES.items()}
"""The same where random numbers are drawn behind the sums: of wider tiles they do not fit the registers on sm_90."""
ITEMSIZE: Mapping[str, int] = {"bf16": 2, "f16": 2, "tf32": 4, "f32": 4}


def tiles(t: Tile, batch: int, m: int, n: int) -> int:
    """Of a product of these sizes."""
    return batch * -(-m // t.m) * -(-n // t.n)


def share(t: Tile, batch: int, m: int, n: int, sms: int = SMS) -> float:
    """Of the rate of good kernels, for a product of these sizes."""
    waves = -(-tiles(t, batch, m, n) // sms)
    full = batch * m * n / (waves * sms * t.m * t.n)
    return full * reuse(t)


def reuse(t: Tile) -> float:
    """The second factor."""
    return min(1.0, math.sqrt(t.m * t.n / (t.m + t.n) / 64))


def ranked(
    batch: int | None,
    m: int | None,
    n: int | None,
    form: str,
    rows: bool = False,
    limit: int | None = None,
    lean: bool = False,
) -> Iterator[Tile]:
    """Candidates whose operands fit ``limit`` bytes of shared memory, best first; None is a size not known: many.

    With ``rows`` a tile computes its rows: what makes the fewest columns of tiles is best.  ``lean``: see ``LEAN``.
    """
    many = 1 << 14
    sizes = (batch or 1, m or many, n or many)
    fit = [
        t
        for t in (WIDE if rows else LEAN if lean else TILES)[form]
        if limit is None or t.shared(ITEMSIZE[form]) <= limit
    ]
    if rows:
        yield from sorted(fit, key=lambda t: (-(-sizes[2] // t.n), t.n))
    else:
        yield from sorted(fit, key=lambda t: -share(t, *sizes))


RATE: Mapping[str, float] = {"bf16": 200e12, "f16": 200e12, "tf32": 100e12, "f32": 12e12}
"""Operations a second of good kernels on an A100, where schedules are weighed against memory and launches: estimates."""
PARTS_BANDWIDTH = 3e12
"""Bytes a second of sums on the way through its second-level cache."""
LAUNCH = 3e-6
MOST_PARTS, LEAST_STEPS = 32, 4
"""Pieces of a contraction, and steps of its loop that a piece has."""
WORTH = 0.8
"""Share of the time of a whole product below which one in pieces is taken."""


def seconds(t: Tile, parts: int, batch: int, m: int, n: int, k: int, form: str) -> float:
    """Of a product whose contraction is in so many parts, modelled: they fill more multiprocessors, and are added up."""
    alone = 2.0 * batch * m * n * k / (RATE[form] * share(t, batch * parts, m, n))
    return alone if parts == 1 else alone + workspace(parts, batch, m, n) / PARTS_BANDWIDTH + LAUNCH


def workspace(parts: int, batch: int, m: int, n: int) -> float:
    """Bytes of the parts' sums, written and read."""
    return 2.0 * 4 * parts * batch * m * n


def split(
    batch: int,
    m: int,
    n: int,
    k: int,
    form: str,
    along: int | None = None,
    limit: int | None = None,
    lean: bool = False,
) -> list[tuple[Tile, int]]:
    """Tiles and numbers of equal parts in which the contraction may be cut, best first, a tile once.

    ``along``: the extent of its axis that is cut.
    """
    found = []
    for t in ranked(batch, m, n, form, limit=limit, lean=lean):
        counts = [
            s
            for s in range(2, MOST_PARTS + 1)
            if (along or k) % s == 0 and k // s % t.k == 0 and k // s >= LEAST_STEPS * t.k
        ]
        if counts:
            found.append((t, min(counts, key=lambda s: seconds(t, s, batch, m, n, k, form))))
    return sorted(found, key=lambda x: seconds(x[0], x[1], batch, m, n, k, form))


def chosen(
    batch: int, m: int, n: int, k: int, form: str, along: int | None = None, lean: bool = False
) -> tuple[Tile, int]:
    """The best tile and number of parts: 1 unless more are modelled to be clearly faster."""
    whole = best(batch, m, n, form, lean=lean)
    cut = split(batch, m, n, k, form, along, lean=lean)
    worth = WORTH * seconds(whole, 1, batch, m, n, k, form)
    return cut[0] if cut and seconds(*cut[0], batch, m, n, k, form) < worth else (whole, 1)


def best(batch: int | None, m: int | None, n: int | None, form: str, rows: bool = False, lean: bool = False) -> Tile:
    return next(ranked(batch, m, n, form, rows, lean=lean))
