"""``dsc passes``: what each pass does to each graph, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsc.debug.capture import Session
    from dsc.debug.passtable import Row

WithRemarks = Annotated[bool, typer.Option("--remarks", "-r", help="Print what each pass did or left, and why.")]


@app.command()
def passes(
    model: ModelName,
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    remarks: WithRemarks = False,
    as_json: AsJson = False,
) -> None:
    """Show what each pass does to the graphs of MODEL: a row a pass, from the traced graph to the program.

    The column s is the time of the pass itself.  Bytes moved, operations, peak memory and time are those of the graph
    on the target, by the model of costs; for kernels and ATen calls that are not yet grouped, each node counts as one.
    """
    from dsc.cli import source
    from dsc.debug import passtable

    session = source.captured(model, inputs, target, training=not inference)
    rows = passtable.rows(session)
    step = passtable.total(session, rows)
    if as_json:
        print_json(
            {
                "model": session.model.name,
                "target": session.target.name,
                "seconds": session.seconds,
                "passes": [r.as_json() for r in rows],
                "step": {k: v for k, v in step.as_json().items() if k not in ("region", "graph", "remarks")}
                if step
                else None,
                "left": [
                    {"region": i, "graph": graph, "why": why}
                    for i, region in enumerate(session.regions)
                    for graph, why in region.left
                ],
            }
        )
        return
    out = console()
    out.print(heading(session), highlight=False, markup=False)
    if rows:
        out.print(table(rows, step, len(session.regions) > 1))
    print_left(session, out)
    if remarks:
        print_remarks(rows, out)


def heading(session: Session) -> str:
    """``gpt-tiny for h100: 1 graph, captured in 3.2 s``."""
    from dsc.debug import units

    graphs = units.plural(len(session.regions), "graph")
    return f"{session.model.name} for {session.target.name}: {graphs}, captured in {units.seconds(session.seconds)}"


def table(rows: Sequence[Row], step: Row | None, several: bool) -> Table:
    """Narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    out.add_column("pass", no_wrap=True)
    for name in ("s", "nodes", "kernels", "ATen", "moved", "FLOP", "peak", "time", "remarks"):
        out.add_column(name, justify="right", no_wrap=True)
    last: tuple[int, str] | None = None
    for row in rows:
        here = (row.region, row.graph)
        if here != last:
            if last is not None:
                out.add_section()
            out.add_row(Text(f"{row.graph} {row.region}" if several else row.graph, style="bold"))
            last = here
        out.add_row(f"  {row.name}", *cells(row))
    if step is not None:
        out.add_section()
        out.add_row("step", *cells(step), style="bold")
    return out


def cells(row: Row) -> list[str]:
    """All but the name."""
    from dsc.debug import units

    same = row.nodes_before == row.nodes
    return [
        f"{row.seconds:.2f}" if row.seconds else "",
        f"{row.nodes}" if same else f"{row.nodes_before}→{row.nodes}",
        f"{row.kernels}",
        f"{row.aten_calls}",
        units.nbytes(row.bytes),
        units.flops(row.flops),
        units.nbytes(row.peak),
        units.seconds(row.modelled),
        f"{len(row.remarks)}" if row.remarks else "",
    ]


def print_left(session: Session, out: Console) -> None:
    """What stays with PyTorch."""
    for i, region in enumerate(session.regions):
        for graph, why in region.left:
            runs = "eager PyTorch" if graph == "dynamo" else "ATen"
            out.print(f"Graph {i} stays with {runs}: {why}", style="yellow", highlight=False, markup=False)


def print_remarks(rows: Sequence[Row], out: Console) -> None:
    """A line each, under the pass and the graph."""
    from rich.text import Text

    for row in rows:
        if not row.remarks:
            continue
        out.print(f"\n{row.name} on {row.graph}", style="bold", highlight=False)
        for r in row.remarks:
            style = "green" if r.verdict == "did" else "yellow"
            out.print(Text.assemble((f"  {r.verdict:8}", style), (r.node, "bold"), f": {r.why}"), soft_wrap=True)
