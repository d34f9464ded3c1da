"""The launches of ``varlen_attention``'s kernels, whoever runs them: a GPU, or Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsc.codegen.templates.block_attention_run import dense
from dsc.codegen.templates.flash_attention_run import Choose, Run, Tile, padded
from dsc.flash_attention import APART

SHORT = 64
"""Rows of a sequence, on average, up to which tiles of 64 rows waste less than those of 128."""


@dataclass(frozen=True)
class Form:
    """What all launches of one call have in common."""

    query: Tensor
    key: Tensor
    q_ends: Tensor
    k_ends: Tensor
    left: int
    right: int
    from_end: bool
    scale: float
    tf32: bool
    """Whether products of fp32 may round their operands to tf32."""

    @property
    def count(self) -> int:
        """Sequences."""
        return self.q_ends.shape[0] - 1

    def tiles(self, rows: int, each: int) -> int:
        """Of the sequences of one head; those that are not full among them."""
        return rows // each + self.count

    def sizes(self, tiles: int) -> tuple[object, ...]:
        """The ends and the numbers that the kernels want."""
        total, heads = self.query.shape[:2]
        right, span = max(self.right, 0), self.left + max(self.right, 0)
        steps = max(self.count - 1, 1).bit_length()
        shared = heads // self.key.shape[1]
        return self.q_ends, self.k_ends, heads, shared, total, self.count, steps, tiles, right, span, self.scale

    def constants(self, tile: Tile) -> dict[str, object]:
        width = self.query.shape[-1]
        return {
            "UPPER": self.right >= 0, "LOWER": self.left >= 0, "FROM_END": self.from_end, "M": tile.queries,
            "N": tile.keys, "D": padded(width), "WIDTH": width, "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip

    def tile(self, choose: Choose, name: str) -> Tile:
        rows = self.key if name == "backward_keys" else self.query
        tile = choose(name, padded(self.query.shape[-1]), self.query.element_size())
        return short(name, tile) if rows.shape[0] <= SHORT * self.count else tile


def short(name: str, tile: Tile) -> Tile:
    """For short sequences: half as many rows and warps, where there are 128 rows, and smaller steps through the others."""
    side, other = ("keys", "queries") if name == "backward_keys" else ("queries", "keys")
    if getattr(tile, side) < 2 * SHORT:
        return tile
    return replace(tile, **{side: SHORT, other: SHORT // 2}, warps=tile.warps // 2, stages=2)


def lines(*tensors: Tensor) -> tuple[int, ...]:
    """Strides of heads and of rows."""
    return tuple(s for t in tensors for s in (t.stride(1), t.stride(0)))


def forward(
    run: Run, choose: Choose, query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, left: int,
    right: int, from_end: bool, scale: float, tf32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``dsc::varlen_attention``."""
    q, k, v = dense(query), dense(key), dense(value)
    f = Form(q, k, q_ends, k_ends, left, right, from_end, scale, tf32)
    out, sums = torch.empty_like(query), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    tile = f.tile(choose, "forward")
    if q.numel():
        tiles = f.tiles(q.shape[0], tile.queries)
        arguments = (q, k, v, out, sums, *f.sizes(tiles), *lines(q, k, v, out))
        run("forward", q.shape[1] * tiles, arguments, f.constants(tile), tile)
    return out, sums


def backward(
    run: Run, choose: Choose, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    q_ends: Tensor, k_ends: Tensor, left: int, right: int, from_end: bool, scale: float, tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``dsc::varlen_attention_backward``."""
    g, q, k, v, o = dense(grad), dense(query), dense(key), dense(value), dense(out)
    f = Form(q, k, q_ends, k_ends, left, right, from_end, scale, tf32)
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    inner = torch.empty_like(sums)
    total, heads, width = q.shape
    tile = f.tile(choose, "products")
    shape = {"M": tile.queries, "D": padded(width), "WIDTH": width}
    if q.numel():  # all sequences as one
        steps = (0, *lines(g), 0, *lines(o))
        run("products", heads * -(-total // tile.queries), (g, o, inner, heads, total, *steps), shape, tile)
    tile = f.tile(choose, "backward_keys")
    if k.numel():
        tiles = f.tiles(k.shape[0], tile.keys)
        arguments = (g, q, k, v, sums, inner, dk, dv, *f.sizes(tiles), *lines(g, q, k, v, dk, dv))
        for keys, values in ((True, False), (False, True)) if padded(width) >= APART else ((True, True),):
            constants = {**f.constants(tile), "KEYS": keys, "VALUES": values}
            run("backward_keys", k.shape[1] * tiles, arguments, constants, tile)
    tile = f.tile(choose, "backward_queries")
    if q.numel():
        tiles = f.tiles(total, tile.queries)
        arguments = (g, q, k, v, sums, inner, dq, *f.sizes(tiles), *lines(g, q, k, v, dq))
        run("backward_queries", heads * tiles, arguments, f.constants(tile), tile)
    return dq, dk, dv
