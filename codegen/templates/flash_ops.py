"""The CUDA kernels of ``dsc::flash_attention``.  Importing this module registers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsc import flash_attention
from dsc.codegen.templates import flash_attention as forward_kernel
from dsc.codegen.templates import flash_attention_backward as backward_kernels
from dsc.codegen.templates import flash_attention_run as runs
from dsc.codegen.templates.sparse_ops import kernel
from dsc.codegen.triton_run import LANGUAGE


def launcher(source: Callable[[str], str]) -> runs.Run:
    """How to run a kernel, found by its name in the text of a file, on the current stream of its tensors' device."""

    def launch(
        name: str, programs: int, arguments: Sequence[object], constants: Mapping[str, object], tile: runs.Tile
    ) -> None:
        first = arguments[0]
        assert isinstance(first, Tensor)
        grid = (programs,)
        with LANGUAGE, torch.cuda.device(first.device):
            kernel(source(name), name)[grid](*arguments, **constants, num_warps=tile.warps, num_stages=tile.stages)

    return launch


def source(name: str) -> str:
    """The text of the file with a kernel."""
    return inspect.getsource(forward_kernel if name == "forward" else backward_kernels)


launch = launcher(source)


def tf32(query: Tensor) -> bool:
    """Whether eager would multiply these operands in tf32."""
    return query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32


def tiles(query: Tensor) -> runs.Choose:
    """Those of the GPU that has the operands."""
    major, _ = torch.cuda.get_device_capability(query.device)
    return runs.tiles(90 if major >= 9 else 80)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keep: Tensor | None, grow: float, causal: bool,
    scale: float, safe: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``dsc::flash_attention`` on CUDA."""
    choose = tiles(query)
    return runs.forward(launch, choose, query, key, value, mask, keep, grow, causal, scale, safe, tf32(query))


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None,
    keep: Tensor | None, grow: float, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``dsc::flash_attention_backward`` on CUDA."""
    choose = tiles(query)
    return runs.backward(
        launch, choose, grad, query, key, value, out, sums, mask, keep, grow, causal, scale, tf32(query)
    )


for _name, _run in (("flash_attention", attend), ("flash_attention_backward", attend_backward)):
    flash_attention.LIBRARY.impl(_name, _run, "CUDA")  # type: ignore[no-untyped-call]
