"""Budgets and plans of memory."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError, size


@dataclass(eq=False, repr=False)
class InfeasibleBudget(DscError):
    """A memory budget below what any plan needs."""

    budget: int
    least: int
    reason: str

    def __str__(self) -> str:
        return (
            f"A memory budget of {size(self.budget)} cannot be met: {self.reason}; "
            f"give at least {self.least} bytes ({size(self.least)}) or a smaller batch."
        )


@dataclass(eq=False, repr=False)
class BadPlan(DscError):
    """A saved plan that cannot be read, or that is for another graph."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"The plan in {self.where} cannot be used: {self.reason}; delete it to plan anew."


@dataclass(eq=False, repr=False)
class OffloadFailed(DscError):
    """A saved value could not be moved away, or back."""

    what: str
    reason: str

    def __str__(self) -> str:
        return (
            f"Offloading failed for {self.what}: {self.reason}; "
            "free space there, name another folder, or leave offload out."
        )
