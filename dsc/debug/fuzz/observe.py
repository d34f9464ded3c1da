"""What one call of a program shows: results, gradients, inputs afterwards, who shares memory, the random state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsc.debug.fuzz.program import Program, World


@dataclass(frozen=True)
class Seen:
    results: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    """As the call left them."""
    wants_grad: tuple[bool, ...]
    shared: tuple[tuple[int, int, int], ...]
    """(i, j, bytes from i to j) of results, then inputs, that share a storage."""

    @property
    def values(self) -> list[torch.Tensor | None]:
        return [*self.results, *self.gradients, *self.inputs]

    def name(self, i: int) -> str:
        """Of ``values[i]``."""
        for word, count in (("result", len(self.results)), ("gradient", len(self.gradients))):
            if i < count:
                return f"{word} {i}"
            i -= count
        return f"input {i} afterwards"


def seen(results: Sequence[torch.Tensor], grads: list[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> Seen:
    return Seen(
        [r.detach() for r in results],
        grads,
        [t.detach() for t in inputs],
        tuple(r.requires_grad for r in results),
        sharing([*results, *inputs]),
    )


def sharing(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
    at = [(t.untyped_storage().data_ptr(), t.data_ptr()) if t.numel() else (0, 0) for t in tensors]
    return tuple(
        (i, j, at[j][1] - at[i][1]) for j in range(len(at)) for i in range(j) if at[i][0] and at[i][0] == at[j][0]
    )


def gradients(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of the inputs that want one, from fixed gradients of the results; empty where no result has one."""
    leaves = [t for t in inputs if wants_gradient(t)]
    roots = [r for r in results if r.requires_grad]
    if not leaves or not roots:
        return []
    seeds = [torch.linspace(-1, 1, r.numel(), dtype=torch.float64).reshape(r.shape).to(r.dtype) for r in roots]
    return list(torch.autograd.grad(roots, leaves, seeds, allow_unused=True))


def wants_gradient(t: torch.Tensor) -> bool:
    """Not what the program itself made depend on others, by writing to it: AOTAutograd ties other results to its old value."""
    return t.requires_grad and t.is_leaf


def random_state() -> torch.Tensor:
    """Of the generator of the device on which programs run."""
    return torch.cuda.get_rng_state() if torch.get_default_device().type == "cuda" else torch.get_rng_state()


def set_random_state(state: torch.Tensor) -> None:
    if torch.get_default_device().type == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def observe(p: Program, fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Seen:
    """What ``fn``, a form of the program, shows."""
    results = list(fn(*inputs))
    return seen(results, gradients(p.used(results), inputs), inputs)


def runs(p: Program) -> bool:
    """Whether eager runs it, forward and backward, in every world and in float64."""
    try:
        for world in p.worlds:
            observe(p, p.function(), p.tensors(world))
            observe(p, p.function(exact=True), p.tensors(world, exact=True))
    except Exception:
        return False
    return True


def in_eager(p: Program, world: World) -> Seen:
    return observe(p, p.function(), p.tensors(world))


def in_float64(p: Program, world: World) -> Seen:
    return observe(p, p.function(exact=True), p.tensors(world, exact=True))
