"""Attention over chosen blocks of keys: operators, their CPU kernels, and the masked attention that they equal.

One softmax over the union of a local window, the first blocks (sinks, Xiao et al. 2023) and the past blocks with the
largest products of mean query and mean key (Lu et al., "MoBA", 2025).  With a fixed number of blocks the work is linear
in the length.  The choice itself has no gradient.  Importing this module registers the operators.

Shapes: query [B, H, T, D]; key, value [B, H', T, D], H a multiple of H'; index [B, H, Q, L] int32, the L blocks of keys
of each of the Q blocks of queries, -1 for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LIBRARY = torch.library.Library("dsc", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define(  # type: ignore[no-untyped-call]
    "block_select(Tensor query, Tensor key, bool causal, int block, int window, int sink, int top_k) -> Tensor"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "block_attention(Tensor query, Tensor key, Tensor value, Tensor index, bool causal, int block, float scale)"
    " -> (Tensor out, Tensor logsumexp)"
)
LIBRARY.define(  # type: ignore[no-untyped-call]
    "block_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor index, bool causal, int block, float scale) -> (Tensor, Tensor, Tensor)"
)

CHUNK = 1 << 19
"""Elements of scores that are computed at once on a CPU: small enough to stay in its caches."""


def listed(causal: bool, window: int, sink: int, top_k: int) -> int:
    """L, with window and sink in blocks: a window of 1 is a query's own block."""
    return (window if causal else 2 * window - 1) + sink + top_k


def block_select(query: Tensor, key: Tensor, causal: bool, block: int, window: int, sink: int, top_k: int) -> Tensor:
    """The blocks that each block of queries attends to; no block twice.  ``window`` and ``sink`` are in blocks.

    1. Its own block first, the ``window - 1`` before it, and, unless ``causal``, as many after it.
    2. The first ``sink`` blocks.
    3. Of the other blocks (``causal``: of those in the past) the ``top_k`` with the largest products of means.
    """
    batch, heads, length, _ = query.shape
    count = -(-length // block)
    own = torch.arange(count, device=query.device)[:, None]
    near = torch.arange(window, device=query.device)
    local = own - near if causal else own + torch.cat([-near, near[1:]])
    first = torch.arange(sink, device=query.device).expand(count, sink)
    gone = (local < 0) | (local >= count)
    local = local.masked_fill(gone, -1)
    first = first.masked_fill((first[:, :, None] == local[:, None, :]).any(-1) | (first >= count), -1)
    if causal:
        first = first.masked_fill(first > own, -1)
    fixed = torch.cat([local, first], 1)
    other = torch.arange(count, device=query.device).expand(count, count)
    taken = (other[:, :, None] == fixed[:, None, :]).any(-1)
    if causal:
        taken = taken | (other > own)
    means = _means(query, block) @ _heads(_means(key, block), heads).transpose(-1, -2)
    best = means.masked_fill(taken, float("-inf")).topk(min(top_k, count), dim=-1)
    chosen = best.indices.masked_fill(best.values == float("-inf"), -1)
    padding = chosen.new_full((batch, heads, count, top_k - chosen.shape[-1]), -1)
    return torch.cat([fixed.expand(batch, heads, *fixed.shape), chosen, padding], -1).to(torch.int32)


def _means(x: Tensor, block: int) -> Tensor:
    """[B, H, T, D] -> [B, H, blocks, D] float32."""
    padded = _padded(x, block).float().contiguous()
    sizes = torch.full((padded.shape[2] // block, 1), float(block), device=x.device)
    if rest := x.shape[2] % block:
        sizes[-1] = rest
    blocks = padded.view(*padded.shape[:2], -1, block, padded.shape[-1])
    return blocks.sum(3) / sizes


def _padded(x: Tensor, block: int) -> Tensor:
    rest = -x.shape[2] % block
    return torch.nn.functional.pad(x, (0, 0, 0, rest)) if rest else x


def _heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def block_mask(index: Tensor, length: int, causal: bool, block: int) -> Tensor:
    """[B, H, T, T] bool: what the blocks of ``index`` allow, for masked attention as reference."""
    count = index.shape[2]
    hit = torch.zeros(*index.shape[:3], count + 1, dtype=torch.bool, device=index.device)
    hit.scatter_(3, index.long() % (count + 1), True)  # -1 falls on the last one
    allowed = hit[..., :count].repeat_interleave(block, 2).repeat_interleave(block, 3)[:, :, :length, :length]
    return allowed.tril() if causal else allowed


@dataclass(frozen=True)
class _Blocks:
    """Operands cut into blocks of float32, one list for all batches and heads."""

    query: Tensor
    """[B H Q, block, D]."""
    key: Tensor
    """[B H' Q, block, D]."""
    value: Tensor
    index: Tensor
    """[B H Q, L]: rows of ``key``; what is not there is 0."""
    absent: Tensor
    """[B H Q, L] bool."""
    last: Tensor
    """[B H Q, L] bool: the block of keys that the length cuts off."""
    ahead: Tensor
    """[block, block]: -inf above the diagonal, else 0."""
    causal: bool
    rest: int
    scale: float

    def chunks(self) -> Iterator[slice]:
        """Parts of the queries' blocks."""
        size = max(1, CHUNK // (self.index.shape[1] * self.query.shape[1] ** 2))
        for start in range(0, len(self.query), size):
            yield slice(start, start + size)

    def gathered(self, blocks: Tensor, at: slice) -> Tensor:
        """[C, L block, D]: the keys or values of a part."""
        index = self.index[at]
        return blocks.index_select(0, index.flatten()).view(len(index), -1, blocks.shape[-1])

    def scores(self, at: slice, keys: Tensor) -> Tensor:
        """[C, block, L block], -inf where a key is not to be seen."""
        query = self.query[at]
        size = query.shape[1]
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(self.scale)
        tiles = scores.view(len(query), size, -1, size)
        if self.causal:  # a query's own block comes first, no later one comes at all
            tiles[:, :, 0].add_(self.ahead)
        if bool((absent := self.absent[at]).any()):
            tiles.masked_fill_(absent[:, None, :, None], float("-inf"))
        if self.rest and not self.causal:
            beyond = torch.arange(size, device=query.device) >= self.rest
            tiles.masked_fill_((self.last[at][:, :, None] & beyond)[:, None], float("-inf"))
        return scores


def _cut(query: Tensor, key: Tensor, value: Tensor, index: Tensor, causal: bool, block: int, scale: float) -> _Blocks:
    batch, heads, length, width = query.shape
    kv_heads, count = key.shape[1], index.shape[2]
    cut = [_padded(x, block).float().reshape(-1, block, width) for x in (query, key, value)]
    owner = torch.arange(batch * heads, device=query.device)
    start = owner // heads * kv_heads + owner % heads // (heads // kv_heads)
    flat = index.reshape(batch * heads, count, -1).long()
    absent = flat < 0
    rows = (flat.clamp_min(0) + start[:, None, None] * count).reshape(batch * heads * count, -1)
    return _Blocks(
        cut[0], cut[1], cut[2], rows, absent.view(rows.shape), (flat == count - 1).view(rows.shape),
        query.new_full((block, block), float("-inf"), dtype=torch.float32).triu(1), causal, length % block, scale,
    )  # fmt: skip


def _joined(blocks: Tensor, like: Tensor) -> Tensor:
    """[B H Q, block, D] -> [B, H, T, D] as ``like``, in memory as [B, T, H, D]."""
    batch, heads, length, width = like.shape
    whole = blocks.view(batch, heads, -1, width)[:, :, :length]
    return spread(like).copy_(whole)


def spread(like: Tensor) -> Tensor:
    """[B, H, T, D], in memory as [B, T, H, D]."""
    batch, heads, length, width = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, causal: bool, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``softmax(scale q k^T) v`` over the listed blocks, and the logarithm of each row's sum, float32 [B, H, T]."""
    b = _cut(query, key, value, index, causal, block, scale)
    out = torch.empty_like(b.query)
    sums = b.query.new_empty(b.query.shape[:2])
    for at in b.chunks():
        scores = b.scores(at, b.gathered(b.key, at))
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        torch.bmm(weights, b.gathered(b.value, at), out=out[at])
        out[at].div_(total)
        sums[at] = (top + total.log()).squeeze(-1)
    batch, heads, length, _ = query.shape
    return _joined(out, query), sums.view(batch, heads, -1)[:, :, :length].contiguous()


def block_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, index: Tensor,
    causal: bool, block: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of ``block_attention``: weights are computed again from the sums of their rows."""
    b = _cut(query, key, value, index, causal, block, scale)
    given = _padded(grad, block).float().reshape(b.query.shape)
    sums = _padded(logsumexp[..., None], block).reshape(b.query.shape[:2])
    inner = (given * _padded(out, block).float().reshape(b.query.shape)).sum(-1)
    found = [torch.empty_like(b.query), torch.zeros_like(b.key), torch.zeros_like(b.value)]
    size, width = b.key.shape[1:]
    for at in b.chunks():
        keys, values, rows = b.gathered(b.key, at), b.gathered(b.value, at), b.index[at].flatten()
        weights = b.scores(at, keys).sub_(sums[at][..., None]).exp_()
        found[2].index_add_(0, rows, torch.bmm(weights.transpose(1, 2), given[at]).view(-1, size, width))
        slope = torch.bmm(given[at], values.transpose(1, 2)).sub_(inner[at][..., None]).mul_(weights).mul_(scale)
        torch.bmm(slope, keys, out=found[0][at])
        found[1].index_add_(0, rows, torch.bmm(slope.transpose(1, 2), b.query[at]).view(-1, size, width))
    return _joined(found[0], query), _joined(found[1], key), _joined(found[2], value)


LIBRARY.impl("block_select", block_select, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("block_select", block_select, "CUDA")  # type: ignore[no-untyped-call]
LIBRARY.impl("block_attention", block_attention, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("block_attention_backward", block_attention_backward, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dsc::block_select", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _select_fake(query: Tensor, key: Tensor, causal: bool, block: int, window: int, sink: int, top_k: int) -> Tensor:
    batch, heads, length, _ = query.shape
    shape = (batch, heads, (length + block - 1) // block, listed(causal, window, sink, top_k))
    return query.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("dsc::block_attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return spread(query), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("dsc::block_attention_backward", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _backward_fake(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    return spread(query), spread(key), spread(value)
