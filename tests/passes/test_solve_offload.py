"""Which values to move away, on plain numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.passes.solve.offload import Event, Item, Placed, Step, choose, elapsed, place

FORWARD, BACKWARD = 6, 6


def step(seconds: float = 1.0) -> list[Step]:
    """Values of 10 bytes are made one a step, and die in the reverse order."""
    alive = [10 * (i + 1) for i in range(FORWARD)] + [10 * (FORWARD - i) for i in range(BACKWARD)]
    return [Step(seconds, a) for a in alive]


ITEMS = [Item(f"v{i}", 10, i, i, FORWARD + BACKWARD - 1 - i) for i in range(FORWARD)]


def alive(steps: list[Step], placed: tuple[Placed, ...]) -> list[int]:
    now = [s.alive for s in steps]
    for p in placed:
        for t in range(p.lands + 1, p.fetched):
            now[t] -= p.item.nbytes
    return now


@pytest.mark.parametrize(("budget", "count"), [(60, 0), (50, 1), (40, 2), (30, 3)])
def test_the_first_ones_made_go_and_no_more_than_needed(budget: int, count: int) -> None:
    found = choose(step(), FORWARD, ITEMS, budget, 20.0)
    assert found is not None
    assert [p.item.name for p in found] == [f"v{i}" for i in range(count)]
    assert max(alive(step(), found)) <= budget


def test_what_cannot_be_met() -> None:
    assert choose(step(), FORWARD, ITEMS, 5, 20.0) is None
    assert choose(step(), FORWARD, ITEMS, 20, 0.1) is None  # the copies are too slow to be out in time


@given(
    st.lists(st.floats(0.1, 3), min_size=FORWARD + BACKWARD, max_size=FORWARD + BACKWARD),
    st.floats(1, 100),
    st.integers(10, 60),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_plans_fit_and_cost_no_more_than_copies_in_a_row(seconds: list[float], rate: float, budget: int) -> None:
    steps = [Step(t, s.alive) for t, s in zip(seconds, step())]
    placed = place(steps, FORWARD, ITEMS[:4], budget, rate)
    if placed is None:
        return
    assert max(alive(steps, placed)) <= budget
    events: list[Event] = []
    for t, s in enumerate(steps):
        events += [Event("in", 0, p.item.name, 10) for p in placed if p.fetched == t]
        events += [Event("in done", 0, p.item.name) for p in placed if p.item.wanted == t]
        events.append(Event("run", s.seconds))
        events += [Event("out", 0, p.item.name, 10) for p in placed if p.item.born == t]
        events += [Event("out done", 0, p.item.name) for p in placed if p.lands == t]
    took = elapsed(events, rate)
    assert sum(seconds) - 1e-9 <= took <= sum(seconds) + 8 * 10 / rate + 1e-9


def test_a_copy_beside_enough_work_costs_nothing() -> None:
    run = [Event("run", 1.0), Event("out", 0, "x", 10), Event("run", 1.0), Event("out done", 0, "x")]
    assert elapsed(run, 10.0) == 2.0
    assert elapsed(run, 5.0) == 3.0
