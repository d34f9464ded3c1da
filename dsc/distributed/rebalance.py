"""A plan again, from what its stages and ranks really took: the same schedule, other cuts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from dsc.distributed import describe, line
from dsc.distributed.forward import Forward
from dsc.distributed.line import Laid
from dsc.distributed.monitor import Report, StageTimes
from dsc.distributed.plan import PipelinePlan
from dsc.manager import Remark
from dsc.passes.solve import stage_cut
from dsc.passes.solve.pipeline_simulate import Pipeline, simulate
from dsc.passes.solve.pipeline_tune import Candidate
from dsc.passes.solve.stage_cut import Line, Numbers

MOVES = (1, 2, 4, 8, 16, 32)
"""Places by which a cut moves."""
ROUNDS = 30


def speeds(report: Report, before: Report | None, known: Sequence[float] = ()) -> tuple[float, ...]:
    """How many times slower than ``before`` each rank does the same work; ``known``: how slow they were then."""
    found = tuple(known) or (1.0,) * len(report.busy)
    if before is None:
        return found
    return tuple(k * now / then if then else k for k, now, then in zip(found, report.busy, before.busy))


def replan(plan: PipelinePlan, traced: Forward, report: Report, slow: Sequence[float] = ()) -> PipelinePlan:
    """The plan with its cuts moved to where the step takes least, by the measured times.

    1. A stage's nodes cost what the roofline gives them, scaled so that the stage takes what was measured.
    2. A rank that is ``slow`` times slower takes that much longer for any nodes, and less for its own on another rank.
    3. Stages move no rank; orders and micro-batches stay.  The result may be the plan itself.
    """
    slow = tuple(slow) or (1.0,) * plan.ranks
    laid = _laid(plan, traced)
    cuts = [0]
    for s in plan.stages:
        cuts.append(cuts[-1] + len(s.nodes))
    times = {s.index: _of_nodes(report.stages[s.index], slow[s.rank], s.recompute) for s in plan.stages}
    scaled = replace(laid, line=_scaled(laid.line, cuts, times))
    before = _pipeline(plan, scaled.line, cuts, slow)
    best = _climb(plan, scaled.line, cuts, slow)
    after = _pipeline(plan, scaled.line, best, slow)
    old, new = simulate(before, plan.orders), simulate(after, plan.orders)
    moved = sum(a != b for a, b in zip(cuts, best))
    remark = Remark(
        "balance",
        "did" if moved else "skipped",
        f"{moved} cuts moved: {old.seconds * 1e3:.4g} -> {new.seconds * 1e3:.4g} ms by the measured times; "
        f"ranks are slower by {', '.join(f'{x:.2f}' for x in slow)}",
    )
    chosen = Candidate(plan.split if not moved else "measured", plan.schedule, tuple(best), after, plan.orders, new)
    made = describe.describe(
        scaled,
        chosen,
        [],
        [s.recompute for s in plan.stages],
        model=plan.model,
        cluster=plan.cluster,
        degrees=plan.degrees,
        devices=plan.devices,
        samples=plan.microbatch_size,
        limit=plan.limit,
        remarks=[remark],
    )
    return replace(made, placement=plan.placement)


def measured_seconds(plan: PipelinePlan, report: Report) -> float:
    """Of a step of this plan, simulated from the measured times of its stages."""
    t = [report.stages[s.index] for s in plan.stages]
    p = Pipeline(
        plan.ranks,
        plan.microbatches,
        tuple(s.rank for s in plan.stages),
        tuple(x.forward for x in t),
        tuple(x.dgrad for x in t),
        tuple(x.wgrad for x in t),
        tuple(s.send for s in plan.stages[:-1]),
        (0.0,) * len(t),
        (0.0,) * len(t),
    )
    return simulate(p, plan.orders).seconds


def _laid(plan: PipelinePlan, traced: Forward) -> Laid:
    nodes = {n.name: n for n in traced.gm.graph.nodes}
    order = [nodes[name] for s in plan.stages for name in s.nodes]
    return line.on_cluster(traced, plan.cluster, plan.degrees, order=order)


def _of_nodes(t: StageTimes, slow: float, recompute: bool) -> tuple[float, float, float]:
    """Seconds on a rank of usual speed, without the forward that the backward runs again."""
    again = t.forward if recompute else 0.0
    return t.forward / slow, max(t.dgrad - again, 0.0) / slow, t.wgrad / slow


def _scaled(line: Line, cuts: Sequence[int], times: dict[int, tuple[float, float, float]]) -> Line:
    """Each stage's sums as measured; where the roofline gives a stage nothing, its nodes share the time."""

    def one(sums: Numbers, which: int) -> Numbers:
        steps = np.diff(sums)
        for s, (low, high) in enumerate(pairwise(cuts)):
            modelled = float(steps[low:high].sum())
            steps[low:high] = (
                steps[low:high] * (times[s][which] / modelled) if modelled else times[s][which] / (high - low)
            )
        return np.concatenate([[0.0], np.cumsum(steps)])

    return replace(line, forward=one(line.forward, 0), dgrad=one(line.dgrad, 1), wgrad=one(line.wgrad, 2))


def _pipeline(plan: PipelinePlan, line: Line, cuts: Sequence[int], slow: Sequence[float]) -> Pipeline:
    home = [s.rank for s in plan.stages]
    machines = [d // plan.cluster.per_node for d in plan.devices]
    limit = float(plan.limit) or stage_cut.NEVER
    again = [s.recompute for s in plan.stages]
    p = stage_cut.pipeline(line, cuts, home, plan.microbatches, limit, again, machines)
    f, i, w = (tuple(x * slow[r] for x, r in zip(each, home)) for each in (p.forward, p.dgrad, p.wgrad))
    return replace(p, forward=f, dgrad=i, wgrad=w)


def _climb(plan: PipelinePlan, line: Line, start: Sequence[int], slow: Sequence[float]) -> list[int]:
    """Move single cuts and runs of cuts while that helps; a rank that would not fit is no help."""
    places = [int(x) for x in stage_cut.places(line, len(start) - 1)]
    places = sorted({*places, *start})
    at = [places.index(c) for c in start]
    rng = random.Random(0)

    def judge(where: Sequence[int]) -> float:
        p = _pipeline(plan, line, [places[i] for i in where], slow)
        timeline = simulate(p, plan.orders)
        over = max(0.0, max(timeline.peaks) / p.limit - 1)
        return timeline.seconds * (1 + 10 * over)

    best = judge(at)
    for _ in range(ROUNDS):
        runs = [(a, b) for a in range(1, len(at) - 1) for b in range(a, len(at) - 1)]
        rng.shuffle(runs)
        improved = False
        for a, b in runs:
            for by in (sign * m for m in MOVES for sign in (1, -1)):
                new = [x + by if a <= i <= b else x for i, x in enumerate(at)]
                if any(x >= y for x, y in pairwise(new)) or new[0] != at[0] or new[-1] != at[-1]:
                    continue
                value = judge(new)
                if value < best * (1 - 1e-6):
                    best, at, improved = value, new, True
        if not improved:
            break
    return [places[i] for i in at]
