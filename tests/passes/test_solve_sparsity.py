"""Masks against brute force; decay and density on cases small enough to check by hand or by search."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dsc.passes.solve.sparsity import (
    PATTERNS,
    allocate,
    choose_decay,
    dense_layers,
    kept_of_groups,
    nm_mask,
    settles,
    transposable_mask,
)

scores = arrays(np.float64, (8, 8), elements=st.integers(0, 9).map(float))


def test_there_are_90_patterns() -> None:
    """All subsets of 8 of 16, tried one by one."""
    found = set()
    for kept in itertools.combinations(range(16), 8):
        tile = np.zeros(16, dtype=bool)
        tile[list(kept)] = True
        if (tile.reshape(4, 4).sum(0) == 2).all() and (tile.reshape(4, 4).sum(1) == 2).all():
            found.add(tuple(bool(x) for x in tile))
    assert set(PATTERNS) == found
    assert len(PATTERNS) == 90


@given(scores)
@settings(max_examples=25, deadline=None)
def test_transposable_masks_keep_the_most_that_can_be_kept(score: np.ndarray) -> None:
    mask = transposable_mask(score)
    for i, j in itertools.product(range(0, 8, 4), repeat=2):
        tile, kept = score[i : i + 4, j : j + 4], mask[i : i + 4, j : j + 4]
        assert (kept.sum(0) == 2).all() and (kept.sum(1) == 2).all()
        assert tile[kept].sum() == max(tile.reshape(-1)[list(p)].sum() for p in PATTERNS)


@given(scores, st.sampled_from([(2, 4), (1, 4), (3, 4), (1, 2), (4, 8), (4, 4)]))
@settings(max_examples=25, deadline=None)
def test_nm_masks_keep_the_largest(score: np.ndarray, pattern: tuple[int, int]) -> None:
    n, m = pattern
    groups, kept = score.reshape(-1, m), nm_mask(score, n, m).reshape(-1, m)
    assert (kept.sum(1) == n).all()
    for group, chosen in zip(groups, kept):
        best = max(itertools.combinations(range(m), n), key=lambda c: (sum(group[list(c)]), [-i for i in c]))
        assert group[chosen].sum() == group[list(best)].sum()
        assert all(i in np.flatnonzero(chosen) for i in range(m) if sum(group >= group[i]) <= n)


def test_of_equal_scores_the_earlier_one() -> None:
    assert nm_mask(np.ones((1, 4)), 2, 4).tolist() == [[True, True, False, False]]


def test_random_weights_keep_seven_tenths() -> None:
    weights = np.abs(np.random.default_rng(0).standard_normal((256, 512)))
    mask = transposable_mask(weights)
    assert mask.mean() == 0.5
    assert weights[mask].sum() / weights.sum() >= 0.70


def test_the_smallest_decay_whose_flips_settle() -> None:
    restless = [0.1, 0.2, 0.2, 0.2, 0.2, 0.2]
    calm = [0.1, 0.2, 0.15, 0.1, 0.05, 0.05]
    assert settles(calm) and not settles(restless)
    assert choose_decay({0.0: restless, 6e-5: restless, 2e-4: calm, 6e-4: calm}) == 2e-4
    assert choose_decay({6e-4: restless, 0.0: [0.2, 0.2, 0.19]}) == 0.0


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(0.1, 10)), min_size=2, max_size=6),
    st.floats(0.05, 0.999),
    st.floats(0.3, 0.9),
)
@settings(max_examples=60, deadline=None)
def test_allocations_keep_their_promises(layers: list[tuple[float, float]], balance: float, density: float) -> None:
    sensitivity, work = zip(*layers)
    found = allocate(sensitivity, work, density, balance, floor=0.05)
    assert sum(found.shares) == pytest.approx(1)
    assert found.entropy >= balance - 1e-6
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in found.shares if p) / math.log(len(layers)))
    assert all(0.05 <= d <= 1 for d in found.densities)
    assert sum(d * w for d, w in zip(found.densities, work)) == pytest.approx(density * sum(work), rel=1e-3)
    order = sorted(range(len(layers)), key=lambda i: sensitivity[i])
    assert [found.shares[i] for i in order] == sorted(found.shares)


def test_the_temperature_is_the_smallest_that_will_do() -> None:
    found = allocate([1, 2, 8, 0.1], [1, 1, 2, 2], 0.5, 0.9)
    assert found.entropy == pytest.approx(0.9, abs=1e-6)
    assert allocate([1, 1, 1], [1, 1, 1], 0.5, 0.9).shares == pytest.approx([1 / 3] * 3)


@given(st.lists(st.tuples(st.floats(0.05, 1), st.floats(0.1, 10)), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_whole_groups_stay_within_the_budget(layers: list[tuple[float, float]]) -> None:
    densities, work = zip(*layers)
    density = sum(d * w for d, w in layers) / sum(work)
    kept = kept_of_groups(densities, work, density, 8)
    assert all(1 <= k <= 8 for k in kept)
    least = sum(max(1, math.floor(d * 8 + 1e-9)) * w for d, w in layers)
    assert sum(k * w for k, w in zip(kept, work)) <= max(density * sum(work) * 8, least) + 1e-6


def test_dense_layers_by_share_and_work() -> None:
    assert dense_layers([0.1, 0.6, 0.3], [1, 1, 2], 0.5) == [False, False, False]
    assert dense_layers([0.1, 0.6, 0.3], [1, 1, 2], 0.7) == [False, True, False]
    assert dense_layers([0.1, 0.6, 0.3], [1, 1, 2], 0.75) == [True, True, False]
    assert dense_layers([0.1, 0.6, 0.3], [1, 1, 2], 1.0) == [True, True, True]
