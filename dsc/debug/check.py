"""A model through the compiler beside eager and float64: results and gradients of one step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsc import errors
from dsc.debug.capture import Outcome, run
from dsc.debug.source import Model

NOISE = 8
"""Times eager's own error that a result may be off."""


@dataclass(frozen=True)
class Compared:
    """One result or gradient.  Errors are the largest over all elements, against float64 where that can be had."""

    name: str
    type: str
    ours: float
    eager: float
    allowed: float
    problem: str = ""
    """What is wrong apart from values."""

    @property
    def agrees(self) -> bool:
        return not self.problem and self.ours <= self.allowed


def check(model: Model, options: Mapping[str, Any], training: bool = True) -> list[Compared]:
    """One step on this machine, compiled and in eager, from the same weights and random numbers.

    Raises:
        ModelFailed: the model raises.
        DscError: the options are wrong.
    """
    want = run(model, model.module, training)
    torch.compiler.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", errors.DscWarning)  # what falls back to ATen proves nothing
            got = run(model, torch.compile(model.module, backend="dsc", options=dict(options)), training)
    finally:
        torch.compiler.reset()
    return compare(model, got, want, in_float64(model, training))


def in_float64(model: Model, training: bool) -> Outcome | None:
    """The same step with all floating-point numbers in 64 bits; None if the model does not run so."""
    try:
        module = copy.deepcopy(model.module).double()
        args = tuple(map(_double, model.args))
        return run(replace(model, module=module, args=args), module, training)
    except Exception:
        return None


def compare(model: Model, got: Outcome, want: Outcome, exact: Outcome | None) -> list[Compared]:
    """All results, then the gradients of parameters that have one."""
    named = [f"result {i}" for i in range(len(want.results))]
    named += [f"gradient of {name}" for name, _ in model.module.named_parameters()]
    sides = [[*o.results, *o.gradients] if o is not None else [None] * len(named) for o in (got, want, exact)]
    pairs = zip(named, *sides, strict=True)
    return [compared(n, g, w, e) for n, g, w, e in pairs if g is not None or w is not None]


def compared(name: str, got: torch.Tensor | None, want: torch.Tensor | None, exact: torch.Tensor | None) -> Compared:
    """Dtype, shape and values.  Integers are equal; floats as near to float64 as eager's, but for a little noise."""
    kind = f"{want.dtype}{tuple(want.shape)}".removeprefix("torch.") if want is not None else "None"
    if got is None or want is None or got.dtype != want.dtype or got.shape != want.shape:
        have = "None" if got is None else f"{got.dtype}{tuple(got.shape)}".removeprefix("torch.")
        return Compared(name, kind, 0.0, 0.0, 0.0, f"{have} instead of {kind}")
    if not want.is_floating_point():
        return Compared(name, kind, float(not torch.equal(got, want)), 0.0, 0.0)
    if not torch.equal(got.isfinite(), want.isfinite()):
        return Compared(name, kind, 0.0, 0.0, 0.0, "finite elsewhere than eager's")
    g, w = (t.double().nan_to_num(0, 0, 0) for t in (got, want))
    scale, eps = _largest(w), torch.finfo(want.dtype).eps
    noise = _largest(w - exact.double()) if exact is not None and exact.shape == want.shape else None
    if noise is None or noise > eps**0.5 * scale:  # no yardstick: other random numbers, or a chaotic model
        return Compared(name, kind, _largest(g - w), 0.0, eps**0.5 * scale)
    assert exact is not None
    return Compared(name, kind, _largest(g - exact.double()), noise, NOISE * noise + 32 * eps * scale)


def agree(every: Sequence[Compared]) -> bool:
    return all(c.agrees for c in every)


def _double(a: object) -> object:
    if not isinstance(a, torch.Tensor) or not a.is_floating_point():
        return a
    return a.detach().double().requires_grad_(a.requires_grad)


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
