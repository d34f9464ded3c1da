"""Autocast regions, around and inside: dtypes of every result and gradient, islands without it, its cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conformance.case import Case, randn

LOOSE = (4e-2, 4e-2)


def regions() -> Case:
    """pytorch/pytorch#179804, #194329: bf16 with an island without; products, softmax, sums and fp32 weights."""

    def fn(x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x @ w
            s = h.softmax(-1)
            with torch.autocast("cpu", enabled=False):
                f = h.float() @ w
            z = F.linear(f, w)
            t = h + x
        return h, s, f, z, t, t.sum()

    return Case(fn, [(randn(5, 8), randn(8, 8, seed=1, grad=True))], grad=True, tol=LOOSE)


def network_in(dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4), nn.LogSoftmax(-1))
    around = partial(torch.autocast, "cpu", dtype=dtype)
    return Case(net, [(randn(6, 8, grad=True),), (randn(3, 8, seed=1),)], grad=True, tol=LOOSE, around=around)


def network_in_bfloat16() -> Case:
    """A network under autocast to bf16: weights and their gradients stay fp32."""
    return network_in(torch.bfloat16)


def network_in_half() -> Case:
    """A network under autocast to fp16."""
    return network_in(torch.float16)


def attention_and_loss() -> Case:
    """Attention, norms and losses, each of which autocast treats in its own way."""

    def fn(q: Tensor, w: Tensor, t: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = F.scaled_dot_product_attention(q, q, q)
            y = F.linear(F.layer_norm(a, (8,)), w)
            return (
                a,
                y,
                F.cross_entropy(y.flatten(0, 1), t),
                torch.cat([y, y.float()]),
                torch.matmul(q, q.mT),
                y.exp(),
                y.cumsum(0),
            )

    return Case(
        fn, [(randn(2, 5, 8, grad=True), randn(4, 8, seed=1, grad=True), torch.arange(10) % 4)], grad=True, tol=LOOSE
    )


def mode_changes_between_calls() -> Case:
    """Autocast on in one call and off in the next."""

    def fn(x: Tensor, w: Tensor, on: bool) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            return (x @ w).relu(), torch.is_autocast_enabled("cpu")

    return Case(
        fn, [(randn(3, 4), randn(4, 2, seed=1, grad=True), on) for on in (True, False, True)], grad=True, tol=LOOSE
    )


CASES = (regions, network_in_bfloat16, network_in_half, attention_and_loss, mode_changes_between_calls)
