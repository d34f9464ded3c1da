"""The launches of ``flash_attention``'s kernels, whoever runs them: a GPU, or Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dsc.codegen.templates.block_attention_run import dense, strides
from dsc.flash_attention import APART, spread


@dataclass(frozen=True, slots=True)
class Tile:
    """How many queries and keys a program holds at once, and how Triton runs it."""

    queries: int
    keys: int
    warps: int
    stages: int


FEATURES = 4096
"""Elements a program of ``products`` reads of each operand."""


class Run(Protocol):
    """Launches one kernel by name: how many programs, its arguments, its constants, its tile."""

    def __call__(
        self, name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object], tile: Tile
    ) -> None: ...


class Choose(Protocol):
    """The tile of a kernel, by its name, the padded width of a head and the bytes of an element."""

    def __call__(self, name: str, width: int, itemsize: int) -> Tile: ...


Table = Mapping[str, Mapping[int, Tile]]
"""Kernel -> the widest padded head -> tile."""

# Tiles that compile for the GPU without spills, its matrix units in all products; none was measured.
AMPERE: Table = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "backward_keys": {64: Tile(32, 128, 8, 2), 128: Tile(32, 64, 8, 2), 256: Tile(32, 64, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 1)},
}
HOPPER: Table = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "backward_keys": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 64, 8, 2)},
    "backward_queries": {64: Tile(128, 64, 8, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
}
FULL: Table = {
    "forward": {64: Tile(32, 32, 4, 1)},
    "backward_keys": {64: Tile(16, 32, 4, 1)},
    "backward_queries": {64: Tile(32, 16, 4, 1)},
}
"""For fp32: wider heads keep too much in registers."""


def padded(width: int) -> int:
    """The tile's side for heads of a width: a power of two from 16 on."""
    return max(16, 1 << (width - 1).bit_length())


def tiles(capability: int) -> Choose:
    """From the tables, for 80 or 90."""

    def choose(name: str, width: int, itemsize: int) -> Tile:
        if name == "products":
            return Tile(FEATURES // width, 1, 4, 1)
        table = FULL if itemsize == 4 else HOPPER if capability >= 90 else AMPERE
        return next(tile for widest, tile in table[name].items() if width <= widest)

    return choose


def masked(name: str, tile: Tile) -> Tile:
    """For a mask or dropout, which take registers: half as many of those that a program walks."""
    if name == "products":
        return tile
    if name == "backward_keys":
        return replace(tile, queries=max(16, tile.queries // 2))
    return replace(tile, keys=max(16, tile.keys // 2))


@dataclass(frozen=True)
class Form:
    """What all launches of one call have in common."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    keep: Tensor | None
    grow: float
    causal: bool
    scale: float
    tf32: bool
    """Whether products of fp32 may round their operands to tf32."""

    @property
    def sizes(self) -> tuple[object, ...]:
        heads, rows, columns = self.query.shape[1], self.query.shape[2], self.key.shape[2]
        return heads, heads // self.key.shape[1], rows, columns, self.scale, self.grow

    @property
    def masks(self) -> tuple[Tensor, Tensor]:
        """Any pointer where there is none: it is not read."""
        mask, keep = self.mask, self.keep
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        return self.query if mask is None else mask, self.query if keep is None else keep.view(torch.uint8)

    @property
    def steps(self) -> tuple[int, ...]:
        """Strides of both masks."""
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return (*mask, *((0, 0, 0) if self.keep is None else self.keep.stride()[:3]))

    def constants(self, tile: Tile) -> dict[str, object]:
        width = self.query.shape[-1]
        kind = "none" if self.mask is None else "bool" if self.mask.dtype == torch.bool else "add"
        return {
            "CAUSAL": self.causal, "MASK": kind, "DROP": self.keep is not None, "M": tile.queries, "N": tile.keys,
            "D": padded(width), "WIDTH": width,
            "RAGGED": bool(self.query.shape[2] % tile.queries or self.key.shape[2] % tile.keys),
            "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip

    def tile(self, choose: Choose, name: str) -> Tile:
        tile = choose(name, padded(self.query.shape[-1]), self.query.element_size())
        return tile if self.mask is None and self.keep is None else masked(name, tile)

    def programs(self, rows: Tensor, each: int) -> int:
        """Tiles of ``each`` rows of [B, H, T, D]."""
        return rows.shape[0] * rows.shape[1] * -(-rows.shape[2] // each)


def near(x: Tensor) -> Tensor:
    """[B, H, T, D] with the heads of a batch less than 2**31 elements apart, as the forward kernel reads keys."""
    return x if x.shape[1] * x.stride(1) < 1 << 31 else spread(x).copy_(x)


def forward(
    run: Run, choose: Choose, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None,
    grow: float, causal: bool, scale: float, safe: bool, tf32: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``dsc::flash_attention``."""
    q, k, v = dense(query), near(dense(key)), near(dense(value))
    f = Form(q, k, mask, keep, grow, causal, scale, tf32)
    out, sums = spread(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    tile = f.tile(choose, "forward")
    arguments = (q, k, v, *f.masks, out, sums, *f.sizes, *strides(q, k, v, out), *f.steps)
    if programs := f.programs(q, tile.queries):
        run("forward", programs, arguments, {**f.constants(tile), "SAFE": safe}, tile)
    return out, sums


def backward(
    run: Run, choose: Choose, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
    mask: Tensor | None, keep: Tensor | None, grow: float, causal: bool, scale: float, tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``dsc::flash_attention_backward``."""
    g, q, k, v, o = dense(grad), dense(query), dense(key), dense(value), dense(out)
    f = Form(q, k, mask, keep, grow, causal, scale, tf32)
    inner = torch.empty_like(sums)
    dq, dk, dv = spread(q), spread(k), spread(v)
    tile = f.tile(choose, "products")
    shape = {"M": tile.queries, "D": padded(q.shape[-1]), "WIDTH": q.shape[-1]}
    if programs := f.programs(q, tile.queries):
        run("products", programs, (g, o, inner, f.sizes[0], q.shape[2], *strides(g, o)), shape, tile)
    tile = f.tile(choose, "backward_keys")
    given = (g, q, k, v, *f.masks, sums, inner)
    arguments = (*given, dk, dv, *f.sizes, *strides(g, q, k, v, dk, dv), *f.steps)
    if programs := f.programs(k, tile.keys):
        for keys, values in ((True, False), (False, True)) if padded(q.shape[-1]) >= APART else ((True, True),):
            run("backward_keys", programs, arguments, {**f.constants(tile), "KEYS": keys, "VALUES": values}, tile)
    tile = f.tile(choose, "backward_queries")
    arguments = (*given, dq, *f.sizes, *strides(g, q, k, v, dq), *f.steps)
    if programs := f.programs(q, tile.queries):
        run("backward_queries", programs, arguments, f.constants(tile), tile)
    return dq, dk, dv
