"""A plan of memory as the compiler will run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import GraphModule

from dsc.liveness import Profile
from dsc.passes.memory_offload import Away
from dsc.passes.solve.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """One plan as the compiler will run it."""

    origin: str
    schedule: Schedule
    profile: Profile
    seconds: float
    away: tuple[Away, ...] = ()
    """Saved values that are not in the device's memory between forward and backward."""
    short: tuple[str, ...] = ()
    """Saved values that are compressed in between."""

    @property
    def peak(self) -> int:
        return self.profile.peak


class Halves(NamedTuple):
    forward: GraphModule
    backward: GraphModule
    saved: dict[str, int]
    """Input of the backward that has been saved -> place among the forward's results."""
    short: dict[str, str]
    """Compressed value -> the node that holds its short form."""
