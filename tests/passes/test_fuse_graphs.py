"""Groups never join around a third (the bits that say what reaches what, against a walk over all paths), nor lose copies."""

import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsc.domain import Space
from dsc.errors import DscWarning
from dsc.passes.fuse_grow import cyclic, find_below, join
from dsc.passes.fuse_web import Unit, Web, link


def reaches(web: Web, start: int, end: int) -> bool:
    """By a path through a third unit."""
    stack, seen = [s for s in web.units[start].succs if s != end], set[int]()
    while stack:
        i = stack.pop()
        if end in web.units[i].succs:
            return True
        fresh = web.units[i].succs - seen
        seen |= fresh
        stack += fresh
    return False


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
)
def test_joining_makes_no_cycle(size: int, edges: list[tuple[int, int]], joins: list[tuple[int, int]]) -> None:
    web = Web({i: Unit(i, [], Space(()), low=i) for i in range(size)}, {}, {}, {}, set(), [], {})
    for i, j in edges:
        if max(i, j) < size:
            link(web, min(i, j), max(i, j))
    find_below(web)
    for i, j in joins:
        if i == j or i not in web.units or j not in web.units:
            continue
        a, b = web.units[i], web.units[j]
        expected = reaches(web, i, j) or reaches(web, j, i)
        assert cyclic(web, a, b) == expected
        if not expected:
            join(web, a, b, Space(()))
    assert not any(i in web.units[i].succs or reaches(web, i, i) for i in web.units)


def test_copies_take_the_views_between_with_them() -> None:
    """A table that costs less to make again than to write, with a view inside, read on both sides of products."""

    def f(x: Tensor, w: Tensor, rates: Tensor) -> Tensor:
        places = torch.arange(x.shape[0]).add(1)[:, None].to(torch.float32)
        table = (places * rates).cos()[:, None, :]  # smaller than what it is multiplied with: no common loop nest
        for _ in range(3):
            x = torch.tanh(x.view(64, 2, 16) * table).view(64, 32) @ w
        return x

    inputs = (torch.randn(64, 32), torch.randn(32, 32) / 6, torch.rand(16))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DscWarning)
        got = torch.compile(f, backend="dsc")(*inputs)
    torch.testing.assert_close(got, f(*inputs))
