"""Programs that PyTorch's own tracing changes: dsc gives eager's answer, if need be by running them in eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


def multilabel_margin_padding() -> Case:
    """pytorch/pytorch#185464: -1 ends the labels of a row; the decomposition reads on."""

    def fn(x: Tensor, m: Tensor) -> Any:
        return F.multilabel_margin_loss(x, m), F.multilabel_margin_loss(x * 2, m, reduction="none")

    m = torch.tensor([[0, 3, -1, -1, -1], [2, -1, 1, 1, 1], [-1, 0, 0, 0, 0], [4, 1, 0, -1, 2]])
    return Case(fn, [(randn(4, 5, grad=True), m)], grad=True)


def multilabel_margin_module() -> Case:
    """The same by a module, by a method of the name-space ``torch._C._nn``, and under ``no_grad``."""
    loss = torch.nn.MultiLabelMarginLoss()
    m = torch.tensor([[0, 3, -1, 1, 1], [2, -1, 1, 1, 1]])

    def fn(x: Tensor) -> Any:
        with torch.no_grad():
            a = loss(x * 2, m)
        return loss(x.exp(), m), a, torch._C._nn.multilabel_margin_loss(x, m)

    return Case(fn, [(randn(2, 5, grad=True),)], grad=True)


def view_of_what_is_contiguous_in_eager_only() -> Case:
    """A ``view`` that eager allows; tracing, with other strides in mind, may not."""

    def fn(x: Tensor) -> Any:
        y = F.pad(x.transpose(1, 2), (0, 0, 0, 2)).contiguous()
        z = (y * 2).view(2, 3, 2, 4)
        return z.sum(-1), torch.stack([z[:, i] for i in range(3)]).transpose(0, 1).reshape(2, -1)

    return Case(fn, [(randn(2, 4, 4, grad=True),)], grad=True)


def solves_inside_triangles() -> Case:
    """The inverse of a triangle row by row, in place, as delta-rule attention does it."""

    def fn(a: Tensor) -> Any:
        t = a.tril(-1)
        for i in range(1, 4):
            t[..., i, :i] = t[..., i, :i].clone() + (t[..., i, :i, None].clone() * t[..., :i, :i].clone()).sum(-2)
        return t + torch.eye(4), (t + torch.eye(4)) @ a

    return Case(fn, [(randn(2, 4, 4, grad=True) * 0.5,), (randn(2, 4, 4, grad=True),)], grad=True, tol=(1e-4, 1e-5))


def softshrink_at_nan() -> Case:
    """The gradient at NaN is passed on in eager, and dropped by the decomposition."""
    x = torch.tensor([float("nan"), 0.3, -0.7, 2.0, 0.5, -0.5]).requires_grad_()
    return Case(lambda v: F.softshrink(v), [(x,)], grad=True)


def bicubic_in_bfloat16() -> Case:
    """Eager's kernel keeps its weights in 32 bits; the decomposition rounds each."""

    def fn(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2.0, mode="bicubic")

    return Case(fn, [(randn(1, 2, 4, 4, dtype=torch.bfloat16),)], tol=(0.0, 0.0))


def interpolation_of_bytes() -> Case:
    """Eager interpolates bytes with integer weights."""

    def fn(x: Tensor) -> Any:
        return F.interpolate(x, size=(7, 3), mode="bilinear"), F.interpolate(x, scale_factor=1.7, mode="nearest")

    return Case(fn, [((randn(1, 2, 5, 4).abs() * 50).to(torch.uint8),)])


def gradients_of_activations_at_edges() -> Case:
    """NaN, infinities and the corners of piecewise activations: values and gradients."""
    functions = (
        F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.elu, F.celu, F.selu, F.leaky_relu, F.logsigmoid, F.softplus,
        F.hardshrink, F.tanhshrink, F.softsign, F.mish, torch.sinc, torch.frac, torch.special.entr, torch.logit, torch.erfc,
    )  # fmt: skip
    x = torch.tensor([float("nan"), 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, 20.0, float("inf"), -float("inf")])
    return Case(lambda v: [f(v) for f in functions], [(x.requires_grad_(),)], grad=True)


CASES = (
    multilabel_margin_padding,
    multilabel_margin_module,
    view_of_what_is_contiguous_in_eager_only,
    solves_inside_triangles,
    softshrink_at_nan,
    bicubic_in_bfloat16,
    interpolation_of_bytes,
    gradients_of_activations_at_edges,
)
