"""Checkpoints of a pipeline that any other split of the same model can read: torch's DCP, by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dsc.errors import BadCheckpoint, PlanMismatch

MODEL, OPTIMIZER, GROUPS, TAKEN, RANDOM = "model.", "optimizer.", "groups", "taken", "random."


def whole(t: Tensor) -> Tensor:
    """A sharded tensor gathered; others as they are."""
    return t.full_tensor() if isinstance(t, DTensor) else t


def like(value: Tensor, pattern: Tensor) -> Tensor:
    """``value`` sharded as ``pattern`` is."""
    if not isinstance(pattern, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(pattern.device), pattern.device_mesh, pattern.placements)


def model_state(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {MODEL + name: t.detach() for name, t in values.items()}


def optimizer_state(names: Mapping[int, str], optimizer: Optimizer) -> dict[str, Any]:
    """The state of an optimizer by names of parameters; ``names`` by the parameter's id.

    A group is saved as its options, and the parameters' names say which group they are in.

    Raises:
        PlanMismatch: the optimizer is of something else.
    """
    out: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = {k: v for k, v in group.items() if k != "params"}
        for p in group["params"]:
            if id(p) not in names:
                raise PlanMismatch(
                    "the optimizer has parameters that are not this rank's", "make it of pipe.parameters()"
                )
            name = names[id(p)]
            out[f"{OPTIMIZER}{name}.{GROUPS}"] = (number, options)
            for key, value in optimizer.state.get(p, {}).items():
                out[f"{OPTIMIZER}{name}.{key}"] = value.detach() if isinstance(value, Tensor) else value
    return out


def own_state(taken: int) -> dict[str, Any]:
    """What a rank goes on with besides: the number of steps, and its random numbers."""
    return {TAKEN: taken, f"{RANDOM}{dist.get_rank()}": torch.get_rng_state()}


def step_name(taken: int) -> str:
    return f"step-{taken:08d}"


def latest(folder: str | Path) -> Path | None:
    """The last step in ``folder`` that was written to its end, or ``folder`` if it is one."""
    folder = Path(folder)
    whole = sorted(p.parent for p in folder.glob("step-*/.metadata"))
    if (folder / ".metadata").exists():
        return folder
    return whole[-1] if whole else None


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written while training goes on."""

    future: Any

    def wait(self) -> None:
        """Until it is on disk."""
        if self.future is not None:
            self.future.result()

    def done(self) -> bool:
        return self.future is None or bool(self.future.done())


def write(state: dict[str, Any], folder: str | Path, group: dist.ProcessGroup, background: bool) -> Saving:
    """Write this rank's share.  In the background, the call copies it and returns; ``group`` must be a CPU one of its own."""
    if background:
        return Saving(async_save(state, checkpoint_id=str(folder), process_group=group))
    save(state, checkpoint_id=str(folder), process_group=group)
    return Saving(None)


def read(
    folder: Path,
    values: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    optimizer: Optimizer | None,
    group: dist.ProcessGroup,
) -> int:
    """Read this rank's share into ``values`` and the optimizer; the number of steps taken.

    The optimizer's groups keep their options and are filled anew with ``parameters``, each in the group that it had.
    Random numbers go on where they stopped, if the same number of processes reads.

    Raises:
        BadCheckpoint: no checkpoint, of another model, or of an optimizer with other groups.
    """
    known = _known(folder)
    state: dict[str, Any] = dict(model_state(values))
    if missing := [name for name in state if name not in known]:
        raise BadCheckpoint(str(folder), f"it has no {missing[0].removeprefix(MODEL)}")
    for name, p in parameters.items() if optimizer is not None else ():
        prefix = f"{OPTIMIZER}{name}."
        for entry in (k for k in known if k.startswith(prefix)):
            if "." not in entry.removeprefix(prefix):
                state[entry] = _room(known[entry], p)
    mine = f"{RANDOM}{dist.get_rank()}"
    as_many = sum(k.startswith(RANDOM) for k in known) == dist.get_world_size()
    state |= {TAKEN: None, **({mine: torch.get_rng_state()} if as_many else {})}
    load(state, checkpoint_id=str(folder), process_group=group)
    if optimizer is not None:
        _fill(optimizer, state, parameters, folder)
    if as_many:
        torch.set_rng_state(state[mine])
    return int(state[TAKEN])


def _known(folder: str | Path) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as why:
        raise BadCheckpoint(str(folder), f"{type(why).__name__}: {why}") from why
    return found


def _room(meta: Any, p: Tensor) -> Any:
    """Where a value of the optimizer's state goes: sharded as its parameter is, if it has its shape."""
    if not isinstance(meta, TensorStorageMetadata):
        return None
    if meta.size == p.shape:
        return torch.empty_like(p.detach(), dtype=meta.properties.dtype)
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def _fill(optimizer: Optimizer, state: Mapping[str, Any], parameters: Mapping[str, Tensor], folder: str | Path) -> None:
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    for name, p in parameters.items():
        prefix = f"{OPTIMIZER}{name}."
        number, options = state.get(prefix + GROUPS) or (None, {})
        if number is None:
            raise BadCheckpoint(str(folder), f"it has no state of an optimizer for {name}")
        if number >= len(optimizer.param_groups):
            raise BadCheckpoint(str(folder), f"its optimizer had {number + 1} groups or more, and this one has fewer")
        optimizer.param_groups[number].update(options)
        optimizer.param_groups[number]["params"].append(p)
        found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix) and k != prefix + GROUPS}
        if found:
            optimizer.state[p] = {k: v for k, v in found.items() if "." not in k}
