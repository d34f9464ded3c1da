"""The cut of saved values against all plans, and its ties and limits."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.passes.solve.mincut import Plan, Problem, Value, cost, solve


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n = draw(st.integers(1, 8))
    names = [f"v{i}" for i in range(n)]
    values = []
    for i, name in enumerate(names):
        deps: tuple[str, ...] = tuple(draw(st.lists(st.sampled_from(names[:i]), max_size=3, unique=True))) if i else ()
        again: int | None = draw(st.sampled_from([None, 0, 0, 0, 1, 3]))
        values.append(Value(name, draw(st.integers(0, 6)), again, deps))
    return Problem(tuple(values), tuple(sorted(draw(st.sets(st.sampled_from(names), min_size=1)))))


def plans(problem: Problem) -> list[Plan]:
    """Every plan: for each set to save, what has to be recomputed."""
    value = {v.name: v for v in problem.values}
    found = []
    for kept in itertools.chain.from_iterable(itertools.combinations(value, k) for k in range(len(value) + 1)):
        again: set[str] = set()
        todo, possible = list(problem.required), True
        while todo and possible:
            v = value[todo.pop()]
            if v.name in kept or v.name in again:
                continue
            possible = v.again is not None
            again.add(v.name)
            todo += v.deps
        if possible:
            found.append(Plan(kept, tuple(n for n in value if n in again)))
    return found


@given(problems())
@settings(max_examples=300, deadline=None)
def test_no_plan_is_better(problem: Problem) -> None:
    plan = solve(problem)
    best = min((cost(problem, p), len(p.recompute)) for p in plans(problem))
    assert (cost(problem, plan), len(plan.recompute)) == best


@given(problems())
@settings(max_examples=100, deadline=None)
def test_the_plan_is_complete_and_no_larger_than_needed(problem: Problem) -> None:
    plan = solve(problem)
    value = {v.name: v for v in problem.values}
    assert not set(plan.save) & set(plan.recompute)
    available = set(plan.save) | set(plan.recompute)
    assert available >= set(problem.required)
    assert all(value[n].again is not None and available >= set(value[n].deps) for n in plan.recompute)
    wanted = set(problem.required) | {d for n in plan.recompute for d in value[n].deps}
    assert available == wanted


def test_cross_entropy_saves_logits() -> None:
    values = (Value("logits", 8), Value("log_softmax", 16, 0, ("logits",)))
    assert solve(Problem(values, ("log_softmax",))) == Plan(("logits",), ("log_softmax",))


def test_equal_bytes_recompute_nothing() -> None:
    values = (Value("x", 8), Value("y", 8, 0, ("x",)))
    assert solve(Problem(values, ("y",))) == Plan(("y",), ())


def test_a_value_read_anyway_costs_nothing_more() -> None:
    values = (Value("x", 8), Value("y", 1, 0, ("x",)))
    assert solve(Problem(values, ("x", "y"))) == Plan(("x",), ("y",))


def test_two_large_inputs_are_not_worth_one_value() -> None:
    values = (Value("a", 4), Value("b", 5), Value("c", 8, 0, ("a", "b")))
    assert solve(Problem(values, ("c",))) == Plan(("c",), ())


def test_nothing_is_recomputed_through_a_value_that_cannot_be() -> None:
    values = (Value("x", 1), Value("mm", 8, None, ("x",)), Value("y", 16, 0, ("mm",)))
    assert solve(Problem(values, ("y",))) == Plan(("mm",), ("y",))


def test_two_readers_share_what_is_saved() -> None:
    values = (Value("x", 10), Value("y", 6, 0, ("x",)), Value("z", 6, 0, ("x",)))
    assert solve(Problem(values, ("y",))) == Plan(("y",), ())
    assert solve(Problem(values, ("y", "z"))) == Plan(("x",), ("y", "z"))


@pytest.mark.parametrize("linked", [False, True])
def test_ten_thousand_values_take_little_time(linked: bool) -> None:
    values = [Value("x0", 8)]
    for i in range(3333):
        before = f"z{i - 1}" if linked and i else "x0"
        values += [
            Value(f"y{i}", 7, None),
            Value(f"a{i}", 8, 0, (before, f"y{i}")),
            Value(f"z{i}", 16 if linked else 9, 0, (f"a{i}",)),
        ]
    start = time.process_time()
    solve(Problem(tuple(values), tuple(f"z{i}" for i in range(3333))))
    assert time.process_time() - start < 10
