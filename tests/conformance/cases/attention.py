"""Attention by hand and by call: masks, rows masked everywhere, grouped heads, causal order, gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conformance.case import Case, randn

TOLERANCE = (1e-4, 1e-5)


def masked_softmax_attention() -> Case:
    """torch-spyre/torch-spyre#4526, pytorch/pytorch#195320: an additive mask, keys permuted, rows masked everywhere."""

    def fn(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, mask: Tensor) -> Any:
        b, t, _ = x.shape
        q = (x @ wq).view(b, t, 2, 4).transpose(1, 2)
        k = (x @ wk).view(b, t, 2, 4).permute(0, 2, 3, 1)
        v = (x @ wv).view(b, t, 2, 4).transpose(1, 2)
        s = torch.matmul(q, k) * 0.5
        return (s + mask).softmax(-1).matmul(v).transpose(1, 2).reshape(b, t, 8), s.softmax(-1).matmul(v)

    p = [randn(8, 8, seed=i, grad=True) for i in range(3)]
    x = randn(2, 6, 8, seed=4)
    m = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    full = m.clone()
    full[1, :, 2] = float("-inf")
    return Case(fn, [(x, *p, m), (x[:1].repeat(2, 1, 1), *p, full)], grad=True, tol=TOLERANCE)


def scaled_dot_product() -> Case:
    """The call with bool masks, additive masks, causal order, a scale, grouped heads, and no mask."""

    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Any:
        bias = torch.zeros(5, 5).masked_fill(~keep, -1e4)
        return (
            F.scaled_dot_product_attention(q, k[:, :4], v[:, :4], attn_mask=keep), F.scaled_dot_product_attention(q, q, q, attn_mask=bias),
            F.scaled_dot_product_attention(q, q, q, is_causal=True), F.scaled_dot_product_attention(q, q, q, scale=0.3),
            F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        )  # fmt: skip

    q, k, v = (randn(2, 4, 5, 8, seed=i, grad=True) for i in range(3))
    return Case(fn, [(q, k, v, torch.ones(5, 5).tril().bool())], grad=True, tol=TOLERANCE)


def relative_positions_and_sliding_window() -> Case:
    """A learned bias by distance, a window, a softcap and sinks: masks made of index arithmetic."""

    def fn(x: Tensor, table: Tensor) -> Any:
        t = x.shape[1]
        i = torch.arange(t)
        distance = (i[:, None] - i).clamp(-3, 3) + 3
        s = 20 * torch.tanh((x @ x.mT + table[distance]) / 20)
        s = s.masked_fill((i[:, None] < i) | (i[:, None] - i > 2), torch.finfo(x.dtype).min)
        return s.softmax(-1) @ x, torch.cat([s, s.new_zeros(1, t, 1).expand(2, t, 1)], -1).softmax(-1)[..., :-1] @ x

    return Case(fn, [(randn(2, 6, 4, grad=True), randn(7, seed=1, grad=True))], grad=True, tol=TOLERANCE)


def chunked_linear_attention() -> Case:
    """Linear attention in chunks with a carried state, cumulative decays and views of what is not contiguous."""

    def fn(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
        q, k, v = (t.transpose(1, 2).reshape(2, 2, 3, 4, 8) for t in (q, k, v))
        decay = F.logsigmoid(g).transpose(1, 2).reshape(2, 2, 3, 4).cumsum(-1)
        inside = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
        state = q.new_zeros(2, 2, 8, 8)
        outs = []
        for c in range(3):
            a = (q[:, :, c] @ k[:, :, c].mT) * inside[:, :, c]
            outs.append(a @ v[:, :, c] + (q[:, :, c] * decay[:, :, c, :, None].exp()) @ state)
            state = state * decay[:, :, c, -1, None, None].exp() + k[:, :, c].mT @ v[:, :, c]
        return torch.stack(outs, 2).reshape(2, 2, 12, 8).transpose(1, 2), state

    q, k, v = (randn(2, 12, 2, 8, seed=i, grad=True) for i in range(3))
    return Case(fn, [(q, k, v, randn(2, 12, 2, seed=3, grad=True))], grad=True, tol=(1e-3, 1e-4))


def cached_keys() -> Case:
    """Decoding with a cache of keys that is written in place, position by position."""

    def fn(x: Tensor, cache: Tensor, at: int) -> Any:
        cache[:, at] = x
        keys = cache[:, : at + 1]
        return (x[:, None] @ keys.mT).softmax(-1) @ keys, cache.sum(1)

    cache = torch.zeros(2, 6, 4)
    return Case(fn, [(randn(2, 4, seed=i), cache.clone(), i) for i in range(4)], tol=TOLERANCE)


CASES = (
    masked_softmax_attention,
    scaled_dot_product,
    relative_positions_and_sliding_window,
    chunked_linear_attention,
    cached_keys,
)
