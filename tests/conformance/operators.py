"""PyTorch's own operator database (``torch.testing``) through torch.compile: a program an operator.

For every dtype and sample: eager's values, dtypes and shapes, inputs as eager leaves them, eager's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from conformance.outcome import Outcome, Settings

RANDOM = frozenset(
    """
    bernoulli multinomial normal rand randn randint rand_like randn_like randint_like uniform exponential geometric log_normal
    cauchy nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout
    nn.functional.feature_alpha_dropout nn.functional.rrelu nn.functional.fractional_max_pool2d
    nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward empty empty_like new_empty
    new_empty_strided empty_strided empty_permuted nn.functional.scaled_dot_product_attention svd_lowrank pca_lowrank
    """.split()
)
"""Random, or with memory that nobody wrote: there is nothing to compare."""

OTHERS = ("sparse.", "torch.ops", "_refs")
DTYPES = ("float32", "int64", "bool", "bfloat16", "float16")
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (1.3e-4, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-4, 1e-5),
}

KINDS = {
    "UnaryUfuncInfo": ("unary", "Elementwise functions of one tensor"),
    "BinaryUfuncInfo": ("binary", "Elementwise functions of two tensors, broadcasting"),
    "ReductionOpInfo": ("reduction", "Reductions over dimensions"),
    "ShapeFuncInfo": ("shape", "Views, joins and rearrangements"),
    "SpectralFuncInfo": ("fft", "Fourier transforms"),
}
PREFIXES = {
    "nn.functional.": ("nn", "Layers, losses, pooling, interpolation"),
    "linalg.": ("linalg", "Linear algebra"),
    "fft.": ("fft", "Fourier transforms"),
    "special.": ("special", "Special functions"),
    "masked.": ("masked", "Reductions under a mask"),
    "signal.": ("signal", "Window functions"),
}
REST = ("other", "Indexing, scattering, sorting, creation and the rest")


def database() -> list[Any]:
    """The operators that can be compared.  Raises ModuleNotFoundError without ``expecttest``."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [o for o in op_db if o.name not in RANDOM and not o.name.startswith(OTHERS)]


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def kind_of(op: Any) -> str:
    for prefix, (kind, _) in PREFIXES.items():
        if op.name.startswith(prefix):
            return kind
    return KINDS.get(type(op).__name__, REST)[0]


def describe(kind: str) -> str:
    return dict([*KINDS.values(), *PREFIXES.values(), REST])[kind]


def compare(op: Any, settings: Settings) -> Outcome:
    """All dtypes and samples of one operator.  Samples that eager refuses are skipped."""
    passed, skipped = 0, 0
    failures: list[str] = []
    for name in settings.dtypes or DTYPES:
        dtype = getattr(torch, name)
        if dtype not in op.supported_dtypes("cpu"):
            continue
        grad = dtype.is_floating_point and op.supports_autograd
        try:
            samples = [s for s, _ in zip(op.sample_inputs("cpu", dtype, requires_grad=grad), range(settings.samples))]
        except Exception:
            skipped += 1
            continue
        for i, sample in enumerate(samples):
            try:
                want = run(op.op, sample, grad)
            except Exception:
                skipped += 1
                continue
            try:
                check(op.op, sample, grad, want, settings)
                passed += 1
            except Exception as e:
                words = " ".join(str(e).split())
                failures.append(f"{name}, sample {i}: {type(e).__name__}: {words[:240]}")
    return Outcome(passed, tuple(failures), skipped)


Run = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Results, inputs afterwards, gradients."""


def check(fn: Callable[..., Any], sample: Any, grad: bool, want: Run, settings: Settings) -> None:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return fn(x, *args, **kwargs)

    torch._dynamo.reset()
    got = run(torch.compile(call, backend=settings.backend, dynamic=settings.dynamic), sample, grad)
    for what, a, b in zip(("result", "input afterwards", "gradient"), want, got):
        same(a, b, what)


def run(fn: Callable[..., Any], sample: Any, grad: bool) -> Run:
    def copied(x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        y = x.detach().clone(memory_format=torch.preserve_format)
        return y.requires_grad_(grad and x.requires_grad)

    inputs = pytree.tree_map(copied, (sample.input, sample.args, dict(sample.kwargs)))
    out = tensors(fn(inputs[0], *inputs[1], **inputs[2]))
    gradients: list[Tensor] = []
    outs, leaves = ([t for t in ts if t.requires_grad] for ts in (out, tensors(inputs)))
    if grad and outs and leaves:
        sums = [o.abs().sum() if o.dtype.is_complex else o.sum() for o in outs]
        gradients = [g for g in torch.autograd.grad(sums, leaves, allow_unused=True) if g is not None]
    return [t.detach() for t in out], tensors(inputs), gradients


def same(want: list[Tensor], got: list[Tensor], what: str) -> None:
    assert len(want) == len(got), f"{what}: {len(got)} tensors, eager has {len(want)}"
    for i, (a, b) in enumerate(zip(want, got)):
        assert a.dtype == b.dtype, f"{what} {i}: {b.dtype}, eager {a.dtype}"
        assert a.shape == b.shape, f"{what} {i}: {tuple(b.shape)}, eager {tuple(a.shape)}"
        if a.layout != torch.strided or b.layout != torch.strided:
            continue
        rtol, atol = TOLERANCES.get(a.dtype, (0.0, 0.0))
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=i: f"{what} {i}: {m}")


def tensors(x: object) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
