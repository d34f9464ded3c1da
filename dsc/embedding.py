"""The gradient of a table that is looked up by index: sums of rows, alone or added to another gradient of the table.

Eager fills a matrix as large as the table with zeros, adds a row for each index, and, where the table is a head's weight
too, adds that matrix to the head's gradient.  Of all this only the rows that were looked up are more than copies of
zeros: ``embedding_add`` adds their sums to the other gradient and touches nothing else.  The sums are eager's, in
eager's order and rounded where eager rounds them.  On CUDA they are Triton's (``dsc.codegen.templates.embedding_sum``),
of indices that were sorted: the same on every run.  Importing this module registers the operators.

Shapes: base [V, D]; grad [.., D], of the same dtype; index [..], int64 or int32, each in 0 <= index < V.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema in (
    "embedding_add(Tensor base, Tensor grad, Tensor index, int padding_idx) -> Tensor",
    "embedding_add_(Tensor(a!) base, Tensor grad, Tensor index, int padding_idx) -> Tensor(a!)",
    "embedding_grad(Tensor grad, Tensor index, SymInt rows, int padding_idx) -> Tensor",
):
    LIBRARY.define(_schema)  # type: ignore[no-untyped-call]


def embedding_add_(base: Tensor, grad: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    """``base += embedding_dense_backward(grad, index, V, padding_idx, False)``, in place.

    ATen sums the rows that have one index, as it would in the whole matrix; each sum is added once.
    """
    rows, places = torch.unique(index.reshape(-1), return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(grad.reshape(-1, grad.shape[-1]), places, len(rows), -1, False)
    if padding_idx >= 0:
        sums.masked_fill_((rows == padding_idx)[:, None], 0)
    return base.index_add_(0, rows, sums)


def embedding_add(base: Tensor, grad: Tensor, index: Tensor, padding_idx: int) -> Tensor:
    """The same in new memory."""
    out: Tensor = torch.ops.dsc.embedding_add_(base.clone(), grad, index, padding_idx)
    return out


def embedding_grad(grad: Tensor, index: Tensor, rows: int, padding_idx: int) -> Tensor:
    """``embedding_dense_backward(grad, index, rows, padding_idx, False)``."""
    out: Tensor = torch.ops.aten.embedding_dense_backward(grad, index, rows, padding_idx, False)
    return out


LIBRARY.impl("embedding_add_", embedding_add_, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("embedding_add", embedding_add, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
LIBRARY.impl("embedding_grad", embedding_grad, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::embedding_add", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _add_fake(base: Tensor, *_: object) -> Tensor:
    return torch.empty_like(base)


@torch.library.register_fake("dsc::embedding_add_", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _add_in_place_fake(base: Tensor, *_: object) -> Tensor:
    return base


@torch.library.register_fake("dsc::embedding_grad", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _grad_fake(grad: Tensor, index: Tensor, rows: int, padding_idx: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))
