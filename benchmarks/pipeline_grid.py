"""Pipelines against one process: loss and every gradient, models x schedules x interpreted and compiled x 2 and 4 ranks.

The largest difference of a gradient, relative to its largest number, and that of the loss.  One process runs the same
micro-batches eagerly, one after the other.  ``searched`` are orders that the search made for random times of the stages.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pipeline_ranks
import torch
import torch.distributed as dist
from common import table
from torch import Tensor, nn

from dsc.distributed import assemble, pipeline
from dsc.distributed.build import drive
from dsc.distributed.cluster import Cluster, Link
from dsc.distributed.plan import PipelinePlan, why_not
from dsc.distributed.planner import plan_pipeline
from dsc.models import zoo
from dsc.passes.solve import pipeline_search
from dsc.passes.solve.pipeline_schedule import halves
from dsc.passes.solve.pipeline_search import Effort
from dsc.passes.solve.pipeline_simulate import Pipeline

MODELS = ("gpt-tiny", "llama-tiny", "moe-tiny", "encdec-tiny", "uvit-tiny")
SCHEDULES = ("1f1b", "zb-h1", "zbv", "dualpipev", "interleaved")
SEARCHED = 20
FREE = Link("free", 1e15, 0.0)
"""So that tiny models are cut evenly: on real links none of them would be cut at all."""


def plans(name: str, ranks: int, schedules: Sequence[str], searched: int) -> dict[str, PipelinePlan]:
    """Made once, for all ranks: a plan for each schedule, and orders that were searched from other seeds for one split."""
    entry = zoo.load(name)
    model, microbatches = entry.build(), 2 * ranks
    inputs = entry.inputs(2 * microbatches)
    cluster = Cluster("cpu", 1, ranks, FREE, FREE)
    common = {"stages": ranks, "cluster": cluster, "microbatches": microbatches, "effort": "quick", "recompute": False}
    out = {s: plan_pipeline(model, inputs, schedule=s, **common) for s in schedules}
    base, rng = out["zbv"], random.Random(0)
    for seed in range(searched):
        times = [tuple(rng.uniform(0.5, 1.5) for _ in base.stages) for _ in "FIW"]  # an order is made for some times
        zero = (0.0,) * len(base.stages)
        p = Pipeline(ranks, microbatches, tuple(s.rank for s in base.stages), *times, zero[1:], zero, zero)
        orders = pipeline_search.search(p, (), Effort(greedy=5, moves=300, starts=1), seed=seed)
        assert orders is not None
        out[f"searched {seed}"] = replace(base, schedule="searched", orders=tuple(map(halves, orders)))
        problem = why_not(out[f"searched {seed}"])
        assert problem is None, problem
    return out


def reference(model: nn.Module, inputs: Sequence[Tensor], count: int) -> tuple[float, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    size, total = len(inputs[0]) // count, 0.0
    for i in range(count):
        loss = model(*(x[i * size : (i + 1) * size] for x in inputs)) / count
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rows(name: str, made: dict[str, PipelinePlan], kinds: Sequence[bool]) -> list[tuple[str, bool, float, float]]:
    """On every rank: schedule, compiled, relative difference of the loss and of the worst gradient anywhere."""
    entry = zoo.load(name)
    plan = next(iter(made.values()))
    inputs = entry.inputs(plan.microbatches * plan.microbatch_size)
    loss, want = reference(entry.build(), inputs, plan.microbatches)
    out = []
    for compiled in kinds:
        kept: pipeline.Pipeline | None = None
        split: set[int] = set()
        for schedule, plan in made.items():
            halved = {s for order in plan.orders for s, kind, _ in order if kind == "I"}
            if kept is None or kept.plan.stages != plan.stages or not halved <= split:
                split = halved
                kept = pipeline.pipeline(entry.build(), inputs, plan=plan, compiled=compiled)
            else:  # the same stages in another order
                carry = assemble.differentiable(kept.setup.traced)
                kept.plan = plan
                kept.built.runtime = drive(plan, kept.place, kept.setup, kept.stages, kept.monitor, carry)
            for p in kept.parameters():
                p.grad = None
            got = float(kept.step(*inputs))
            worst = torch.zeros(())
            for n, p in kept.named_parameters():
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                worst = torch.maximum(worst, (grad - want[n]).abs().max() / want[n].abs().max().clamp_min(1e-12))
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            out.append((schedule, compiled, abs(got - loss) / loss, float(worst)))
    return out


def main(models: Sequence[str], worlds: Sequence[int], searched: int) -> dict[str, object]:
    found: dict[str, object] = {}
    lines = []
    for world, name in itertools.product(worlds, models):
        made = plans(name, world, SCHEDULES, searched)
        order = sorted(
            made, key=lambda k: (made[k].stages != made["zbv"].stages, not k.startswith("searched"))
        )  # these split all
        results = pipeline_ranks.run(world, rows, name, {k: made[k] for k in order}, (False, True))[0]
        for schedule, compiled, loss, grad in results:
            found[f"{name} {world} {schedule} {'compiled' if compiled else 'interpreted'}"] = (loss, grad)
        for compiled in (False, True):
            cells: list[object] = [name, world, "compiled" if compiled else "interpreted"]
            for s in (*SCHEDULES, "searched"):
                mine = [r for r in results if r[0].split()[0] == s and r[1] == compiled]
                cells.append(
                    f"{max(r[3] for r in mine):.1e}" + (f" ({len(mine)})" if s == "searched" else "") if mine else None
                )
            cells.append(f"{max(r[2] for r in results if r[1] == compiled):.1e}")
            lines.append(cells)
        print(table(("gradients", "ranks", "stages", *SCHEDULES, "searched", "loss"), lines[-2:]), flush=True)
    print()
    print(table(("gradients", "ranks", "stages", *SCHEDULES, "searched", "loss"), lines))
    worst = max(x for pair in found.values() for x in pair)  # type: ignore[attr-defined]
    print(f"\n{len(found)} runs, the worst difference {worst:.1e}")
    return found
