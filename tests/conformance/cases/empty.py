"""Tensors without elements and without dimensions: neutral elements, shapes and gradients of the right shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, randn


def empty_reductions_and_views() -> Case:
    """pytorch/pytorch#197108, #95370, #88278: zero elements in reductions, views, joins and products."""

    def fn(e: Tensor, m: Tensor, w: Tensor) -> Any:
        v, mu = torch.var_mean(e)
        sd, mu0 = torch.std_mean(m, 0, correction=0)
        return (
            v, mu, sd, mu0, e.sum(), e.prod(), e.mean(), (e > 0).all(), (e > 0).any(), m.sum(0), m.amax(1),
            m.argmin(1).view(0, 3) if m.shape[1] == 0 else m.argmin(1), m @ w, torch.cat([e, e]), w[:0].sum(0), m.softmax(1),
            e.cumsum(0),
        )  # fmt: skip

    return Case(fn, [(torch.zeros(0), torch.zeros(0, 3), torch.ones(3, 2, requires_grad=True))], grad=True)


def no_rows_through_a_network() -> Case:
    """A batch of no rows through linear, norm, activation, dropout and a sum: gradients are zeros, not None."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return Case(net, [(torch.zeros(0, 4),), (randn(2, 4),), (torch.zeros(3, 0, 4),)], grad=True, tol=(1e-5, 1e-6))


def one_dimension_of_zero() -> Case:
    """Zero in each place: sums over it are zeros, over the others empty."""

    def fn(x: Tensor) -> Any:
        return (
            x.sum(0),
            x.sum(1),
            x.sum(2),
            x.sum(),
            (x + 1).exp(),
            x.mean((0, 2)),
            x.any(1),
            x.transpose(0, 2),
            x.flatten(),
        )

    return Case(fn, [(torch.zeros(0, 2, 3),), (torch.zeros(2, 0, 3),), (torch.zeros(2, 3, 0),)], dynamic=False)


def scalars_of_no_dimension() -> Case:
    """0-dim tensors in arithmetic, reductions, softmax, indexing, stacking and broadcasting."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            x + y, x * 2, x.sum(), x.softmax(0), x.amax(), x.cumsum(0), torch.stack([x, x]), x[None], x.expand(3), x.sort()[0],
            x.norm(), x.var(correction=0), x.flip(()), x.argmax(), y[x.long()], x.reshape(1), x.log_softmax(-1), x.max(0)[0],
        )  # fmt: skip

    return Case(fn, [(torch.tensor(2.0, requires_grad=True), randn(4, grad=True))], grad=True)


def zero_dim_of_every_dtype() -> Case:
    """A 0-dim tensor does not promote a tensor with dimensions, except to another category."""

    def fn(x: Tensor, i: Tensor, z: Tensor, k: Tensor) -> Any:
        return (
            x + z,
            i + z,
            i + k,
            x * k,
            z + k,
            torch.where(x > 0, x, z),
            i.clamp(max=k),
            x.bfloat16() * z,
            torch.maximum(x, z.float()),
        )

    return Case(
        fn, [(randn(3), torch.arange(3), torch.tensor(1.5, dtype=torch.float64), torch.tensor(2, dtype=torch.int16))]
    )


def empty_lists_and_slices() -> Case:
    """Slices of no length, empty indices, masks that select nothing, splits with empty pieces."""

    def fn(x: Tensor, none: Tensor) -> Any:
        return (
            x[2:2], x[none], x[:, 0:0] @ x[0:0], x[x > 99], torch.split(x, [0, 4]), x.index_select(1, none), x.gather(0, none[:, None]),
            torch.cat([x, x[:0]]), x.index_add(0, none, x[:0]), F.pad(x[:0], (0, 0, 1, 1), value=2.0),
        )  # fmt: skip

    return Case(fn, [(randn(4, 3), torch.zeros(0, dtype=torch.int64))])


def losses_of_nothing() -> Case:
    """Mean losses of no rows are NaN, sums are zero; embedding and attention of no tokens."""

    def fn(x: Tensor, t: Tensor, w: Tensor) -> Any:
        return (
            F.cross_entropy(x, t),
            F.cross_entropy(x, t, reduction="sum"),
            F.mse_loss(x, x * 2),
            F.embedding(t, w),
            F.l1_loss(x, x + 1),
        )

    return Case(
        fn,
        [(torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=torch.int64), randn(5, 3, grad=True))],
        grad=True,
    )


def parameters_without_dimensions() -> Case:
    """One channel, whose weight and bias are single numbers."""

    def fn(x: Tensor, w: Tensor) -> Any:
        m = w.mean()
        return F.batch_norm(x, None, None, m, m, training=True), F.prelu(x, m.abs()), x * m

    return Case(fn, [(randn(16, 1, grad=True), randn(3, seed=1, grad=True))], grad=True, tol=(1e-4, 1e-5))


def native_dropout_of_nothing() -> Case:
    """Called by itself it gives its operand back, which then depends on itself."""

    def fn(x: Tensor) -> Any:
        return torch.ops.aten.native_dropout(x, 0.4, True)[0]

    def check(results: list[Any], inputs: list[Tensor], _: list[Tensor | None]) -> None:
        assert not inputs[0].is_leaf

    return Case(fn, [(randn(0, 4, grad=True),)], check=check)


CASES = (
    parameters_without_dimensions,
    empty_reductions_and_views,
    no_rows_through_a_network,
    one_dimension_of_zero,
    scalars_of_no_dimension,
    zero_dim_of_every_dtype,
    empty_lists_and_slices,
    losses_of_nothing,
    native_dropout_of_nothing,
)
