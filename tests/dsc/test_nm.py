"""Operators of N:M sparsity against NumPy and against products of all rows; the cost rule with a measurement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from dsc import nm, sparsity
from dsc.debug.capture import capture
from dsc.debug.source import Model
from dsc.options import Options
from dsc.passes.linears import find as linears
from dsc.passes.solve import sparsity as solve
from dsc.passes.sparsify_cost import times
from dsc.runtime.state import State
from dsc.target import find

scores = arrays(np.float32, (8, 16), elements=st.integers(0, 6).map(float))


@given(scores, st.sampled_from([(2, 4), (1, 4), (4, 4), (1, 2), (3, 8)]))
@settings(max_examples=30, deadline=None)
def test_masks_are_the_solvers(score: Any, pattern: tuple[int, int]) -> None:
    n, m = pattern
    found = nm.nm_mask(torch.from_numpy(score), torch.tensor(n), m, False)
    assert np.array_equal(found.numpy(), solve.nm_mask(score, n, m))


@given(scores)
@settings(max_examples=20, deadline=None)
def test_transposable_masks_are_the_solvers(score: Any) -> None:
    found = nm.nm_mask(torch.from_numpy(score), torch.tensor(2), 4, True)
    assert np.array_equal(found.numpy(), solve.transposable_mask(score))
    assert bool(nm.nm_mask(torch.from_numpy(score), torch.tensor(4), 4, True).all())


def test_the_patterns_are_the_solvers() -> None:
    assert np.array_equal(nm.tile_patterns(torch.device("cpu")).numpy(), np.array(solve.PATTERNS))


def test_refreshes_by_step_and_by_density() -> None:
    score, old = torch.rand(4, 8), nm.nm_mask(torch.rand(4, 8), torch.tensor(2), 4, False)
    fresh = nm.nm_mask(score, torch.tensor(2), 4, False)
    given = (torch.tensor(2), old)
    assert torch.equal(nm.nm_refresh(score, *given, torch.tensor(6), 3, 4, False), fresh)
    assert torch.equal(nm.nm_refresh(score, *given, torch.tensor(7), 3, 4, False), old)
    dense = nm.nm_refresh(score, torch.tensor(4), old, torch.tensor(7), 3, 4, False)
    assert bool(dense.all())
    assert torch.equal(nm.nm_refresh(score, torch.tensor(2), dense, torch.tensor(8), 3, 4, False), fresh)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95, 1.0])
def test_products_over_rows_that_are_alive(share: float) -> None:
    g, x, w = torch.randn(40, 8), torch.randn(40, 12), torch.randn(8, 12)
    g[torch.rand(40) >= share] = 0
    alive = nm.alive_rows(g, torch.tensor(0.0))
    assert torch.equal(alive, (g != 0).any(1))
    assert torch.allclose(nm.mm_over_rows(g, x, alive), g.T @ x, atol=1e-5)
    assert torch.allclose(nm.mm_of_rows(g, w, alive), g @ w, atol=1e-5)


def test_a_threshold_is_relative_and_what_is_no_number_stays() -> None:
    g = torch.tensor([[1.0, 0.0], [0.001, 0.0], [0.0, 0.0], [2.0, -1.0]])
    assert nm.alive_rows(g, torch.tensor(0.01)).tolist() == [True, False, False, True]
    assert nm.alive_rows(1e6 * g, torch.tensor(0.01)).tolist() == [True, False, False, True]
    g[1, 0] = torch.nan
    assert nm.alive_rows(g, torch.tensor(0.01)).all()


def test_a_measurement_overrules_the_model() -> None:
    net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).bfloat16()
    inputs = (torch.randn(8192, 1024).bfloat16(),)
    session = capture(Model("m", net, inputs), "h100", Options())
    (stage,) = [s for s in session.regions[0].stages if s.graph == "joint" and s.name == "canonicalize"]
    layer = linears(stage.gm)[0][0]
    asked = []

    def measure(kernel: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[float, float]:
        asked.append((kernel, m, n, k, dtype))
        return 1.0, 3.0

    found = times(layer, (2, 4), False, find("h100"), measure)
    assert asked == [("cusparselt", 8192, 4096, 1024, torch.bfloat16)]
    assert found.dense == 2.0 and found.sparse == pytest.approx(4.0, abs=0.01)  # no gradient of the input is wanted
    assert times(layer, (2, 4), False, replace(find("h100"), features=frozenset())).kernel == "masked"


def test_one_callback_for_precision_and_sparsity() -> None:
    net, state, heard = nn.Linear(8, 8), State(), []
    torch.compiler.reset()
    call = torch.compile(net, backend="dsc", options={"sparsity": {"layers": "all"}, "state": state})
    call(torch.randn(4, 8)).sum().backward()
    sparsity.tell(state, lambda step, numbers: heard.append((step, dict(numbers))))
    ((step, numbers),) = heard
    assert step == 1 and numbers["sparsity/density"] == 0.5
    assert {n.rpartition("/")[2] for n in numbers} == {
        "density",
        "flip_rate",
        "retained",
        "entropy",
        "coverage",
        "gated",
    }
