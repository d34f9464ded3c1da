"""Arguments and results in any structure: None, numbers, dicts, dataclasses, named tuples, repeated tensors."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.case import Case, randn


@dataclasses.dataclass
class Out:
    logits: Tensor
    cache: object
    extra: dict[str, object]


class Pair(NamedTuple):
    first: Tensor
    second: Any = None


def nested_dataclass() -> Case:
    """pytorch/pytorch#138980, #93594: a dataclass with None, numbers, strings and the same tensor twice."""

    def fn(x: Tensor, y: Tensor, unused: Tensor) -> Out:
        z = (x * y).sum(-1)
        extra = {"same": [z, z, None], "inp": y, "n": x.shape[0], "s": "tag", "t": (x, x[0], 3.5)}
        return Out(logits=z, cache=None, extra=extra)

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    return Case(fn, [(x, torch.ones(3), torch.zeros(2, requires_grad=True))], grad=True)


def named_tuples_and_dicts() -> Case:
    """Named tuples, ordered dicts, empty containers, and results of calls that are structures themselves."""

    def fn(x: Tensor) -> Any:
        return (
            Pair(x * 2, Pair(x.max(1))),
            OrderedDict(b=x + 1, a=[]),
            (),
            {},
            x.sort(),
            torch.Size([1, 2]),
            x.shape,
            x.dtype,
        )

    return Case(fn, [(randn(2, 3, grad=True),)], grad=True)


def structures_as_arguments() -> Case:
    """Lists, dicts and named tuples of tensors go in; one is written to, one is returned."""

    def fn(batch: dict[str, Any], pair: Pair, rest: list[Tensor]) -> Any:
        batch["x"].add_(1)
        return {"y": batch["x"] * pair.first, "same": pair.second, "n": len(rest)}, [t * 2 for t in rest], batch["flag"]

    return Case(
        fn,
        [
            ({"x": randn(3), "flag": f}, Pair(randn(3, seed=1), randn(2)), [randn(1)] * n)
            for f, n in ((True, 2), (None, 2))
        ],
    )


def nothing_and_constants() -> Case:
    """No result, only numbers, constant tensors, and tensors that do not depend on the input."""

    def fn(x: Tensor, which: int) -> Any:
        if which == 0:
            return None
        if which == 1:
            return 3.5, "text", True
        return torch.ones(2), torch.tensor([1, 2]), x

    return Case(fn, [(randn(2), i) for i in range(3)])


def same_result_many_times() -> Case:
    """One tensor in several places stays one tensor; views of it stay views."""

    def fn(x: Tensor) -> Any:
        y = x.exp()
        return y, [y, (y,)], y.view(-1), {"y": y}

    return Case(fn, [(randn(2, 3, grad=True),)], grad=True)


def generators_and_closures() -> Case:
    """Results built by comprehensions, generators, ``zip`` and ``functools``, and a defaulted argument."""

    def fn(xs: list[Tensor], scale: float = 2.0, *, flip: bool = False) -> Any:
        ys = [x * scale for x in xs if x.numel() > 1]
        total = sum(y.sum() for y in ys)
        return dict(zip("abc", reversed(ys) if flip else ys)), total, max(len(y) for y in ys)

    return Case(fn, [([randn(3), randn(1), randn(3, seed=1)],), ([randn(2), randn(2)], 0.5)])


CASES = (
    nested_dataclass,
    named_tuples_and_dicts,
    structures_as_arguments,
    nothing_and_constants,
    same_result_many_times,
    generators_and_closures,
)
