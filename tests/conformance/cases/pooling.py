"""Pooling, padding, convolution and interpolation at their edges, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


def edge_cases() -> Case:
    """pytorch/pytorch#198119, #143738, #100987, #94775, #143720: windows over the edge, integers, indices."""

    def fn(x: Tensor, i: Tensor) -> Any:
        return (
            F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            F.max_pool2d(x, 1, (2, 2), 0, ceil_mode=True), F.max_pool2d(x, 3, 2, 1, dilation=2, return_indices=True),
            F.avg_pool1d(x[0, 0, :1, :1], 4, 3, 2), F.avg_pool2d(i, 2, 2), F.adaptive_avg_pool2d(x, (3, 5)),
        )  # fmt: skip

    return Case(fn, [(randn(2, 3, 6, 7, grad=True), torch.arange(24).reshape(1, 1, 4, 6))], grad=True)


def adaptive_pool_flatten_sum() -> Case:
    """pytorch/pytorch#179931, #180848: pooling, flattening and row sums with odd channel counts."""

    def fn(x: Tensor) -> Any:
        y = F.adaptive_avg_pool2d(x, 7)
        return y.flatten(1).sum(-1), y.flatten(1).amax(-1), y.sum((2, 3))

    return Case(fn, [(randn(3, c, 8, 8, dtype=torch.float64, grad=True),) for c in (33, 65)], grad=True, dynamic=False)


def padding_modes() -> Case:
    """Constant, reflecting, replicating and circular padding; negative padding; of integers and bools."""

    def fn(x: Tensor, i: Tensor) -> Any:
        modes = [F.pad(x, (1, 2, 0, 1), mode=m) for m in ("reflect", "replicate", "circular")]
        return (
            *modes,
            F.pad(x, (1, -1), value=3.5),
            F.pad(x, (-1, -1, 2, 0)),
            F.pad(i, (2, 0)),
            F.pad(i > 1, (0, 1), value=True),
        )

    return Case(fn, [(randn(2, 3, 4, 5, grad=True), torch.arange(4))], grad=True)


def convolutions() -> Case:
    """Strides, dilation, groups, transposed, of one to three dimensions, without a batch."""

    def fn(x: Tensor, w: Tensor, d: Tensor) -> Any:
        return (
            F.conv2d(x, w, stride=2, padding=1), F.conv2d(x, w, dilation=2), F.conv2d(x, d, groups=4, padding="same"),
            F.conv_transpose2d(x, w, stride=2, output_padding=1), F.conv1d(x[0], w[:, :, 0].repeat(1, 2, 1)[:, :7]), F.conv3d(x[None], w[:, :2, None]),
        )  # fmt: skip

    return Case(
        fn,
        [(randn(2, 4, 7, 6, grad=True), randn(4, 4, 3, 3, seed=1, grad=True), randn(4, 1, 3, 3, seed=2, grad=True))],
        grad=True,
        tol=(1e-4, 1e-4),
    )


def interpolation() -> Case:
    """Nearest, linear, bilinear, bicubic and area resizing, up and down, with and without aligned corners."""

    def fn(x: Tensor) -> Any:
        return (
            F.interpolate(x, size=(7, 3)), F.interpolate(x, scale_factor=1.7, mode="bilinear"),
            F.interpolate(x, size=(9, 9), mode="bilinear", align_corners=True), F.interpolate(x, size=(3, 8), mode="bicubic"),
            F.interpolate(x, size=(2, 2), mode="area"), F.interpolate(x[0], scale_factor=2, mode="linear"),
            F.interpolate(x, size=(6, 6), mode="nearest-exact"), F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2),
        )  # fmt: skip

    return Case(fn, [(randn(2, 2, 5, 4, grad=True),)], grad=True, tol=(1e-4, 1e-5))


def other_pools() -> Case:
    """Max pooling with ties and NaN, unpooling, power pooling, fold and unfold, grid sampling."""

    def fn(x: Tensor, grid: Tensor) -> Any:
        y, where = F.max_pool2d(x.round(), 2, return_indices=True)
        return (
            y, where, F.max_unpool2d(y, where, 2), F.lp_pool2d(x, 2.0, 2), F.unfold(x, 2), F.fold(F.unfold(x, 2), (4, 4), 2),
            F.grid_sample(x, grid, align_corners=False), F.adaptive_max_pool2d(x, 3), F.avg_pool3d(x[None], 2),
        )  # fmt: skip

    return Case(
        fn, [(randn(2, 3, 4, 4, grad=True), randn(2, 3, 3, 2, seed=1).clamp(-1.2, 1.2))], grad=True, tol=(1e-4, 1e-5)
    )


CASES = (edge_cases, adaptive_pool_flatten_sum, padding_modes, convolutions, interpolation, other_pools)
