"""Under deterministic algorithms: filled empty tensors, deterministic scatters, and eager's refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def filled_memory_and_scatters() -> Case:
    """pytorch/pytorch#174386, #93537, #162522: empty tensors are filled, duplicates added in a fixed order."""

    def fn(x: Tensor, i: Tensor, s: Tensor) -> Any:
        rows = i[:, None].expand(5, 3)
        return (
            x.index_put((i,), s, accumulate=True), x.scatter_add(0, rows, s), torch.empty_like(x), torch.empty(4, dtype=torch.int32),
            x.index_add(0, i, s).cumsum(0), torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    return Case(fn, [(randn(4, 3), torch.tensor([1, 1, 3, 0, 1]), randn(5, 3, seed=1))], around=deterministic)


def training_step() -> Case:
    """Embedding, attention, loss and their gradients, bit by bit the same in a second call."""

    def fn(w: Tensor, t: Tensor) -> Any:
        x = F.embedding(t, w)
        y = F.scaled_dot_product_attention(x, x, x)
        return F.cross_entropy(y.flatten(0, 1) @ w.T, t.flatten()), x.new_empty(3)

    arguments = (randn(11, 8, grad=True), torch.tensor([[1, 1, 4], [9, 1, 0]]))
    return Case(fn, [arguments, arguments], grad=True, around=deterministic, tol=(1e-5, 1e-6))


def memory_of_narrow_dtypes() -> Case:
    """What ``empty`` holds for every kind of dtype: NaN, the largest integer, True."""

    def fn(x: Tensor) -> Any:
        kinds = (torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64)
        return (
            [torch.empty(3, dtype=d) for d in kinds],
            torch.empty_like(x.t()),
            x.new_empty(2, 2),
            torch.empty_strided((2, 2), (1, 2)),
        )

    return Case(fn, [(randn(2, 3),)], around=deterministic)


CASES = (filled_memory_and_scatters, training_step, memory_of_narrow_dtypes)
