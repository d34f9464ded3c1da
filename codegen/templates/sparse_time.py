"""How long a linear layer's product takes on the GPU that is here, dense and by a packed 2:4 weight."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import lru_cache

import torch

from dsc import packed
from dsc.codegen.templates import sparse_ops
from dsc.torch_shim import unset_fake_temporarily

ROUNDS, CALLS = 5, 10
assert sparse_ops.OPERATORS  # importing it registers what is measured


@lru_cache(maxsize=256)
def seconds(kernel: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[float, float]:
    """(dense, sparse) seconds of [m, k] @ [n, k].T by ``kernel``, mma.sp or cusparselt, on the current CUDA device.

    The median of rounds; the weight is packed already.  A kernel that cannot run takes forever.
    """
    with unset_fake_temporarily(), torch.no_grad():
        x, w = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda")
        keep = torch.tensor(2)
        values, meta, *_ = torch.ops.dsc.pack24(w, False, dtype)
        low = packed.unpack(values, meta)
        dense = _timed(lambda: x @ low.T)
        try:
            if kernel == "mma.sp":
                return dense, _timed(lambda: torch.ops.dsc.sparse_mm24(x, values, meta, w, keep, False))
            small = torch.ops.dsc.cslt_compress(low)
            return dense, _timed(lambda: torch.ops.dsc.cslt_mm(x, small, w, keep, False))
        except (RuntimeError, NotImplementedError):  # a build without cuSPARSELt
            return dense, float("inf")


def _timed(call: Callable[[], object]) -> float:
    call()
    rounds = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        rounds.append(float(begin.elapsed_time(end)) / 1e3 / CALLS)
    return statistics.median(rounds)
