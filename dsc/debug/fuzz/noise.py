"""How far roundings move the results of a program: it runs in float64, each value off by a rounding where it is read.

This is Monte Carlo arithmetic (Parker, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic",
1997) at the precision of each value's own dtype, forward and backward: two machines that round at other places, or add
in another order, cannot be told apart below what these runs differ by.

With ``inside``, operators that take several steps, such as the backward of a softmax, round at each of them too: what
cancels within one operator would otherwise look exact.  With ``own`` the program runs in its own dtypes rather than in
float64, and values are off by a rounding to a number of their dtype: only there do two of them become equal, and only
there is a sum that stands within a line rounded up or down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsc.debug.fuzz.inside import Stepwise
from dsc.debug.fuzz.observe import Seen, observe, set_random_state
from dsc.debug.fuzz.program import Program, World, execute
from dsc.debug.fuzz.rules import How

GRAIN = {torch.float64: 2.0**-47, torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative size of a rounding: half a unit in the last place of the 16-bit dtypes, whose operators round once; four
times that of float32, for elementary functions and sums in another order; more of float64, whose truth is no more exact
than what is compared with it."""

FLOOR = {torch.float64: 0.0, torch.float32: 1e-44, torch.bfloat16: 1e-40, torch.float16: 2.0**-24}
"""Distance between subnormal numbers."""


class Rounding(torch.autograd.Function):
    """``x`` off by up to a rounding, element by element, and its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grain: float, floor: float, gen: torch.Generator) -> torch.Tensor:
        ctx.noise = grain, floor, gen
        return disturbed(x, grain, floor, gen)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return disturbed(grads[0], *ctx.noise), None, None, None


class Again(Rounding):
    """``x`` as it is, and its gradient off by a rounding: the gradients of several uses are added up in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grain: float, floor: float, gen: torch.Generator) -> torch.Tensor:
        ctx.noise = grain, floor, gen
        return x.view_as(x)


def disturbed(x: torch.Tensor, grain: float, floor: float, gen: torch.Generator) -> torch.Tensor:
    a, b = (torch.rand(x.shape, generator=gen, dtype=torch.float64) * 2 - 1 for _ in range(2))
    return (x.double() * (1 + grain * a) + floor * b).to(x.dtype)


def samples(
    p: Program,
    world: World,
    state: torch.Tensor,
    count: int,
    seed: int,
    grain: Mapping[torch.dtype, float] = GRAIN,
    *,
    how: How = "exact",
) -> list[Seen]:
    """``count`` runs from the random ``state``, each with other roundings; in float64 unless in their ``own`` dtypes."""
    exact = how != "own"
    values = _all_values(p, world, state)
    dtypes = [v.dtype for v in values]
    gen = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def off(kind: type[Rounding]) -> Callable[[torch.Tensor, int], torch.Tensor]:
        def call(x: torch.Tensor, i: int) -> torch.Tensor:
            if not x.is_floating_point():
                return x
            return kind.apply(x, grain[dtypes[i]], FLOOR[dtypes[i]], gen)  # type: ignore[no-any-return,no-untyped-call]

        return call

    fn = execute(
        p.source(exact=exact, noisy=dict.fromkeys([*_fresh(p, values), p.size], "noise({0}, {1})")),
        noise=off(Rounding),
        again=off(Again),
    )["program"]
    single = any(d in (torch.float32, torch.bfloat16, torch.float16) for d in dtypes)  # these compute in 32 bits inside
    inner = grain[torch.float32 if single else torch.float64]
    out = []
    for _ in range(count):
        set_random_state(state)
        with Stepwise(inner, gen) if how == "inside" else contextlib.nullcontext():
            out.append(observe(p, fn, p.tensors(world, exact=exact)))
    return out


def _all_values(p: Program, world: World, state: torch.Tensor) -> list[torch.Tensor]:
    set_random_state(state)
    every = execute(p.source(results=range(p.size)))["program"]
    with torch.no_grad():
        return list(every(*(t.detach() for t in p.tensors(world))))


def _fresh(p: Program, values: list[torch.Tensor]) -> list[int]:
    """Lines whose result is memory of its own: to read through a copy would cut views and writes off their base."""

    def storage(i: int) -> int:
        return values[i].untyped_storage().data_ptr()

    lines = enumerate(p.lines, len(p.inputs))
    return [i for i, x in lines if not any(storage(i) == storage(o) for o in x.operands)]
