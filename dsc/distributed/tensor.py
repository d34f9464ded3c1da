"""Tensor parallelism inside of the stages: some parameters sharded over the mesh's ``tp``, the rest by DTensor's own rules.

A stage's graph runs on DTensors, whose rules shard what follows from the parameters and put collectives where they must be.
What enters and leaves a stage is whole on every rank, so that pipelines of any split meet at the same values.  All of it is
traced away: what is compiled are local tensors and functional collectives, in the forward, dgrad and wgrad alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement
from torch.fx import GraphModule, Interpreter

from dsc.errors import NotParallel


def placement(name: str, t: Tensor, shards: Mapping[str, int], mesh: DeviceMesh) -> Placement:
    """Of a parameter: sharded along the dimension that the first pattern gives which its name matches, else whole.

    Raises:
        NotParallel: the dimension does not exist, or does not fall into equal shards.
    """
    for pattern, dim in shards.items():
        if fnmatchcase(name, pattern):
            if not -t.dim() <= dim < t.dim() or t.shape[dim] % mesh.size():
                raise NotParallel(
                    f"{name} of shape {tuple(t.shape)} sharded along {dim} over {mesh.size()} ranks",
                    "that dimension is missing or not divisible",
                    "give another dimension, or leave it whole",
                )
            return Shard(dim % t.dim())
    return Replicate()


def spread(name: str, t: Tensor, shards: Mapping[str, int], mesh: DeviceMesh) -> Tensor:
    """A parameter or buffer over the mesh; buffers stay as they are."""
    if not isinstance(t, nn.Parameter):
        return t
    return nn.Parameter(distribute_tensor(t.detach(), mesh, [placement(name, t, shards, mesh)]), t.requires_grad)


class Local(Interpreter):
    """Runs a graph on DTensors.  Attention over whole sequences runs on each rank's own heads and samples, whatever the
    kernel: DTensor has rules for those of GPUs alone.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attention = target is torch.ops.aten.scaled_dot_product_attention.default
        masked = len(args) > 3 and args[3] is not None
        if not attention or masked or not all(isinstance(x, DTensor) for x in args[:3]):
            return super().call_function(target, args, kwargs)
        mesh = args[0].device_mesh
        shards = [x.placements for x in args[:3] if isinstance(x.placements[0], Shard) and x.placements[0].dim < 2]
        place = shards[0] if shards else (Replicate(),)
        own = [x.redistribute(mesh, place).to_local() for x in args[:3]]
        return DTensor.from_local(target(*own, *args[3:], **kwargs), mesh, place, run_check=False)


class Spread(nn.Module):
    """A stage's graph as a function of local tensors: shards of what ``held`` are DTensors, whole tensors else."""

    def __init__(self, graph: GraphModule, held: Sequence[Tensor], mesh: DeviceMesh) -> None:
        super().__init__()
        self._graph = Local(graph)
        self._mesh = mesh
        self._placements = [h.placements if isinstance(h, DTensor) else (Replicate(),) for h in held]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        whole = [(Replicate(),)] * (len(inputs) - len(self._placements))
        given = [
            DTensor.from_local(x, self._mesh, p, run_check=False) for x, p in zip(inputs, [*self._placements, *whole])
        ]
        with implicit_replication():
            results = self._graph.run(*given)
        return tuple(
            r.redistribute(self._mesh, [Replicate()]).to_local() if isinstance(r, DTensor) else r for r in results
        )


def local(t: Tensor) -> Tensor:
    """This rank's shard, differentiable; others as they are."""
    found: Tensor = t.to_local() if isinstance(t, DTensor) else t
    return found


def like(grad: Tensor, p: Tensor) -> Tensor:
    """The gradient of a shard as a gradient of its parameter."""
    if not isinstance(p, DTensor) or isinstance(grad, DTensor):
        return grad
    return DTensor.from_local(grad, p.device_mesh, p.placements, run_check=False)
