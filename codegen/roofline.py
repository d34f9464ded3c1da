"""Seconds of one launch of a compiled kernel on a target, from what its machine code says.

The slowest of four counts: bytes over the bandwidth, bytes read again over that of the second-level cache, instructions
over the rate at which a multiprocessor issues them, and waves of programs over the time that one program takes from
its first load to its last store (Little's law: too few programs, or warps, do not keep the memory busy).  After
Williams, Waterman and Patterson, "Roofline", CACM 2009, and Hong and Kim, "An analytical model for a GPU architecture
with memory-level and thread-level parallelism awareness", ISCA 2009.  It serves to rank schedules of one kernel, not to
foretell times: nothing in it was fitted to measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsc.codegen.candidates import Code
from dsc.cost import BANDWIDTH_EFFICIENCY, LAUNCH_SECONDS
from dsc.target import Target

LATENCY = 0.7e-6
"""Seconds from a load of device memory to its value, on a busy GPU.  (Luo et al., "Benchmarking and dissecting the
NVIDIA Hopper GPU architecture", IPDPS workshops 2024: near 480 cycles of an idle one, A100 and H100 alike.)"""
START = 0.5e-6
"""Seconds that a program takes beside: to be started, to compute its indices, to join its threads' sums."""
CACHE = 2.5
"""Bandwidth of the second-level cache over that of the memory (Luo et al.: 2 to 3)."""
ISSUED = 4
"""Instructions of a warp that a multiprocessor issues in a clock."""
LANES = {80: 64, 90: 128}
"""fp32 lanes of a multiprocessor, which with the peak rate give the clock."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does, as far as the machine code does not say it."""

    programs: int
    loops: int
    """Times that a program goes through the loops of its code; 1 if it has none."""
    rounds: int
    """Loads that it waits for, one after the other."""
    moved: float
    """Bytes between memory and chip, each buffer once."""
    again: float = 0.0
    """Bytes that are read a second time, soon after the first."""


def seconds(work: Work, code: Code, target: Target) -> float:
    """Of one launch; infinite for code that cannot start."""
    if not code.blocks:
        return math.inf
    slots = min(work.programs, target.sms * code.blocks)
    waves = math.ceil(work.programs / slots) if slots else 0
    memory = work.moved / (target.bandwidth * BANDWIDTH_EFFICIENCY)
    cache = work.again / (target.bandwidth * CACHE)
    latency = waves * (START + work.rounds * LATENCY)
    issued = code.instructions * work.loops * code.warps * work.programs
    busy = min(work.programs, target.sms) or 1
    arithmetic = issued / (ISSUED * clock(target) * busy)
    return max(memory + cache, latency, arithmetic) + LAUNCH_SECONDS[target.kind]


def clock(target: Target) -> float:
    """Hertz of a multiprocessor, from the peak rate: two operations a lane and clock."""
    assert target.capability is not None
    lanes = LANES[80 if target.capability < (9, 0) else 90]
    return target.peak["fp32"] / (2 * lanes * target.sms)
