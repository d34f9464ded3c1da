"""``dsc replay``: the pass that failed, on the graph that it failed on, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsc.cli.app import AsJson, app, console, fail, print_json

CrashFile = Annotated[Path, typer.Argument(metavar="CRASH.json", help="What the warning of a failed pass names.")]
Definition = Annotated[
    str | None, typer.Option("--from", metavar="FILE.py", help="The file that defines the pass, if it is your own.")
]


@app.command()
def replay(crash: CrashFile, definition: Definition = None, as_json: AsJson = False) -> None:
    """Run the pass of a saved crash again; exit code 1 if it fails again."""
    from dsc.debug import crash as crashes
    from dsc.debug.load.python import execute
    from dsc.errors import PassFailed
    from dsc.manager import Pass

    saved = crashes.read(crash.with_suffix(".json") if crash.suffix == ".txt" else crash)
    mine = vars(execute(definition, definition)).values() if definition else ()
    known = {c.name: c for c in mine if isinstance(c, type) and issubclass(c, Pass) and hasattr(c, "name")}
    error = None
    try:
        crashes.replay(saved, known)
    except PassFailed as again:
        error = again
    if as_json:
        print_json(
            {
                "pass": saved.spelled,
                "graph": saved.stage,
                "target": saved.target.name,
                "then": saved.error,
                "now": str(error) if error else None,
                "node": error.node if error else None,
                "line": error.line if error else None,
            }
        )
        raise typer.Exit(1 if error else 0)
    if error is not None:
        fail(str(error))
    console().print(f"Pass {saved.spelled} runs now on the {saved.stage} graph on which it failed.", highlight=False)
