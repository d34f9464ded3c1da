"""The CUDA kernels of dsc's sparse operators: packing, products by packed weights, attention over chosen blocks.

Importing this module registers them; a kernel is compiled at its first launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dsc import block_attention, packed
from dsc.codegen.templates import block_attention as attention
from dsc.codegen.templates import block_attention_run as runs
from dsc.codegen.templates import pack24 as packing
from dsc.codegen.templates import sparse_mm as product
from dsc.codegen.triton_run import LANGUAGE, load_source

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


@lru_cache
def kernel(source: str, name: str) -> Any:
    """What Triton calls a JITFunction."""
    return load_source(source)[name]


def pack24(weight: Tensor, transposable: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dsc::pack24`` on CUDA: one launch.  N is a multiple of 32, K of 64."""
    n, k = weight.shape
    out = [torch.empty(n // 16, k // 32, 32, 8, dtype=dtype, device=weight.device)]
    out.append(torch.empty(n // 16, k // 32, 8, 2, dtype=torch.int32, device=weight.device))
    if transposable:
        out.append(torch.empty(k // 16, n // 32, 32, 8, dtype=dtype, device=weight.device))
        out.append(torch.empty(k // 16, n // 32, 8, 2, dtype=torch.int32, device=weight.device))
    words = [t.view(torch.int32) for t in out]
    programs = n // packing.ROWS * (k // packing.COLUMNS)
    with LANGUAGE:
        kernel(packing.source(transposable), "pack24")[(programs,)](
            weight.contiguous(), *words, n, k, TYPES[dtype], packing.ROWS, packing.COLUMNS, num_warps=packing.WARPS
        )
    if not transposable:
        out += [weight.new_empty(0, dtype=dtype), weight.new_empty(0, dtype=torch.int32)]
    return out[0], out[1], out[2], out[3]


def sparse_mm24(x: Tensor, values: Tensor, meta: Tensor, weight: Tensor, keep: Tensor, turned: bool) -> Tensor:
    """``dsc::sparse_mm24`` on CUDA; N is a multiple of 128, K of 128."""
    if int(keep) >= 4:
        return packed.dense_mm(x, weight, turned)
    tile = product.SMALL if x.shape[0] <= product.FEW else product.LARGE
    rows, k = x.shape
    n = values.shape[0] * packed.ROWS
    padding = -rows % tile.rows
    whole = torch.nn.functional.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    y = x.new_empty(len(whole), n)
    grid = (n // tile.columns, len(whole) // tile.rows)
    with LANGUAGE:
        product.sparse_mm[grid](
            values.view(torch.int32), meta, whole.view(torch.int32), y, k, k // 2, n,
            **product.constants(tile, KINDS[x.dtype]), num_warps=tile.warps,
        )  # fmt: skip
    return y[:rows]


def launch(name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object]) -> None:
    """One of the kernels of ``block_attention``."""
    with LANGUAGE:
        found = kernel(Path(attention.__file__).read_text(), name)
        found[(programs,)](*arguments, **constants, num_warps=runs.WARPS, num_stages=runs.STAGES)


def attend(
    query: Tensor, key: Tensor, value: Tensor, index: Tensor, causal: bool, block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``dsc::block_attention`` on CUDA."""
    return runs.forward(launch, query, key, value, index, causal, block, scale)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, index: Tensor,
    causal: bool, block: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``dsc::block_attention_backward`` on CUDA."""
    return runs.backward(launch, grad, query, key, value, out, sums, index, causal, block, scale)


OPERATORS: Sequence[tuple[torch.library.Library, str, Callable[..., Any]]] = (
    (packed.LIBRARY, "pack24", pack24),
    (packed.LIBRARY, "sparse_mm24", sparse_mm24),
    (block_attention.LIBRARY, "block_attention", attend),
    (block_attention.LIBRARY, "block_attention_backward", attend_backward),
)
for _library, _name, _run in OPERATORS:
    _library.impl(_name, _run, "CUDA")  # type: ignore[no-untyped-call]
