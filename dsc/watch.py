"""Listening to compilations: who wants to hear of every graph and pass subclasses ``Watcher``.

Watchers come from ``options["watchers"]``, or from ``watching``, which holds for the compilations that start inside of it.
Nothing is copied or formatted for them: with no watcher, watching costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch.fx import GraphModule

from dsc.compilation import Compilation
from dsc.manager import Observer, Pass, Report
from dsc.options import Options
from dsc.target import Target


class Watcher:
    """Hears what happens to the graphs of a model, in order.  Every method may be left as it is.

    ``stage`` is joint, forward, backward or inference.  A graph is only lent: the compiler goes on to change it.
    """

    def captured(self, gm: GraphModule, inputs: Sequence[object]) -> Watcher:
        """Dynamo gave a graph; the watcher that this returns hears the rest about it, its late backward included."""
        return self

    def begins(self, options: Options, target: Target) -> None:
        """The graph is about to be compiled: with these options, for this target."""

    def traced(self, stage: str, gm: GraphModule) -> None:
        """An ATen graph, before any pass."""

    def before(self, stage: str, p: Pass, gm: GraphModule) -> None:
        """A pass is about to run."""

    def after(self, stage: str, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        """A pass has run."""

    def failed(self, stage: str, p: Pass, gm: GraphModule, error: Exception) -> None:
        """A pass raised, or left a graph that is not legal."""

    def compiled(self, compilation: Compilation) -> None:
        """A graph has become a program."""

    def left(self, stage: str, why: str) -> None:
        """The graph stays with PyTorch: with eager if ``stage`` is dynamo, else with ATen."""


@dataclass(frozen=True)
class Heard:
    """The observer of one stage's pass pipeline, which tells all watchers."""

    watchers: tuple[Watcher, ...]
    stage: str

    def before(self, p: Pass, gm: GraphModule) -> None:
        for w in self.watchers:
            w.before(self.stage, p, gm)

    def after(self, p: Pass, gm: GraphModule, report: Report, seconds: float) -> None:
        for w in self.watchers:
            w.after(self.stage, p, gm, report, seconds)

    def failed(self, p: Pass, gm: GraphModule, error: Exception) -> None:
        for w in self.watchers:
            w.failed(self.stage, p, gm, error)


def observers(watchers: Sequence[Watcher], stage: str) -> tuple[Observer, ...]:
    """What a pass pipeline takes to tell ``watchers`` about its passes on the graph ``stage``."""
    return (Heard(tuple(watchers), stage),) if watchers else ()


def captured(watchers: Sequence[Watcher], gm: GraphModule, inputs: Sequence[object]) -> tuple[Watcher, ...]:
    """Tell the watchers of a new Dynamo graph; whoever hears the rest about it."""
    return tuple(w.captured(gm, inputs) for w in watchers)


_ACTIVE: ContextVar[tuple[Watcher, ...]] = ContextVar("dsc_watchers", default=())


@contextmanager
def watching(*watchers: Watcher) -> Iterator[None]:
    """Compilations that start inside the block, in this thread or task, tell ``watchers`` too."""
    token = _ACTIVE.set((*_ACTIVE.get(), *watchers))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active() -> tuple[Watcher, ...]:
    """The watchers of the blocks that surround the caller."""
    return _ACTIVE.get()
