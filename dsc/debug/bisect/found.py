"""What the search for a wrong pass tells: its stages, what it found, and what a reproducer needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch.fx import GraphModule

from dsc.debug.bisect.tolerance import Difference, Rule
from dsc.debug.capture import Session, Stage
from dsc.manager import Pass


@dataclass(frozen=True)
class Checked:
    """One stage that was looked at."""

    region: int
    graph: str
    pass_name: str
    how: Literal["ran", "same by construction", "not built"]
    seconds: float
    difference: Difference | None


@dataclass(frozen=True)
class Finding:
    """What is wrong, from coarse to fine.  ``node`` is empty where only results could be told apart."""

    region: int
    graph: str
    pass_name: str
    result: str
    difference: Difference
    """Of the worst result."""
    node: str = ""
    node_difference: Difference | None = None
    confirmed: bool = False
    """Whether the results come right with what the node computed before the pass."""
    suspects: tuple[str, ...] = ()
    """New nodes that it reads, of which nothing before tells whether they are right."""
    line: str = ""
    """The user's line behind the node, and ``module`` the user's module."""
    module: str = ""
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    """What the pass said of these nodes."""
    diff: str = ""
    """The graph around the change, before and after."""


@dataclass(frozen=True)
class Case:
    """What a reproducer needs: a graph before the step that is wrong, and its inputs."""

    graph: str
    stage: Stage
    before: GraphModule
    inputs: Mapping[str, object]
    applied: Pass | None
    """The pass; None for the lowering to kernels."""
    around: tuple[str, ...]
    """Nodes of ``before`` that the change is about."""


@dataclass(frozen=True)
class Verdict:
    session: Session
    checked: tuple[Checked, ...]
    finding: Finding | None
    seconds: float
    rule: Rule
    case: Case | None = None
