"""Four ranks whose stages sleep for exact times, on torch's runtime over gloo: what an order and a cut are really worth.

Nothing is computed, so that cores that ranks share do not count.  A step is the fastest of three, from barrier to barrier.
The bubble is 1 - work / (ranks x step), of the nominal work.  The simulator knows the nominal times, and one number for
what an action and a message take besides, measured on an even pipeline before (``calibrate``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pipeline_ranks
import torch
import torch.distributed as dist
from common import table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from dsc.passes.solve import pipeline_search, pipeline_tune
from dsc.passes.solve.pipeline_schedule import SCHEDULES, homes
from dsc.passes.solve.pipeline_search import Effort, Jitter, Shaken
from dsc.passes.solve.pipeline_simulate import Coded, Order, Pipeline, simulate
from dsc.passes.solve.pipeline_tune import Task, Work
from dsc.passes.solve.stage_cut import Line
from dsc.torch_shim import pipeline_runtime

RANKS, MICROBATCHES, UNIT, PIECES = 4, 8, 0.12, 16
"""Seconds of a forward of a rank; pieces of a stage between which it may be cut."""
PROFILES: Mapping[str, tuple[float, float, float, float, float]] = {
    "head-heavy": (0.9, 1.6, 1.0, 1.15, 0.85),
    "uniform": (1.0, 1.0, 1.0, 1.0, 1.0),
}
"""First stage, last stage over the others; forward, dgrad, wgrad over the unit."""
JITTER = Jitter(0.03, 0.0, 1.0)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage = stage
        time.sleep(stage.seconds[0])
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.stage.seconds[1])
        return grad * 1.0, None


class SleepingStage(nn.Module):
    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self)  # type: ignore[no-any-return,no-untyped-call]

    def later(self) -> Callable[[], None]:
        return lambda: time.sleep(self.seconds[2])


def step_seconds(p: Pipeline, orders: Sequence[Order]) -> float:
    """On every rank: the fastest of three steps."""
    rank, last = dist.get_rank(), p.stages - 1
    stages = []
    for s in p.of(rank):
        module = SleepingStage((p.forward[s], p.dgrad[s], p.wgrad[s]))
        x = torch.zeros(1024)
        stages.append(
            PipelineStage(
                module, s, p.stages, torch.device("cpu"), input_args=(x.clone().requires_grad_(s > 0),),
                output_args=(x.clone().requires_grad_(),), dw_builder=module.later,
            )
        )  # fmt: skip
    texts = {r: [f"{s}{k}{m}" for s, k, m in order] for r, order in enumerate(orders)}
    runtime = pipeline_runtime(stages, texts, p.microbatches, lambda y, _: y.sum())
    best = float("inf")
    for _ in range(3):
        x = torch.zeros(1024 * p.microbatches, requires_grad=True)
        dist.barrier()
        start = time.perf_counter()
        mine = p.of(rank)
        target = {"target": torch.zeros(p.microbatches)} if last in mine else {}
        runtime.step(*((x,) if 0 in mine else ()), return_outputs=False, **target)
        dist.barrier()
        best = min(best, time.perf_counter() - start)
    return best


@dataclass(frozen=True)
class Run:
    name: str
    pipeline: Pipeline
    orders: tuple[Order, ...]

    @property
    def work(self) -> float:
        return sum(self.pipeline.busy(r) for r in range(RANKS))

    def bubble(self, seconds: float) -> float:
        return 1 - self.work / (RANKS * seconds)

    def simulated(self, besides: Besides) -> float:
        return simulate(besides.on(self.pipeline), self.orders).seconds


@dataclass(frozen=True)
class Besides:
    """Seconds that an action and a message take beyond their nominal ones."""

    action: float
    message: float

    def on(self, p: Pipeline) -> Pipeline:
        f, i, w = (tuple(x + self.action for x in each) for each in (p.forward, p.dgrad, p.wgrad))
        return replace(p, forward=f, dgrad=i, wgrad=w, send=(self.message,) * (p.stages - 1))


def pipeline(profile: str, chunks: int, v: bool) -> Pipeline:
    first, last, f, i, w = PROFILES[profile]
    shares = np.ones(RANKS * chunks)
    shares[0], shares[-1] = first, last
    shares *= UNIT * RANKS / shares.sum()
    n = len(shares)
    times = (tuple(float(x * k) for x in shares) for k in (f, i, w))
    home = homes(RANKS, chunks, "v" if v else "loop")
    return Pipeline(RANKS, MICROBATCHES, home, *times, (0.001,) * (n - 1), (1.0,) * n, (1.0,) * n)


def line(profile: str) -> Line:
    """The work of the profile's eight stages in equal pieces each, to be cut anew."""
    p = pipeline(profile, 2, v=True)
    sums = [np.concatenate([[0.0], np.cumsum(np.repeat(x, PIECES) / PIECES)]) for x in (p.forward, p.dgrad, p.wgrad)]
    n = len(sums[0])
    zero, ones = np.zeros(n), np.arange(n, dtype=float)
    sends = np.full(n, 0.001)
    return Line(*sums, ones, zero, zero, zero, zero, zero, sends, sends, np.ones(n, bool), ())


def known(profile: str) -> list[Run]:
    out = []
    for k in SCHEDULES.values():
        chunks = k.chunks or 2
        if (orders := k.orders(RANKS, MICROBATCHES, chunks)) is not None:
            out.append(Run(k.name, pipeline(profile, chunks, k.placement == "v"), orders))
    return out


def searched(p: Pipeline, seeds: Sequence[Sequence[Order]], besides: Besides) -> tuple[float, tuple[Order, ...]]:
    """Orders for a split that stand up to jitter, and their mean seconds under it; a known order, if less than 1 % slower."""
    real = besides.on(p)
    found = pipeline_search.search(real, seeds, Effort(samples=8, moves=6000), JITTER, 0)
    assert found is not None
    code = Coded(real)
    shaken = Shaken(code, 12, JITTER, 1)
    scored = [(shaken.mean([code.encode(o) for o in orders]), tuple(orders)) for orders in (*seeds, found)]
    best, known = scored[-1], min(scored[:-1], key=lambda x: x[0])
    return best if best[0] < 0.99 * known[0] else known


def found(profile: str, besides: Besides) -> list[Run]:
    """Known schedules, orders found for the same stages, and stages cut anew with orders found for them."""
    out = known(profile)
    v = pipeline(profile, 2, v=True)
    fixed = searched(v, [r.orders for r in out if r.pipeline.home == v.home], besides)[1]
    task = Task(line(profile), tuple(range(0, 8 * PIECES, PIECES)), RANKS, MICROBATCHES)
    pool = pipeline_tune.portfolio(task)
    tuned = pipeline_tune.tune(task, pool, Work(3, 2, 800, 3000, 6), JITTER)
    assert tuned is not None
    again = [(*searched(c.pipeline, [c.orders], besides), c.pipeline) for c in (*pool[:4], tuned)]
    _, orders, p = min(again, key=lambda x: x[0])
    same = next((f", as {r.name}" for r in out if r.orders == fixed and r.pipeline == v), "")
    return [*out, Run(f"searched{same}", v, fixed), Run("cut anew, searched", p, orders)]


def calibrate() -> Besides:
    """Fitted to gpipe and 1f1b on the even profile alone."""
    fitted = [r for r in known("uniform") if r.name in ("gpipe", "1f1b")]
    took = [max(pipeline_ranks.run(RANKS, step_seconds, r.pipeline, r.orders)) for r in fitted]
    grid = [Besides(a, m) for a in np.arange(0, 0.006, 0.0002) for m in np.arange(0.0002, 0.006, 0.0004)]
    return min(grid, key=lambda b: sum((r.simulated(b) / t - 1) ** 2 for r, t in zip(fitted, took)))


def main(profiles: Sequence[str] = tuple(PROFILES)) -> dict[str, object]:
    besides = calibrate()
    print(f"besides: {besides.action * 1e3:.1f} ms an action, {besides.message * 1e3:.1f} ms a message\n")
    out: dict[str, object] = {"action": besides.action, "message": besides.message}
    for profile in profiles:
        lines, measured = [], {}
        for r in found(profile, besides):
            took = max(pipeline_ranks.run(RANKS, step_seconds, r.pipeline, r.orders))
            modelled = r.simulated(besides)
            measured[r.name] = (took, modelled)
            cells = (f"{took / modelled - 1:+.1%}", f"{r.bubble(took):.1%}", f"{r.bubble(modelled):.1%}")
            lines.append((r.name, took * 1e3, modelled * 1e3, *cells))
        head = (f"{profile}, M={MICROBATCHES}", "step ms", "simulated", "error", "bubble", "simulated")
        print(table(head, lines), flush=True)
        pairs = [(a, b) for a in measured for b in measured if measured[b][1] > 1.02 * measured[a][1]]
        wrong = [f"{a} / {b}" for a, b in pairs if measured[b][0] < measured[a][0]]
        worst = max(abs(x / p - 1) for x, p in measured.values())
        print(f"largest error {worst:.1%}; of {len(pairs)} pairs more than 2 % apart, {len(wrong)} in the wrong order")
        print(*(f"  {w}\n" for w in wrong))
        out[profile] = {name: {"measured": x, "simulated": p} for name, (x, p) in measured.items()}
    return out
