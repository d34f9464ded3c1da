"""State that lives between steps."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError


@dataclass(eq=False, repr=False)
class BadState(DscError):
    """An entry of a state that does not fit what it is to be used for."""

    name: str
    reason: str
    what_to_do: str

    def __str__(self) -> str:
        return f"State entry {self.name!r} {self.reason}; {self.what_to_do}."
