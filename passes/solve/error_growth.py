"""How the errors of roundings add up: in quadrature while they are small, faster than that once they are not.

Small errors of different products have nothing to do with each other, so their squares add up to ``e**2``.  Behind an
exponential, as in attention, noise grows like that of a lognormal number: ``(exp(c * e**2) - 1) / c``, with one number
``c`` for a model; 0 is plain quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

LARGE = 0.3
"""Relative error from which on growth can be told from chance."""
MOST = 30.0
TRIED = 60
"""Values of growth that are compared."""


def total(errors: Iterable[float], growth: float = 0.0) -> float:
    """The error of all together; infinite where it leaves all bounds."""
    squares = sum(e * e for e in errors)
    if growth <= 0 or not math.isfinite(squares):
        return math.sqrt(squares)
    return math.sqrt(math.expm1(growth * squares) / growth) if growth * squares < 300 else math.inf


def quadrature(error: float, growth: float = 0.0) -> float:
    """What errors must add up to in quadrature, so that together they are ``error``: undoes ``total``."""
    return math.sqrt(math.log1p(growth * error * error) / growth) if growth > 0 else error


def fitted(pairs: Sequence[tuple[float, float]]) -> float:
    """The growth for which sums in quadrature (first of each pair) come nearest to what was measured (second).

    0 where no measured error is ``LARGE``.
    """
    usable = [(a, b) for a, b in pairs if a > 0 and b > 0 and math.isfinite(a) and math.isfinite(b)]
    if not any(b > LARGE for _, b in usable):
        return 0.0
    ratio = float((MOST / 0.05) ** (1 / (TRIED - 1)))
    return min((0.0, *(0.05 * ratio**i for i in range(TRIED))), key=lambda c: _distance(usable, c))


def _distance(pairs: Sequence[tuple[float, float]], growth: float) -> float:
    return sum(math.log(quadrature(b, growth) / a) ** 2 for a, b in pairs)
