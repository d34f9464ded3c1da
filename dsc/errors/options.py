"""Mistakes in what the user asks for."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError, nearest


@dataclass(eq=False, repr=False)
class UnknownOption(DscError):
    """A key that names no option of dsc, or of a pass."""

    name: str
    known: tuple[str, ...]
    owner: str = "dsc"

    def __str__(self) -> str:
        return f"{self.name!r} is not an option of {self.owner}; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class BadOption(DscError):
    """An option whose value has the wrong type or is not one of its values."""

    name: str
    value: object
    expected: str

    def __str__(self) -> str:
        return f"Option {self.name!r} cannot be {self.value!r}; give {self.expected}."


@dataclass(eq=False, repr=False)
class UnknownTarget(DscError):
    """A machine that is not in the table of targets."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a target that dsc knows; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class UnknownPass(DscError):
    """A pipeline string that names a pass that does not exist."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a pass; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class BadPlugin(DscError):
    """A pass of another package that cannot be used."""

    name: str
    package: str
    problem: str

    def __str__(self) -> str:
        problem = self.problem.rstrip(".")
        return f"Pass {self.name!r} of the package {self.package!r} cannot be used: {problem}; update or remove that package."


@dataclass(eq=False, repr=False)
class BadPassOrder(DscError):
    """Two passes of a pipeline that cannot stand in this order."""

    pass_name: str
    problem: str
    move: str

    def __str__(self) -> str:
        return f"Pass {self.pass_name!r} {self.problem}; {self.move}."
