"""``dsc trace``: record the compilation of a model, for any target, into a file that the other commands read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.cli.app import AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json

Out = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="The trace to write.")]
Pipeline = Annotated[
    str | None, typer.Option("--passes", "-p", metavar="TEXT", help="A pipeline such as 'canonicalize,fuse'.")
]
Numerics = Annotated[str, typer.Option(metavar="NAME", help="eager or fast: where low-precision values are rounded.")]


@app.command()
def trace(
    model: ModelName,
    out: Out,
    passes: Pipeline = None,
    numerics: Numerics = "eager",
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Record the compilation of MODEL into a file for dsc diff, passes, show, graph and view.

    A program of yours records itself: with dsc.trace("file.trace") around it, or DSC_TRACE=folder.
    """
    import dsc
    from dsc import options
    from dsc.cli import source
    from dsc.debug import trace as traces
    from dsc.debug.capture import capture

    given = options.parse({"passes": passes, "numerics": numerics}, None, {})
    found = source.find(model, inputs or ())
    with dsc.trace(out):
        capture(found, target or "cpu", given, training=not inference)
    read = traces.read(out)
    stages = sum(len(r.stages) for r in read.regions)
    if as_json:
        print_json({"trace": str(out), "graphs": len(read.regions), "stages": stages})
        return
    size = out.stat().st_size
    console().print(f"Wrote {out}: {len(read.regions)} graph(s), {stages} stages, {size / 1e6:.1f} MB", highlight=False)
