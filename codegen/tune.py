"""Schedules chosen where a GPU is at hand: modelled first, the best few measured, the choice kept on disk.

A choice is kept beside the kernels, as ``KEY.choice``.  The key is a hash of the emitted source, the default schedule,
the target, Triton, and this package, so that a choice is found by every process that would make it, and by no other.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import triton

from dsc.codegen import build, cache, cubin
from dsc.codegen.alternatives import alternatives, modelled
from dsc.codegen.candidates import Choice, Code, as_data, from_data, measure
from dsc.codegen.kernel import Kernel
from dsc.codegen.schedule import Schedule
from dsc.codegen.triton_plan import Plan, source
from dsc.errors import CodegenFailed
from dsc.target import Target

LOG = logging.getLogger("dsc")
FORMAT = 2
"""Of kept choices, and of what makes them: raised when either changes."""

Timer = Callable[[Kernel, Schedule], float]
"""Seconds of one launch on the device."""
Compile = Callable[[Kernel, Schedule, int], Code | str]


def tuned(
    plans: Iterable[Plan], target: Target, folder: Path, timer: Timer, compile: Compile | None = None
) -> dict[str, Choice[Schedule]]:
    """Launched kernel -> its choice, found in ``folder`` or measured by ``timer`` and kept there.

    Kernels whose sizes are not known yet, and those with one schedule alone, have no choice.
    """
    out: dict[str, Choice[Schedule]] = {}
    for plan in plans:
        for part in plan.choices:
            name = key(part.kernel, part.schedule, target)
            choice = kept(folder, name)
            if choice is None:
                choice = fresh(part.kernel, part.schedule, target, timer, compile or compiled)
                if choice is None:
                    continue
                keep(folder, name, choice)
            LOG.info("Schedule of %s: %s, %s", part.kernel.name, choice.chosen.label, choice.why)
            out[part.kernel.name] = choice
    return out


def fresh(kernel: Kernel, default: Schedule, target: Target, timer: Timer, compile: Compile) -> Choice[Schedule] | None:
    """A measured choice; None where there is nothing to choose from."""
    found = alternatives(kernel, default, target)
    if len(found) < 2:
        return None
    assert target.capability is not None
    major, minor = target.capability
    choice = modelled(kernel, default, target, {s: compile(kernel, s, 10 * major + minor) for s in found})
    return measure(choice, lambda s: timer(kernel, s))


def compiled(kernel: Kernel, schedule: Schedule, capability: int) -> Code | str:
    """What the machine code says, or why there is none."""
    try:
        return cubin.inspect(kernel, schedule, capability).code
    except CodegenFailed as why:
        return str(why)


def key(kernel: Kernel, default: Schedule, target: Target) -> str:
    """The name of a choice in the cache."""
    parts = (
        source(kernel, default),
        repr(default),
        target.name,
        str(target.capability),
        triton.__version__,
        str(FORMAT),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def kept(folder: Path, name: str) -> Choice[Schedule] | None:
    """The choice of that key, if it is there, whole, and ours."""
    data = cache.read(folder / f"{name}.choice")
    if data is None:
        return None
    try:
        return from_data(json.loads(data), Schedule)
    except (ValueError, KeyError, TypeError):
        return None  # of another version


def keep(folder: Path, name: str, choice: Choice[Schedule]) -> None:
    """Write it for other processes; where that cannot be, they measure again."""
    try:
        build.guard(folder)
        cache.write(folder / f"{name}.choice", json.dumps(as_data(choice)).encode())
    except (build.CacheUnusable, OSError) as why:
        LOG.info("A schedule could not be kept: %s", why)
