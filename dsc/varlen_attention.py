"""Attention over sequences of any length that lie one after the other, as one operator.

On CUDA it is Triton's (``dsc.codegen.templates.varlen_attention``).  On a CPU it is products and a softmax in fp32 for
each sequence, the reference for it.  Importing this module registers the operators.

Shapes: query [T, H, D]; key, value [S, H', D], H a multiple of H'; cu_seq_q, cu_seq_k int32 [N + 1], where the sequences
start, and where the last one ends, on both sides; out as query; logsumexp float32 [H, T].  A query i of a sequence of
``rows`` queries and ``columns`` keys sees the keys from ``i + gap - left`` to ``i + gap + right``, where -1 is no bound,
and ``gap`` is ``columns - rows`` if ``from_end`` (the last query and the last key are the same token), else 0.  One that
sees nothing gives 0, and infinity for a sum.  What lies before the first and after the last sequence is not written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, int left, int right,"
    " bool from_end, float scale) -> (Tensor out, Tensor logsumexp)"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "varlen_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor cu_seq_q, Tensor cu_seq_k, int left, int right, bool from_end, float scale) -> (Tensor, Tensor, Tensor)"
)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, left: int, right: int, from_end: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``softmax(scale q k^T) v`` of each sequence, and the logarithm of each row's sum."""
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    for i, j in _sequences(q_ends, k_ends):
        scores = _scores(query[i], key[j], left, right, from_end, scale)
        found = torch.logsumexp(scores, -1)
        found = found.masked_fill(found == float("-inf"), float("inf"))
        weights = torch.exp(scores - found[..., None])
        out[i] = (weights @ _by_head(value[j], query)).transpose(0, 1).to(out.dtype)
        sums[:, i] = found
    return out, sums


def varlen_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, q_ends: Tensor, k_ends: Tensor,
    left: int, right: int, from_end: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    dq, dk, dv = (torch.empty_like(x) for x in (query, key, value))
    for i, j in _sequences(q_ends, k_ends):
        q, k, v = query[i], key[j], value[j]
        weights = torch.exp(_scores(q, k, left, right, from_end, scale) - sums[:, i, None])
        given, made = (_by_head(x[i], query) for x in (grad, out))
        slope = weights * (given @ _by_head(v, query).mT - (given * made).sum(-1, keepdim=True)) * scale
        dq[i] = (slope @ _by_head(k, query)).transpose(0, 1).to(dq.dtype)
        dk[j] = _own_heads(slope.mT @ _by_head(q, query), k)
        dv[j] = _own_heads(weights.mT @ given, v)
    return dq, dk, dv


def _sequences(q_ends: Tensor, k_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    """The rows of each sequence on both sides."""
    rows, columns = q_ends.tolist(), k_ends.tolist()
    for a, b, c, d in zip(rows, rows[1:], columns, columns[1:]):
        yield slice(a, b), slice(c, d)


def _scores(q: Tensor, k: Tensor, left: int, right: int, from_end: bool, scale: float) -> Tensor:
    """[H, rows, columns] fp32, -inf where a key is not seen."""
    scores = _by_head(q, q) @ _by_head(k, q).mT * scale
    gap = len(k) - len(q) if from_end else 0
    ahead = torch.arange(len(k)) - torch.arange(len(q))[:, None] - gap
    if right >= 0:
        scores = scores.masked_fill(ahead > right, float("-inf"))
    return scores.masked_fill(ahead < -left, float("-inf")) if left >= 0 else scores


def _by_head(x: Tensor, query: Tensor) -> Tensor:
    """[rows, H', D] -> [H, rows, D] fp32, heads repeated for those that share them."""
    times = query.shape[1] // x.shape[1]
    return (x if times == 1 else x.repeat_interleave(times, 1)).transpose(0, 1).float()


def _own_heads(grad: Tensor, x: Tensor) -> Tensor:
    """[H, rows, D] -> [rows, H', D]: the sums over the heads of queries that share one of ``x``."""
    times = grad.shape[0] // x.shape[1]
    return grad.reshape(x.shape[1], times, *grad.shape[1:]).sum(1).transpose(0, 1).to(x.dtype)


LIBRARY.impl("varlen_attention", varlen_attention, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("varlen_attention_backward", varlen_attention_backward, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::varlen_attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.register_fake("dsc::varlen_attention_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
