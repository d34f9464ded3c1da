"""The CUDA kernels of ``dsc::embedding_add_`` and ``dsc::embedding_grad``.  Importing this module registers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsc import embedding
from dsc.codegen.templates import embedding_sum
from dsc.codegen.templates.sparse_ops import kernel
from dsc.codegen.triton_run import LANGUAGE

Run = Callable[[int, Sequence[object], Mapping[str, int]], None]
"""Launches the kernel: how many programs, its arguments, its constants."""


def source() -> str:
    return inspect.getsource(embedding_sum)


def launch(programs: int, arguments: Sequence[object], constants: Mapping[str, int]) -> None:
    first = arguments[0]
    assert isinstance(first, Tensor)
    with LANGUAGE, torch.cuda.device(first.device):
        kernel(source(), "embedding_sum")[(programs,)](*arguments, **constants, num_warps=embedding_sum.WARPS)


def add_rows(run: Run, table: Tensor, grad: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    """As ``dsc::embedding_add_``: the indices are sorted by ATen, which keeps the order of equal ones."""
    columns = grad.shape[-1]
    if index.numel() == 0 or columns == 0:
        return table
    ordered, place = torch.sort(index.reshape(-1).to(torch.int64), stable=True)
    rows = grad.reshape(-1, columns).contiguous()
    arguments = (table, rows, ordered, place, len(ordered), columns, padding_idx, table.stride(0))
    run(embedding_sum.programs(len(ordered), columns), arguments, embedding_sum.constants(columns))
    return table


def embedding_add_(base: Tensor, grad: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    """``dsc::embedding_add_`` on CUDA."""
    return add_rows(launch, base, grad, index, padding_idx)


def embedding_grad(grad: Tensor, index: Tensor, rows: int, padding_idx: int) -> Tensor:
    """``dsc::embedding_grad`` on CUDA."""
    return add_rows(launch, grad.new_zeros(rows, grad.shape[-1]), grad, index, padding_idx)


embedding.LIBRARY.impl("embedding_add_", embedding_add_, "CUDA")  # type: ignore[no-untyped-call]
embedding.LIBRARY.impl("embedding_grad", embedding_grad, "CUDA")  # type: ignore[no-untyped-call]
