"""Stages of real models in one process: are they even, and what does splitting their backward cost.

Seconds are those of the one thread's CPU, so that other work on the machine does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common import ratios, table
from pipeline_grid import FREE
from torch import Tensor
from torch.fx import GraphModule

from dsc.distributed import assemble, describe, forward, line, rebalance
from dsc.distributed.cluster import Cluster
from dsc.distributed.forward import Forward
from dsc.distributed.monitor import Report, StageTimes
from dsc.distributed.plan import Degrees, PipelinePlan, StagePlan
from dsc.distributed.planner import plan_pipeline
from dsc.distributed.stage import GIVEN, StageModule
from dsc.models import zoo
from dsc.options import Options
from dsc.passes.solve import stage_cut
from dsc.passes.solve.pipeline_schedule import SCHEDULES
from dsc.passes.solve.pipeline_tune import Task, candidate

RANKS, MICROBATCHES = 4, 8
MODELS = ("gpt", "llama", "moe", "encdec")
CLUSTER = Cluster("cpu", 1, RANKS, FREE, FREE)
ROUNDS, AGAIN = 7, 4
"""Rounds of measuring; how often the cut is moved by what was measured."""


@dataclass
class Bench:
    """One stage that can be run alone: its inputs are random, its gradients ones."""

    module: StageModule
    graph: GraphModule
    inputs: list[Tensor]
    arriving: int
    """How many of them come from the stage before; the others are given by name."""
    names: tuple[str, ...]

    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]

    def run(self) -> tuple[float, float, float]:
        """CPU seconds of F, of the backward or dgrad, and of wgrad."""
        for p in self.module.parameters():
            p.grad = None
        leaves = self.leaves()
        given = {GIVEN + name: x for name, x in zip(self.names, leaves[self.arriving :])}
        a = time.process_time()
        results = self.module(*leaves[: self.arriving], **given)
        b = time.process_time()
        backward(results if isinstance(results, tuple) else (results,))
        c = time.process_time()
        assert self.module.functions is not None
        if self.module.functions.later:
            self.module.weight_gradients()()
        return b - a, c - b, time.process_time() - c

    def eager(self) -> float:
        """The same calls under autograd, without any compiler."""
        for p in self.module.parameters():
            p.grad = None
        given = self.leaves()
        start = time.process_time()
        backward(self.graph(*self.module._held(), *given))
        return time.process_time() - start


def backward(results: Sequence[Tensor]) -> None:
    moving = [r for r in results if r.requires_grad and r.grad_fn is not None]
    torch.autograd.backward(moving, [torch.ones_like(r) for r in moving])


def bench(traced: Forward, plan: StagePlan, name: str, samples: int, options: Options | None, split: bool) -> Bench:
    entry = zoo.load(name)
    model = entry.build()
    values = dict((*model.named_parameters(), *model.named_buffers()))
    parts = assemble.assemble(traced, plan)
    module = StageModule(parts, {**traced.constants, **values}, values.keys())
    example = assemble.example(
        traced, (*plan.receives, *plan.inputs), assemble.differentiable(traced), torch.device("cpu")
    )
    module.compile(example, options, split)
    real = dict(zip(traced.inputs, entry.inputs(samples)))
    inputs = [
        real[n] if n in real else torch.randn_like(t).requires_grad_(t.requires_grad)
        for n, t in zip((*plan.receives, *plan.inputs), example)
    ]
    arriving = len(plan.receives) or len(inputs)
    return Bench(module, parts.graph, inputs, arriving, plan.inputs)


def measure(traced: Forward, plan: PipelinePlan, name: str) -> Report:
    """Every stage of a plan, interpreted, in turns."""
    benches = [bench(traced, s, name, plan.microbatch_size, None, split=True) for s in plan.stages]
    for b in benches:
        b.run()
    taken: list[list[tuple[float, float, float]]] = [[] for _ in benches]
    for _ in range(ROUNDS):
        for b, each in zip(benches, taken):
            each.append(b.run())
    stages = {i: StageTimes(*(statistics.median(t[k] for t in each) for k in range(3))) for i, each in enumerate(taken)}
    busy = tuple(sum(stages[s.index].total for s in plan.stages_of(r)) for r in range(plan.ranks))
    zero = (0,) * plan.ranks
    return Report(stages, (0.0,) * plan.ranks, busy, zero, (0.0,) * plan.ranks, (1.0,) * plan.ranks)


def equal_layers(traced: Forward, plan: PipelinePlan) -> PipelinePlan:
    """As many layers for each rank, 1F1B: what people do by hand."""
    laid = line.on_cluster(traced, CLUSTER, Degrees(pipeline=RANKS))
    cuts = stage_cut.equal(laid.layers, laid.line.length, RANKS)
    assert cuts is not None
    task = Task(laid.line, laid.layers, RANKS, MICROBATCHES)
    orders = SCHEDULES["1f1b"].orders(RANKS, MICROBATCHES, 1)
    assert orders is not None
    made = candidate(task, "equal", "1f1b", cuts, range(RANKS), orders)
    return describe.describe(
        laid, made, [], [False] * RANKS, model="", cluster=CLUSTER, degrees=Degrees(pipeline=RANKS),
        devices=range(RANKS), samples=plan.microbatch_size, limit=0,
    )  # fmt: skip


def even(models: Sequence[str] = MODELS) -> dict[str, object]:
    """Largest stage over the mean, and how much longer the largest of equal layers is."""
    out: dict[str, object] = {}
    lines = []
    for name in models:
        entry = zoo.load(name)
        model, inputs = entry.build(), entry.inputs(MICROBATCHES)
        traced = forward.trace(model, forward.microbatch(inputs, MICROBATCHES))
        plan = plan_pipeline(
            model, inputs, stages=RANKS, cluster=CLUSTER, microbatches=MICROBATCHES, schedule="1f1b", recompute=False
        )
        hand = measure(traced, equal_layers(traced, plan), name)
        first = report = measure(traced, plan, name)
        best = report
        for _ in range(AGAIN):
            plan = rebalance.replan(plan, traced, report)
            report = measure(traced, plan, name)
            best = min(best, report, key=lambda r: r.imbalance)
        gain = max(hand.busy) / max(best.busy)
        out[name] = {"equal": hand.busy, "planned": first.busy, "measured": best.busy}
        lines.append((name, hand.imbalance, first.imbalance, best.imbalance, f"{gain:.2f} x"))
    head = ("largest stage / mean", "equal layers", "planned", "measured and moved", "shorter than equal layers")
    print(table(head, lines), "\n", flush=True)
    return out


def zero_bubble(
    models: Sequence[str] = ("gpt", "llama", "moe", "gpt-tiny", "llama-tiny"), rounds: int = 15
) -> dict[str, object]:
    """F + dgrad + wgrad compiled, against eager F + B, and against the backward left whole."""
    out: dict[str, object] = {}
    lines = []
    for name in models:
        entry = zoo.load(name)
        model, inputs = entry.build(), entry.inputs(MICROBATCHES)
        traced = forward.trace(model, forward.microbatch(inputs, MICROBATCHES))
        plan = plan_pipeline(
            model, inputs, stages=RANKS, cluster=CLUSTER, microbatches=MICROBATCHES, schedule="1f1b", recompute=False,
            effort="quick",
        ).stages[1]  # fmt: skip
        split, whole = (bench(traced, plan, name, 1, Options(), s) for s in (True, False))
        runs: list[tuple[Callable[[], object], list[tuple[float, ...]]]] = [
            (split.run, []), (whole.run, []), (lambda b=split: (b.eager(),), [])
        ]  # fmt: skip
        for i in range(rounds + 2):
            for call, seen in runs:
                seen.append(call())  # type: ignore[arg-type]
                if i < 2:
                    seen.clear()
        halves, fused, eager = (seen for _, seen in runs)
        total = ratios([sum(t) for t in halves], [sum(t) for t in eager])
        back = ratios([t[1] for t in fused], [t[1] + t[2] for t in halves])
        medians = [statistics.median(t[k] for t in halves) * 1e3 for k in range(3)]
        lines.append(
            (name, *medians, statistics.median(t[1] for t in fused) * 1e3,
             statistics.median(t[0] for t in eager) * 1e3, f"{total:.2f} x", f"{back:.2f} x")
        )  # fmt: skip
        out[name] = {"against eager": total, "halves over whole": back}
    head = (
        "second of 4 stages, one sample, ms",
        "F",
        "dgrad",
        "wgrad",
        "whole B",
        "eager F+B",
        "faster than eager",
        "dgrad+wgrad / B",
    )
    print(table(head, lines), "\n", flush=True)
    return out
