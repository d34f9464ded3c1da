"""``dsc reduce``: what ``dsc bisect`` finds, as a script of a few lines that fails in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.cli.app import FAILED, AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json, progress
from dsc.cli.bisect import Against, AgainstWhat, Passes, Tolerance

Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="Where to write it; default: print.")
]
Seconds = Annotated[float, typer.Option("--seconds", min=1.0, help="Shrink no longer than this.")]


@app.command()
def reduce(
    model: ModelName,
    out: Out = None,
    inputs: Inputs = None,
    target: TargetName = None,
    passes: Passes = None,
    tolerance: Tolerance = None,
    against: AgainstWhat = Against.eager,
    seconds: Seconds = 120.0,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Write a script that fails as MODEL does, with the smallest graph that still makes a pass go wrong.

    Exit code 0: no pass changes the numbers, and there is nothing to reduce.  1: there is a script.  2: bad input.
    """
    from dsc.cli.bisect import lines, search, show
    from dsc.debug.reduce import reduce as shrink
    from dsc.debug.reduce import save

    quiet = None if as_json else progress()
    verdict = search(model, inputs, target, passes, tolerance, against, inference, quiet)
    if verdict.finding is None:
        if as_json:
            print_json({"model": verdict.session.model.name, "script": None})
        else:
            show(verdict, console())
        return
    if quiet is not None:
        for line in lines(verdict.finding):
            quiet.print(line, highlight=False, markup=False, soft_wrap=True)
    small = shrink(verdict, seconds)
    if out is not None or small.saved:
        path = out or Path("reduced.py")
        save(small, path)
        if quiet is not None:
            quiet.print(f"Wrote {path}: {small.lines} lines of graph.", highlight=False, markup=False)
    if as_json:
        print_json({"model": verdict.session.model.name, "lines": small.lines, "script": small.script})
    elif out is None:
        typer.echo(small.script, nl=False)
    raise typer.Exit(FAILED)
