"""Which values to move away, on plain numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.passes.solve.offload import Event, Item, Placed, Step, choose, elapsed, fewest, place, waits

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


def in_order(steps: list[Step], placed: tuple[Placed, ...]) -> list[Event]:
    events: list[Event] = []
    for t, s in enumerate(steps):
        events += [Event("in", 0, p.item.name, p.item.nbytes) for p in placed if p.fetched == t]
        events += [Event("in done", 0, p.item.name) for p in placed if p.item.wanted == t]
        events.append(Event("run", s.seconds))
        events += [Event("out", 0, p.item.name, p.item.nbytes) for p in placed if p.item.born == t]
        events += [Event("out done", 0, p.item.name) for p in placed if p.lands == t]
    return events


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
    events = in_order(steps, placed)
    took = elapsed(events, rate)
    assert sum(seconds) - 1e-9 <= took <= sum(seconds) + 8 * 10 / rate + 1e-9


def test_a_copy_beside_enough_work_costs_nothing() -> None:
    run = [Event("run", 1.0), Event("out", 0, "x", 10), Event("run", 1.0), Event("out done", 0, "x")]
    assert elapsed(run, 10.0) == 2.0
    assert elapsed(run, 5.0) == 3.0


PLANS = given(
    st.lists(st.floats(0.1, 3), min_size=FORWARD + BACKWARD, max_size=FORWARD + BACKWARD),
    st.lists(st.integers(1, 30), min_size=FORWARD, max_size=FORWARD),
    st.floats(1, 60),
    st.floats(0.3, 1),
)


def uneven(seconds: list[float], sizes: list[int]) -> tuple[list[Step], list[Item]]:
    """Values of so many bytes are made one a step, and die in the reverse order."""
    items = [Item(f"v{i}", n, i, i, FORWARD + BACKWARD - 1 - i) for i, n in enumerate(sizes)]
    alive = [sum(x.nbytes for x in items if x.born <= t <= x.wanted) for t in range(FORWARD + BACKWARD)]
    return [Step(t, a) for t, a in zip(seconds, alive)], items


@PLANS
@settings(max_examples=80, deadline=None, derandomize=True)
def test_waits_are_what_the_step_takes_longer(
    seconds: list[float], sizes: list[int], rate: float, share: float
) -> None:
    steps, items = uneven(seconds, sizes)
    placed = fewest(steps, FORWARD, items, int(max(s.alive for s in steps) * share), rate)
    if placed is None:
        return
    events = in_order(steps, placed)
    longer = elapsed(events, rate) - sum(seconds)
    assert sum(waits(steps, placed, rate).values()) == pytest.approx(longer, abs=1e-9)


@PLANS
@settings(max_examples=80, deadline=None, derandomize=True)
def test_others_are_chosen_only_where_the_step_gets_shorter(
    seconds: list[float], sizes: list[int], rate: float, share: float
) -> None:
    steps, items = uneven(seconds, sizes)
    budget = int(max(s.alive for s in steps) * share)
    first, found = fewest(steps, FORWARD, items, budget, rate), choose(steps, FORWARD, items, budget, rate)
    assert (first is None) == (found is None)
    if first is None or found is None:
        return
    assert max(alive(steps, found)) <= budget
    assert sum(waits(steps, found, rate).values()) <= sum(waits(steps, first, rate).values())


def test_a_value_whose_room_comes_too_late_stays() -> None:
    """The first value is read right behind the peak, which leaves no room to fetch it; the second one has a step more."""
    steps = [Step(1.0, a) for a in (10, 10, 10, 20, 10, 10)]
    items = [Item("first", 10, 0, 0, 4), Item("second", 10, 1, 1, 5)]
    first, found = fewest(steps, 3, items, 15, 10.0), choose(steps, 3, items, 15, 10.0)
    assert first is not None and found is not None
    assert waits(steps, first, 10.0) == {"first": 1.0}
    assert [p.item.name for p in found] == ["second"] and waits(steps, found, 10.0) == {}
