"""Attention over chosen blocks against masked attention: numbers, gradients, and which blocks are chosen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsc.block_attention import block_mask, block_select, listed

CASES = {
    "causal": (2, 4, 4, 100, 16, True, 16, 2, 1, 2),
    "both ways": (2, 2, 2, 90, 8, False, 16, 2, 1, 2),
    "grouped": (1, 4, 2, 64, 8, True, 16, 1, 0, 1),
    "window alone": (1, 1, 1, 70, 8, True, 16, 2, 0, 0),
    "everything": (1, 2, 1, 50, 8, False, 16, 1, 2, 9),
}
"""batch, heads, heads of keys, length, width, causal, block, window, sink, top_k"""


def operands(batch: int, heads: int, kv: int, length: int, width: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, length, width), (batch, kv, length, width), (batch, kv, length, width))
    return tuple(torch.randn(s, generator=g).requires_grad_() for s in shapes)


@pytest.mark.parametrize("name", CASES)
def test_as_masked_attention(name: str) -> None:
    batch, heads, kv, length, width, causal, block, window, sink, top_k = CASES[name]
    q, k, v = operands(batch, heads, kv, length, width)
    index = torch.ops.dsc.block_select(q.detach(), k.detach(), causal, block, window, sink, top_k)
    mask = block_mask(index, length, causal, block)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    raw = [x.detach() for x in (q, k, v)]
    scale = width**-0.5
    out, sums = torch.ops.dsc.block_attention(*raw, index, causal, block, scale)
    found = torch.ops.dsc.block_attention_backward(grad, *raw, out, sums, index, causal, block, scale)
    assert (out - want).abs().max() <= 1e-5
    assert max(float((a - b).abs().max()) for a, b in zip(found, wanted)) <= 1e-5
    torch.library.opcheck(
        torch.ops.dsc.block_attention, (*raw, index, causal, block, scale), test_utils="test_faketensor"
    )


@pytest.mark.parametrize("name", CASES)
def test_the_blocks_are_those_that_were_asked_for(name: str) -> None:
    """Against a choice made one block of queries after the other."""
    batch, heads, kv, length, width, causal, block, window, sink, top_k = CASES[name]
    q, k, _ = (x.detach() for x in operands(batch, heads, kv, length, width))
    index = block_select(q, k, causal, block, window, sink, top_k)
    count = math.ceil(length / block)
    assert index.shape == (batch, heads, count, listed(causal, window, sink, top_k))
    for b, h, i in torch.cartesian_prod(torch.arange(batch), torch.arange(heads), torch.arange(count)).tolist():
        row = index[b, h, i].tolist()
        chosen = [j for j in row if j >= 0]
        assert len(set(chosen)) == len(chosen)
        assert row[0] == i
        near = {j for j in range(count) if abs(i - j) < window and (not causal or j <= i)}
        fixed = near | {j for j in range(min(sink, count)) if not causal or j <= i}
        rest = [j for j in range(count) if j not in fixed and (not causal or j < i)]
        mean = q[b, h, i * block : (i + 1) * block].mean(0)
        own = k[b, h * kv // heads]
        score = {j: float(mean @ own[j * block : (j + 1) * block].mean(0)) for j in rest}
        best = sorted(rest, key=lambda j: -score[j])[:top_k]
        assert set(chosen) == fixed | set(best)


def test_causal_attention_never_looks_ahead() -> None:
    q, k, v = (x.detach() for x in operands(1, 1, 1, 80, 8))
    index = block_select(q, k, True, 16, 1, 1, 2)
    before, _ = torch.ops.dsc.block_attention(q, k, v, index, True, 16, 1.0)
    k[:, :, 41:] += 3
    v[:, :, 41:] -= 5
    after, _ = torch.ops.dsc.block_attention(q, k, v, index, True, 16, 1.0)
    assert torch.equal(before[:, :, :41], after[:, :, :41])
    assert not torch.equal(before[:, :, 41:], after[:, :, 41:])
