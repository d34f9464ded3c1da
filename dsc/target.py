"""The machines that dsc can compile for.  A target is data: nothing here asks the machine it runs on, but ``for_device``.

Sources: the NVIDIA datasheets and architecture white papers of A100, H100 and H200.  All rates are peaks without
sparsity; the datasheets print tensor-core rates with 2:4 sparsity, which is twice as much.  Real kernels reach 60 to 90
per cent of them.  ``link`` is PCIe x16 in one direction (generation 4 for A100, 5 for H100 and H200).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from dsc.errors import BadOption, UnknownTarget


@dataclass(frozen=True)
class Target:
    """What a plan may know about a machine."""

    name: str
    kind: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None
    memory: int
    """Bytes of device memory."""
    bandwidth: float
    """Bytes per second between that memory and the chip."""
    link: float
    """Bytes per second between host and device, one way."""
    peak: Mapping[str, float] = field(hash=False)
    """Dense operations per second of a matrix product, by fp64, fp32, tf32, bf16, fp16, fp8, int8; absent: not in hardware."""
    sms: int
    """Multiprocessors of a GPU, cores of a CPU."""
    smem_per_sm: int
    """Bytes of shared memory of a multiprocessor, or of a core's own cache."""
    l2: int
    """Bytes of the cache that all share."""
    features: frozenset[str] = frozenset()
    drive: float = 3e9
    """Bytes per second that one local NVMe drive writes: of the DGX's drives by their data sheets, 3.84 TB PM1733 (A100) and
    PM9A3 (H100, H200); else of a middling one."""


GIB, MIB, KIB = 2**30, 2**20, 2**10

AMPERE = frozenset({"bf16", "tf32", "cp.async", "2:4"})
HOPPER = AMPERE | {"fp8", "tma", "wgmma", "cluster"}

A100_PEAK = {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12, "int8": 624e12}
H100_PEAK = {
    "fp64": 67e12, "fp32": 67e12, "tf32": 494.5e12, "bf16": 989e12, "fp16": 989e12, "fp8": 1979e12, "int8": 1979e12,
}  # fmt: skip
H100_PCIE_PEAK = {
    "fp64": 51e12, "fp32": 51e12, "tf32": 378e12, "bf16": 756e12, "fp16": 756e12, "fp8": 1513e12, "int8": 1513e12,
}  # fmt: skip
# A middling desktop: 8 cores with AVX2 near 3 GHz and two channels of DDR5.  No 16-bit units: halves compute in fp32.
CPU_PEAK = {"fp64": 0.35e12, "fp32": 0.7e12, "tf32": 0.7e12, "bf16": 0.7e12, "fp16": 0.7e12}

# name, kind, capability, memory, bandwidth, link, peak, sms, smem_per_sm, l2, features, drive
TARGETS = (
    Target("a100-40", "cuda", (8, 0), 40 * GIB, 1555e9, 32e9, A100_PEAK, 108, 164 * KIB, 40 * MIB, AMPERE, 3.8e9),
    Target("a100", "cuda", (8, 0), 80 * GIB, 2039e9, 32e9, A100_PEAK, 108, 164 * KIB, 40 * MIB, AMPERE, 3.8e9),
    Target("h100", "cuda", (9, 0), 80 * GIB, 3350e9, 64e9, H100_PEAK, 132, 228 * KIB, 50 * MIB, HOPPER, 4e9),
    Target("h100-pcie", "cuda", (9, 0), 80 * GIB, 2000e9, 64e9, H100_PCIE_PEAK, 114, 228 * KIB, 50 * MIB, HOPPER, 4e9),
    Target("h200", "cuda", (9, 0), 140 * GIB, 4800e9, 64e9, H100_PEAK, 132, 228 * KIB, 50 * MIB, HOPPER, 4e9),
    Target("cpu", "cpu", None, 16 * GIB, 60e9, 60e9, CPU_PEAK, 8, MIB, 16 * MIB),
)
TABLE: Mapping[str, Target] = {t.name: t for t in TARGETS}


def find(name: str) -> Target:
    """The target called ``name``, in any case."""
    try:
        return TABLE[name.lower()]
    except KeyError:
        raise UnknownTarget(name, tuple(TABLE)) from None


def for_device(device: torch.device) -> Target:
    """The target that ``device`` is.

    1. A device that is not a GPU is the nominal CPU.
    2. A GPU whose model is in the table is that row, with the memory that this card really has.
    3. Another GPU is the nearest row of its generation, with its compute rate scaled by multiprocessors.
    4. A GPU on a machine that has none raises: name the target instead.
    """
    if device.type != "cuda":
        return find("cpu")
    if not torch.cuda.is_available():
        raise BadOption("target", None, f"a name, since {device} is not on this machine: one of {', '.join(TABLE)}")
    props = torch.cuda.get_device_properties(device)
    row = _row(props.name, props.total_memory)
    if row is not None:
        return replace(row, memory=props.total_memory)
    near = find("a100" if props.major < 9 else "h100")
    scale = props.multi_processor_count / near.sms
    return replace(
        near,
        name=props.name,
        capability=(props.major, props.minor),
        memory=props.total_memory,
        peak={dtype: rate * scale for dtype, rate in near.peak.items()},
        sms=props.multi_processor_count,
        l2=props.L2_cache_size,
        features=near.features if props.major >= 8 else frozenset(),
    )


def _row(model: str, memory: int) -> Target | None:
    """``NVIDIA A100-SXM4-40GB`` and the like to a row of the table."""
    model = model.upper()
    if "H200" in model:
        return find("h200")
    if "H100" in model:
        return find("h100-pcie" if "PCIE" in model else "h100")
    if "A100" in model:
        return find("a100" if memory > 60e9 else "a100-40")
    return None
