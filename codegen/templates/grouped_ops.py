"""The CUDA kernel of ``dsc::grouped_mm``, and its launches, whoever runs them.  Importing this module registers it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dsc import gemm_tiles, grouped
from dsc.codegen.templates import grouped_mm as kernels
from dsc.codegen.templates.sparse_ops import kernel
from dsc.codegen.triton_run import LANGUAGE


class Run(Protocol):
    """Launches a kernel by name: how many programs, its arguments, its constants, its tile."""

    def __call__(
        self,
        name: str,
        programs: int,
        arguments: Sequence[object],
        constants: Mapping[str, int | bool],
        tile: gemm_tiles.Tile,
    ) -> None: ...


def source() -> str:
    return inspect.getsource(kernels)


def launch(
    name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, int | bool], tile: gemm_tiles.Tile
) -> None:
    first = arguments[0]
    assert isinstance(first, Tensor)
    with LANGUAGE, torch.cuda.device(first.device):
        kernel(source(), name)[(programs,)](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)


def rows_tile(rows: int, groups: int, n: int) -> gemm_tiles.Tile:
    """For groups of rows that are as long as the others."""
    return gemm_tiles.best(groups, max(rows // groups, 1), n, "bf16")


def multiply(run: Run, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """As ``dsc::grouped_mm``."""
    if a.dim() == 3:
        out = a.new_empty(a.shape[1], b.shape[1])
        _rows(run, b.t(), a.transpose(1, 2), out.t(), offs)
        return out
    if b.dim() == 3:
        out = a.new_empty(a.shape[0], b.shape[2])
        _rows(run, a, b, out, offs)
        return out
    (m, _), n, groups = a.shape, b.shape[1], offs.shape[0]
    out = a.new_empty(groups, m, n)
    tile = gemm_tiles.best(groups, m, n, "bf16")
    constants = {"M": tile.m, "N": tile.n, "K": tile.k, "WHOLE": m % tile.m == 0 and n % tile.n == 0}
    if out.numel():
        arguments = (a, b, out, offs, m, n, *a.stride(), *b.stride())
        run("grouped_sums", gemm_tiles.tiles(tile, groups, m, n), arguments, constants, tile)
    return out


def _rows(run: Run, a: Tensor, b: Tensor, out: Tensor, offs: Tensor) -> None:
    """Rows of ``a`` [S, K] in groups times ``b`` [E, K, N], into ``out`` [S, N]."""
    (s, k), (groups, _, n) = a.shape, b.shape
    if not (s and n and groups):
        return
    tile = rows_tile(s, groups, n)
    constants = {
        "M": tile.m, "N": tile.n, "K": tile.k, "E": max(16, 1 << (groups - 1).bit_length()),
        "WHOLE": k % tile.k == 0 and n % tile.n == 0,
    }  # fmt: skip
    most = -(-s // tile.m) + groups  # each group may end in a tile that is not full
    arguments = (a, b, out, offs, n, k, groups, *a.stride(), *b.stride(), *out.stride())
    run("grouped_rows", most * -(-n // tile.n), arguments, constants, tile)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """``dsc::grouped_mm`` on CUDA."""
    return multiply(launch, a, b, offs)


grouped.LIBRARY.impl("grouped_mm", grouped_mm, "CUDA")  # type: ignore[no-untyped-call]
