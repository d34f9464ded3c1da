"""Gradients that several processes share: tied weights over stages, and replicas, plain, compressed or sharded.

Replicas do not use the class ``DistributedDataParallel``: it reduces from autograd hooks, which never fire for the weight
gradients of a zero-bubble schedule.  Its communication hooks are used, on the buckets of a stage, where the runtime says
that the stage's last weight gradient is there: other stages of the rank go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dsc.distributed.place import Place
from dsc.distributed.plan import PipelinePlan
from dsc.distributed.stage import StageModule
from dsc.errors import BadOption, NotParallel


class Bucket:
    """The gradients of a stage of one dtype, one behind the other: what torch's communication hooks ask of a bucket."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._buffer = torch.cat([_gradient(p).reshape(-1) for p in parameters])

    def buffer(self) -> Tensor:
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        """Views into the buffer."""
        out, start = [], 0
        for p in self._parameters:
            out.append(self._buffer[start : start + p.numel()].view(p.shape))
            start += p.numel()
        return out

    def give_back(self, reduced: Tensor) -> None:
        self._buffer = reduced
        for p, grad in zip(self._parameters, self.gradients()):
            p.grad = grad


def _gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


@dataclass
class Replicas:
    """Copies of every stage, whose gradients are averaged over the ``dp`` dimension of the mesh."""

    reduces: bool = True
    """Whether ``reduce`` is to be called when a stage's gradients are complete."""
    waiting: list[tuple[Bucket, Any]] = field(default_factory=list)
    groups: dict[int, dist.ProcessGroup] = field(default_factory=dict)
    """A group of its own for each stage: hooks start collectives from callbacks, in an order that ranks do not share."""

    def wrap(self, index: int, module: StageModule, at: Place) -> None:
        """All replicas start from the values of the first."""
        mesh = at.dimension("dp")
        if mesh is None:
            return
        everybody = mesh.get_group()
        members = dist.get_process_group_ranks(everybody)
        for t in (*module.parameters(), *module.buffers()):
            if not t.is_meta:
                dist.broadcast(t.detach(), members[0], group=everybody)
        self.groups[index] = dist.new_group(members, use_local_synchronization=True)

    def reduce(self, index: int, module: StageModule) -> None:
        """Start to average the gradients of a stage."""
        kinds: dict[torch.dtype, list[nn.Parameter]] = {}
        for p in module.parameters():
            if p.requires_grad:
                kinds.setdefault(p.dtype, []).append(p)
        for parameters in kinds.values():
            bucket = Bucket(parameters)
            self.waiting.append((bucket, self.start(index, bucket)))

    def start(self, index: int, bucket: Bucket) -> Any:
        """A future of the averaged buffer."""
        buffer = bucket.buffer().div_(dist.get_world_size(self.groups[index]))
        return dist.all_reduce(buffer, group=self.groups[index], async_op=True).get_future()

    def finish(self) -> None:
        """Wait for all, and put the averages into ``.grad``."""
        for bucket, future in self.waiting:
            found = future.wait()
            bucket.give_back(found[0] if isinstance(found, (list, tuple)) else found)
        self.waiting.clear()


@dataclass
class Compressed(Replicas):
    """Averages low-rank factors of the gradients: torch's PowerSGD hook (Vogels et al., 2019), with error feedback.

    Matrices of ``n x m`` send ``rank * (n + m)`` numbers where that is at least ``least`` times less; vectors go as they are.
    """

    rank: int = 4
    start_after: int = 2
    """Steps that are reduced whole, so that the first large gradients are exact."""
    least: float = 2.0
    states: dict[int, Any] = field(default_factory=dict)

    def wrap(self, index: int, module: StageModule, at: Place) -> None:
        super().wrap(index, module, at)
        self.states.pop(index, None)

    def start(self, index: int, bucket: Bucket) -> Any:
        if index not in self.states:
            self.states[index] = powerSGD_hook.PowerSGDState(
                self.groups[index],
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=max(2, self.start_after),  # the hook needs 2 for its warm start
                min_compression_rate=self.least,
                use_error_feedback=True,
                warm_start=True,
                compression_stats_logging_frequency=1_000_000_000,
            )
        return powerSGD_hook.powerSGD_hook(self.states[index], bucket)

    @property
    def ratio(self) -> float:
        """Numbers of the gradients over numbers sent, of the steps that were compressed; 1 before."""
        before = sum(s.total_numel_before_compression for s in self.states.values())
        after = sum(s.total_numel_after_compression for s in self.states.values())
        return before / after if after else 1.0


@dataclass
class Sharded(Replicas):
    """Each replica keeps its share of parameters, gradients and optimizer state: FSDP2, driven by torch's runtime."""

    reduces: bool = False
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)

    def wrap(self, index: int, module: StageModule, at: Place) -> None:
        mesh = at.dimension("dp")
        if mesh is None:
            return
        if module.borrowed:
            raise NotParallel(
                "FSDP",
                f"two stages of rank {at.rank} share {module.borrowed[0]}",
                "untie it, place its stages on two ranks, or use replicas='ddp'",
            )
        fully_shard(module, mesh=mesh, mp_policy=self.precision)


def replicas(name: str) -> Replicas:
    """``ddp``, ``powersgd`` or ``fsdp``."""
    kinds: Mapping[str, type[Replicas]] = {"ddp": Replicas, "powersgd": Compressed, "fsdp": Sharded}
    if name not in kinds:
        raise BadOption("replicas", name, f"one of {', '.join(map(repr, kinds))}, or a dsc.distributed.reduce.Replicas")
    return kinds[name]()


def take_gradients(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Set aside what earlier steps left: sums over processes must meet each step's gradients once."""
    kept = {p: p.grad for p in parameters if p.grad is not None}
    for p in kept:
        p.grad = None
    return kept


def put_back(kept: Mapping[nn.Parameter, Tensor]) -> None:
    """Add what was set aside."""
    for p, grad in kept.items():
        p.grad = grad if p.grad is None else grad.add_(p.grad)


def sum_shared(plan: PipelinePlan, at: Place, stages: Mapping[int, StageModule]) -> None:
    """Tied weights: the sum of all stages' gradients goes to the first stage of every rank that has one.

    Each stage has gathered its own over the micro-batches, so that the sum does not depend on where the stages are.
    """
    for name, owners in sorted(plan.shared.items()):
        mine = [dict(stages[s].named_parameters())[name] for s in owners if s in stages and name in stages[s].trained]
        if not mine:
            continue
        first, *others = mine
        grad = _gradient(first)
        for p in others:
            grad, p.grad = grad.add_(_gradient(p)), None
        ranks = {plan.stages[s].rank for s in owners}
        if len(ranks) > 1:
            _sum_between(_local(grad), sorted(ranks), at)
        first.grad = grad


def _sum_between(mine: Tensor, ranks: Sequence[int], at: Place) -> None:
    """In place, the sum over a few ranks of the plan, in their order: the same bits on all.  Needs no group of its own."""
    parts = {r: mine.clone() if r == at.rank else torch.empty_like(mine) for r in ranks}
    ops = []
    for r in ranks:
        if r != at.rank:
            ops.append(dist.P2POp(dist.isend, parts[at.rank], at.members[r], at.group))
            ops.append(dist.P2POp(dist.irecv, parts[r], at.members[r], at.group))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    mine.copy_(parts[ranks[0]])
    for r in ranks[1:]:
        mine.add_(parts[r])


def _local(t: Tensor) -> Tensor:
    found: Tensor = t.to_local() if isinstance(t, dist.tensor.DTensor) else t
    return found
