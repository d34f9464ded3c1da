"""When two answers are the same: the written rules under which dsc may differ from eager, and no others.

Never different: number of results, dtypes, shapes, strides (of dimensions longer than 1), ``requires_grad``, which
gradients are None, who shares memory with whom and at which distance, what inputs hold after the call, and the state
of the random generator.  Numbers are compared one by one, with a run of the program in float64 as the truth:

1. *Last place.*  Two units in the last place of eager's number, in its dtype.
2. *Roundings on the way.*  ``SPREAD`` times as far as the number moves in float64 when every value is off by one
   rounding of its own dtype wherever it is read (``dsc.debug.fuzz.noise``).  This covers sums in another order,
   fused multiply-adds, a library's exp against ours, a 16-bit rounding that falls the other way, cancellation, and
   comparisons decided by a last bit; integers and bools have no other rule than this one.  What that does not explain
   is tried with roundings inside of operators too (``dsc.debug.fuzz.inside``): the backward of a softmax cancels there,
   and so do partial sums that grow large before they come back.  Last, eager itself runs with such roundings, in the
   dtypes of the program, and ``SPREAD`` times as far as that moves its numbers is allowed: 16-bit values become equal or
   not by a last bit, which ``==`` sees, and ``log(x + 1)`` within a line tells how ``x + 1`` was rounded.
3. *Nearer to the truth.*  As far from float64 as eager's number is, or less, or float64's own infinity: ATen sums some
   16-bit values in 16 bits (gradients of layer norm's parameters, ``prod``, ``cumsum``), kernels never do; its
   vectorised ``gelu(inf)`` is NaN, while its scalar one, which it takes for strided tensors, is inf.
4. *Overflow on the way.*  Where eager's number is finite and float64's is not, or the other way round, or where
   roundings on the way decide it, an intermediate value ran out of its dtype's range; where that happens first
   depends on the order of operations.

Infinities are otherwise equal with their signs, and NaN is NaN.  A sign of zero and a NaN's bits are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from dsc.debug.fuzz.observe import Seen

SPREAD = 4.0
How = Literal["exact", "inside", "own"]
"""Where a run rounds: between lines, in float64; inside of operators too; between lines, in the program's own dtypes."""

ROUNDS: tuple[tuple[int, How], ...] = ((8, "exact"), (32, "exact"), (128, "exact"), (32, "inside"), (64, "own"))
"""Runs with roundings before a difference counts as unexplained."""

Sampler = Callable[[int, int, How], list[Seen]]
"""(how many runs, seed, where they round) -> those runs."""


def difference(got: Seen, want: Seen, exact: Seen, sample: Sampler) -> str | None:
    """What the rules do not allow, in a line, or None."""
    return unlike(got, want) or _by_rounding(got, want, exact, sample)


def unlike(got: Seen, want: Seen) -> str | None:
    """What numbers do not show."""
    if len(got.results) != len(want.results) or len(got.gradients) != len(want.gradients):
        return f"{len(got.results)} results and {len(got.gradients)} gradients instead of {len(want.results)} and {len(want.gradients)}"
    for i, (a, b) in enumerate(zip(got.values, want.values)):
        if a is None or b is None:
            if a is not b:
                return f"{want.name(i)}: {'None' if a is None else 'a tensor'} instead of {'None' if b is None else 'a tensor'}"
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{want.name(i)}: {a.dtype}{tuple(a.shape)} instead of {b.dtype}{tuple(b.shape)}"
        if i < len(want.results) and not same_strides(a, b):
            return f"{want.name(i)}: strides {a.stride()} instead of {b.stride()} of {tuple(b.shape)}"
    if got.wants_grad != want.wants_grad:
        return f"requires_grad {got.wants_grad} instead of {want.wants_grad}"
    if got.shared != want.shared:
        return f"memory shared by {got.shared} instead of {want.shared} (of results, then inputs)"
    return None


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() == 0 or all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride()) if n > 1)


def _by_rounding(got: Seen, want: Seen, exact: Seen, sample: Sampler) -> str | None:
    zeros: list[torch.Tensor | None] = [None] * len(want.values)
    open_ = [i for i in range(len(want.values)) if _unexplained(got, want, exact, i, None) is not None]
    spread = zeros
    for seed, (count, how) in enumerate(ROUNDS if open_ else ()):
        runs, centre = sample(count, seed, how), want if how == "own" else exact
        for i in open_:
            spread[i] = _widest(spread[i], centre.values[i], [r.values[i] for r in runs])
        open_ = [i for i in open_ if _unexplained(got, want, exact, i, spread[i]) is not None]
        if not open_:
            return None
    return _unexplained(got, want, exact, open_[0], spread[open_[0]]) if open_ else None


def _widest(
    before: torch.Tensor | None, middle: torch.Tensor | None, runs: Sequence[torch.Tensor | None]
) -> torch.Tensor | None:
    if middle is None:
        return None
    centre = middle.double()
    out = torch.zeros_like(centre) if before is None else before
    for run in runs:
        assert run is not None
        moved = (run.double() - centre).abs()
        # roundings decide whether it is a number at all: any answer will do
        moved = torch.where(run.double().isfinite() != centre.isfinite(), torch.inf, moved)
        out = torch.maximum(out, moved.nan_to_num(0.0, posinf=torch.inf))
    return out


def last_place(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One unit in the last place of the numbers in ``x`` (float64) as ``dtype`` holds them."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.tiny, max=info.max))
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)


def _unexplained(got: Seen, want: Seen, exact: Seen, i: int, spread: torch.Tensor | None) -> str | None:
    a, b, c = got.values[i], want.values[i], exact.values[i]
    if a is None or b is None or c is None or a.numel() == 0:
        return None
    dtype = b.dtype
    a, b, c = a.double(), b.double(), c.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    if bool(equal.all()):
        return None
    room = torch.zeros_like(b) if spread is None else SPREAD * spread
    if dtype.is_floating_point:
        room = room + 2 * last_place(b.nan_to_num(0.0, 0.0, 0.0), dtype)
        decided = b.isfinite() != c.isfinite()
    else:
        room = torch.where(room > 0, torch.inf, 0.0)
        decided = torch.zeros_like(equal)
    decided |= room == torch.inf
    finite = a.isfinite() & b.isfinite() & c.isfinite()
    away = (a - b).abs()
    near = (a == c) | finite & ((away <= room) | ((a - c).abs() <= torch.maximum((b - c).abs(), room)))
    bad = ~(equal | decided | near)
    if not bool(bad.any()):
        return None
    at = int(torch.where(bad, away.nan_to_num(torch.inf, torch.inf), -1.0).argmax())
    x, y, z = (float(t.reshape(-1)[at]) for t in (a, b, c))
    return f"{want.name(i)}: {x!r} instead of {y!r}, {z!r} in float64, at {at}; {int(bad.sum())} of {b.numel()} differ"
