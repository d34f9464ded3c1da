"""Progress, tables and JSON of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.outcome import Outcome, Program, Suite


@dataclass(frozen=True)
class Result:
    program: Program
    backend: str
    outcome: Outcome


def summary(results: Sequence[Result], suites: Sequence[Suite], backends: Sequence[str]) -> Table:
    """A row for each kind, a sum for each suite; for each backend what passed, of how many, and seconds."""
    table = Table(title="Conformance with eager", title_justify="left")
    for name in ("suite", "kind", "what is compared"):
        table.add_column(name, no_wrap=name != "what is compared")
    for backend in backends:
        table.add_column(f"{backend}\npassed", justify="right", no_wrap=True)
        table.add_column("\nseconds", justify="right", no_wrap=True)
    for suite in suites:
        mine = [r for r in results if r.program.suite == suite.name]
        if not mine:
            continue
        for kind in dict.fromkeys(r.program.kind for r in mine):
            rows = [r for r in mine if r.program.kind == kind]
            table.add_row(suite.name, kind, suite.kinds(kind), *cells(rows, backends))
        table.add_row(f"[bold]{suite.name}", "[bold]all", suite.about, *cells(mine, backends), end_section=True)
    return table


def cells(results: Iterable[Result], backends: Sequence[str]) -> list[str]:
    rows = list(results)
    out = []
    for backend in backends:
        outcomes = [r.outcome for r in rows if r.backend == backend]
        passed = sum(o.passed for o in outcomes)
        failed = sum(len(o.failures) for o in outcomes)
        colour = "red" if failed else "green"
        out.append(f"[{colour}]{passed} of {passed + failed}[/]" if outcomes else "")
        out.append(f"{sum(o.seconds for o in outcomes):.0f}" if outcomes else "")
    return out


def failures(results: Iterable[Result], console: Console) -> None:
    for r in results:
        for why in r.outcome.failures:
            console.print(f"[red]FAIL[/] {r.backend} {r.program.suite} {r.program.name}: {escape(why)}", soft_wrap=True)


def regressions(results: Sequence[Result], first: str, other: str) -> list[str]:
    """Programs of which ``other`` passes more than ``first`` does."""
    passed: dict[str, dict[tuple[str, str], int]] = {first: {}, other: {}}
    for r in results:
        if r.backend in passed:
            passed[r.backend][r.program.suite, r.program.name] = r.outcome.passed
    return [f"{s} {n}" for (s, n), k in passed[other].items() if k > passed[first].get((s, n), k)]


def write(path: Path, results: Sequence[Result], facts: Mapping[str, object]) -> None:
    rows = [
        {"suite": r.program.suite, "kind": r.program.kind, "name": r.program.name, "backend": r.backend}
        | asdict(r.outcome)
        for r in results
    ]
    path.write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
