"""Changes to sparse training while it runs: they are writes to the state, and nothing is compiled again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dsc.errors import BadOption
from dsc.passes.solve.sparsity import allocate, choose_decay, dense_layers, kept_of_groups
from dsc.runtime.state import State
from dsc.sparsity.export import weight_of
from dsc.sparsity.telemetry import PREFIX, form, layers, read

DECAYS = (0.0, 6e-5, 2e-4, 6e-4)


def set_decay(state: State, decay: float, loss_scale: float = 1.0, accumulation: int = 1) -> None:
    """Pull pruned weights to zero by ``decay`` times themselves, added to their gradients.

    The gradients must be those of the loss: with a loss scale, or with a loss that is divided among ``accumulation``
    backward passes, the term is scaled likewise.  It is equal on all ranks: a mean of gradients keeps it.
    """
    state[f"{PREFIX}decay"].fill_(decay * loss_scale / accumulation)


def densify(state: State, step: int | None = None) -> None:
    """All layers are dense from ``step`` on, counted in training steps so far; None: from the next one."""
    now = int(state[f"{PREFIX}step"])
    state[f"{PREFIX}dense_from"].fill_(now if step is None else step)


def balance(state: State, density: float, entropy: float = 0.9) -> tuple[float, ...]:
    """Spread ``density`` over the layers by what their weights are worth, and return each one's own density.

    A layer is worth the running mean of the squares of gradient times weight (the Fisher prediction of the loss without
    it), which compiling with ``density`` or ``balance_entropy`` measures.  Layers of 2:4 stay that or become dense, the
    most valuable first; others keep as many of every M as their share allows.

    Raises:
        NoSparsity: the state has no sparse layers.
        BadOption: what layers are worth is not measured.
    """
    names = layers(state)
    missing = [n for n in names if f"{PREFIX}{n}.cost" not in state]
    if missing:
        raise BadOption("sparsity.density", None, "a number when compiling, so that what layers are worth is measured")
    worth = [float(state[f"{PREFIX}{n}.cost"]) for n in names]
    work = [float(state[f"{PREFIX}{n}.work"]) for n in names]
    forms = [form(state, n) for n in names]
    m = forms[0]["m"]
    found = allocate(worth, work, density, entropy, floor=1 / m)
    if (forms[0]["n"], m) == (2, 4):
        kept = [m if d else 2 for d in dense_layers(found.shares, work, density)]
    else:
        kept = kept_of_groups(found.densities, work, density, m)
    for name, keep in zip(names, kept):
        state[f"{PREFIX}{name}.keep"].fill_(keep)
    return tuple(k / m for k in kept)


def probe_decay(
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    steps: int = 30,
    decays: Sequence[float] = DECAYS,
) -> float:
    """Try decays for a few steps each, and set the smallest one whose flip rate falls after its early peak.

    ``step`` does one training step of ``model`` with ``optimizer``.  Model, optimizer and state are as before
    afterwards, but for the decay; what ``step`` draws from elsewhere (data, random numbers) moves on.
    """
    step()  # compiles, and makes what is to be kept
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), state.state_dict()))
    curves: dict[float, list[float]] = {}
    for decay in decays:
        set_decay(state, decay)
        curves[decay] = []
        for _ in range(steps):
            step()
            curves[decay].append(read(state).flip_rate)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(copy.deepcopy(kept[1]))
        state.load_state_dict(kept[2])
    chosen = choose_decay(curves)
    set_decay(state, chosen)
    return chosen


def estimate_hessian(state: State, model: nn.Module, loss: Callable[[], Tensor], samples: int = 4) -> None:
    """Fill the scales of ``importance="hessian"`` with diagonals of the loss's Hessian: Hutchinson's estimate.

    The mean of v * (H v) over random signs v (Bekas et al. 2007).  ``loss`` computes the loss of the model in eager
    mode: compiled graphs have no second derivatives.

    Raises:
        NoSparsity: the state has no sparse layers.
    """
    names = layers(state)
    weights = [weight_of(model, n) for n in names]
    sums = [torch.zeros_like(w) for w in weights]
    for _ in range(samples):
        gradients = torch.autograd.grad(loss(), weights, create_graph=True)
        signs = [torch.randint_like(w, 2) * 2 - 1 for w in weights]
        products = torch.autograd.grad(sum((g * s).sum() for g, s in zip(gradients, signs)), weights)  # type: ignore[arg-type]
        for total, sign, product in zip(sums, signs, products):
            total += sign * product / samples
    for name, total in zip(names, sums):
        state[f"{PREFIX}{name}.scale"].copy_(total)
