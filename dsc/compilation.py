"""The record of one compiled graph, handed to ``options["on_compile"]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsc.manager import Report
from dsc.program import Program


@dataclass(frozen=True)
class Compilation:
    kind: str
    """forward, backward or inference."""
    program: Program
    reports: tuple[tuple[str, Report], ...]
    text: str
    """Canonical text of the graph after all passes."""
    seconds: float

    @property
    def numbers(self) -> Mapping[str, float]:
        return self.program.numbers
