"""How errors add up: in quadrature, or faster, and what is fitted to measured sums."""

from __future__ import annotations

import math

import pytest

from dsc.passes.solve.error_growth import LARGE, fitted, quadrature, total


@pytest.mark.parametrize("growth", [0.0, 0.5, 4.0])
def test_sums_are_undone(growth: float) -> None:
    for errors in ([0.01, 0.02, 0.02], [0.4, 0.3], [1.2]):
        assert quadrature(total(errors, growth), growth) == pytest.approx(math.hypot(*errors))
    assert total([3.0, 4.0]) == 5.0
    assert total([1e-3], growth) == pytest.approx(1e-3, rel=1e-5)  # small errors know no growth


def test_growth_is_found_in_what_was_measured() -> None:
    added = [0.01, 0.1, 0.4, 0.8, 1.1]
    assert fitted([(a, total([a], 2.5)) for a in added]) == pytest.approx(2.5, rel=0.1)
    assert fitted([(a, a) for a in added]) == 0.0
    assert fitted([(0.01, LARGE / 2)]) == 0.0  # whatever this is, it is no growth
    assert fitted([(0.5, math.inf), (math.nan, 1.0), (0.0, 0.0)]) == 0.0


def test_what_leaves_all_bounds_is_infinite() -> None:
    assert total([30.0], 4.0) == math.inf
    assert total([math.inf], 1.0) == math.inf
