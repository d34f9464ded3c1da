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
            f"{self.cluster} has {self.cards} cards, and {self.how} take {self.needed}; "
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


@dataclass(eq=False, repr=False)
class WorldMismatch(DscError):
    """Processes that are not as many as the plan has ranks."""

    processes: int
    needed: int
    how: str
    """What makes up ``needed``."""

    def __str__(self) -> str:
        return (
            f"The plan needs {self.needed} processes ({self.how}), and {self.processes} run; "
            f"launch with torchrun --nproc-per-node {self.needed}, or plan for {self.processes} stages."
        )


@dataclass(eq=False, repr=False)
class PlanMismatch(DscError):
    """A plan that is for another model, other shapes, or not the same on every rank."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"The pipeline plan does not fit: {self.reason}; {self.advice}."


@dataclass(eq=False, repr=False)
class BadBatch(DscError):
    """A batch that a pipeline cannot take."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"The batch does not fit the pipeline: {self.reason}; {self.advice}."


@dataclass(eq=False, repr=False)
class RankLost(DscError):
    """Another process of the pipeline is gone."""

    rank: int
    doing: str
    cause: str

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} lost another rank while it ran {self.doing} ({self.cause}); look for the first error in the "
            f"logs of the others, and start again from a checkpoint, or let torchrun do so with --max-restarts."
        )


@dataclass(eq=False, repr=False)
class StageFailed(DscError):
    """The model's own code raised inside of a stage."""

    rank: int
    doing: str
    cause: str

    def __str__(self) -> str:
        return f"Rank {self.rank} failed in {self.doing}: {self.cause}; the other ranks stop too."


@dataclass(eq=False, repr=False)
class NotParallel(DscError):
    """Kinds of parallelism that do not go together."""

    what: str
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what} cannot be: {self.reason}; {self.advice}."


@dataclass(eq=False, repr=False)
class BadCheckpoint(DscError):
    """A folder that is no checkpoint of this model."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"The checkpoint in {self.where} cannot be used: {self.reason}; give a folder that Pipeline.save wrote."


@dataclass(eq=False, repr=False)
class NotLoaded(DscError):
    """A step of a model that never got values."""

    def __str__(self) -> str:
        return "The model was on the meta device and has no values yet; call load or load_state_dict before step."


@dataclass(eq=False, repr=False)
class ChartImpossible(DscError):
    """A chart of a plan that cannot be drawn here."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"The chart cannot be drawn: {self.reason}; {self.advice}."
