"""``dsc doctor``: what works on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict

import typer

from dsc.cli.app import FAILED, AsJson, app, console, print_json, progress

MARKS = {"ok": ("✓", "green"), "missing": ("–", "yellow"), "broken": ("✗", "red")}


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what works here: compilers, targets, cache, extras; exit code 1 if the main path is broken.

    Every row was tried: kernels are built and run, a train step is compared with eager, and kernels for GPUs are
    compiled down to machine code.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dsc import options
    from dsc.debug import doctor as checkup

    given = options.parse(None, None, os.environ)
    found: list[checkup.Check] = []
    with progress().status("Trying everything ...") as status:
        for check in checkup.checks(given):
            found.append(check)
            status.update(f"Tried {check.name} ...")
    healthy = checkup.healthy(found)
    if as_json:
        print_json({"healthy": healthy, "checks": [asdict(c) for c in found]})
        raise typer.Exit(0 if healthy else FAILED)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "", "found", "what helps"):
        table.add_column(column, overflow="fold")
    for c in found:
        mark, style = MARKS[c.state]
        table.add_row(Text(mark, style), Text(c.name, "bold" if c.main else ""), Text(c.found), Text(c.todo, style))
    out = console()
    out.print(table)
    if healthy:
        out.print('torch.compile(model, backend="dsc") works here.', style="green", highlight=False)
        return
    bad = ", ".join(c.name for c in found if c.main and c.state != "ok")
    out.print(f"Broken: {bad}. Models still run, on PyTorch's own kernels where dsc's cannot be had.", style="red")
    raise typer.Exit(FAILED)
