"""Index, gather, scatter and embedding read and write the right element, duplicates and negative indices included."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn

NAN = float("nan")


def expanded_base() -> Case:
    """pytorch/pytorch#183986: index calls on a base of stride 0 write to a copy, a row at a time."""

    def fn(row: Tensor, idx: Tensor, src: Tensor) -> Any:
        base = row.expand(4, 5)
        return (
            base.index_add(0, idx, src), base.index_copy(0, idx, src), base.index_fill(0, idx, -1.0),
            base.index_put((idx,), src, accumulate=True), base.index_put((idx,), src), base.clone().index_add_(0, idx, src),
        )  # fmt: skip

    return Case(fn, [(torch.ones(1, 5), torch.tensor([2, 0]), torch.arange(10.0).reshape(2, 5))])


def duplicate_updates() -> Case:
    """pytorch/pytorch#174074, #138908: all sources are read before one is written; accumulation adds each."""

    def fn(x: Tensor, acc: Tensor) -> Any:
        x[[0, 0, 2]] += x[[0, 0, 2]]
        acc.index_put_((torch.tensor([1, 1, 1, -1]),), torch.ones(4, 3, dtype=acc.dtype), accumulate=True)
        ones = torch.ones(3, dtype=torch.int64)
        count = torch.zeros(4, dtype=torch.int64).scatter_add(0, torch.tensor([3, 3, 0]), ones)
        return x.sum(), count, acc[[-1, 0]]

    x = torch.tensor([[-0.9, 0.1], [1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    return Case(fn, [(x, torch.zeros(4, 3)), (x + 1, torch.zeros(4, 3, dtype=torch.int32))])


def embedding_padding_and_gather() -> Case:
    """pytorch/pytorch#151918, #102602, #149496: padding rows, frequency scaling, lists with negative positions."""

    def fn(table: Tensor, tok: Tensor, x: Tensor) -> Any:
        e = F.embedding(tok, table, padding_idx=1)
        s = F.embedding(tok, table, scale_grad_by_freq=True)
        rows = torch.take_along_dim(x, x.argsort(1), 1)
        return e.tanh(), s * 3, x[:, [-1, 0, -2]], x.gather(1, tok % 4), rows, x[..., -1:]

    return Case(
        fn,
        [(randn(6, 3, grad=True), torch.tensor([[1, 5, 1, 0], [5, 5, 2, 1]]), randn(2, 4, seed=1, grad=True))],
        grad=True,
    )


def argmax_after_layout_change() -> Case:
    """pytorch/pytorch#183082, #118266, #93815: positions in transposed and flipped views, with ties and NaN."""

    def fn(x: Tensor, t: Tensor) -> Any:
        y = x.clone().sin_()
        return (
            y.t().argmax(), y.argmax(0), torch.fliplr(y).argmin(), y.flip(0).max(1), t.argmax(1), t.t().argmin(0), t.max(0),
            (t - t).argmax(1), t.min(1).indices, y.t().contiguous().argmax(1, keepdim=True),
        )  # fmt: skip

    t = torch.tensor([[1.0, 3.0, 3.0, 2.0], [NAN, 5.0, NAN, 0.0], [4.0, 4.0, 4.0, 4.0]])
    return Case(fn, [(randn(5, 7, seed=5), t)])


def several_index_tensors() -> Case:
    """Index tensors that broadcast, with slices and None between, negative ones, masks, and their gradients."""

    def fn(x: Tensor, i: Tensor, j: Tensor, m: Tensor) -> Any:
        return (
            x[i, j],
            x[:, i, None],
            x[i[:, None], :, j],
            x[..., j],
            x[-1],
            x[m],
            x[i, 1:],
            x[:, :, [0, -1]],
            x[None, i][0],
        )

    x = randn(3, 4, 5, grad=True)
    return Case(
        fn, [(x, torch.tensor([0, -1, 2]), torch.tensor([3, 0, -2]), torch.tensor([True, False, True]))], grad=True
    )


def scatter_kinds() -> Case:
    """scatter, scatter_add, scatter_reduce of every kind, with duplicates, and their gradients."""

    def fn(x: Tensor, i: Tensor, s: Tensor) -> Any:
        kinds = [
            x.scatter_reduce(0, i, s, r, include_self=k) for r in ("sum", "mean", "amax", "amin") for k in (True, False)
        ]
        return *kinds, x.scatter(0, i[:1], s[:1]), x.scatter_add(0, i, s), x.scatter(1, i[:, :2] % 3, 2.0)

    i = torch.tensor([[0, 1, 2], [2, 1, 0]])
    return Case(fn, [(randn(3, 3, grad=True), i, randn(2, 3, seed=1, grad=True))], grad=True)


def index_put_into_an_intermediate() -> Case:
    """Values and masks are put into what a kernel has just computed; later reads see them."""

    def fn(x: Tensor, i: Tensor, v: Tensor) -> Any:
        y = x.sigmoid() * 2
        y[i] = v
        z = y.index_put((i, i % 2), torch.tensor(9.0))
        z[z > 5] = 0
        return y * 2, z, y.masked_scatter(y > 0.5, x), y.masked_fill(y < 0.4, -1)

    return Case(fn, [(randn(4, 3, grad=True), torch.tensor([3, 0]), randn(2, 3, seed=1, grad=True))], grad=True)


def select_and_slice_backwards() -> Case:
    """Gradients of overlapping slices, steps, selects, narrow, diagonals and unfold add up."""

    def fn(x: Tensor) -> Any:
        return (
            x[1:4, ::2],
            x[2],
            x[:, -1],
            x.diagonal(1),
            x.unfold(0, 3, 1),
            x.narrow(0, 1, 2),
            x[::3],
            x.tril()[1:],
            x[-3:-1],
        )

    return Case(fn, [(randn(5, 6, grad=True),)], grad=True)


def sorting_and_taking_back() -> Case:
    """sort, topk, argsort and their gradients; searchsorted, bucketize, unique, bincount, histogram."""

    def fn(x: Tensor, i: Tensor) -> Any:
        values, order = x.sort(dim=1, stable=True)
        edges = torch.tensor([-1.0, 0.0, 1.0])
        return (
            values,
            order,
            *x.topk(2),
            torch.bucketize(x, edges),
            i.bincount(minlength=6),
            x.gather(1, order).cumsum(1),
        )

    return Case(fn, [(randn(3, 5, grad=True), torch.tensor([1, 1, 3]))], grad=True)


def embeddings_in_bags_and_tables() -> Case:
    """embedding_bag of three modes, one_hot, index_select, repeat_interleave, and an embedding of an embedding."""

    def fn(w: Tensor, t: Tensor) -> Any:
        bags = [F.embedding_bag(t, w, mode=m) for m in ("sum", "mean", "max")]
        return (
            *bags,
            F.one_hot(t, 7),
            w.index_select(0, t[0]),
            w[t].mean(1),
            t.repeat_interleave(2),
            w.repeat_interleave(2, 1),
        )

    return Case(fn, [(randn(6, 3, grad=True), torch.tensor([[1, 5, 1], [0, 0, 2]]))], grad=True)


CASES = (
    expanded_base,
    duplicate_updates,
    embedding_padding_and_gather,
    argmax_after_layout_change,
    several_index_tensors,
    scatter_kinds,
    index_put_into_an_intermediate,
    select_and_slice_backwards,
    sorting_and_taking_back,
    embeddings_in_bags_and_tables,
)
