"""Results have eager's strides: those of the operands' order, also of channels-last and transposed ones.

Callers see strides through ``view``, ``as_strided``, ``data_ptr`` and every kernel that they hand the tensor to.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, rand, randn


def transposed_operands() -> Case:
    """pytorch/pytorch#198364: elementwise calls on transposed, permuted and channels-last operands."""

    def fn(a: Tensor, b: Tensor, img: Tensor) -> Any:
        return (
            torch.copysign(a, b - 1.5), torch.floor_divide(a, b), a.mul(b), torch.where(a > b, a, b), img.relu(),
            img * img.mean((2, 3), keepdim=True), (img + 1).to(torch.float64), a.exp() + a,
        )  # fmt: skip

    img = randn(2, 3, 4, 5, seed=1).to(memory_format=torch.channels_last)
    return Case(fn, [(rand(6, 5).mT, rand(5, 6, seed=2) + 1, img)])


def as_strided_after_roll() -> Case:
    """pytorch/pytorch#174963: ``as_strided`` reads what lies in memory, so the layout before it counts."""

    def fn(x: Tensor) -> Tensor:
        return torch.as_strided(torch.roll(x, 2, dims=1), (6, 8), (3, 2), 1)

    x = torch.arange(2 * 4 * 3 * 4, dtype=torch.float32).reshape(2, 4, 3, 4)
    return Case(fn, [(x,), (x.to(memory_format=torch.channels_last),)])


def creation_like_a_permuted_tensor() -> Case:
    """``zeros_like``, ``full_like``, ``clone``, ``empty_like`` keep the order of dimensions, ``new_zeros`` does not."""

    def fn(x: Tensor) -> Any:
        return (
            torch.zeros_like(x), torch.full_like(x, 2), x.clone(), x.clone(memory_format=torch.contiguous_format),
            x.new_zeros(x.shape), torch.ones_like(x, memory_format=torch.contiguous_format), torch.empty_like(x).fill_(1),
        )  # fmt: skip

    return Case(fn, [(randn(2, 3, 4).permute(2, 0, 1),), (randn(2, 6)[:, ::2],), (randn(1, 3).expand(2, 3),)])


def reductions_of_permuted_tensors() -> Case:
    """Reductions, cumulative sums and softmax of a permuted tensor, with and without ``keepdim``."""

    def fn(x: Tensor) -> Any:
        return (
            x.sum(0), x.amax(1, keepdim=True), x.mean((0, 2)), x.softmax(0), x.cumsum(1), x.var(2), x.argmax(0),
            x.log_softmax(-1), x.norm(dim=1), x.sort(1)[0],
        )  # fmt: skip

    return Case(fn, [(randn(4, 2, 3, grad=True).permute(1, 2, 0),)], tol=(1e-5, 1e-6))


def broadcast_of_two_orders() -> Case:
    """Operands whose orders of dimensions disagree, and operands with size-1 dimensions of odd strides."""

    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return a + b, b + a, a * c, c * b, torch.where(c > 0, a, b), a.add(1).mul(b)

    a, b = randn(3, 4, 5), randn(4, 5, 3, seed=1).permute(2, 0, 1)
    return Case(fn, [(a, b, randn(4, 1, seed=2).as_strided((3, 1, 5), (0, 7, 0)))])


def channels_last_network() -> Case:
    """Convolution, batch norm, activation, pooling and a residual sum in channels-last, forward and backward."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1), nn.SiLU()
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x = randn(2, 3, 8, 8, seed=1).to(memory_format=torch.channels_last).requires_grad_()
    return Case(net, [(x,), (randn(2, 3, 8, 8, seed=2, grad=True),)], grad=True, tol=(1e-4, 1e-4))


def channels_last_calls() -> Case:
    """Calls that keep channels-last, and calls that lose it."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.conv2d(x, w, padding=1)
        return y, F.gelu(y), y.mean(1, keepdim=True), F.interpolate(y, scale_factor=2.0), F.pad(y, (1, 1)), y.flatten(1)

    x = randn(2, 4, 5, 5).to(memory_format=torch.channels_last)
    return Case(fn, [(x, randn(4, 4, 3, 3, seed=1, grad=True))], grad=True, tol=(1e-4, 1e-5))


def cat_stack_and_pad() -> Case:
    """Joined tensors of equal and of different orders."""

    def fn(a: Tensor, b: Tensor) -> Any:
        return (
            torch.cat([a, a], 1),
            torch.cat([a, b]),
            torch.stack([a, b], 1),
            torch.cat([a, b[:1]]),
            a.repeat(2, 1, 1, 1),
        )

    a = randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return Case(fn, [(a, randn(2, 3, 4, 4, seed=1)), (a, a * 2)])


def matmul_results() -> Case:
    """Products of transposed and batched operands, and linear layers over leading dimensions."""

    def fn(a: Tensor, b: Tensor, w: Tensor) -> Any:
        return a @ b, b.mT @ a.mT, (a @ b).mT, F.linear(a, w), torch.einsum("bij,bjk->bki", a, b), a.mT.contiguous() * 2

    return Case(fn, [(randn(2, 3, 4), randn(2, 5, 4, seed=1).mT, randn(6, 4, seed=2))], tol=(1e-5, 1e-5))


def flips_rolls_and_triangles() -> Case:
    """Index permutations of transposed tensors."""

    def fn(x: Tensor) -> Any:
        return (
            x.flip(0),
            x.roll(1, 1),
            x.tril(),
            x.triu(1),
            x.rot90(),
            x.repeat_interleave(2, 0),
            x.index_select(0, torch.tensor([1, 0])),
        )

    return Case(fn, [(randn(4, 3).t(),), (randn(3, 4),)])


def writes_keep_the_layout() -> Case:
    """In-place calls on transposed intermediates, views and arguments: the result is laid out as before."""

    def fn(x: Tensor, y: Tensor, i: Tensor) -> Any:
        def writes(t: Tensor) -> Any:
            return (
                t().tril_(), t().triu_(1), t().cumsum_(0), t().cumprod_(1), t().masked_fill_(t() > 0, 2.0), t().renorm_(2, 0, 1.0),
                t().index_copy_(0, i, t()[:2]), t().index_add_(0, i, t()[:2]), t().scatter_(0, i[None], 1.0), t().index_fill_(0, i, 3.0),
                t().scatter_add_(0, i[None], t()), t().addmm_(t()[:, :2], t()[:2]), t().masked_scatter_(t() > 0, y), t().mul_(2),
            )  # fmt: skip

        return writes(lambda: (x * 2).t()), writes(lambda: torch.cat([x, y])[1:4].t()), y.t().tril_(), y.t().cumsum_(0)

    return Case(fn, [(randn(3, 4), randn(3, 4, seed=1), torch.tensor([0, 1]))])


def layouts_changed_in_place() -> Case:
    """In-place calls that change what a tensor is; and a write through a view of an argument with gaps."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            (x * 2).transpose_(0, -1),
            (x * 2).t().t_(),
            (x * 3).t().squeeze_(),
            y[..., None, :].tril_(),
            y[1:].T.cumsum_(0),
        )

    return Case(fn, [(randn(4, 4), randn(5, 5, 6)[1:, 1:, 1:]), (randn(4, 3), randn(4, 6, 2)[..., ::2])])


def writes_keep_the_layout_with_gradients() -> Case:
    def fn(x: Tensor, i: Tensor) -> Any:
        return (x * 2).t().tril_(), (x * 3).t().index_add_(0, i, x.t()[:2]), (x * 4).t().cumsum_(0).sin()

    return Case(fn, [(randn(3, 4, grad=True), torch.tensor([0, 1]))], grad=True)


def writes_into_gaps() -> Case:
    """Whatever writes to a part of a larger tensor, what is computed from it afterwards is laid out as by eager."""

    def after(x: Tensor) -> tuple[Tensor, ...]:
        return x.unsqueeze(0).expand(2, *x.shape), torch.ops.aten.copy.default(x, torch.ones(x.shape)), x * 2

    def fn(*xs: Tensor) -> Any:
        xs[0].index_fill_(0, torch.arange(1), 0.5)
        xs[1].abs_()
        F.relu(xs[2], inplace=True)
        F.leaky_relu(xs[3], 0.1, True)
        torch.add(torch.ones(xs[4].shape), 1, out=xs[4])
        xs[5][torch.tensor([0])] = 1.0
        xs[6][xs[6] > 0] = 2.0
        torch.ops.aten.add_.Tensor(xs[7], 3)
        xs[8].zero_()
        xs[9].mT.tril_()
        y = xs[10]
        y *= torch.full(y.shape, 0.3, dtype=torch.float64)
        xs[11].bernoulli_(0.5)
        return [after(x) for x in xs]

    def parts(seed: int) -> tuple[Tensor, ...]:
        return tuple(randn(6, 28, seed=seed + i)[1:, ::2] for i in range(12))

    return Case(fn, [parts(1), parts(20)])


def results_laid_out_anew() -> Case:
    """``one_hot``, softmaxes, resized lines, idle ``rrelu``: contiguous, whatever their operands are; sizes of 1 count."""

    def fn(t: Tensor, x: Tensor) -> Any:
        s = torch.log_softmax(x, 0)
        lines = F.interpolate(t.float(), scale_factor=2, mode="nearest-exact")
        return (
            F.one_hot(t, 4),
            lines,
            F.rrelu(t.float()),
            torch.minimum(x, s[..., 0].add(2)),
            torch.minimum(x, x.softmax(0)[..., 0]),
        )

    index = torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1) % 4
    return Case(fn, [(index, randn(1, 1, 3).permute(2, 1, 0))])


def elements_by_turned_indices() -> Case:
    """Results of indexing are laid out as the indices are, and so is what is computed from them."""

    def fn(x: Tensor, i: Tensor, j: Tensor) -> Any:
        return x[i % 5].isinf(), x[:, i % 4] * 2, x[i % 5, :, j % 3].exp(), x[i % 5, j % 4].sum(0)

    index = torch.arange(6).reshape(3, 2).t()
    return Case(fn, [(randn(5, 4, 3), index, index + 1), (randn(3, 4, 5).permute(2, 1, 0), index, index[:, :1])])


CASES = (
    writes_keep_the_layout,
    layouts_changed_in_place,
    writes_keep_the_layout_with_gradients,
    transposed_operands,
    as_strided_after_roll,
    creation_like_a_permuted_tensor,
    reductions_of_permuted_tensors,
    broadcast_of_two_orders,
    channels_last_network,
    channels_last_calls,
    cat_stack_and_pad,
    matmul_results,
    flips_rolls_and_triangles,
    writes_into_gaps,
    results_laid_out_anew,
    elements_by_turned_indices,
)
