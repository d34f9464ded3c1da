"""Formats of matrix products, their plans and their calibration."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError, nearest


@dataclass(eq=False, repr=False)
class PrecisionError(DscError):
    """Any of the mistakes of this file: what the user asked for cannot be had."""


@dataclass(eq=False, repr=False)
class UnknownFormat(PrecisionError):
    """A name that is no format."""

    name: object
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a format of matrix products; {nearest(str(self.name), self.known)}"


@dataclass(eq=False, repr=False)
class BadPrecision(PrecisionError):
    """A value of the option ``precision`` that has the wrong form."""

    value: object
    expected: str

    def __str__(self) -> str:
        return f"Option 'precision' cannot be {self.value!r}; give {self.expected}."


@dataclass(eq=False, repr=False)
class NoSuchLayer(PrecisionError):
    """A pattern that matches no matrix product of the graph."""

    pattern: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.layers[:8])) + (", ..." if len(self.layers) > 8 else "")
        return f"The precision pattern {self.pattern!r} matches no layer with a matrix product; there are {shown}."


@dataclass(eq=False, repr=False)
class NotOnTarget(PrecisionError):
    """A format that the target's hardware has not got."""

    format: str
    target: str
    instead: str

    def __str__(self) -> str:
        return f"{self.target} cannot compute in {self.format}; use {self.instead}."


@dataclass(eq=False, repr=False)
class BadCalibration(PrecisionError):
    """A batch on which the errors of formats cannot be measured."""

    reason: str
    what_to_do: str

    def __str__(self) -> str:
        return f"Precision cannot be calibrated: {self.reason}; {self.what_to_do}."


@dataclass(eq=False, repr=False)
class ErrorBudgetTooSmall(PrecisionError):
    """A budget that no choice of the target's formats keeps."""

    budget: float
    least: float

    def __str__(self) -> str:
        return (
            f"An error budget of {self.budget:g} cannot be met: the most exact formats of the candidates err by "
            f"{self.least:.3g}; give more than that, or leave precision out."
        )


@dataclass(eq=False, repr=False)
class BadPrecisionPlan(PrecisionError):
    """A plan that cannot be read, or that is for another model."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"The precision plan in {self.where} cannot be used: {self.reason}; delete it to calibrate anew."


@dataclass(eq=False, repr=False)
class BadControl(PrecisionError):
    """Something that the controller of formats cannot do."""

    reason: str
    what_to_do: str

    def __str__(self) -> str:
        return f"The precision controller refuses: {self.reason}; {self.what_to_do}."
