"""What the stages of a rank really take: times of every action, idle share, bytes over the links, and drift from the plan."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from dsc.distributed.plan import PipelinePlan

WINDOW = 20
"""Steps over which medians are taken."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch, medians over the last steps."""

    forward: float
    dgrad: float
    wgrad: float

    @property
    def total(self) -> float:
        return self.forward + self.dgrad + self.wgrad


@dataclass(frozen=True)
class Report:
    """What all ranks measured, equal on every rank."""

    stages: Mapping[int, StageTimes]
    steps: tuple[float, ...]
    """Seconds of a step, of each rank."""
    busy: tuple[float, ...]
    """Seconds of work on stages in a step, of each rank."""
    sent: tuple[int, ...]
    """Bytes that each rank sends in a step: activations on, gradients back."""
    links: tuple[float, ...]
    """Share of a step in which each rank's link would be busy with that, at the rate that the plan assumes."""
    planned: tuple[float, ...]
    """Work of each rank as the plan modelled it, in the plan's seconds."""

    @property
    def step(self) -> float:
        return max(self.steps)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is not work on stages."""
        return 1 - sum(self.busy) / (len(self.busy) * self.step)

    @property
    def imbalance(self) -> float:
        """Busiest rank over the mean."""
        return max(self.busy) * len(self.busy) / sum(self.busy)

    @property
    def drift(self) -> float:
        """How far a rank is beyond the share of the work that the plan gave it: 0 if shares are as planned."""
        return _beyond(self.busy, self.planned)

    def drift_from(self, before: Report) -> float:
        """How far a rank is beyond the share that it had before."""
        return _beyond(self.busy, before.busy)

    def __str__(self) -> str:
        head = f"step {self.step * 1e3:.1f} ms, bubble {self.bubble:.1%}, busiest rank {self.imbalance:.2f} x the mean, drift {self.drift:.1%}"
        rows = [
            f"  stage {i}: F {t.forward * 1e3:.2f} ms, dgrad {t.dgrad * 1e3:.2f} ms, wgrad {t.wgrad * 1e3:.2f} ms"
            for i, t in sorted(self.stages.items())
        ]
        ranks = [
            f"  rank {r}: busy {b * 1e3:.1f} ms, sends {n / 1e6:.2f} MB a step, link {u:.2%}"
            for r, (b, n, u) in enumerate(zip(self.busy, self.sent, self.links))
        ]
        return "\n".join([head, *rows, *ranks])


def _beyond(now: Sequence[float], then: Sequence[float]) -> float:
    total, before = sum(now), sum(then)
    return max(a / total * before / b for a, b in zip(now, then)) - 1


@dataclass
class Monitor:
    """The times of one rank.  Recording costs two clock reads an action."""

    device: torch.device
    actions: dict[tuple[int, str], deque[list[Any]]] = field(default_factory=dict)
    """Stage and kind -> of each step, marks of start and end of its actions."""
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def mark(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            return event
        return time.perf_counter()

    def begin(self) -> None:
        for seen in self.actions.values():
            seen.append([])

    def note(self, stage: int, kind: str, start: Any) -> None:
        seen = self.actions.setdefault((stage, kind), deque([[]], maxlen=WINDOW))
        seen[-1].append((start, self.mark()))

    def seconds(self, stage: int, kind: str) -> float:
        """Of one action, the median of all that are remembered."""
        found = [_between(a, b) for step in self.actions.get((stage, kind), ()) for a, b in step]
        return statistics.median(found) if found else 0.0

    def busy(self) -> float:
        """Of one step, the median."""
        sums: list[float] = []
        for i in range(-min((len(s) for s in self.actions.values()), default=0), 0):
            sums.append(sum(_between(a, b) for s in self.actions.values() for a, b in s[i]))
        return statistics.median(sums) if sums else 0.0

    def clear(self) -> None:
        """Forget what was measured: stages have changed, or the first steps were no measure."""
        self.actions.clear()
        self.steps.clear()


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class TimedStage(PipelineStage):
    """A stage that tells its rank's monitor how long its actions take; waiting for neighbours is not in them."""

    monitor: Monitor

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        start = self.monitor.mark()
        out = super().forward_one_chunk(*args, **kwargs)
        self.monitor.note(self.stage_index, "F", start)
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        start = self.monitor.mark()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.monitor.note(self.stage_index, "B" if full_backward else "I", start)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        start = self.monitor.mark()
        super().backward_weight_one_chunk(*args, **kwargs)
        self.monitor.note(self.stage_index, "W", start)


def gather(monitor: Monitor, plan: PipelinePlan, rank: int, sent: int, group: dist.ProcessGroup) -> Report:
    """Everybody's measures to everybody; ``rank`` is this one's in the plan, ``sent`` the bytes that it sends in a step."""
    mine = {}
    for s in plan.stages_of(rank):
        whole, dgrad, wgrad = (monitor.seconds(s.index, kind) for kind in "BIW")
        if not dgrad and whole:  # never split: shares as planned
            share = s.dgrad / s.backward if s.backward else 0.0
            dgrad, wgrad = whole * share, whole * (1 - share)
        mine[s.index] = StageTimes(monitor.seconds(s.index, "F"), dgrad, wgrad)
    step = statistics.median(monitor.steps) if monitor.steps else 0.0
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (rank, mine, step, monitor.busy(), sent), group=group)
    found.sort(key=lambda f: f[0])
    stages = {i: t for f in found for i, t in f[1].items()}
    links = []
    for r, _, took, _, nbytes in found:
        peers = {s.rank for s in plan.stages} - {r}
        rates = [k.bandwidth for p in peers if (k := plan.cluster.link(plan.devices[r], plan.devices[p])) is not None]
        links.append(nbytes / min(rates) / took if rates and took else 0.0)
    planned = tuple(
        sum(s.forward + s.backward for s in plan.stages_of(r)) * plan.microbatches for r in range(plan.ranks)
    )
    return Report(
        stages,
        tuple(f[2] for f in found),
        tuple(f[3] for f in found),
        tuple(f[4] for f in found),
        tuple(links),
        planned,
    )
