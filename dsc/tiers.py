"""Where saved values may go while the device does not need them: the host's memory, or a file.

Four operators move them; ``dsc.runtime.offload`` runs them, on streams or threads of their own:

- ``handle = dsc::offload(x, tier)`` starts the copy out.
- ``saved = dsc::offloaded(handle, x)`` waits for it: then ``x`` may die.  ``saved`` is what crosses to the backward.
- ``y = dsc::fetch(saved, size, stride, dtype, device)`` allocates ``y`` and starts the copy in.
- ``dsc::fetched(y, saved)`` waits for it, and so counts as a write to ``y``: readers stand after it.

A handle is an int64 on the host; what it stands for is freed with the last handle.  Importing this module registers the
operators, as far as graphs can hold them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsc.errors import BadOption
from dsc.target import Target

LINK_EFFICIENCY = 0.78
"""Share of PCIe's rate that copies from and to pinned memory reach: 25 GB/s of 32 on generation 4."""
RATE = re.compile(r"@(\d+(?:\.\d+)?)\s*(MB|GB|MiB|GiB)/s$")
UNITS = {"MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
EXPECTED = "'cpu', or 'nvme:FOLDER' with a folder on a local drive, if need be with its speed: 'nvme:FOLDER@6.5GB/s'"


@dataclass(frozen=True)
class Tier:
    kind: Literal["cpu", "nvme"]
    folder: str = ""
    rate: float | None = None
    """Bytes per second of the drive; None is what the target has."""

    def __str__(self) -> str:
        if self.kind == "cpu":
            return "cpu"
        return f"nvme:{self.folder}" + (f"@{self.rate / 1e6:g}MB/s" if self.rate else "")

    def bandwidth(self, target: Target) -> float:
        """Bytes per second, one way."""
        link = target.link * LINK_EFFICIENCY
        return min(link, self.rate or target.drive) if self.kind == "nvme" else link


def parse(text: object, name: str = "offload") -> Tier:
    """``cpu``, ``nvme:FOLDER`` or ``nvme:FOLDER@6.5GB/s``.

    Raises:
        BadOption: it is neither.
    """
    if text == "cpu":
        return Tier("cpu")
    if isinstance(text, str) and text.startswith("nvme:"):
        where = text.removeprefix("nvme:")
        found = RATE.search(where)
        folder, rate = (where[: found.start()], float(found[1]) * UNITS[found[2]]) if found else (where, None)
        if folder and rate != 0:
            return Tier("nvme", folder, rate)
    raise BadOption(name, text, EXPECTED)


LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("offload(Tensor x, str tier) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define("offloaded(Tensor handle, Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "fetch(Tensor handle, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
)
LIBRARY.define("fetched(Tensor(a!) x, Tensor handle) -> ()")  # type: ignore[no-untyped-call]


def _handle(*_: object) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fetch(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


torch.library.register_fake("dsc::offload", _handle, lib=LIBRARY)
torch.library.register_fake("dsc::offloaded", _handle, lib=LIBRARY)
torch.library.register_fake("dsc::fetch", _fetch, lib=LIBRARY)
torch.library.register_fake("dsc::fetched", lambda x, handle: None, lib=LIBRARY)
