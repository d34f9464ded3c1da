"""Stages of real models in one process: are they even, and what does splitting their backward cost.

Seconds are those of the one thread's CPU, so that other work on the machine does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from common import ratios, table
from pipeline_grid import FREE
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.profiler import ProfilerActivity, profile

from dsc.distributed import assemble, describe, forward, line, stage_cost
from dsc.distributed import measure as measuring
from dsc.distributed.cluster import Cluster
from dsc.distributed.forward import Forward
from dsc.distributed.plan import Degrees, PipelinePlan, StagePlan
from dsc.distributed.planner import plan_pipeline
from dsc.distributed.stage import GIVEN, StageModule
from dsc.models import zoo
from dsc.options import Options
from dsc.passes.solve import stage_cut
from dsc.passes.solve.pipeline_schedule import SCHEDULES
from dsc.passes.solve.pipeline_tune import Task, candidate

RANKS, MICROBATCHES = 4, 8
MODELS = ("gpt", "llama", "bert", "encdec", "moe")
CLUSTER = Cluster("cpu", 1, RANKS, FREE, FREE)
ROUNDS = 9


@dataclass
class Bench:
    """One stage that can be run alone: its inputs are those of the model, its gradients ones."""

    module: StageModule
    graph: GraphModule
    inputs: list[Tensor]
    arriving: int
    """How many of them come from the stage before; the others are given by name."""
    names: tuple[str, ...]

    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]

    def clear(self) -> None:
        for p in self.module.parameters():
            p.grad = None

    def run(self) -> tuple[float, float, float]:
        """CPU seconds of F, of the backward or dgrad, and of wgrad, which is added to what is there."""
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
        given = self.leaves()
        start = time.process_time()
        backward(self.graph(*self.module._held(), *given))
        return time.process_time() - start


def backward(results: Sequence[Tensor]) -> None:
    moving = [r for r in results if r.requires_grad and r.grad_fn is not None]
    torch.autograd.backward(moving, [torch.ones_like(r) for r in moving])


class Keep(Interpreter):
    """The forward of one micro-batch; every value is in ``found``."""

    def __init__(self, traced: Forward) -> None:
        super().__init__(traced.gm)
        self.found: dict[str, object] = {}

    def run_node(self, n: Node) -> object:
        value = self.found[n.name] = super().run_node(n)
        return value


def values_of(traced: Forward, name: str, samples: int) -> dict[str, object]:
    """Every value of the forward of one micro-batch, by the name of its node."""
    entry = zoo.load(name)
    model, keep = entry.build(), Keep(traced)
    state = dict((*model.named_parameters(), *model.named_buffers()))
    given = dict(zip(traced.inputs, entry.inputs(samples)))
    places = [n.name for n in traced.gm.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        keep.run(*(state[traced.state[p]] if p in traced.state else {**traced.constants, **given}[p] for p in places))
    return keep.found


def bench(
    traced: Forward, plan: StagePlan, name: str, known: Mapping[str, object], options: Options | None, split: bool
) -> Bench:
    model = zoo.load(name).build()
    values = dict((*model.named_parameters(), *model.named_buffers()))
    parts = assemble.assemble(traced, plan)
    module = StageModule(parts, {**traced.constants, **values}, values.keys())
    example = assemble.example(
        traced, (*plan.receives, *plan.inputs), assemble.differentiable(traced), torch.device("cpu")
    )
    module.compile(example, options, split)
    inputs = [
        torch.as_tensor(known[n]).detach().clone().requires_grad_(t.requires_grad)
        for n, t in zip((*plan.receives, *plan.inputs), example)
    ]
    arriving = len(plan.receives) or len(inputs)
    return Bench(module, parts.graph, inputs, arriving, plan.inputs)


def measure(traced: Forward, plans: Sequence[PipelinePlan], name: str, options: Options | None) -> list[list[float]]:
    """Seconds of every stage of some plans, all in turns, so that a busy machine is as busy for each."""
    known = values_of(traced, name, plans[0].microbatch_size)
    benches = [[bench(traced, s, name, known, options, True) for s in plan.stages] for plan in plans]
    every = [b for each in benches for b in each]
    taken: dict[int, list[float]] = {id(b): [] for b in every}
    for i in range(ROUNDS + 1):
        for b in every:
            took = sum(b.run())
            if i:
                taken[id(b)].append(took)
    return [[statistics.median(taken[id(b)]) for b in each] for each in benches]


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


def least(model: torch.nn.Module, traced: Forward, inputs: Sequence[Tensor]) -> float:
    """Largest stage over the mean that no cut of this line of calls is below, by what each call took."""
    priced = stage_cost.costs(traced, stage_cost.Layout(CLUSTER, Degrees(pipeline=RANKS)))
    took = measuring.measured(traced, priced, model, inputs)
    laid = line.on_cluster(traced, CLUSTER, Degrees(pipeline=RANKS), priced=took)
    cuts = stage_cut.straight(laid.line, RANKS, np.flatnonzero(laid.line.allowed))
    assert cuts is not None
    return uneven(np.diff(laid.line.total[list(cuts)]))


def uneven(stages: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(max(stages) * len(stages) / sum(stages))


def even(models: Sequence[str] = MODELS) -> dict[str, object]:
    """Largest stage over the mean, and how much longer the largest of equal layers is."""
    out: dict[str, object] = {}
    lines = []
    for name in models:
        entry = zoo.load(name)
        model, inputs = entry.build(), entry.inputs(MICROBATCHES)
        one = forward.microbatch(inputs, MICROBATCHES)
        traced = forward.trace(model, one)
        modelled, planned = (
            plan_pipeline(
                model, inputs, stages=RANKS, cluster=CLUSTER, microbatches=MICROBATCHES, schedule="1f1b",
                recompute=False, costs=costs,
            )
            for costs in ("modelled", "measured")
        )  # fmt: skip
        plans = {"equal": equal_layers(traced, modelled), "modelled": modelled, "measured": planned}
        found: dict[str, object] = {"least": least(model, traced, one)}
        for kind, options in (("interpreted", None), ("compiled", Options())):
            took = dict(zip(plans, measure(traced, list(plans.values()), name, options)))
            gain = max(took["equal"]) / max(took["measured"])
            found[kind] = {**took, "gain": gain}
            lines.append((name, kind, *(uneven(took[k]) for k in plans), found["least"], f"{gain:.2f} x"))
        out[name] = found
        head = ("largest stage / mean", "stages", "equal layers", "costs modelled", "measured", "least", "shorter")
        print(table(head, lines[-2:]), "\n", flush=True)
    print(table(head, lines), "\n", flush=True)
    return out


PRODUCTS = ("::mm", "::addmm", "::bmm", "::baddbmm", "scaled_dot_product", "mkldnn", "convolution")
"""Calls of ATen that no compiler here makes faster: products, attention, convolutions."""


def parts(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call that products take, and all else, as torch's profiler counts them."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    events = seen.key_averages()
    mine = sum(e.self_cpu_time_total for e in events if any(p in e.key for p in PRODUCTS))
    return mine / 1e6, (sum(e.self_cpu_time_total for e in events) - mine) / 1e6


def zero_bubble(
    models: Sequence[str] = ("gpt", "llama", "moe", "bert", "encdec", "vit", "gpt-tiny", "llama-tiny"), rounds: int = 15
) -> dict[str, object]:
    """F + dgrad + wgrad compiled, against eager F + B, and against the backward left whole.

    ``rest`` is what is no product: eager's over ours, the fastest of the rounds for each.  ``most`` is eager's time over that of its products: what the whole
    would gain if all else took no time.
    """
    out: dict[str, object] = {}
    lines: list[tuple[object, ...]] = []
    for name in models:
        entry = zoo.load(name)
        model, inputs = entry.build(), entry.inputs(MICROBATCHES)
        traced = forward.trace(model, forward.microbatch(inputs, MICROBATCHES))
        plan = plan_pipeline(
            model, inputs, stages=RANKS, cluster=CLUSTER, microbatches=MICROBATCHES, schedule="1f1b", recompute=False,
            effort="quick",
        ).stages[1]  # fmt: skip
        known = values_of(traced, name, 1)
        split, whole = (bench(traced, plan, name, known, Options(), s) for s in (True, False))
        runs: list[tuple[Callable[[], object], list[tuple[float, ...]]]] = [
            (split.run, []), (whole.run, []), (lambda b=split: (b.eager(),), [])
        ]  # fmt: skip
        for i in range(rounds + 2):
            for call, seen in runs:
                split.clear()
                whole.clear()
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
        profiled: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for _ in range(rounds):
            split.clear()
            mine = parts(split.run)
            split.clear()
            profiled.append((mine, parts(split.eager)))
        (_, ours), (heavy, theirs) = ([min(x[i][k] for x in profiled) for k in (0, 1)] for i in (0, 1))
        rest, most = theirs / ours, (heavy + theirs) / heavy
        lines[-1] += (f"{heavy / (heavy + theirs):.0%}", f"{rest:.2f} x", f"{most:.2f} x")
        out[name] = {"against eager": total, "halves over whole": back, "rest": rest, "most": most}
    head = (
        "second of 4 stages, one sample, ms",
        "F",
        "dgrad",
        "wgrad",
        "whole B",
        "eager F+B",
        "faster than eager",
        "dgrad+wgrad / B",
        "products",
        "rest",
        "most",
    )
    print(table(head, lines), "\n", flush=True)
    return out
