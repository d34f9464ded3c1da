"""The CUDA kernels of ``dsc::varlen_attention``.  Importing this module registers them."""

from __future__ import annotations

import inspect

from torch import Tensor

from dsc import varlen_attention
from dsc.codegen.templates import flash_attention_backward as dense_kernels
from dsc.codegen.templates import varlen_attention as kernels
from dsc.codegen.templates import varlen_run
from dsc.codegen.templates.flash_ops import launcher, tf32, tiles


def source(name: str) -> str:
    """The text of the file with a kernel."""
    return inspect.getsource(dense_kernels if name == "products" else kernels)


launch = launcher(source)


def attend(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, k_ends: Tensor, left: int, right: int, from_end: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``dsc::varlen_attention`` on CUDA."""
    settings = (left, right, from_end, scale, tf32(query))
    return varlen_run.forward(launch, tiles(query), query, key, value, q_ends, k_ends, *settings)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, q_ends: Tensor, k_ends: Tensor,
    left: int, right: int, from_end: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``dsc::varlen_attention_backward`` on CUDA."""
    settings = (q_ends, k_ends, left, right, from_end, scale, tf32(query))
    return varlen_run.backward(launch, tiles(query), grad, query, key, value, out, sums, *settings)


for _name, _run in (("varlen_attention", attend), ("varlen_attention_backward", attend_backward)):
    varlen_attention.LIBRARY.impl(_name, _run, "CUDA")  # type: ignore[no-untyped-call]
