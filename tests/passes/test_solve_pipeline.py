"""Pipelines on plain numbers: schedules against torch's own, the simulator against its rules, cuts and orders against all."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

from dsc.passes.solve import pipeline_greedy, pipeline_search, pipeline_tune, stage_cut
from dsc.passes.solve.pipeline_schedule import SCHEDULES, halves, homes
from dsc.passes.solve.pipeline_search import Effort
from dsc.passes.solve.pipeline_simulate import Coded, Deadlock, Order, Pipeline, bound, simulate
from dsc.passes.solve.pipeline_tune import Task, Work
from dsc.passes.solve.stage_cut import Line

TORCH = {
    "zb-h1": ("InterleavedZeroBubble", 1),
    "interleaved": ("Interleaved1F1B", 2),
    "interleaved-zb": ("InterleavedZeroBubble", 2),
    "zbv": ("ZBVZeroBubble", 2),
    "dualpipev": ("DualPipeV", 2),
}


def even(ranks: int, batches: int, name: str, send: float = 0.0) -> Pipeline:
    """Stages that take a third each of what a rank has to do for a micro-batch."""
    known = SCHEDULES[name]
    chunks = known.chunks or 2
    n, unit = ranks * chunks, 1.0 / chunks
    home = homes(ranks, chunks, known.placement)
    return Pipeline(
        ranks, batches, home, (unit,) * n, (unit,) * n, (unit,) * n, (send,) * (n - 1), (unit,) * n, (unit,) * n
    )


def orders_of(name: str, ranks: int, batches: int) -> tuple[Order, ...] | None:
    return SCHEDULES[name].orders(ranks, batches, SCHEDULES[name].chunks or 2)


def uneven(seed: int, ranks: int = 4, batches: int = 8, send: float = 0.03) -> Pipeline:
    g = random.Random(seed)
    n = 2 * ranks
    f = tuple(0.5 * g.lognormvariate(0, 0.3) for _ in range(n))
    i = tuple(x * g.uniform(0.9, 1.4) for x in f)
    w = tuple(x * g.uniform(0.6, 1.0) for x in f)
    return Pipeline(ranks, batches, homes(ranks, 2, "v"), f, i, w, (send,) * (n - 1), f, tuple(0.6 * x for x in f))


# --- schedules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (2, 5), (3, 6), (4, 8), (4, 13), (8, 16)])
def test_known_schedules_are_those_that_torch_runs(name: str, ranks: int, batches: int) -> None:
    title, chunks = TORCH[name]
    cls = torchs.get_schedule_class(title)
    theirs: Any = object.__new__(cls)
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = ranks, batches, chunks
    theirs._num_stages = theirs.num_stages = ranks * chunks
    rounds = max(1, batches // ranks)
    theirs.number_of_rounds, theirs.microbatches_per_round = rounds, batches // rounds
    ours = orders_of(name, ranks, batches)
    if (name.startswith(("int", "zb-")) and batches % rounds) or (name == "dualpipev" and batches < 2 * ranks):
        assert ours is None
        return
    assert ours is not None
    for rank in range(ranks):
        flat = [
            (b.stage_index, b.computation_type.value, b.microbatch_index)
            for a in theirs._calculate_single_rank_operations(rank)
            if a is not None
            for b in (a.sub_actions or (a,))
        ]
        assert list(ours[rank]) == flat


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "batches"), [(1, 1), (1, 4), (2, 2), (3, 7), (4, 8), (5, 10)])
def test_every_action_stands_once_and_in_order(name: str, ranks: int, batches: int) -> None:
    orders = orders_of(name, ranks, batches)
    if orders is None:
        pytest.skip("this schedule cannot take these numbers")
    home = even(ranks, batches, name).home
    for rank, order in enumerate(map(halves, orders)):
        mine = [s for s, r in enumerate(home) if r == rank]
        assert sorted(order) == sorted((s, k, b) for s in mine for k in "FIW" for b in range(batches))
        for s, kind in itertools.product(mine, "FIW"):
            assert [b for t, k, b in order if (t, k) == (s, kind)] == list(range(batches))
    simulate(even(ranks, batches, name), orders)  # no deadlock


# --- the simulator ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8), (8, 16), (8, 13)])
def test_bubbles_of_the_papers(ranks: int, batches: int) -> None:
    def line(name: str) -> tuple[float, float]:
        orders = orders_of(name, ranks, batches)
        assert orders is not None
        found = simulate(even(ranks, batches, name), orders)
        return found.bubble, max(found.peaks)

    naive = (ranks - 1) / (batches + ranks - 1)
    assert line("gpipe") == pytest.approx((naive, batches))
    assert line("1f1b") == pytest.approx((naive, ranks))
    assert line("zb-h1")[1] == pytest.approx(ranks)
    assert line("zbv")[0] == pytest.approx(
        (ranks - 1) / (6 * batches + ranks - 1) if batches >= 2 * ranks else line("zbv")[0]
    )
    assert line("zbv")[0] < line("zb-h1")[0] < naive
    assert line("zbv")[1] <= ranks + 1e-9


def test_messages_follow_each_other_over_a_slow_cut() -> None:
    p = Pipeline(2, 4, (0, 1), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (3.0,), (1.0, 1.0), (0.0, 0.0))
    orders = SCHEDULES["gpipe"].orders(2, 4, 1)
    assert orders is not None
    spans = simulate(p, orders).spans
    assert [start for start, _ in spans[1][:4]] == [4.0, 7.0, 10.0, 13.0]  # one message at a time
    assert spans[0][4][0] == 18.0  # the first gradient left at 15


def test_a_backward_as_a_whole_sends_when_it_is_over() -> None:
    p = Pipeline(2, 1, (0, 1), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0,), (1.0, 1.0), (1.0, 1.0))
    whole = [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "B", 0)]]
    apart = [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "I", 0), (1, "W", 0)]]
    assert simulate(p, [tuple(o) for o in whole]).seconds == 6.0
    assert simulate(p, [tuple(o) for o in apart]).seconds == 5.0


def test_orders_that_wait_for_each_other_are_found() -> None:
    p = Pipeline(2, 1, (0, 1), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0,), (1.0, 1.0), (1.0, 1.0))
    with pytest.raises(Deadlock):
        simulate(p, (((0, "I", 0), (0, "F", 0), (0, "W", 0)), ((1, "F", 0), (1, "I", 0), (1, "W", 0))))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["1f1b", "zb-h1", "zbv", "interleaved-zb", "dualpipev"]))
def test_no_order_beats_the_bound_and_slower_parts_never_help(seed: int, name: str) -> None:
    g = random.Random(seed)
    ranks, batches = g.randint(1, 4), g.randint(1, 9)
    orders = orders_of(name, ranks, batches)
    if orders is None:
        return
    base = even(ranks, batches, name)
    draw = lambda: tuple(g.uniform(0.1, 2.0) for _ in base.home)  # noqa: E731
    p = replace(base, forward=draw(), dgrad=draw(), wgrad=draw(), send=tuple(g.uniform(0, 1) for _ in base.send))
    line = simulate(p, orders)
    assert line.seconds >= bound(p) * (1 - 1e-9)
    assert line.bubble == pytest.approx(1 - sum(map(p.busy, range(ranks))) / (ranks * line.seconds))
    for order, spans in zip(orders, line.spans):
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))
        assert len(order) == len(spans)
    ends = {a: span for order, spans in zip(orders, line.spans) for a, span in zip(order, spans)}
    for (s, kind, b), (start, _) in ends.items():
        if kind == "F" and s:
            assert start >= ends[s - 1, "F", b][1] + p.lags[s - 1] - 1e-9
        if kind in "IB" and s < p.stages - 1:
            sent = ends.get((s + 1, "I", b)) or ends[s + 1, "B", b]
            assert start >= sent[1] + p.lags[s] - 1e-9
    slower = replace(p, wgrad=tuple(2 * x for x in p.wgrad))
    assert simulate(slower, orders).seconds >= line.seconds
    held = replace(p, held=draw(), kept=tuple(g.choice((0.0, 0.05, 0.1)) for _ in base.home))
    line = simulate(held, orders)
    exact = replace(held, limit=max(line.peaks))
    assert line.seconds >= bound(exact) * (1 - 1e-9) >= bound(held) * (1 - 2e-9), "the least limit that they keep"


# --- the search --------------------------------------------------------------------------------------------------------------


def all_orders(p: Pipeline) -> Iterator[tuple[Order, ...]]:
    """Every way to run a pipeline of two ranks with one stage each."""

    def interleavings(stage: int) -> list[Order]:
        found: list[Order] = []

        def grow(prefix: list[tuple[int, str, int]], done: tuple[int, int, int]) -> None:
            if done == (p.microbatches,) * 3:
                found.append(tuple(prefix))
                return
            for k, kind in enumerate("FIW"):
                if done[k] < p.microbatches and (k == 0 or done[k] < done[k - 1]):
                    after = tuple(n + (i == k) for i, n in enumerate(done))
                    grow([*prefix, (stage, kind, done[k])], after)  # type: ignore[arg-type]

        grow([], (0, 0, 0))
        return found

    return itertools.product(interleavings(0), interleavings(1))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("batches", [2, 3])
def test_the_search_finds_the_best_of_all_orders(seed: int, batches: int) -> None:
    g = random.Random(seed)
    draw = lambda: (g.uniform(0.5, 2), g.uniform(0.5, 2))  # noqa: E731
    p = Pipeline(2, batches, (0, 1), draw(), draw(), draw(), (0.1,), (1.0, 1.0), (0.5, 0.5), limit=2.0)
    code = Coded(p)
    best = float("inf")
    ways = [[code.encode(o) for o in side] for side in map(dict.fromkeys, zip(*all_orders(p)))]
    for first, second in itertools.product(*ways):
        if max(code.peak(0, first), code.peak(1, second)) <= p.limit:
            best = min(best, code.run([first, second])[0])
    assert best >= bound(p) * (1 - 1e-9)
    found = pipeline_search.search(p, effort=Effort(moves=4000))
    assert found is not None
    line = simulate(p, found)
    assert max(line.peaks) <= p.limit
    assert line.seconds == pytest.approx(best, rel=1e-6)


def test_little_memory_raises_the_bound() -> None:
    p = even(4, 8, "zbv")
    assert bound(replace(p, limit=8.0)) == bound(p)
    assert bound(replace(p, limit=1.0)) > 1.2 * bound(p)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("full", [False, True])
def test_list_scheduling_runs_every_action_within_the_limit(seed: int, full: bool) -> None:
    p = uneven(seed)
    p = replace(p, limit=1.7 * max(p.held[r] + p.held[7 - r] for r in range(4)))
    made = pipeline_greedy.schedule(p, pipeline_greedy.Rule(full=full))
    assert made is not None and sum(map(len, made)) == 3 * 8 * 8
    assert max(simulate(p, made).peaks) <= p.limit * (1 + 1e-9)


def test_room_of_later_stages_is_used_while_they_will_give_it_back() -> None:
    better = 0
    for seed in range(8):
        p = uneven(seed)
        p = replace(p, limit=2.5 * max(p.held[r] + p.held[7 - r] for r in range(4)))
        seconds = [
            min(simulate(p, o).seconds for r in pipeline_greedy.RULES if r.full == full and (o := pipeline_greedy.schedule(p, r)))
            for full in (False, True)
        ]  # fmt: skip
        better += seconds[1] < seconds[0]
    assert better >= 6


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5])
def test_the_search_keeps_the_limit_and_is_never_worse_than_its_seeds(share: float) -> None:
    for seed in range(2):
        p = uneven(seed)
        zbv = orders_of("zbv", 4, 8)
        assert zbv is not None
        known = simulate(p, zbv)
        p = replace(p, limit=max(known.peaks) * share)
        found = pipeline_search.search(p, [zbv], Effort(20, 2000))
        assert found is not None
        line = simulate(p, found)
        assert max(line.peaks) <= p.limit * (1 + 1e-9)
        assert share < 1 or line.seconds <= known.seconds
        assert line.seconds <= bound(p) * {1.0: 1.05, 0.75: 1.12, 0.5: 1.3}[share]
        assert found == pipeline_search.search(p, [zbv], Effort(20, 2000)), "equal numbers give equal orders"


def test_even_stages_keep_the_known_schedule() -> None:
    p, zbv = even(4, 8, "zbv"), orders_of("zbv", 4, 8)
    assert zbv is not None
    found = pipeline_search.search(p, [zbv], Effort(moves=500, samples=4))
    assert found is not None
    assert simulate(p, found).seconds <= simulate(p, zbv).seconds * (1 + 1e-9)


def test_nothing_fits_into_too_little() -> None:
    assert pipeline_search.search(replace(uneven(0), limit=0.1), effort=Effort(moves=10)) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_list_scheduling_runs_everything_within_the_limit(seed: int) -> None:
    g = random.Random(seed)
    p = uneven(seed, g.randint(1, 4), g.randint(1, 8), g.uniform(0, 0.5))
    p = replace(
        p, kept=p.held, limit=max(sum(p.held[s] for s in p.of(r)) for r in range(p.ranks)) * g.uniform(1.0, 3.0)
    )
    orders = pipeline_greedy.schedule(p, g.choice(pipeline_greedy.RULES), g)
    if orders is None:
        return
    assert sum(map(len, orders)) == 3 * p.stages * p.microbatches
    assert max(simulate(p, orders).peaks) <= p.limit * (1 + 1e-9)


# --- cuts ----------------------------------------------------------------------------------------------------------------------


def a_line(seed: int, n: int = 10, shared: bool = True) -> Line:
    g = np.random.default_rng(seed)
    sums = lambda high: np.concatenate([[0.0], np.cumsum(g.uniform(0.1, high, n))])  # noqa: E731
    crossing = g.uniform(1.0, 2.0, n + 1)
    allowed = g.random(n + 1) < 0.9
    uses = tuple(sorted(g.choice(n, 2, replace=False).tolist()))
    return Line(
        sums(2), sums(2), sums(2), sums(1), sums(1), sums(1), sums(1), sums(1), crossing, crossing * 0.05, crossing * 0.01,
        allowed, (((1.0, 1.0, 1.0), uses),) if shared else (),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_straight_cuts_are_the_best_of_all(seed: int, parts: int) -> None:
    line = a_line(seed)
    at = [0, *(np.flatnonzero(line.allowed[1:-1]) + 1), line.length]
    limit = 14.0

    def slowest(cuts: tuple[int, ...]) -> float:
        worst = 0.0
        for k, (low, high) in enumerate(pairwise(cuts)):
            held = line.held(low, high) * (parts - k)
            if sum(line.static(low, high)) + held > limit:
                return float("inf")
            wires = sum(float(line.send[c]) for c in (low, high)) * 2
            worst = max(worst, float(line.total[high] - line.total[low]) + wires)
        return worst

    best = min(slowest((0, *inner, line.length)) for inner in itertools.combinations(at[1:-1], parts - 1))
    found = stage_cut.straight(line, parts, at, limit, lambda k: parts - k)
    assert (found is None) == (best == float("inf"))
    if found is not None:
        assert slowest(found) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_folded_cuts_balance_the_ranks_as_well_as_any(seed: int, ranks: int) -> None:
    line = a_line(seed, 12)
    at = list(range(13))

    def slowest(cuts: tuple[int, ...]) -> float:
        pieces = [float(line.total[b] - line.total[a]) for a, b in pairwise(cuts)]
        return max(pieces[r] + pieces[-1 - r] for r in range(ranks))

    best = min(slowest((0, *inner, 12)) for inner in itertools.combinations(range(1, 12), 2 * ranks - 1))
    found = stage_cut.folded(line, ranks, at)
    assert found is not None and len(found) == 2 * ranks + 1
    assert slowest(found) <= best * 1.001


def test_layers_are_counted_as_people_count_them() -> None:
    starts = tuple(range(1, 33))
    assert stage_cut.equal(starts, 40, 4) == (0, 9, 17, 25, 40)
    assert stage_cut.equal(starts, 40, 4, 1, 1) == (0, 9, 18, 26, 40)
    assert stage_cut.equal(starts[:3], 40, 4) is None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(2, "loop"), (3, "loop"), (4, "v"), (6, "v")]), st.booleans())
def test_pieces_add_up_to_the_line(seed: int, shape: tuple[int, str], again: bool) -> None:
    parts, placement = shape
    line = a_line(seed, 14)
    g = random.Random(seed)
    cuts = (0, *sorted(g.sample(range(1, 14), parts - 1)), 14)
    ranks = parts if placement == "loop" else parts // 2
    home = homes(ranks, parts // ranks, "v" if placement == "v" else "loop")
    p = stage_cut.pipeline(line, cuts, home, 4, again=[again] * parts)
    assert sum(p.forward) == pytest.approx(line.forward[-1])
    assert sum(p.dgrad) == pytest.approx(line.dgrad[-1] + (line.forward[-1] if again else 0))
    readers = {r for r in range(ranks) for s in p.of(r) if any(cuts[s] <= u < cuts[s + 1] for u in line.shared[0][1])}
    once = sum(float(a[-1]) for a in (line.parameters, line.gradients, line.state))
    assert sum(p.static) == pytest.approx(once + 3 * len(readers))
    assert all(h >= 0 and w >= 0 for h, w in zip(p.held, p.work))


def test_cuts_and_orders_together_beat_what_they_start_from() -> None:
    line = a_line(1, 60, shared=False)
    task = Task(line, tuple(range(1, 60, 5)), 4, 8)
    found = pipeline_tune.portfolio(task)
    assert {c.schedule for c in found} == set(SCHEDULES)
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    capped = replace(task, limit=max(found[0].timeline.peaks))
    ours = pipeline_tune.tune(capped, pipeline_tune.portfolio(capped), Work(2, 1, 300, 1500, 0))
    assert ours is not None and ours.fits
    assert ours.seconds < found[0].seconds


def test_a_slow_rank_gets_less() -> None:
    line = a_line(1, 60, shared=False)
    even_task = Task(line, (), 4, 8)
    slow_task = replace(even_task, slow=(1.0, 1.0, 1.5, 1.0))
    work = Work(2, 1, 400, 1500, 0)
    plan = pipeline_tune.tune(even_task, pipeline_tune.portfolio(even_task), work)
    assert plan is not None
    stuck = pipeline_tune.candidate(slow_task, plan.split, plan.schedule, plan.cuts, plan.pipeline.home, plan.orders)
    again = pipeline_tune.tune(slow_task, [stuck, *pipeline_tune.portfolio(slow_task)], work)
    assert again is not None
    assert again.seconds < 0.93 * stuck.seconds
