"""A compiled graph as plain data: Python source over a pool of buffers, and the kernels that it launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dsc.codegen.kernel import Call, Kernel
from dsc.codegen.schedule import Schedule
from dsc.domain import Extent


@dataclass(frozen=True, slots=True)
class Slot:
    """A temporary in the pool, alive from step ``first`` to step ``last`` of the program."""

    name: str
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    dtype: torch.dtype
    device: torch.device
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """``source`` defines ``call(args)``, which takes a list of inputs, empties it, and returns a tuple of results.

    Plain data: ``dsc.runtime.run.load`` makes it a function, ``dsc.portable`` makes it bytes.
    """

    source: str
    externals: Mapping[str, Any]
    """What the source mentions by other names than PyTorch's: operators, constants."""
    slots: tuple[Slot, ...]
    symbols: tuple[str, ...]
    """Size symbols on which slots depend, in the order in which ``call`` hands them to the pool."""
    kernels: tuple[Kernel, ...]
    sequences: tuple[tuple[Call, ...], ...]
    """What ``run_0``, ``run_1``, ... of the source launch, one kernel after the other."""
    emitter: str
    """cpp or triton; aten where there are no kernels."""
    device: torch.device
    code: str = ""
    """The emitted C++ or Triton of all kernels."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """kernels (launched), distinct_kernels, aten_calls, bytes (moved by all of them)."""
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    """Launched kernel -> its schedule, where that is not the default one."""
    written: tuple[int, ...] = ()
    """Inputs that the call writes to."""
    unrecordable: tuple[str, ...] | None = None
    """Why its launches cannot be recorded and replayed; empty: they can; None: nobody asked."""
