"""Dense attention as one operator, with what ATen's fused kernels do not take together: shared heads, masks, dropout.

On CUDA it is Triton's (``dsc.codegen.templates.flash_attention``), which holds no scores in memory.  On a CPU it is
products and a softmax in fp32, the reference for it.  Importing this module registers the operators.

Shapes: query [B, H, T, D]; key, value [B, H', S, D], H a multiple of H'; mask [B, H, T, S] in any strides, bool (True is
seen) or added to the scores; keep [B, H, T, S] bool, contiguous: the weights that dropout keeps, times ``grow``.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "flash_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? keep, float grow,"
    " bool is_causal, float scale, bool safe) -> (Tensor out, Tensor logsumexp)"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor? attn_mask, Tensor? keep, float grow, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)"
)
WIDEST = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 64}
"""Of a head; its keys are the dtypes of operands."""
APART = 256
"""Heads so wide, padded to a power of two, that the gradients of keys and of values have a launch each: both sums would
not fit into registers."""


def spread(like: Tensor) -> Tensor:
    """[B, H, T, D], in memory as [B, T, H, D]."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None, grow: float, causal: bool,
    scale: float, safe: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``(keep * grow * softmax(scale q k^T + mask)) v``, and the logarithm of each row's sum, float32 [B, H, T].

    A row that sees nothing is NaN; with ``safe`` it is 0, and its sum's logarithm stands as infinity.
    """
    scores = _scores(query, key, mask, causal, scale)
    sums = torch.logsumexp(scores, -1)
    if safe:
        sums = sums.masked_fill(sums == float("-inf"), float("inf"))
    weights = torch.exp(scores - sums[..., None])
    if keep is not None:
        weights = weights * keep * grow
    out = weights @ _all_heads(value, query)
    return spread(query).copy_(out), sums.float()


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None,
    keep: Tensor | None, grow: float, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    weights = torch.exp(_scores(query, key, mask, causal, scale) - sums[..., None])
    given, noise = grad.float(), 1.0 if keep is None else keep * grow
    worth = given @ _all_heads(value, query).mT * noise
    slope = weights * (worth - (given * out.float()).sum(-1, keepdim=True)) * scale
    found = (
        slope @ _all_heads(key, query),
        _own_heads(slope.mT @ query.float(), key),
        _own_heads((weights * noise).mT @ given, value),
    )
    return tuple(spread(x).copy_(g) for x, g in zip((query, key, value), found))  # type: ignore[return-value]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """[B, H, T, S] fp32, -inf where a key is not seen."""
    scores = query.float() @ _all_heads(key, query).mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _all_heads(x: Tensor, query: Tensor) -> Tensor:
    times = query.shape[1] // x.shape[1]
    return (x if times == 1 else x.repeat_interleave(times, 1)).float()


def _own_heads(grad: Tensor, x: Tensor) -> Tensor:
    """The sums over the heads of queries that share one of ``x``."""
    return grad.reshape(x.shape[0], x.shape[1], -1, *x.shape[2:]).sum(2)


LIBRARY.impl("flash_attention", flash_attention, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("flash_attention_backward", flash_attention_backward, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::flash_attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return spread(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("dsc::flash_attention_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return spread(query), spread(key), spread(value)
