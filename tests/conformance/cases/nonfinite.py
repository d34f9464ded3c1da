"""NaN and infinities go through min, max, clamp, softmax, sorting, comparison and reductions as in eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conformance.case import Case, randn

INF = float("inf")

INF, NAN = float("inf"), float("nan")
EDGES = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3.4e38, 1e-45, -2.5])


def clamp_minimum_maximum() -> Case:
    """pytorch/pytorch#93784: NaN of either operand wins, bounds keep eager's promotion."""

    def fn(x: Tensor, y: Tensor, i: Tensor) -> Any:
        return (
            x.clamp(-1, 1), x.clamp_min(0.5), torch.maximum(x, y), torch.minimum(y, x), x.relu(), x.amax(), y.amin(-1),
            torch.fmax(x, y), i.clamp(min=1.5), torch.clamp(x, min=y), torch.where(x > y, x, y), x.clamp(max=NAN),
        )  # fmt: skip

    x = torch.tensor([[NAN, 1.0, -INF, 0.0], [2.0, NAN, INF, -3.0]])
    y = torch.tensor([[0.0, NAN, 1.0, -0.5], [NAN, NAN, 5.0, -4.0]])
    i = torch.tensor([-2, 1, 2, 9])
    return Case(fn, [(x, y, i), (x.repeat(1, 9), y.repeat(1, 9), i), (x.half(), y.half(), i)])


def softmax_of_infinities() -> Case:
    """pytorch/pytorch#161150: rows that hold infinities or NaN."""

    def fn(x: Tensor, s: Tensor) -> Any:
        for _ in range(3):
            x = x * s
        return x, x.softmax(-1), x.softmax(0), torch.log_softmax(x, -1), torch.logsumexp(x, -1)

    x = randn(3, 10, seed=3)
    x[1] = -INF
    return Case(fn, [(x, torch.tensor([-2.3e14])), (x.abs(), torch.tensor([1.0]))])


def constant_folding_to_nan() -> Case:
    """pytorch/pytorch#188225: constants alone give NaN, which meets softmax and maximum."""

    def fn(x: Tensor) -> Any:
        c = torch.log2(torch.atan2(torch.ones(2, 2), torch.ones(2, 2))).arccosh()
        nan = torch.full((2, 2), NAN)
        return c.softmax(-1), torch.maximum(c, x), x + nan.clamp(0, 1), torch.zeros(2, 2) / 0 * x

    return Case(fn, [(torch.ones(2, 2),)])


def comparisons_and_predicates() -> Case:
    """NaN is not equal to itself; signed zeros are equal; predicates in fp32, fp16 and bf16."""

    def fn(x: Tensor, y: Tensor) -> Any:
        return (
            x == y, x != y, x < y, x >= y, x.isnan(), x.isinf(), x.isfinite(), x.sign(), torch.signbit(x), x == x,
            x.isposinf(), x.bool(), x.logical_not(), x.nan_to_num(), x.nan_to_num(1.0, 2.0, -3.0),
        )  # fmt: skip

    return Case(fn, [(EDGES, EDGES.flip(0)), (EDGES.half(), EDGES), (EDGES.bfloat16(), EDGES.bfloat16())])


def reductions() -> Case:
    """Sums, means, extremes, variances, ``any`` and ``all`` of rows with NaN and infinities."""

    def fn(x: Tensor) -> Any:
        return (
            x.sum(1), x.mean(1), x.amax(1), x.amin(0), x.max(1), x.min(1), x.var(1), x.std(0), x.any(1), x.all(1), x.prod(1),
            x.norm(), x.nansum(1), x.nanmean(1), x.median(1), x.logsumexp(0), x.argmax(1), x.cumsum(1), x.cummax(1),
        )  # fmt: skip

    rows = torch.stack([EDGES, EDGES.flip(0), torch.ones(10), torch.full((10,), -INF), torch.full((10,), NAN)])
    return Case(fn, [(rows,), (rows.repeat(1, 5),)])


def sorting() -> Case:
    """Order of NaN, infinities and equal values in sort, topk, argsort, unique and searchsorted."""

    def fn(x: Tensor) -> Any:
        s = x.sort(stable=True)
        return (
            s,
            x.sort(descending=True, stable=True),
            x.topk(4)[0],
            x.argsort(stable=True),
            x.msort(),
            x.kthvalue(3)[0],
        )

    return Case(fn, [(EDGES,), (torch.stack([EDGES, EDGES * -1]),)])


def gradients_at_edges() -> Case:
    """Gradients of clamp, relu, abs, max, sqrt, norm, where and masked softmax at zero, ties and infinities."""

    def fn(x: Tensor, y: Tensor) -> Any:
        m = torch.where(torch.arange(6) < 2, -INF, 0.0)
        return (
            x.clamp(-1, 1), x.relu(), x.abs(), x.amax(), torch.maximum(x, y), x.max(0)[0], (x * x).sqrt(), x[:2].norm(),
            torch.where(x > 0, x.log(), 0.0), (x + m).softmax(0), x.clamp_min(y), torch.minimum(x, y), x.amin(),
        )  # fmt: skip

    x = torch.tensor([1.0, -1.0, 0.0, 2.0, 2.0, -3.0]).requires_grad_()
    return Case(fn, [(x, torch.tensor([1.0, 0.0, 0.0, 2.0, 1.0, -3.0]).requires_grad_())], grad=True)


def functions_of_edges() -> Case:
    """Elementary functions at zero, infinities, NaN and outside of their domain."""

    def fn(x: Tensor) -> Any:
        return (
            x.exp(), x.log(), x.sqrt(), x.rsqrt(), x.reciprocal(), x.tanh(), x.sigmoid(), x.log1p(), x.expm1(), x.erf(),
            x.sin(), x.atan2(x.flip(0)), x**2, x**0.5, x**-1, 2**x, x.floor(), x.round(), x % 2, x.atan(), x.acos(),
            torch.nn.functional.gelu(x.clamp(-99, 99)), torch.nn.functional.silu(x), torch.nn.functional.softplus(x), x.pow(x.flip(0)),
        )  # fmt: skip

    return Case(fn, [(EDGES,), (EDGES.repeat(5),), (EDGES.double(),)], tol=(1e-5, 1e-6))


def mean_beside_a_variance() -> Case:
    """An infinity makes a running mean NaN unless it comes last."""

    def fn(x: Tensor) -> Any:
        var, mean = torch.var_mean(x, 1)
        std, other = torch.std_mean(x, 0)
        return var, mean, std, other * 2

    x = randn(6, 4)
    x[0, 0], x[1, 3], x[2, 1], x[2, 2], x[3, 3] = INF, INF, INF, -INF, float("nan")
    return Case(fn, [(x,), (x.t(),), (randn(3, 1),)])


CASES = (
    clamp_minimum_maximum,
    softmax_of_infinities,
    constant_folding_to_nan,
    comparisons_and_predicates,
    reductions,
    sorting,
    gradients_at_edges,
    functions_of_edges,
    mean_beside_a_variance,
)
