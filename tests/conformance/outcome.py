"""What a program of a suite says, and how suites describe their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """How every program is run."""

    backend: str
    dynamic: bool | None = None
    dtypes: tuple[str, ...] = ()
    samples: int = 2


@dataclass(frozen=True)
class Outcome:
    """Counts of comparisons with eager; a program of one comparison passes 1 or fails 1."""

    passed: int = 0
    failures: tuple[str, ...] = ()
    skipped: int = 0
    """What eager itself refuses, or cannot be built."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Program:
    suite: str
    kind: str
    name: str
    run: Callable[[Settings], Outcome] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Suite:
    name: str
    about: str
    programs: Callable[[Settings], list[Program]]
    """Imports what the suite needs.  Raises ModuleNotFoundError where it is not installed."""

    kinds: Callable[[str], str]
    """One line on a kind."""


def once(check: Callable[[], object]) -> Outcome:
    """One comparison: the failure is what the check raises."""
    try:
        check()
    except Exception as e:
        words = " ".join(str(e).split())
        return Outcome(failures=(f"{type(e).__name__}: {words[:400]}",))
    return Outcome(passed=1)
