"""Gradient and inference modes, around and inside of the program, and switches of them between calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn


def grad_mode_switches() -> Case:
    """pytorch/pytorch#114338, #100977: enable_grad and no_grad inside, the same function with and without gradients."""

    def fn(x: Tensor, w: Tensor, train: bool) -> Any:
        with torch.set_grad_enabled(train):
            h = x @ w
        with torch.no_grad():
            a = h + 1
        with torch.enable_grad():
            b = h + 1
        return a, b, h, torch.is_grad_enabled()

    x, w = randn(3, 4), randn(4, 2, seed=1, grad=True)
    return Case(fn, [(x, w, False), (x, w, True)], grad=True)


def inference_mode_view_inside() -> Case:
    """pytorch/pytorch#180823: inference mode entered inside, views of tensors from outside."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        with torch.inference_mode():
            y = (x.detach() @ w.detach()).view(-1)
            return y.reshape(2, 3).clone()

    return Case(fn, [(randn(2, 4), randn(4, 3, seed=1))])


def all_in_inference_mode() -> Case:
    """The whole run in inference mode, with a write to an input and views."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.relu(x @ w)
        x.mul_(2)
        return y, y.t(), x + 1, y.softmax(-1)

    return Case(fn, [(randn(2, 3), randn(3, 4, seed=1)) for _ in range(2)], around=torch.inference_mode)


def all_without_gradients() -> Case:
    """The whole run under ``no_grad``, though inputs need gradients."""

    def fn(x: Tensor, w: Tensor) -> Any:
        y = F.gelu(x @ w)
        return y, y[0], x.view(-1), w

    return Case(fn, [(randn(2, 3, grad=True), randn(3, 4, seed=1, grad=True))], around=torch.no_grad)


def part_without_gradients() -> Case:
    """A teacher runs without gradients beside a student with them; an average of weights is updated in place."""

    def fn(x: Tensor, w: Tensor, mean: Tensor) -> Any:
        with torch.no_grad():
            teacher = (x @ mean).softmax(-1)
            mean.lerp_(w, 0.1)
        return (F.log_softmax(x @ w, -1) * teacher).sum(), teacher

    return Case(
        fn, [(randn(3, 4, grad=True), randn(4, 5, seed=1, grad=True), randn(4, 5, seed=2))], grad=True, tol=(1e-5, 1e-6)
    )


def decorated_functions() -> Case:
    """Modes as decorators, nested, and turned on again inside."""

    @torch.no_grad()
    def quiet(x: Tensor) -> Tensor:
        return x * 2

    @torch.enable_grad()
    def loud(x: Tensor) -> Tensor:
        return x * 3

    def fn(x: Tensor) -> Any:
        with torch.no_grad():
            y = loud(x)
        return quiet(x), y, quiet(x) + loud(x)

    return Case(fn, [(randn(3, grad=True),)], grad=True)


CASES = (
    grad_mode_switches,
    inference_mode_view_inside,
    all_in_inference_mode,
    all_without_gradients,
    part_without_gradients,
    decorated_functions,
)
