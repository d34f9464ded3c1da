"""What a linear layer takes in a train step, dense and 2:4 sparse, on a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsc import cost, ops
from dsc.passes.linears import Linear
from dsc.target import Target
from dsc.torch_shim import optimization_hint

GAIN: Mapping[int, float] = {8: 1.25, 9: 1.2}
"""Major compute capability -> how much faster large 2:4 products are than dense ones, as reported of cuSPARSELt:
1.1 to 1.25 on A100 (PyTorch, "Accelerating neural network training with semi-structured sparsity", 2024), 1.2 on H100."""
SMALL_ROWS = 32
"""Rows of x up to which the weight's bytes decide."""
PACKED = 0.5625
"""Bytes of a packed 2:4 weight with its metadata, over those of a dense one of 16 bits."""
UNIT = 128
"""What the weight's sides must be multiples of, for whole tiles."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a layer's three products a step, with what sparsity adds to them."""

    dense: float
    sparse: float
    kernel: str
    """masked, mma.sp, or cusparselt."""


Measure = Callable[[str, int, int, int, torch.dtype], tuple[float, float]]
"""Kernel, sizes M, N, K and dtype of a product -> its seconds, dense and sparse, on the GPU that is here."""


def times(x: Linear, nm: tuple[int, int], transposable: bool, target: Target, measure: Measure | None = None) -> Times:
    """Of the layer on the target.

    1. Sparse tensor cores multiply 16-bit operands by 2:4 weights with sides of whole tiles.  On sm_80 that is dsc's own
       kernel; on sm_90 it is for few rows, and cuSPARSELt otherwise.  All else is a masked dense product.
    2. The weight's gradient stays dense; so does the input's, unless the mask is transposable.
    3. Sparsity adds a pass over the weight: it is read, and written packed or masked.
    4. Without ``measure`` all is a roofline; with it, products are what was measured.
    """
    rows, n, k = x.shape
    m = optimization_hint(rows)
    operand = x.forward.all_input_nodes[-1]
    dtype = ops.tensor(operand).dtype
    product = _seconds(m, n, k, 1.0, 1.0, dtype, target)
    backward = (x.dgrad is not None) + (x.wgrad is not None)
    dense = product * (1 + backward)
    kernel = kernel_of(m, n, k, nm, dtype, target)
    written = (PACKED * 2 * (1 + transposable) if kernel != "masked" else 0) + (0 if transposable else 2) + 1
    prepare = n * k * (ops.tensor(x.weight).element_size() + written) / _bandwidth(target)
    prepare += cost.LAUNCH_SECONDS[target.kind]
    if kernel == "masked" or target.capability is None:
        return Times(dense, dense + prepare, "masked")
    fast = _seconds(m, n, k, GAIN[target.capability[0]], PACKED, dtype, target)
    if measure is not None:
        product, fast = measure(kernel, m, n, k, dtype)
        dense = product * (1 + backward)
    count = 1 + (transposable and x.dgrad is not None)
    return Times(dense, fast * count + product * (1 + backward - count) + prepare, kernel)


def kernel_of(m: int, n: int, k: int, nm: tuple[int, int], dtype: torch.dtype, target: Target) -> str:
    """What multiplies by a sparse weight [n, k]: mma.sp, cusparselt, or masked."""
    if nm != (2, 4) or dtype not in HALF or n % UNIT or k % UNIT:
        return "masked"
    if target.capability is None or "2:4" not in target.features or target.capability[0] not in GAIN:
        return "masked"
    return "mma.sp" if target.capability[0] == 8 or m <= SMALL_ROWS else "cusparselt"


def _seconds(m: int, n: int, k: int, gain: float, weight: float, dtype: torch.dtype, target: Target) -> float:
    size = dtype.itemsize
    names = cost.RATES.get(dtype, ("fp32",))
    peak = next((target.peak[name] for name in names if name in target.peak), target.peak["fp32"])
    work = 2.0 * m * n * k / (peak * cost.EFFICIENCY["matmul"] * gain)
    moved = size * (m * k + m * n + weight * n * k) / _bandwidth(target)
    return max(work, moved) + cost.LAUNCH_SECONDS[target.kind]


def _bandwidth(target: Target) -> float:
    return target.bandwidth * cost.BANDWIDTH_EFFICIENCY
