"""How to divide a cluster: degrees of data, tensor, pipeline, sequence and expert parallelism, by modelled seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from dsc import budget
from dsc.distributed import forward, line
from dsc.distributed.cluster import Cluster
from dsc.distributed.forward import Forward
from dsc.distributed.line import Laid
from dsc.distributed.plan import Degrees
from dsc.distributed.stage_cost import has_experts
from dsc.distributed.topology import devices, reduce_seconds, words
from dsc.errors import BadOption
from dsc.manager import Remark
from dsc.passes.solve import pipeline_tune
from dsc.passes.solve.pipeline_tune import Task

SCHEDULES = ("1f1b", "zb-h1", "zbv")
"""That degrees are compared by; the search comes later."""
MOST_BATCHES = 64
TOO_MANY = 8
"""Micro-batches for each rank beyond which more bring nothing."""


@dataclass(frozen=True)
class Proposal:
    """One way to divide a cluster, and what it would do."""

    degrees: Degrees
    microbatches: int
    seconds: float
    """Of a step of the whole batch, with the sum of gradients over replicas; infinite if it cannot be."""
    peak: int
    fits: bool
    recompute: bool
    reduce: float
    """Of those seconds, for gradients."""

    @property
    def remark(self) -> Remark:
        how = words(self.degrees)
        if not self.fits:
            return Remark(how, "skipped", f"it needs {self.peak / 2**30:.1f} GiB a card")
        again = ", forwards computed again" if self.recompute else ""
        return Remark(
            how,
            "did",
            f"{self.seconds * 1e3:.4g} ms a step before the search, {self.reduce * 1e3:.3g} ms of it gradients{again}",
        )


def candidates(cluster: Cluster, samples: int) -> Iterator[Degrees]:
    """All ways to use the whole cluster: tensor parallelism inside a node alone; stages or replicas on the nearer cards."""
    for tensor in _divisors(cluster.per_node):
        for pipeline in _divisors(cluster.size // tensor):
            data = cluster.size // tensor // pipeline
            if samples % data or tensor > 8:
                continue
            yield Degrees(data, tensor, pipeline, tensor, 1, 1 if data > 1 else 0)
            if data > 1 and pipeline > 1 and cluster.nodes > 1:
                yield Degrees(data, tensor, pipeline, tensor, 1, 1, "replicas")


def propose(
    model: nn.Module,
    inputs: Sequence[Tensor],
    cluster: Cluster,
    *,
    memory: int | str | None = None,
    optimizer: str = "adam",
) -> list[Proposal]:
    """Ways to train ``model`` on a whole cluster, the fastest first; ``inputs`` are the batch of all replicas together.

    Micro-batches are as small as the batch allows, but no more than ``TOO_MANY`` a rank.

    Raises:
        BadOption: no division of the cluster suits the model and its batch.
    """
    samples = forward.batch_of(inputs)
    limit = budget.bytes_of("auto" if memory is None else memory, cluster.target, "memory")
    traced: dict[int, Forward] = {}
    found: list[Proposal] = []
    experts = 0
    for d in candidates(cluster, samples):
        m = _batches(samples // d.data, d.pipeline)
        each = samples // d.data // m
        if each not in traced:
            traced[each] = forward.trace(model, tuple(t[:each] if t.dim() else t for t in inputs))
            experts = experts or _experts(traced[each])
        ways = [d] if experts < 2 or d.data == 1 else _with_experts(d, experts)
        judged = (_judge(w, m, line.on_cluster(traced[each], cluster, w, optimizer), cluster, limit) for w in ways)
        found += [p for p in judged if p is not None]
    if not found:
        raise BadOption("cluster", str(cluster), "a smaller one: no division of it suits this model and its batch")
    return sorted(found, key=lambda p: (not p.fits, p.seconds if p.fits else p.peak))


def _with_experts(d: Degrees, experts: int) -> list[Degrees]:
    """The same with all experts on every replica, and spread over as many of them as can be."""
    most = max(e for e in _divisors(d.data) if experts % e == 0)
    return [d] if most == 1 else [d, replace(d, expert=most)]


def _judge(d: Degrees, m: int, laid: Laid, cluster: Cluster, limit: int) -> Proposal | None:
    machines = tuple(p // cluster.per_node for p in devices(d))
    gradients = float(laid.line.gradients[-1]) * (d.data if d.zero >= 2 else 1) / d.pipeline
    reduce = reduce_seconds(gradients, d, cluster)
    best = None
    for again in (False, True):
        task = Task(laid.line, laid.layers, d.pipeline, m, limit, again, 2, machines)
        made = pipeline_tune.portfolio(task, SCHEDULES)
        best = pipeline_tune.best_of(made)
        if best is not None:
            return Proposal(d, m, best.seconds + reduce, int(max(best.timeline.peaks)), True, again, reduce)
    if not made:
        return None  # more ranks than places to cut
    least = min(int(max(c.timeline.peaks)) for c in made)
    return Proposal(d, m, float("inf"), least, False, True, reduce)


def _batches(samples: int, ranks: int) -> int:
    """Micro-batches of a replica's batch."""
    most = min(samples, MOST_BATCHES, max(TOO_MANY * ranks, 1))
    return max(m for m in range(1, most + 1) if samples % m == 0)


def _experts(traced: Forward) -> int:
    """How many experts the model has: the first dimension of three-dimensional parameters in products of batches."""
    for n in traced.gm.graph.nodes:
        if n.op != "placeholder" or n.name not in traced.parameters or n.meta["val"].dim() != 3:
            continue
        if any(has_experts(u) for u in n.users):
            return int(n.meta["val"].shape[0])
    return 1


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
