"""A trained sparse model as plain weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsc.errors import StrangeMask
from dsc.nm import IMPORTANCES, nm_mask, nm_score
from dsc.runtime.state import State
from dsc.sparsity.telemetry import MASK, PREFIX, form, layers


def finalize(model: nn.Module, state: State) -> None:
    """Write zeros where the masks are, in place: afterwards ``model.state_dict()`` is plain, and N:M along rows.

    Masks are those that an evaluation of the model would use now; layers that are dense stay dense.  Weights in 2:4
    can be given to ``torch.sparse.to_sparse_semi_structured`` as they are.

    Raises:
        NoSparsity: the state has no sparse layers.
        StrangeMask: the model has no such layers, or other shapes.
    """
    for name in layers(state):
        weight = weight_of(model, name)
        mask = current_mask(state, name, weight)
        with torch.no_grad():
            weight.masked_fill_(~mask, 0)


def weight_of(model: nn.Module, layer: str) -> nn.Parameter:
    """The weight of a layer, in a model that may have been wrapped by ``torch.compile``."""
    plain = getattr(model, "_orig_mod", model)
    try:
        return plain.get_parameter(f"{layer}.weight" if layer != "model" else "weight")
    except AttributeError as why:
        raise StrangeMask(layer, "it has no such layer") from why


def current_mask(state: State, layer: str, weight: Tensor) -> Tensor:
    """[N, K] bool: the mask of ``weight`` as it is now."""
    kept, how = state[f"{PREFIX}{layer}{MASK}"], form(state, layer)
    if kept.shape != weight.shape:
        raise StrangeMask(layer, f"its weight is {list(weight.shape)}, the mask {list(kept.shape)}")
    if how["refresh"] > 1:
        return kept
    keep, since = state[f"{PREFIX}{layer}.keep"], int(state[f"{PREFIX}dense_from"])
    dense = 0 <= since <= int(state[f"{PREFIX}step"])
    score = nm_score(weight.detach(), state.get(f"{PREFIX}{layer}.scale"), IMPORTANCES[how["importance"]])
    many = torch.tensor(how["m"]) if dense else keep
    return nm_mask(score, many, how["m"], bool(how["transposable"]))
