"""The schedules of kernels as tables: the one that is taken, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dsc.cli.app import progress as errors_console
from dsc.codegen.candidates import Candidate, Choice, as_data, micro

if TYPE_CHECKING:
    from rich.console import Console

    from dsc.codegen.schedule import Schedule
    from dsc.debug.candidates import Choices
    from dsc.debug.kernels import Listed
    from dsc.target import Target


def chosen(kernels: Sequence[Listed], target: Target, parallel: int) -> Choices:
    """The choices, with a progress bar on the error stream; measured ones of this machine's cache where it has them."""
    import os
    from pathlib import Path

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dsc import options
    from dsc.debug.candidates import choices_of, jobs

    given = options.parse(None, None, os.environ).cache_dir
    folder = Path(given) if given else options.default_cache_dir()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors_console(), transient=True) as bar:
        job = bar.add_task("compiling candidates", total=len(jobs(kernels, target)))
        return choices_of(kernels, target, parallel, lambda: bar.advance(job), measured=folder)


def show(out: Console, kernels: Sequence[Listed], choices: Mapping[str, Choice[Schedule]]) -> None:
    """A table a kernel."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    for k in kernels:
        choice = choices.get(k.title)
        if choice is None:
            continue
        title = f"{k.title} for {choice.target}: {choice.why}"
        made = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
        made.add_column("tile", no_wrap=True)
        for column in ("regs", "spill", "shared", "occ.", "instr.", "modelled", "measured"):
            made.add_column(column, justify="right", no_wrap=True)
        made.add_column("why not", overflow="fold")
        for c in choice.candidates:
            made.add_row(*map(escape, cells(c)))
        out.print(made)
    if choices and (alone := sum(k.title not in choices for k in kernels)):
        out.print(f"Kernels with one schedule alone (products, sizes that are not known): {alone}", highlight=False)


def cells(c: Candidate[Schedule]) -> tuple[str, ...]:
    found = c.code
    facts = (
        (
            str(found.registers),
            f"{found.spilled} B",
            f"{found.shared} B",
            f"{found.occupancy:.0%}",
            str(found.instructions),
        )
        if found is not None
        else ("-",) * 5
    )
    times = (micro(t) if t is not None else "-" for t in (c.modelled, c.measured))
    return (c.schedule.label, *facts, *times, c.lost or "taken")


def data(choices: Mapping[str, Choice[Schedule]], title: str) -> dict[str, Any]:
    """As JSON, beside what else is said of a kernel."""
    choice = choices.get(title)
    return {"choice": {**as_data(choice), "why": choice.why}} if choice is not None else {}
