"""What an allocator reserves: no two values that are alive at one time overlap, and holes are used again."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.fragments import ALIGN, Heap, reserved
from dsc.liveness import Live, Profile


def profile(spans: list[tuple[int, int, int]], steps: int = 8) -> Profile:
    values = tuple(Live(f"v{i}", n, a, max(a, b), "temporary") for i, (n, a, b) in enumerate(spans))
    alive = [sum(v.nbytes for v in values if v.first <= t <= v.last) for t in range(steps)]
    return Profile(tuple((f"s{t}", n) for t, n in enumerate(alive)), values)


SPANS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7), st.integers(0, 7)), max_size=12)


@given(SPANS)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_no_less_than_the_peak_and_no_more_than_all(spans: list[tuple[int, int, int]]) -> None:
    spans = [(n * ALIGN, a, b) for n, a, b in spans]
    found = profile(spans)
    assert found.peak <= reserved(found) <= sum(n for n, _, _ in spans)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=40))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_values_never_overlap(moves: list[tuple[bool, int]]) -> None:
    heap, held = Heap(), []
    for take, n in moves:
        if take or not held:
            start = heap.take(n)
            assert all(start + n <= s or s + m <= start for s, m in held)
            held.append((start, n))
        else:
            heap.give(*held.pop(n % len(held)))
    for s, n in held:
        heap.give(s, n)
    assert heap.holes in ([], [(0, heap.end)])


def test_a_hole_that_is_too_small_costs_its_bytes() -> None:
    a, b, c = (n * ALIGN for n in (1, 2, 2))
    assert reserved(profile([(a, 0, 0), (b, 0, 7), (c, 2, 3)])) == a + b + c
    assert profile([(a, 0, 0), (b, 0, 7), (c, 2, 3)]).peak == b + c
