"""The stages of a rank, from a plan: graphs, functions, parameters, and the runtime that drives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsc.distributed import assemble, reduce, tensor
from dsc.distributed.forward import Forward
from dsc.distributed.monitor import Monitor, TimedStage
from dsc.distributed.place import Place
from dsc.distributed.plan import PipelinePlan
from dsc.distributed.stage import StageModule
from dsc.errors import PlanMismatch
from dsc.options import Options
from dsc.torch_shim import on_reduced, pipeline_runtime

Loss = Callable[[Any, Any], Tensor]


@dataclass
class Setup:
    """All that a pipeline was made with but the plan: enough to make it again from another plan."""

    traced: Forward
    names: Mapping[str, tuple[str, ...]]
    """First name of a parameter or buffer -> all names under which the model's ``state_dict`` has it."""
    unsaved: Mapping[str, Tensor]
    """Buffers that no ``state_dict`` has, such as tables."""
    loss: Loss
    options: Options | None
    device: torch.device
    replicas: reduce.Replicas
    shards: Mapping[str, int]


@dataclass
class Built:
    """What one plan makes of a rank."""

    stages: dict[int, StageModule]
    runtime: Any
    """torch's, of the stages and the plan's orders."""
    monitor: Monitor
    sent: int
    """Bytes that this rank sends in a step."""
    extra: dict[str, Tensor]
    """Parameters and buffers that no stage reads; the first rank keeps them."""
    ready: bool
    """Whether the parameters have values: not those of a model on the meta device, before they are loaded."""


def build(plan: PipelinePlan, at: Place, setup: Setup, values: Mapping[str, Tensor]) -> Built:
    """This rank's stages, with these parameters and buffers; those on the meta device get memory, but no values."""
    carry = assemble.differentiable(setup.traced)
    modules = _modules(plan, at, setup, values, carry)
    watch = Monitor(setup.device)
    used = {name for s in plan.stages for name in s.state}
    return Built(
        modules,
        drive(plan, at, setup, modules, watch, carry),
        watch,
        _sent(plan, at, setup, carry),
        {name: t for name, t in values.items() if name not in used and at.rank == 0 and not t.is_meta},
        not any(t.is_meta for t in values.values()),
    )


def _modules(
    plan: PipelinePlan, at: Place, setup: Setup, values: Mapping[str, Tensor], carry: frozenset[str]
) -> dict[int, StageModule]:
    traced, wide = setup.traced, at.dimension("tp")
    modules: dict[int, StageModule] = {}
    own: dict[str, Tensor] = {}
    for s in plan.stages_of(at.rank):
        parts = assemble.assemble(traced, s)
        for name in (*parts.weights, *parts.held):
            if name not in own:
                own[name] = _own(values[name] if name in values else traced.constants[name], setup.device)
                if wide is not None:
                    own[name] = tensor.spread(name, own[name], setup.shards, wide)
        borrowed = [name for name in parts.weights if any(name in m.trained for m in modules.values())]
        aliases = {name: nn.Parameter(own[name].detach()) for name in borrowed}
        module = StageModule(parts, {**own, **aliases}, setup.names.keys(), borrowed)
        splits = any(stage == s.index and kind == "I" for stage, kind, _ in plan.orders[at.rank])
        example = assemble.example(traced, (*s.receives, *s.inputs), carry, setup.device)
        module.compile(example, setup.options, splits, wide)
        setup.replicas.wrap(s.index, module, at)  # behind: the functions see whole parameters, FSDP gathers them
        modules[s.index] = module
    return modules


def drive(
    plan: PipelinePlan,
    at: Place,
    setup: Setup,
    modules: Mapping[int, StageModule],
    watch: Monitor,
    carry: frozenset[str],
) -> Any:
    """The runtime of torch for these modules in the plan's orders."""
    engine = []
    for s in plan.stages_of(at.rank):
        module = modules[s.index]
        takes = s.receives if s.index else s.inputs
        arriving, leaving = (assemble.example(setup.traced, names, carry, setup.device) for names in (takes, s.sends))
        assert module.functions is not None
        stage = TimedStage(
            module,
            s.index,
            len(plan.stages),
            setup.device,
            input_args=tuple(arriving),
            output_args=tuple(leaving),
            group=at.group,
            dw_builder=module.weight_gradients if module.functions.split else None,
        )
        stage.monitor = watch
        engine.append(stage)
    orders = {at.member(r): [f"{s}{k}{m}" for s, k, m in order] for r, order in enumerate(plan.orders)}
    runtime = pipeline_runtime(engine, orders, plan.microbatches, setup.loss)
    if setup.replicas.reduces and at.dimension("dp") is not None:
        on_reduced(runtime, lambda index: setup.replicas.reduce(index, modules[index]))
    return runtime


def _sent(plan: PipelinePlan, at: Place, setup: Setup, carry: frozenset[str]) -> int:
    """Bytes of a step: activations to the next rank, gradients back."""
    total = 0
    for s in plan.stages:
        if s.index + 1 < len(plan.stages) and plan.stages[s.index + 1].rank != s.rank:
            crossing = assemble.example(setup.traced, s.sends, carry, torch.device("meta"))
            total += sum(t.nbytes for t in crossing) * (s.rank == at.rank)
            back = plan.stages[s.index + 1].rank == at.rank
            total += sum(t.nbytes for t in crossing if t.requires_grad) * back
    return total * plan.microbatches


def fits(plan: PipelinePlan, traced: Forward) -> None:
    """Raise ``PlanMismatch`` if the plan is for another graph."""
    if traced.fingerprint != plan.graph:
        raise PlanMismatch(
            f"it was made for the graph {plan.graph}, and this model on these inputs has {traced.fingerprint}",
            "plan again, or give the model and the batch that it was made for",
        )


def unfilled(traced: Forward) -> dict[str, Tensor]:
    """The parameters and buffers of the model on the meta device."""
    out: dict[str, Tensor] = {}
    for n in traced.gm.graph.find_nodes(op="placeholder"):
        if n.name in traced.state:
            value = torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype, device="meta")
            parameter = n.name in traced.parameters or isinstance(n.meta["val"], nn.Parameter)
            out[traced.state[n.name]] = nn.Parameter(value, n.name in traced.parameters) if parameter else value
    return out


def _own(value: Tensor, device: torch.device) -> Tensor:
    """The same tensor if it lies there already; else one of the same kind that does."""
    if value.device == device:
        return value
    moved = torch.empty_like(value, device=device) if value.is_meta else value.detach().to(device)
    return nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved
