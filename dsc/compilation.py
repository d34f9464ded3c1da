"""The record of one compiled graph, handed to ``options["on_compile"]`` and to watchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from dsc import text
from dsc.manager import Report
from dsc.program import Program
from dsc.runtime.state import State

if TYPE_CHECKING:
    from dsc.codegen.lower import Bound
    from dsc.runtime.graphs import Replayer


@dataclass(frozen=True)
class Compilation:
    kind: str
    """forward, backward or inference."""
    program: Program
    reports: tuple[tuple[str, Report], ...]
    """What each pass did, by its name, and last ``link``: what could not become a kernel."""
    gm: GraphModule
    """The graph after all passes, with its groups in the notes."""
    seconds: float
    bound: Mapping[str, Bound] = field(default_factory=dict)
    """Group -> its kernel and the nodes behind the kernel's buffers."""
    state: State = field(default_factory=State)
    """What lives between steps: the tensors that the program reads and writes by name."""
    replayer: Replayer | None = None
    """How its launches are recorded and replayed, where they are: counts, and remarks of calls that ran plainly."""

    @cached_property
    def text(self) -> str:
        """Canonical text of the graph after all passes."""
        return text.show(self.gm.graph)

    @property
    def numbers(self) -> Mapping[str, float]:
        return self.program.numbers
