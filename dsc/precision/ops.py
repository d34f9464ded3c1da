"""The operators that graphs call for 8-bit and tf32 products, with what a CPU computes for them.

    dsc::quantise(x [R, C], dtype, grain) -> (q [R, C], scale)
    dsc::quantise_both(x, dtype, grain) -> (q, scale, q of the transpose [C, R], its scale)
    dsc::quantise_by(x, amax, dtype, grain), dsc::quantise_both_by(x, amax, amax of the transpose, dtype, grain) -> the same, with
        the maxima that the scales need already found
    dsc::quantise_of(inputs, producer, dtype, grain) -> the same four, of what a pointwise operator makes of the inputs
    dsc::mm8(a [M, K], scale_a, b [N, K], scale_b, dtype) -> [M, N]
    dsc::mm_tf32(a [M, K], b [K, N]) -> fp32 [M, N], or with one more dimension in front of each

``dsc.precision.emulate`` says what they mean.  ``dsc.codegen.templates`` brings the kernels for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsc.precision import emulate

NAMESPACE = "dsc"

torch.library.define("dsc::quantise", "(Tensor x, str dtype, str grain) -> (Tensor, Tensor)")
torch.library.define("dsc::quantise_both", "(Tensor x, str dtype, str grain) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "dsc::quantise_of",
    "(Tensor[] inputs, str producer, str dtype, str grain) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("dsc::quantise_by", "(Tensor x, Tensor amax, str dtype, str grain) -> (Tensor, Tensor)")
torch.library.define(
    "dsc::quantise_both_by",
    "(Tensor x, Tensor amax, Tensor amax_t, str dtype, str grain) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("dsc::mm8", "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, ScalarType dtype) -> Tensor")
torch.library.define("dsc::mm_tf32", "(Tensor a, Tensor b) -> Tensor")

PRODUCERS: Mapping[str, Callable[..., Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "silu_mul": lambda x, y: torch.nn.functional.silu(x) * y,
    "add": torch.add,
}
"""Operators of one or two matrices that the kernel which rounds can compute on the way."""


def quantise_of(inputs: list[Tensor], producer: str, dtype: str, grain: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return emulate.quantise_both(PRODUCERS[producer](*inputs), dtype, grain)


def quantise_by(x: Tensor, amax: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor]:
    return emulate.quantise(x, dtype, grain, amax)


def quantise_both_by(
    x: Tensor, amax: Tensor, amax_t: Tensor, dtype: str, grain: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return emulate.quantise_both(x, dtype, grain, amax, amax_t)


torch.library.impl("dsc::quantise", "CPU", emulate.quantise)
torch.library.impl("dsc::quantise_by", "CPU", quantise_by)
torch.library.impl("dsc::quantise_both_by", "CPU", quantise_both_by)
torch.library.impl("dsc::quantise_of", "CPU", quantise_of)
torch.library.impl("dsc::quantise_both", "CPU", emulate.quantise_both)
torch.library.impl("dsc::mm8", "CPU", emulate.mm8)


def mm_tf32(a: Tensor, b: Tensor) -> Tensor:
    return emulate.round_tf32(a) @ emulate.round_tf32(b)


def fake_quantise(x: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    scale = x.new_empty(emulate.scale_shape(rows, columns, grain), dtype=torch.float32)
    return x.new_empty((rows, columns), dtype=emulate.STORED[dtype]), scale


def fake_quantise_both(x: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    stored = emulate.STORED[dtype]
    return (
        x.new_empty((rows, columns), dtype=stored),
        x.new_empty(emulate.scale_shape(rows, columns, grain), dtype=torch.float32),
        x.new_empty((columns, rows), dtype=stored),
        x.new_empty(emulate.scale_shape(columns, rows, grain), dtype=torch.float32),
    )


def fake_quantise_of(
    inputs: list[Tensor], producer: str, dtype: str, grain: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_quantise_both(inputs[0], dtype, grain)


def fake_quantise_by(x: Tensor, amax: Tensor, dtype: str, grain: str) -> tuple[Tensor, Tensor]:
    return fake_quantise(x, dtype, grain)


def fake_quantise_both_by(
    x: Tensor, amax: Tensor, amax_t: Tensor, dtype: str, grain: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_quantise_both(x, dtype, grain)


def fake_mm8(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def fake_mm_tf32(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


torch.library.impl("dsc::mm_tf32", "CPU", mm_tf32)
torch.library.register_fake("dsc::quantise", fake_quantise)
torch.library.register_fake("dsc::quantise_both", fake_quantise_both)
torch.library.register_fake("dsc::quantise_of", fake_quantise_of)
torch.library.register_fake("dsc::quantise_by", fake_quantise_by)
torch.library.register_fake("dsc::quantise_both_by", fake_quantise_both_by)
torch.library.register_fake("dsc::mm8", fake_mm8)
torch.library.register_fake("dsc::mm_tf32", fake_mm_tf32)

quantise = torch.ops.dsc.quantise.default
quantise_both = torch.ops.dsc.quantise_both.default
quantise_by_maxima = torch.ops.dsc.quantise_by.default
quantise_both_by_maxima = torch.ops.dsc.quantise_both_by.default
produced = torch.ops.dsc.quantise_of.default
mm8 = torch.ops.dsc.mm8.default
tf32 = torch.ops.dsc.mm_tf32.default
