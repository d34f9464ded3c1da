"""Pipelines: clusters, stages, schedules, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.errors.base import DscError, nearest, size


@dataclass(eq=False, repr=False)
class BadCluster(DscError):
    """A text that describes no cluster."""

    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.text!r} is no cluster: {self.reason}."


@dataclass(eq=False, repr=False)
class ClusterTooSmall(DscError):
    """More ranks than cards."""

    cluster: str
    cards: int
    needed: int
    how: str

    def __str__(self) -> str:
        return (
            f"{self.cluster} has {self.cards} cards, and {self.how} needs {self.needed}; "
            f"give a larger cluster or smaller degrees."
        )


@dataclass(eq=False, repr=False)
class UnknownSchedule(DscError):
    """A schedule that does not exist."""

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name!r} is not a schedule; {nearest(self.name, self.known)}"


@dataclass(eq=False, repr=False)
class TooManyStages(DscError):
    """More stages than places where the graph can be cut."""

    stages: int
    most: int
    why: str = ""

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"The model cannot be cut into {self.stages} stages{because}; give at most {self.most}."


@dataclass(eq=False, repr=False)
class BadMicrobatches(DscError):
    """A number of micro-batches that does not divide the batch, or that a schedule cannot take."""

    microbatches: object
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.microbatches!r} micro-batches cannot be: {self.reason}; {self.advice}."


@dataclass(eq=False, repr=False)
class PipelineTooLarge(DscError):
    """No split fits into the memory of the ranks."""

    limit: int
    least: int
    rank: int
    what: str
    """What fills that rank."""
    advice: str

    def __str__(self) -> str:
        return (
            f"No pipeline fits into {size(self.limit)} a rank: rank {self.rank} needs at least {size(self.least)} "
            f"({self.what}); {self.advice}."
        )
