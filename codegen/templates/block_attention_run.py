"""The launches of ``block_attention``'s kernels, whoever runs them: a GPU, or Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dsc.block_attention import spread

WARPS = 4
STAGES = 2


class Run(Protocol):
    """Launches one kernel by name: how many programs, its arguments, its constants."""

    def __call__(
        self, name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object]
    ) -> None: ...


@dataclass(frozen=True)
class Form:
    """What all launches of one call have in common."""

    heads: int
    shared: int
    length: int
    count: int
    scale: float
    constants: Mapping[str, object]

    @property
    def sizes(self) -> tuple[object, ...]:
        return self.heads, self.shared, self.length, self.count, self.scale


def form(query: Tensor, key: Tensor, causal: bool, block: int, scale: float) -> Form:
    _, heads, length, width = query.shape
    fixed = {
        "CAUSAL": causal, "BLOCK": block, "D": max(16, 1 << (width - 1).bit_length()), "WIDTH": width,
        "PRECISION": "ieee",
    }  # fmt: skip
    return Form(heads, heads // key.shape[1], length, -(-length // block), scale, fixed)


def dense(x: Tensor) -> Tensor:
    """With elements of a row next to each other, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for t in tensors for s in t.stride()[:3])


def forward(
    run: Run, query: Tensor, key: Tensor, value: Tensor, index: Tensor, causal: bool, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As ``dsc::block_attention``."""
    q, k, v = dense(query), dense(key), dense(value)
    f = form(q, k, causal, block, scale)
    out, sums = spread(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    arguments = (q, k, v, index, out, sums, *f.sizes, *strides(q, k, v, out))
    run("forward", q.shape[0] * f.heads * f.count, arguments, {"LISTED": index.shape[-1], **f.constants})
    return out, sums


def backward(
    run: Run, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, index: Tensor,
    causal: bool, block: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``dsc::block_attention_backward``."""
    g, q, k, v = dense(grad), dense(query), dense(key), dense(value)
    f = form(q, k, causal, block, scale)
    inner = (g.float() * out.float()).sum(-1).contiguous()
    dq, dk, dv = spread(q), spread(k), spread(v)
    start, reader = readers(index, f)
    arguments = (g, q, k, v, index, sums, inner, dq, *f.sizes, *strides(g, q, k, v, dq))
    run("backward_queries", q.shape[0] * f.heads * f.count, arguments, {"LISTED": index.shape[-1], **f.constants})
    arguments = (g, q, k, v, start, reader, sums, inner, dk, dv, *f.sizes, *strides(g, q, k, v, dk, dv))
    run("backward_keys", k.shape[0] * k.shape[1] * f.count, arguments, f.constants)
    return dq, dk, dv


def readers(index: Tensor, f: Form) -> tuple[Tensor, Tensor]:
    """The transposed lists: blocks of queries by the block of keys that they list, int32, without waiting for a GPU."""
    batch, heads, count, listed = index.shape
    kv_heads = heads // f.shared
    head = torch.arange(batch * heads, device=index.device)
    owner = head // heads * kv_heads + head % heads // f.shared
    blocks = owner[:, None] * count + index.view(batch * heads, -1)
    none = batch * kv_heads * count
    blocks = torch.where(index.view(batch * heads, -1) < 0, none, blocks).flatten()
    order = torch.argsort(blocks, stable=True)
    start = torch.searchsorted(blocks[order], torch.arange(none + 1, device=index.device))
    return start.to(torch.int32), (order // listed).to(torch.int32)
