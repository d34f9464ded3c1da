"""How far the gradient of a compiled train step is from eager's: both are run here, from the same random state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dsc.debug.capture import run
from dsc.debug.source import Model


def measure(model: Model, options: Mapping[str, Any]) -> float:
    """The norm of the difference of all gradients, as a share of the norm of eager's; 0 if all are 0.

    Raises:
        ModelFailed, DscError: the model cannot be run, or not be compiled so.
    """
    want = run(model, model.module, True).gradients
    torch.compiler.reset()
    got = run(model, torch.compile(model.module, backend="dsc", options=dict(options)), True).gradients
    torch.compiler.reset()
    pairs = [(w.double(), g.double()) for w, g in zip(want, got, strict=True) if w is not None and g is not None]
    off = sum(float((g - w).square().sum()) for w, g in pairs)
    whole = sum(float(w.square().sum()) for w, _ in pairs)
    return float((off / whole) ** 0.5) if whole else 0.0
