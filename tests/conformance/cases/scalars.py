"""Python numbers, strings and flags as arguments: no stale value survives in a kernel or its backward."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case, randn


def scalars_change_between_calls() -> Case:
    """NVIDIA/Megatron-LM#6918, pytorch/pytorch#171320: floats, integers, flags and modes vary from call to call."""

    def fn(x: Tensor, lim: float, n: int, flag: bool, mode: str | None) -> Any:
        y = torch.clamp(x * lim, -lim, lim) + n * (lim * 0.1)
        return (y * 2 if flag else y - 1) * n, lim * n, mode, x.new_full((2,), lim)

    values = ((0.5, 2, True, "a"), (1.0, 2, True, "a"), (1.5, 3, False, None), (0.1, 1, True, "b"))
    return Case(fn, [(torch.linspace(-2, 2, 9).requires_grad_(), *v) for v in values], grad=True)


def exponents_change() -> Case:
    """pytorch/pytorch#171320: ``x ** n`` with an integer that changes, and is a symbol then."""

    def fn(x: Tensor, n: int) -> Tensor:
        return (x + 1) ** n

    return Case(fn, [(torch.linspace(0.0, 2.0, 5).requires_grad_(), n) for n in (2, 3, 1, 0, -1)], grad=True)


def special_floats() -> Case:
    """Zero, minus zero, infinities, NaN and huge numbers as arguments, one after another."""

    def fn(x: Tensor, a: float) -> Any:
        return x + a, x * a, x.clamp(max=a), torch.where(x > 0, x, a), torch.full_like(x, a), x / a if a else x

    return Case(fn, [(randn(5), a) for a in (1.0, 0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, 1e-300)])


def scale_attribute_changes() -> Case:
    """Numbers that are attributes of a module and change between calls, as a loss scale or an epoch does."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.step = 1.0, 0

        def forward(self, x: Tensor) -> Any:
            self.step += 1
            self.scale *= 1.5
            return x * self.scale + self.step, self.step

    return Case(Scaled(), [(randn(4, grad=True),) for _ in range(4)], grad=True)


def learning_rate_and_closure() -> Case:
    """A number in a closure, in a list and in a dict, each changed between calls."""
    box: dict[str, Any] = {"lr": 0.1, "seen": [1, 2]}

    def fn(x: Tensor) -> Any:
        out = x * box["lr"] + box["seen"][0]
        box["lr"] /= 2
        box["seen"][0] += 3
        return out

    return Case(fn, [(randn(4),) for _ in range(4)])


def numbers_of_tensors() -> Case:
    """``item``, ``tolist``, ``float`` of tensors feed later arithmetic, with a new value in every call."""

    def fn(x: Tensor, k: Tensor) -> Any:
        n = k.item()
        return x * n, x.sum() * float(k), k.tolist(), x[: int(k)]

    return Case(fn, [(randn(5), torch.tensor(k)) for k in (2, 3, 1)])


def double_precision_of_numbers() -> Case:
    """Arithmetic of Python numbers is done in doubles before it meets an fp32 tensor."""

    def fn(x: Tensor, a: float, b: float) -> Any:
        return x * (a * b), x + (a - b), (a + b) / 3, x.double() * a, x.half() * (a * 1e-3), x * a * b, math.sqrt(a) + x

    return Case(fn, [(randn(5), a, b) for a, b in ((0.1, 0.3), (1e10, 1e-10), (1 / 3, 1e8), (1e38, 10.0))])


def integer_numbers_of_any_size() -> Case:
    """Integers that outgrow 32 bits, and bools given as integers."""

    def fn(x: Tensor, n: int, b: bool) -> Any:
        return x + n, x * b, n // 3, torch.full((2,), n), x.float() * n

    return Case(fn, [(torch.arange(4), n, b) for n, b in ((1, True), (2**31, False), (2**40, True), (-(2**62), False))])


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    random.seed(7)
    yield


def numbers_drawn_by_python() -> Case:
    """pytorch/pytorch#95425: ``random`` draws anew at each call, and its numbers take on the dtype of what is beside them."""

    def fn(x: Tensor) -> Any:
        r, k, v = random.uniform(-2, 2), random.randint(1, 9), random.uniform(0, 1)
        mixed = torch.full((2,), r, dtype=torch.float64) * v, torch.arange(3) * r, x.new_ones(2) * r, x.double() - v
        return x * r, x * v - r, x + k, x / k, v - x, torch.where(x > r, x, x * v), x > r, r, k, *mixed

    dtypes = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
    return Case(fn, [((randn(3, seed=i) * 3).to(d),) for i, d in enumerate(dtypes)], around=seeded)


CASES = (
    scalars_change_between_calls,
    exponents_change,
    special_floats,
    scale_attribute_changes,
    learning_rate_and_closure,
    numbers_of_tensors,
    double_precision_of_numbers,
    integer_numbers_of_any_size,
    numbers_drawn_by_python,
)
