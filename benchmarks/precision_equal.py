"""The emulation of 8-bit products against PyTorch's own on the CPU."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from dsc.precision import ops as eight


def equal(settings: argparse.Namespace) -> dict[str, Any]:
    """Our product against ``_scaled_mm`` on the CPU: bits, and time where the two are not one."""
    numbers: dict[str, Any] = {}
    shapes = {
        "row": ((64, 300, 96), (5, 20, 7), (33, 4096, 17), (128, 1024, 384)),
        "tensor": ((64, 300, 96), (5, 20, 7), (33, 1024, 17)),
    }
    for grain in shapes:
        numbers[grain] = equal_by(grain, shapes[grain])
    return numbers


def equal_by(grain: str, shapes: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    tried = same = 0
    far, ours, theirs = 0.0, 0.0, 0.0
    for (m, k, n), out, left in itertools.product(shapes, (torch.float32, torch.bfloat16), ("e4m3", "e5m2")):
        a, sa = eight.quantise(torch.randn(m, k), left, grain)
        b, sb = eight.quantise(torch.randn(n, k), "e4m3", grain)
        start = time.process_time()
        want = torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb.t(), out_dtype=out)
        middle = time.process_time()
        got = eight.mm8(a, sa, b, sb, out)
        theirs, ours = theirs + middle - start, ours + time.process_time() - middle
        tried += 1
        same += torch.equal(want, got)
        far = max(far, float((got.float() - want.float()).norm() / want.float().norm()))
    print(f"_scaled_mm by {grain}: {same} of {tried} equal bit for bit, largest relative difference {far:.1e}; "
          f"CPU seconds {ours:.3f}, _scaled_mm {theirs:.3f}")  # fmt: skip
    return {"tried": tried, "equal": same, "difference": far}
