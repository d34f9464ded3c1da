"""Recomputing changes memory, never values: random numbers and gradients are those of the plain program."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from conformance.case import Case, rand, randn


def dropout_block() -> Case:
    """pytorch/pytorch#121966, #198333: the backward's second run of a region sees the forward's mask."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x * w, 0.4, training=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(block, x, w, use_reentrant=False)  # type: ignore[no-any-return]

    def check(outs: list[Any], ins: list[Tensor], grads: list[Tensor | None]) -> None:
        o = outs[0].detach()
        c = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64, device="cpu").to(o)
        torch.testing.assert_close(grads[0], c * (o != 0) / 0.6 * ins[1].detach(), rtol=1e-4, atol=1e-5)
        assert 0.45 < (o != 0).float().mean() < 0.75

    arguments = ((rand(40, 64) + 0.5).requires_grad_(), (rand(64, seed=1) + 0.5).requires_grad_())
    return Case(fn, [arguments], grad=True, check=check)


def save_products(ctx: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, save_products)
        y = x
        for block in self.b:
            y = checkpoint(block, y, use_reentrant=False, context_fn=contexts)
        z = x * 2
        for block in self.b:
            z = checkpoint(block, z, use_reentrant=False)
        return y.sum() + z.square().mean()


def selective_policy() -> Case:
    """pytorch/pytorch#161889, #193193: two passes over the same blocks, one with a policy that saves products."""
    torch.manual_seed(0)
    return Case(Blocks(), [(randn(6, 8, grad=True),)], grad=True, tol=(1e-4, 1e-5))


def dropout_inside_and_outside() -> Case:
    """Random calls before, inside and after regions: each draws what it draws in eager."""

    def block(x: Tensor) -> Tensor:
        return F.dropout(x.tanh(), 0.3) * torch.rand_like(x)

    def fn(x: Tensor) -> Any:
        y = F.dropout(x, 0.2)
        y = checkpoint(block, y, use_reentrant=False)
        y = F.dropout(y * 2, 0.1)
        return checkpoint(block, y, use_reentrant=False).sum(0), torch.rand(3)

    return Case(fn, [(randn(9, 5, grad=True),), (randn(9, 5, seed=1, grad=True),)], grad=True, tol=(1e-5, 1e-6))


def without_kept_random_state() -> Case:
    """``preserve_rng_state=False``, where the user says that nothing inside is random."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(lambda a: (a @ w).sigmoid().log(), x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    return Case(fn, [(randn(4, 3, grad=True), randn(3, 3, seed=1, grad=True))], grad=True, tol=(1e-5, 1e-6))


def nested_regions() -> Case:
    """A region inside of a region, with a dropout in each."""

    def inner(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.25) + x

    def outer(x: Tensor) -> Tensor:
        return F.dropout(checkpoint(inner, x * 2, use_reentrant=False), 0.25).exp()  # type: ignore[no-any-return]

    def fn(x: Tensor) -> Tensor:
        return checkpoint(outer, x, use_reentrant=False)  # type: ignore[no-any-return]

    return Case(fn, [(randn(6, 4, grad=True),)], grad=True, tol=(1e-5, 1e-6))


def unread_draw_in_a_region() -> Case:
    """Numbers that nobody reads are drawn inside of a region, before a dropout; both are drawn again in the backward."""

    def block(x: Tensor) -> Tensor:
        torch.rand(3)
        return F.dropout(x, 0.5)

    def fn(x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False), torch.rand(2)

    return Case(fn, [(randn(6, grad=True),)], grad=True)


def region_beside_what_runs_in_eager() -> Case:
    """A graph that is left to eager keeps the numbers of its regions."""

    def fn(x: Tensor) -> Any:
        y = checkpoint(lambda v: F.dropout(v.sin(), 0.4), x, use_reentrant=False)
        return F.softshrink(y * 3), torch.rand(2)

    return Case(fn, [(randn(5, 4, grad=True),)], grad=True)


CASES = (
    dropout_block,
    selective_policy,
    dropout_inside_and_outside,
    without_kept_random_state,
    nested_regions,
    unread_draw_in_a_region,
    region_beside_what_runs_in_eager,
)
