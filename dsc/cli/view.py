"""``dsc view``: a whole compilation as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.cli.app import AsJson, Inference, Inputs, ModelName, TargetName, app, print_json

Out = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")]


@app.command()
def view(
    model: ModelName,
    output: Out = Path("report.html"),
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Write a page about the compilation of MODEL: passes, graphs, memory, roofline, kernels, sources.

    The page is one file that needs no network.  Keys: 1 to 6 choose a tab, / searches, arrows move, Esc closes.
    """
    from dsc.cli import source
    from dsc.debug.dump import files
    from dsc.debug.report import page

    session = source.captured(model, inputs, target, training=not inference)
    text = page.whole(session)
    files.write(output, text)
    if as_json:
        print_json(
            {
                "file": str(output),
                "model": session.model.name,
                "target": session.target.name,
                "bytes": len(text.encode()),
                "left": [why for r in session.regions for _, why in r.left],
            }
        )
    else:
        typer.echo(f"Wrote {output} ({len(text.encode()) / 1e6:.1f} MB): open it in any browser.")
