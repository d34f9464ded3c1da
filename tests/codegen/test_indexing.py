"""Views as index maps, against torch's own views."""

import math

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.codegen.indexing import Index, reshape, row_major

FACTORS = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5)


def shapes(factors: list[int], cuts: list[bool]) -> tuple[int, ...]:
    """The factors, joined where there is no cut."""
    out, run = [], 1
    for f, cut in zip(factors, cuts):
        run *= f
        if cut:
            out.append(run)
            run = 1
    return (*out, run)


@given(FACTORS, st.lists(st.booleans(), min_size=5, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_reshape_reads_the_element_that_torch_puts_there(f: list[int], a: list[bool], b: list[bool]) -> None:
    new, old = shapes(f, a), shapes(f, b)
    symbols = [sympy.Symbol(f"p{i}", integer=True, nonnegative=True) for i in range(len(new))]
    index = reshape(tuple(symbols), new, old, dict(zip(symbols, new)))
    x = torch.arange(math.prod(old)).view(old)
    y = x.view(new)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in new)).view(-1, len(new)).tolist():
        at = dict(zip(symbols, place))
        assert x[at_index(index, at)] == y[tuple(place)]


def at_index(index: Index, at: dict[sympy.Symbol, int]) -> tuple[int, ...]:
    return tuple(int(sympy.sympify(e).subs(at)) for e in index)


def test_splitting_a_dimension_leaves_no_division() -> None:
    b, t, c = (sympy.Symbol(n, integer=True, nonnegative=True) for n in "btc")
    index = reshape((b * 256 + t, c), (1024, 384), (4, 256, 384), {b: 4, t: 256, c: 384})
    assert index == (b, t, c)


def test_symbolic_sizes() -> None:
    s = sympy.Symbol("s0", integer=True, positive=True)
    p, q = (sympy.Symbol(n, integer=True, nonnegative=True) for n in "pq")
    assert reshape((p, q), (s, 8), (s, 2, 4), {p: s, q: 8})[0] == p
    assert row_major((s, 8, 2)) == (16, 2, 1)
