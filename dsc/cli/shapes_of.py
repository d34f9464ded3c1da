"""Train steps of models by name and batch, traced on shapes: as large as one likes, on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsc import cost, liveness
from dsc.compiler import copied
from dsc.debug import shapes
from dsc.errors import UnknownModel
from dsc.models import gpt, llama, zoo
from dsc.passes.canonicalize import Canonicalize
from dsc.passes.fuse import Fuse
from dsc.passes.memory_plan import Search
from dsc.passes.memory_problem import extract
from dsc.passes.memory_program import Program
from dsc.target import Target
from dsc.tiers import Tier
from dsc.torch_shim import activation_budget, min_cut_rematerialization_partition

LARGE: Mapping[str, zoo.Entry] = {
    e.name: e
    for e in (
        zoo.gpt_entry("gpt2-xl", "48 layers of 1600, 1024 tokens", gpt.Config(50257, 1024, 48, 25, 1600, 0.1), 8),
        zoo.llama_entry(
            "llama-3-1b",
            "16 layers of 2048, 8 heads of keys, 2048 tokens",
            llama.Config(128256, 2048, 16, 32, 8, 2048, 8192),
            1,
        ),
        zoo.llama_entry(
            "llama-3-8b",
            "32 layers of 4096, 8 heads of keys, 8192 tokens",
            llama.Config(128256, 8192, 32, 32, 8, 4096, 14336),
            1,
        ),
    )
}
"""Models of real sizes, which are traced on shapes alone."""
TRIES = 6
"""Batches that are traced to find the largest one."""


def entry(name: str) -> zoo.Entry:
    """A model of the zoo, or a large one.

    Raises:
        UnknownModel: neither.
    """
    known = {**zoo.ZOO, **LARGE}
    if name.lower() not in known:
        raise UnknownModel(name, tuple(known))
    return known[name.lower()]


def traced(model: zoo.Entry, batch: int, dtype: torch.dtype | None, target: Target) -> shapes.Joint:
    """The joint graph of a train step with ``batch`` samples, as the planner gets it."""
    joint = shapes.joint(model.make, lambda: model.inputs(batch), dtype, cuda=target.kind == "cuda")
    Canonicalize().run(joint.gm, target)
    return joint


def search(joint: shapes.Joint, target: Target, tier: Tier | None = None, format: str | None = None) -> Search:
    return Search(joint.gm, extract(joint.gm, target), target, tier=tier, format=format)


def torch_point(joint: shapes.Joint, share: float, target: Target) -> tuple[int, float]:
    """Peak and modelled seconds of torch's own plan for ``activation_memory_budget=share``, with dsc's fusion."""
    with activation_budget(share):
        forward, backward = min_cut_rematerialization_partition(
            copied(joint.gm),
            (),
            num_fwd_outputs=joint.results,
            static_lifetime_input_indices=list(range(joint.parameters)),
        )
    saved = liveness.saved_places(forward, backward)
    for gm in (forward, backward):
        for p in (Canonicalize(), Fuse()):
            p.run(gm, target)
    seconds = sum(cost.graph_cost(gm, target).seconds for gm in (forward, backward))
    return liveness.profile_step(forward, backward, saved).peak, seconds


@dataclass(frozen=True)
class Largest:
    """The largest batch whose step fits, by a plan that was made."""

    batch: int
    search: Search
    program: Program


def largest_batch(make: Callable[[int], Search], limit: int) -> Largest | None:
    """The largest batch that fits into ``limit`` bytes; None if not even one sample does.

    Peaks grow by about the same with each sample: two batches tell how far to go, and what is found is planned.
    """
    known: dict[int, tuple[Search, int]] = {}

    def least(batch: int) -> int:
        if batch not in known:
            found = make(batch)
            known[batch] = found, found.least().peak
        return known[batch][1]

    if least(1) > limit:
        return None
    low, high = 1, 0  # fits; does not
    guess = 2
    for _ in range(TRIES):
        if least(guess) <= limit:
            low = guess
        else:
            high = guess
        other = high or 1
        each = (known[max(low, other)][1] - known[min(low, other)][1]) / max(abs(other - low), 1)
        step = int((limit - known[low][1]) / each) if each > 0 else low
        guess = low + max(step, 1)
        if high:
            guess = min(guess, high - 1)
        if guess <= low:
            break
    found = known[low][0]
    program = found.within(limit)
    return Largest(low, found, program if program is not None else found.least())
