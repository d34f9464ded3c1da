"""``dsc ops``: which ATen operators kernels compute, for which dtypes, and why ATen keeps the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from dsc.cli.app import BAD_INPUT, AsJson, app, console, fail, print_json

Word = Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show operators whose names hold this word only.")]
All = Annotated[bool, typer.Option("--all", help="Name every operator that is left to ATen, rather than count them.")]


@app.command()
def ops(name: Word = None, everything: All = False, as_json: AsJson = False) -> None:
    """List the ATen operators that dsc computes in kernels, and those that it leaves to ATen, each with the reason."""
    from rich.markup import escape
    from rich.table import Table

    from dsc.debug import op_report

    rows = [r for r in op_report.rows() if name is None or name in r.name]
    if not rows:
        fail(f"No operator has {name!r} in its name; dsc ops --all lists them.", BAD_INPUT)
    if as_json:
        print_json({"operators": [r.as_json() for r in rows], "everywhere": list(op_report.EVERYWHERE)})
        return
    out = console()
    for kind in dict.fromkeys(r.kind for r in rows if r.kernels):
        table = Table(title=f"{kind}: {op_report.ABOUT[kind]}", title_justify="left", expand=False)
        table.add_column("operator", no_wrap=True)
        table.add_column("in kernels")
        table.add_column("left to ATen: why")
        for row in (r for r in rows if r.kind == kind):
            left = "\n".join(f"{escape(what)}: [dim]{escape(why)}[/]" for what, why in op_report.by_reason(row))
            table.add_row(row.name, " ".join(row.kernels), left)
        out.print(table)
    table = Table(title="Left to ATen in every call", title_justify="left")
    for column in ("kind", "operators", "why"):
        table.add_column(column)
    for kind in dict.fromkeys(r.kind for r in rows if not r.kernels):
        names = [r.name for r in rows if r.kind == kind and not r.kernels]
        listed = " ".join(names) if everything or name is not None else f"{len(names)}, such as {' '.join(names[:4])}"
        table.add_row(kind, listed, next(why for r in rows if r.kind == kind and not r.kernels for _, why in r.aten))
    if table.row_count:
        out.print(table)
    out.print(f"ATen also keeps, of every operator: {'; '.join(op_report.EVERYWHERE)}.")
    out.print("Operators that ATen makes of others, and those that write to their operands, are traced into these.")
