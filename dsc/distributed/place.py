"""Which process is which rank of a plan: one pipeline of processes, or a mesh with replicas and tensor parallelism too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dsc.distributed.plan import PipelinePlan
from dsc.errors import PlanMismatch, WorldMismatch


@dataclass
class Place:
    """This process in the pipeline."""

    rank: int
    """In the plan."""
    members: tuple[int, ...]
    """The plan's rank -> global rank of the process."""
    group: dist.ProcessGroup
    """The processes of this pipeline."""
    mesh: DeviceMesh | None
    """Of all processes, with the dimensions ``pp`` and, where there are any, ``dp`` and ``tp``."""
    saving: dist.ProcessGroup | None = None

    def member(self, rank: int) -> int:
        """The number in the group of a rank of the plan."""
        return dist.get_group_rank(self.group, self.members[rank])

    def everybody(self) -> dist.ProcessGroup:
        """All processes, over their CPUs: for checkpoints, which may be written while training goes on."""
        if self.saving is None:
            self.saving = dist.new_group(backend="gloo")
        return self.saving

    def dimension(self, name: str) -> DeviceMesh | None:
        """One dimension of the mesh; None where it is missing, or where it is but one process."""
        if self.mesh is None or name not in (self.mesh.mesh_dim_names or ()):
            return None
        found = self.mesh[name]
        return found if found.size() > 1 else None


def place(plan: PipelinePlan, mesh: DeviceMesh | None, device: torch.device) -> Place:
    """Find this process.  Without a mesh, all processes stand as the plan's degrees say: replicas, ranks, tensor.

    Raises:
        WorldMismatch: too many or too few processes.
        PlanMismatch: a mesh without ``pp``, or processes with different plans.
    """
    world, d = dist.get_world_size(), plan.degrees
    if mesh is None:
        if world != d.data * d.tensor * plan.ranks:
            how = f"{plan.ranks} ranks" + "".join(
                f" x {n} {what}" for n, what in ((d.data, "replicas"), (d.tensor, "tensor parallel")) if n > 1
            )
            raise WorldMismatch(world, d.data * d.tensor * plan.ranks, how)
        if world > plan.ranks:
            sizes = {"dp": d.data, "pp": plan.ranks, "tp": d.tensor}
            names = ("dp", "pp", "tp") if d.near == "stages" else ("pp", "dp", "tp")
            mesh = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
    elif "pp" not in (mesh.mesh_dim_names or ()):
        raise PlanMismatch(
            f"the mesh has the dimensions {mesh.mesh_dim_names}, none of which is 'pp'", "name one of them 'pp'"
        )
    elif mesh["pp"].size() != plan.ranks:
        raise WorldMismatch(mesh["pp"].size(), plan.ranks, f"{plan.ranks} ranks along 'pp'")
    group = dist.group.WORLD if mesh is None else mesh["pp"].get_group()
    assert group is not None
    globals_ = dist.get_process_group_ranks(group)
    ordered = sorted(plan.devices)
    members = tuple(globals_[ordered.index(device)] for device in plan.devices)
    same_everywhere(plan, group)
    return Place(members.index(dist.get_rank()), members, group, mesh)


def same_everywhere(plan: PipelinePlan, group: dist.ProcessGroup) -> None:
    """Plan once and hand the file around: a search with a time limit may end elsewhere on every rank.

    Raises:
        PlanMismatch: on every rank, if not all have the same plan.
    """
    keys: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(keys, plan.key, group=group)
    if len(set(keys)) > 1:
        raise PlanMismatch(
            f"the ranks hold {len(set(keys))} different plans", "save it on one rank, and load that file on all"
        )
