"""Whether Triton's operators may be put into graphs: nothing else computes them on CUDA."""

from __future__ import annotations

from importlib.util import find_spec

from dsc.manager import Remark


def without_triton() -> Remark | None:
    """Why not: it is not installed."""
    if find_spec("triton") is not None:
        return None
    return Remark("", "skipped", "Triton is not installed: what ATen has runs instead of its kernels")
