"""The knapsack of formats against all combinations."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
from hypothesis import given, settings

from dsc.passes.solve.precision import Option, front, solve

NUMBER = st.floats(0, 100, allow_nan=False)
GROUPS = st.lists(st.lists(st.builds(Option, NUMBER, NUMBER), min_size=1, max_size=4), max_size=5)


def brute(groups: list[list[Option]], limit: float) -> float | None:
    """The least cost within the limit."""
    costs = [sum(o.cost for o in c) for c in itertools.product(*groups) if sum(o.weight for o in c) <= limit]
    return min(costs, default=None)


@settings(max_examples=80, deadline=None)
@given(GROUPS, st.floats(0, 300))
def test_as_good_as_all_combinations(groups: list[list[Option]], limit: float) -> None:
    want, got = brute(groups, limit), solve(groups, limit)
    if want is None or got is None:
        assert want is None and got is None
        return
    assert sum(g[k].weight for g, k in zip(groups, got)) <= limit
    cost = sum(g[k].cost for g, k in zip(groups, got))
    # the solver holds the limit to 1e-6 or so: an optimum that lies on it to the last digit may be given up
    near = brute(groups, limit * (1 - 1e-5) - 1e-5)
    assert want - 1e-6 <= cost
    if near is not None:
        assert cost <= near + 1e-4


def test_only_options_that_nothing_beats_are_weighed() -> None:
    options = [Option(5, 1), Option(4, 2), Option(4, 3), Option(6, 0.5), Option(1, 9), Option(2, 9)]
    assert front(options) == [3, 0, 1, 4]


def test_nothing_to_choose_and_nothing_that_fits() -> None:
    assert solve([], 1.0) == ()
    assert solve([[Option(1, 2)]], 1.0) is None
