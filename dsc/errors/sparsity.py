"""Sparse weights and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError


@dataclass(eq=False, repr=False)
class StaleMasks(DscError):
    """Masks that are not made anew at every step: a warning."""

    every: int

    def __str__(self) -> str:
        return (
            f"Masks are made anew every {self.every} steps: on a small language model that cost 0.02 (2 steps) to 0.09 "
            "nats (10 steps) more than doing it at every step, which reads the weights once; leave 'refresh' out."
        )


@dataclass(eq=False, repr=False)
class NothingSparse(DscError):
    """Sparsity was asked for, and a graph with linear layers has none that can have it: a warning."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.reasons[:3]) + ("; ..." if len(self.reasons) > 3 else "")
        return (
            f"No layer of this graph is sparse ({shown}); choose others by options={{'sparsity': {{'layers': ...}}}}."
        )


@dataclass(eq=False, repr=False)
class NoSparsity(DscError):
    """A state that holds no masks, where masks are needed."""

    def __str__(self) -> str:
        return (
            "This state has no masks; compile with options={'sparsity': '2:4', 'state': state}, and run a step before."
        )


@dataclass(eq=False, repr=False)
class StrangeMask(DscError):
    """A mask of the state that fits no parameter of the model."""

    layer: str
    problem: str

    def __str__(self) -> str:
        return (
            f"The mask of layer {self.layer!r} does not fit the model: {self.problem}; give the state that trained it."
        )


@dataclass(eq=False, repr=False)
class CannotPrune(DscError):
    """Channels or heads that cannot be cut out of a model."""

    layer: str
    problem: str

    def __str__(self) -> str:
        return f"{self.layer!r} cannot be pruned: {self.problem}."
