"""``dsc.pipeline``: the stages of a plan on the processes that torchrun started, driven by torch's pipeline runtime."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dsc import options as opt
from dsc.distributed import assemble, checkpoint, forward, monitor, rebalance, reduce
from dsc.distributed.build import Built, Loss, Setup, build, fits, unfilled
from dsc.distributed.join import failures, own_device, start_processes
from dsc.distributed.monitor import Monitor, Report
from dsc.distributed.place import Place, place
from dsc.distributed.plan import PipelinePlan, dump, parse
from dsc.distributed.stage import GIVEN, StageModule
from dsc.errors import BadBatch, BadCheckpoint, NotLoaded, PlanMismatch
from dsc.torch_shim import forwards_alone


@dataclass
class Pipeline:
    """This process's stages of a model.  Made by ``dsc.pipeline``."""

    plan: PipelinePlan
    place: Place
    setup: Setup
    built: Built
    taken: int = 0
    """Steps."""
    before: Report | None = None
    """What was measured when the shares of the ranks were last as they should be."""
    slow: tuple[float, ...] = ()
    """How many times slower than at first each rank is."""

    @property
    def stages(self) -> Mapping[int, StageModule]:
        """By their numbers in the plan."""
        return self.built.stages

    @property
    def monitor(self) -> Monitor:
        return self.built.monitor

    def step(self, *inputs: Tensor | None, target: Any = None) -> Tensor:
        """Forward and backward of one batch; gradients are added to ``.grad``.  The mean loss, on every rank.

        The whole batch on every rank, or None where a rank reads nothing of it: the first reads ``inputs``, the last
        ``target``, which the loss function gets with the model's results.  Dimension 0 is the batch.

        Raises:
            BadBatch: not as many samples as the plan has in its micro-batches, or an input missing on this rank.
            RankLost: another process is gone.
            StageFailed: the model's own code raised.
        """
        return self._run(inputs, target, train=True)

    def evaluate(self, *inputs: Tensor | None, target: Any = None) -> Tensor:
        """The mean loss of one batch, without gradients."""
        with torch.no_grad(), forwards_alone(self.built.runtime):
            return self._run(inputs, target, train=False)

    def _run(self, inputs: Sequence[Tensor | None], target: Any, train: bool) -> Tensor:
        if not self.built.ready:
            raise NotLoaded()
        args, given, target = self._batch(inputs, target)
        kept = reduce.take_gradients(self.parameters()) if train else {}
        losses: list[Tensor] = []
        run = self.built.runtime.step if train else self.built.runtime.eval
        start = time.perf_counter()
        if train:
            self.monitor.begin()
        with failures(f"step {self.taken}"):
            run(*args, target=target, losses=losses, return_outputs=False, **given)
            if train:
                self.setup.replicas.finish()
                reduce.sum_shared(self.plan, self.place, self.stages)
                reduce.put_back(kept)
            loss = self._mean(losses)
        if train:
            self.monitor.steps.append(time.perf_counter() - start)
            self.taken += 1
        return loss

    def _batch(self, inputs: Sequence[Tensor | None], target: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Any]:
        """What the runtime gets on this rank: arguments of the first stage, inputs by name, and the target."""
        names, size = self.setup.traced.inputs, self.plan.microbatches * self.plan.microbatch_size
        if len(inputs) not in (0, len(names)):
            raise BadBatch(f"the model takes {len(names)} inputs, and {len(inputs)} were given", "give all of them")
        known = dict(zip(names, inputs))
        for name, x in (*known.items(), ("target", target)):
            if isinstance(x, Tensor) and x.dim() and x.shape[0] != size:
                raise BadBatch(
                    f"{name} has {x.shape[0]} samples, and the plan {self.plan.microbatches} micro-batches of {self.plan.microbatch_size}",
                    f"give {size} samples, drop or fill up the last batch, or plan for another batch",
                )
        mine = self.plan.stages_of(self.place.rank)
        for stage in mine:
            if missing := [name for name in stage.inputs if known.get(name) is None]:
                raise BadBatch(
                    f"rank {self.place.rank} reads {missing[0]}, which is None there", "give it on that rank"
                )
        place = self.setup.device
        first = mine[0].inputs if mine[0].index == 0 else ()
        args = tuple(known[name].to(place) for name in first)  # type: ignore[union-attr]
        later = [name for s in mine if s.index > 0 for name in s.inputs]
        given = {GIVEN + name: known[name].to(place) for name in later}  # type: ignore[union-attr]
        if mine[-1].index < len(self.plan.stages) - 1:
            return args, given, None
        if target is None:
            return args, given, torch.zeros(self.plan.microbatches, 1, device=place)  # the loss function takes none
        return args, given, target.to(place)

    def _mean(self, losses: Sequence[Tensor]) -> Tensor:
        found = torch.zeros((), device=self.setup.device)
        if losses:
            found = torch.stack([x.detach().float() for x in losses]).sum()
        last = self.plan.stages[-1].rank
        dist.broadcast(found, self.place.members[last], group=self.place.group)
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's, by the model's first name for each; one that two of its stages share comes once."""
        seen: set[str] = set()
        for stage in self.stages.values():
            for name, p in stage.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, p

    def parameters(self) -> list[nn.Parameter]:
        """For the optimizer of this rank."""
        return [p for _, p in self.named_parameters()]

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and buffers under all names that the model has for them; together, the model's own."""
        found = dict(self.built.extra)
        for stage in self.stages.values():
            for name, value in stage.state_dict().items():
                found |= dict.fromkeys(self.setup.names[name], value)
        return found

    def full_state_dict(self) -> dict[str, Tensor]:
        """Everybody's, gathered on every rank of the pipeline, on the CPU: what the model's ``load_state_dict`` takes."""
        mine = {k: checkpoint.whole(v).cpu() for k, v in self.state_dict().items()}
        found: list[Any] = [None] * self.plan.ranks
        dist.all_gather_object(found, mine, group=self.place.group)
        return {k: v for part in found for k, v in part.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share of a state with the model's names; what it does not need may be missing or there.

        Raises:
            PlanMismatch: a name or a shape is missing.
        """
        with torch.no_grad():
            for name, value in self.state_dict().items():
                if name not in state or state[name].shape != value.shape:
                    raise PlanMismatch(
                        f"the state has no {name} of shape {tuple(value.shape)}", "give this model's state"
                    )
                value.copy_(checkpoint.like(state[name], value))
        self.built.ready = True

    def save(
        self, folder: str | Path, optimizer: Optimizer | None = None, background: bool = False
    ) -> checkpoint.Saving:
        """Write ``folder/step-N``, all ranks together: any split of the same model can read it.

        In the background the call copies the state and returns; the step that it is of counts as saved once it is whole.
        """
        state = checkpoint.model_state(self.state_dict())
        if optimizer is not None:
            state |= checkpoint.optimizer_state({id(p): name for name, p in self.named_parameters()}, optimizer)
        state |= checkpoint.own_state(self.taken)
        where = Path(folder) / checkpoint.step_name(self.taken)
        return checkpoint.write(state, where, self.place.everybody(), background)

    def load(self, folder: str | Path, optimizer: Optimizer | None = None) -> int:
        """Read the last whole step in ``folder``, or ``folder`` itself if it is one, and give the number of steps taken.

        The optimizer keeps its groups; they are filled with this rank's parameters and their state.

        Raises:
            BadCheckpoint: there is none, or it is of another model.
        """
        where = checkpoint.latest(folder)
        if where is None:
            raise BadCheckpoint(str(folder), "no whole step lies in it")
        parameters = dict(self.named_parameters())
        self.taken = checkpoint.read(where, self.state_dict(), parameters, optimizer, self.place.everybody())
        self.built.ready = True
        return self.taken

    def resume(self, folder: str | Path, optimizer: Optimizer | None = None) -> int:
        """``load`` if there is something to load; else 0.  The first line of a script that torchrun may start again."""
        return 0 if checkpoint.latest(folder) is None else self.load(folder, optimizer)

    def resplit(self, plan: PipelinePlan, folder: str | Path, optimizer: Optimizer | None = None) -> None:
        """Go on with another plan of the same graph on the same processes: through a checkpoint in ``folder``.

        Parameters and the optimizer's state move bit by bit; compressed replicas start with no error to feed back.

        Raises:
            PlanMismatch, WorldMismatch: the plan is for something else.
        """
        fits(plan, self.setup.traced)
        at = place(plan, self.place.mesh, self.setup.device)
        self.save(folder, optimizer)
        extra = self.built.extra
        self.built.stages.clear()  # memory of the old parameters, before that of the new
        built = build(plan, at, self.setup, {**unfilled(self.setup.traced), **self.setup.unsaved})
        built.extra = extra
        self.plan, self.place, self.built, self.before = plan, at, built, None
        self.load(Path(folder) / checkpoint.step_name(self.taken), optimizer)

    def rebalance(
        self,
        folder: str | Path,
        optimizer: Optimizer | None = None,
        threshold: float = 0.1,
        gain: float = 0.05,
    ) -> PipelinePlan | None:
        """Move to other cuts if the ranks' shares of the work drifted, and a step would gain by it; all ranks call it.

        ``threshold``: how far a rank may be beyond its share, as it was when last measured here, or else as planned.
        ``gain``: the least share of a step that the new cuts must save.  Plans on the first rank; the new plan, or None.
        """
        report = self.report()
        if not report.step:
            return None
        drifted = report.drift if self.before is None else report.drift_from(self.before)
        if drifted <= threshold:
            self.before = self.before or report
            return None
        self.slow = rebalance.speeds(report, self.before, self.slow)
        text: list[str | None] = [None]
        if self.place.rank == 0:
            new = rebalance.replan(self.plan, self.setup.traced, report, self.slow)
            worth = new.seconds < (1 - gain) * rebalance.measured_seconds(self.plan, report)
            text = [dump(new) if worth else None]
        dist.broadcast_object_list(text, self.place.members[0], group=self.place.group)
        self.before = report
        if text[0] is None:
            return None
        self.resplit(parse(text[0]), folder, optimizer)
        return self.plan

    def report(self) -> Report:
        """What all ranks measured over the last steps; all of them ask."""
        return monitor.gather(self.monitor, self.plan, self.place.rank, self.built.sent, self.place.group)


def pipeline(
    model: nn.Module,
    example_inputs: Sequence[Tensor],
    *,
    plan: PipelinePlan,
    loss: Loss | None = None,
    reduction: str = "mean",
    options: Mapping[str, object] | None = None,
    compiled: bool = True,
    mesh: DeviceMesh | None = None,
    replicas: str | reduce.Replicas = "ddp",
    shards: Mapping[str, int] | None = None,
    device: torch.device | str | None = None,
    timeout: float = 600.0,
) -> Pipeline:
    """The stages that this process owns, ready to train; every process that torchrun started calls it alike.

    Args:
        model: the whole model, on any device; on the meta device, ``load`` or ``load_state_dict`` gives it values.
        example_inputs: one whole batch, as ``plan_pipeline`` was given.
        plan: the same on every rank.
        loss: of the model's results (a tuple if several) and the target of one micro-batch.  Without it, a model that
            gives one scalar gives its loss, and any other gives logits over classes in the last dimension.
        reduction: ``mean`` if the loss is a mean over its samples, ``sum`` if it is a sum.
        options: those of ``torch.compile(backend="dsc")``.
        compiled: False runs the graphs of the stages node by node.
        mesh: of all processes, with a dimension ``pp``, and ``dp`` or ``tp`` where there are replicas or tensor parallelism.
        replicas: what the ``dp`` dimension does: ``ddp``, ``fsdp``, or a ``dsc.distributed.reduce.Replicas``.
        shards: patterns of names of parameters, such as ``"*.q.weight"`` -> the dimension along which the ``tp`` dimension
            of the mesh shards them; what else is to be sharded follows from DTensor's rules.
        device: where the stages run; by default the GPU of this process, or the CPU where there is none.
        timeout: seconds after which a silent process counts as dead, if the process group is made here.

    Raises:
        WorldMismatch: the processes are not as many as the plan has ranks.
        PlanMismatch: the plan is for another model or other shapes, or ranks hold different plans.
        Untraceable: the model's control flow depends on values.
        BadMicrobatches: the batch does not fall into equal micro-batches.
    """
    where = torch.device(device) if device is not None else own_device()
    start_processes(where, timeout)
    at = place(plan, mesh, where)
    traced = forward.trace(model, forward.microbatch(example_inputs, plan.microbatches))
    fits(plan, traced)
    chosen = opt.parse(options, None, {}) if compiled else None
    wanted = reduce.replicas(replicas) if isinstance(replicas, str) else replicas
    names = assemble.saved_names(model)
    values: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
    unsaved = {name: t for name, t in values.items() if name not in names}
    scaled_loss = scaled(loss or default_loss, plan.microbatches, reduction)
    setup = Setup(traced, names, unsaved, scaled_loss, chosen, where, wanted, dict(shards or {}))
    return Pipeline(plan, at, setup, build(plan, at, setup, values))


def default_loss(results: Any, target: Any) -> Tensor:
    """The model's own loss if it gives one scalar; else the mean cross entropy over the last dimension."""
    if isinstance(results, Tensor) and results.dim() == 0:
        return results
    if isinstance(results, tuple):
        raise BadBatch(f"the model gives {len(results)} results, and no loss function was given", "give loss=")
    return F.cross_entropy(results.flatten(0, -2), target.flatten())


def scaled(loss: Loss, microbatches: int, reduction: str) -> Loss:
    """The share of one micro-batch in the loss of the batch."""
    if reduction not in ("mean", "sum"):
        raise BadBatch(f"{reduction!r} is no reduction of a loss", "give 'mean' or 'sum'")
    share = microbatches if reduction == "mean" else 1
    return lambda results, target: loss(results, target) / share
