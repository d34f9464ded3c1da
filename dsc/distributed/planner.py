"""``dsc.plan_pipeline``: the stages, the schedule and the place of each, for a cluster that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from dsc import budget
from dsc.distributed import degrees as proposals
from dsc.distributed import describe, forward, line, measure, stage_cost, topology
from dsc.distributed.cluster import Cluster
from dsc.distributed.line import Laid
from dsc.distributed.plan import Degrees, PipelinePlan
from dsc.errors import (
    BadMicrobatches,
    BadOption,
    ClusterTooSmall,
    PipelineTooLarge,
    TooManyStages,
    UnknownSchedule,
    size,
)
from dsc.manager import Remark
from dsc.passes.solve import pipeline_tune, stage_cut
from dsc.passes.solve.pipeline_schedule import SCHEDULES
from dsc.passes.solve.pipeline_simulate import simulate
from dsc.passes.solve.pipeline_tune import Candidate, Task, Work

SEARCHED = "searched"
NAMES = (*SCHEDULES, SEARCHED)
TRIED = 4
"""Numbers of micro-batches that ``auto`` looks at."""
COSTS = ("modelled", "measured")
WORK = {"quick": Work(2, 1, 400, 2000, 4), "usual": Work(), "long": Work(6, 4, 4000, 25_000, 8)}


def plan_pipeline(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor],
    *,
    stages: int | Literal["auto"] = "auto",
    cluster: str | Cluster = "8xa100",
    microbatches: int | Literal["auto"] = "auto",
    schedule: str = "auto",
    memory: int | str | None = None,
    degrees: Degrees | None = None,
    optimizer: str = "adam",
    recompute: bool | Literal["auto"] = "auto",
    chunks: int = 2,
    slow: Sequence[float] = (),
    costs: str = "modelled",
    effort: str = "usual",
    seed: int = 0,
) -> PipelinePlan:
    """Cut ``model`` into pipeline stages for ``cluster`` and choose who runs what when.  Nothing is sent.

    ``example_inputs``: the batch of one replica, dimension 0 of each; on the meta device if the model is.
    ``stages``: ranks of the pipeline; schedules may give each rank several stages.  ``auto`` proposes all degrees.
    ``microbatches``: slices of the batch; ``auto`` tries divisors of it.
    ``schedule``: ``auto`` or ``searched``, gpipe, 1f1b, zb-h1, interleaved, interleaved-zb, zbv, dualpipev.
    ``memory``: bytes a rank may use, such as ``"70GiB"`` or ``"80%"``; default: 94 % of the card's.
    ``recompute``: whether stages compute their forward again; ``auto``: those that would not fit otherwise.
    ``chunks``: stages a rank, of interleaved schedules.  ``slow``: for each rank what it takes, as a multiple of what
    the card should (measured times over modelled ones).  ``costs``: ``modelled`` by the roofline of the cluster's cards,
    nothing is computed; or ``measured`` where the model lies: one micro-batch runs a few times, call by call.
    ``effort``: quick, usual or long.

    Raises:
        BadCluster, UnknownTarget, UnknownSchedule, BadOption: what is given makes no sense.
        ClusterTooSmall, TooManyStages, BadMicrobatches, PipelineTooLarge: it makes sense, and cannot be.
        Untraceable: the model cannot become one graph.
    """
    machine = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    if odd := [x for x in inputs if not isinstance(x, Tensor)]:
        raise BadOption("example_inputs", odd[0], "tensors, on the meta device or any other")
    _check(schedule, optimizer, effort, chunks, costs)
    if costs == "measured" and any(t.is_meta for t in (*model.parameters(), *model.buffers(), *inputs)):
        raise BadOption("costs", costs, "'modelled' for a model or a batch on the meta device: nothing runs there")
    samples = forward.batch_of(inputs)
    remarks: list[Remark] = []
    if degrees is None and stages == "auto":
        found = proposals.propose(model, inputs, machine, memory=memory, optimizer=optimizer)
        degrees = found[0].degrees
        remarks = [p.remark for p in found[:5]]
        inputs = tuple(t[: samples // degrees.data] if t.dim() else t for t in inputs)
        samples //= degrees.data
        if microbatches == "auto":
            microbatches = found[0].microbatches
    degrees = degrees or Degrees()
    ranks = degrees.pipeline if stages == "auto" else stages
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise BadOption("stages", stages, "a positive whole number, or 'auto'")
    degrees = replace(degrees, pipeline=ranks)
    if degrees.devices > machine.size:
        raise ClusterTooSmall(str(machine), machine.size, degrees.devices, topology.words(degrees))
    if slow and (len(slow) != ranks or min(slow) <= 0):
        raise BadOption("slow", tuple(slow), f"{ranks} positive numbers, one a rank")
    limit = budget.bytes_of("auto" if memory is None else memory, machine.target, "memory")
    if costs == "measured" and (degrees.tensor, degrees.sequence, degrees.expert) != (1, 1, 1):
        raise BadOption("costs", costs, "'modelled' where cards share a layer: what runs here is a whole one")
    request = Request(
        model, inputs, machine, degrees, limit, optimizer, recompute, chunks, schedule, tuple(slow), costs
    )
    counts = request.counts(microbatches)
    setups = {m: request.setup(m) for m in counts}
    best = min(setups, key=lambda m: (not setups[m].fits, setups[m].seconds))
    for m in counts:
        if m != best:
            why = f"{setups[m].seconds / setups[best].seconds - 1:+.1%} time before the search"
            remarks.append(Remark(f"{m} micro-batches", "skipped", why if setups[m].fits else "does not fit"))
    return request.finish(setups[best], WORK[effort], seed, remarks, samples // best)


def _check(schedule: str, optimizer: str, effort: str, chunks: int, costs: str) -> None:
    if schedule not in (*NAMES, "auto"):
        raise UnknownSchedule(schedule, (*NAMES, "auto"))
    if optimizer not in line.STATE:
        raise BadOption("optimizer", optimizer, f"one of {', '.join(line.STATE)}")
    if effort not in WORK:
        raise BadOption("effort", effort, f"one of {', '.join(WORK)}")
    if costs not in COSTS:
        raise BadOption("costs", costs, f"one of {', '.join(COSTS)}")
    if not isinstance(chunks, int) or not 2 <= chunks <= 16:
        raise BadOption("chunks", chunks, "a whole number from 2 to 16")


@dataclass(frozen=True)
class Setup:
    """A number of micro-batches, with the line of the model at that size and what known schedules make of it."""

    laid: Laid
    task: Task
    found: list[Candidate]

    @property
    def fits(self) -> bool:
        return any(c.fits for c in self.found)

    @property
    def seconds(self) -> float:
        return min((c.seconds for c in self.found if c.fits or not self.fits), default=float("inf"))


@dataclass(frozen=True)
class Request:
    """What is asked for, checked."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    cluster: Cluster
    degrees: Degrees
    limit: int
    optimizer: str
    recompute: bool | Literal["auto"]
    chunks: int
    schedule: str
    slow: tuple[float, ...] = ()
    costs: str = "modelled"

    def counts(self, microbatches: int | str) -> list[int]:
        """The numbers of micro-batches to look at."""
        samples = forward.batch_of(self.inputs)
        if microbatches != "auto":
            if not isinstance(microbatches, int) or isinstance(microbatches, bool):
                raise BadMicrobatches(microbatches, "it is no whole number", f"give a divisor of {samples} or 'auto'")
            forward.microbatch(self.inputs, microbatches)
            return [microbatches]
        whole = [m for m in range(1, samples + 1) if samples % m == 0]
        ranks = self.degrees.pipeline
        return sorted(sorted(whole, key=lambda m: (m < ranks, abs(m / (4 * ranks) - 1)))[:TRIED])

    def setup(self, microbatches: int) -> Setup:
        microbatch = forward.microbatch(self.inputs, microbatches)
        traced = forward.trace(self.model, microbatch)
        priced = stage_cost.costs(traced, stage_cost.Layout(self.cluster, self.degrees))
        if self.costs == "measured":
            priced = measure.measured(traced, priced, self.model, microbatch)
        devices = self.devices()
        machines = tuple(d // self.cluster.per_node for d in devices)
        names = list(SCHEDULES) if self.schedule in ("auto", SEARCHED) else [self.schedule]
        best: Setup | None = None
        for again in (False, True) if self.recompute == "auto" else (self.recompute,):
            for order in line.orders(traced):
                laid = line.on_cluster(traced, self.cluster, self.degrees, self.optimizer, order, priced)
                self.check(laid)
                task = Task(
                    laid.line,
                    laid.layers,
                    self.degrees.pipeline,
                    microbatches,
                    self.limit,
                    again,
                    self.chunks,
                    machines,
                    self.slow,
                )
                made = Setup(laid, task, pipeline_tune.portfolio(task, names))
                if best is None or (not made.fits, made.seconds) < (not best.fits, best.seconds):
                    best = made
            if best is not None and best.fits:
                break
        assert best is not None
        if not best.found:
            raise BadMicrobatches(
                microbatches,
                f"the schedule {self.schedule!r} cannot run them on {self.degrees.pipeline} ranks",
                "give a multiple of the ranks, twice as many at least, or another schedule",
            )
        return best

    def check(self, laid: Laid) -> None:
        """Whether there are enough places to cut."""
        known = SCHEDULES.get(self.schedule)
        parts = self.degrees.pipeline * (1 if known is None else known.chunks or self.chunks)
        most = int(laid.line.allowed[1:-1].sum()) + 1
        if parts > most:
            a_rank = parts // self.degrees.pipeline
            why = f"its graph has {len(laid.nodes)} calls" + (
                f", and {self.schedule} takes {a_rank} stages a rank" if a_rank > 1 else ""
            )
            raise TooManyStages(self.degrees.pipeline, most // a_rank, why)

    def devices(self) -> tuple[int, ...]:
        return topology.devices(self.degrees)

    def finish(self, setup: Setup, work: Work, seed: int, remarks: Sequence[Remark], samples: int) -> PipelinePlan:
        """The best plan from what known schedules make of the model."""
        search = self.schedule in ("auto", SEARCHED)
        chosen = pipeline_tune.tune(setup.task, setup.found, work, seed=seed, search=search)
        if chosen is None:
            raise self.too_large(setup)
        again = [setup.task.again] * (len(chosen.cuts) - 1)
        if setup.task.again and self.recompute == "auto":
            chosen, again = less_again(setup.task, chosen)
        if self.costs == "measured":
            remarks = [Remark("costs", "did", "measured call by call, where the model lies"), *remarks]
        rivals = [c for c in setup.found if c.cuts != chosen.cuts or c.orders != chosen.orders]
        return describe.describe(
            setup.laid,
            chosen,
            rivals,
            again,
            model=type(self.model).__name__,
            cluster=self.cluster,
            degrees=self.degrees,
            devices=self.devices(),
            samples=samples,
            limit=self.limit,
            remarks=remarks,
        )

    def too_large(self, setup: Setup) -> PipelineTooLarge:
        """Which rank is over, by what, and what would help."""
        c = min(setup.found, key=lambda c: max(c.timeline.peaks))
        rank = max(range(c.pipeline.ranks), key=lambda r: c.timeline.peaks[r])
        static = c.pipeline.static[rank]
        what = f"{size(int(static))} of parameters, gradients and optimizer state, the rest activations"
        if static > self.limit:
            advice = "give more stages, ZeRO (degrees with zero=1) or tensor parallelism, or larger cards"
        elif samples := forward.batch_of(self.inputs):
            more = [m for m in range(c.pipeline.microbatches + 1, samples + 1) if samples % m == 0]
            smaller = f"microbatches={more[0]}, " if more else "a smaller batch, "
            advice = f"give {smaller}more stages, or larger cards"
        return PipelineTooLarge(self.limit, int(c.timeline.peaks[rank]), rank, what, advice)


def less_again(task: Task, c: Candidate) -> tuple[Candidate, list[bool]]:
    """Stages that fit without computing their forward again, do without, the costliest first."""
    again = [True] * (len(c.cuts) - 1)
    for s in sorted(range(len(again)), key=lambda s: -c.pipeline.forward[s]):
        trial = [x and i != s for i, x in enumerate(again)]
        p = stage_cut.pipeline(
            task.line, c.cuts, c.pipeline.home, task.microbatches, task.limit, trial, task.machines, task.slow
        )
        timeline = simulate(p, c.orders)
        if max(timeline.peaks) <= task.limit and timeline.seconds <= c.seconds:
            c, again = replace(c, pipeline=p, timeline=timeline), trial
    return c, again
