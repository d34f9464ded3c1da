"""``dsc diff``: what changed between two recorded compilations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsc.cli.app import FAILED, AsJson, app, console, print_json, progress

if TYPE_CHECKING:
    from rich.console import Console

    from dsc.debug.tracediff import RegionDiff, StageDiff, TraceDiff, Value

Recorded = Annotated[Path, typer.Argument(metavar="TRACE", help="A .trace file, or a folder of them.")]
Everything = Annotated[bool, typer.Option("--all", help="Print the diff after every pass, not only the first of each.")]
Context = Annotated[int, typer.Option("--context", "-c", metavar="N", min=0, help="Lines around each change.")]


@app.command()
def diff(
    a: Recorded, b: Recorded, everything: Everything = False, context: Context = 3, as_json: AsJson = False
) -> None:
    """Compare two traces: options, numbers, and the graph after each pass; exit code 1 if they differ.

    For each graph the first pass after which the two differ is printed as a diff; later passes are counted.
    Times and versions are shown, but do not count as differences.
    """
    from dsc.debug import trace, tracediff

    one, other = trace.read(a), trace.read(b)
    for remark in (*one.remarks, *other.remarks):
        progress().print(remark, style="yellow", highlight=False, markup=False)
    found = tracediff.compare(one, other, context)
    if as_json:
        print_json(as_data(found))
    else:
        show(found, everything, console())
    raise typer.Exit(0 if found.same else FAILED)


def show(found: TraceDiff, everything: bool, out: Console) -> None:
    out.print(f"--- {found.a}", style="red", highlight=False, markup=False)
    out.print(f"+++ {found.b}", style="green", highlight=False, markup=False)
    for v in found.versions:
        out.print(f"{v.name}: {v.a} → {v.b}", style="dim", highlight=False, markup=False)
    for r in found.regions:
        show_region(r, everything, out)
    if found.same:
        out.print("The compilations are the same.", style="green")


def show_region(r: RegionDiff, everything: bool, out: Console) -> None:
    title = f"Graph {r.index}" + (f", {r.function}" if r.function else "")
    if r.side != "both":
        side = "first" if r.side == "a" else "second"
        out.print(f"\n{title}: only in the {side}", style="bold", highlight=False, markup=False)
        return
    out.print(f"\n{title}" + (": same" if r.same else ""), style="bold", highlight=False, markup=False)
    for v in r.settings:
        out.print(f"  {v.name}: {shown(v.a)} → {shown(v.b)}", style="yellow", highlight=False, markup=False)
    rows = [*(v for v in r.numbers if not v.same), *(v for v in r.seconds if v.name == "all")]
    width = max((len(v.name) for v in rows), default=0) + 2
    for v in rows:
        out.print(number_line(v, width), style="dim" if v.name == "all" else "", highlight=False, markup=False)
    printed: set[str] = set()
    for s in r.stages:
        if not s.same:
            show_stage(s, everything or s.graph not in printed, out)
            printed.add(s.graph)


def number_line(v: Value, width: int) -> str:
    """``  forward kernels       2 →       3   +50%``."""
    name = "seconds" if v.name == "all" else v.name
    change = f"{v.b / v.a - 1:+8.1%}" if v.a and v.b is not None else ""
    return f"  {name:{width}}{shown(v.a):>14} → {shown(v.b):>14} {change}".rstrip()


def shown(value: Any) -> str:
    match value:
        case None | "":
            return "—"
        case float():
            return f"{value:,.0f}" if value.is_integer() else f"{value:.3f}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return str(value)


def show_stage(s: StageDiff, in_full: bool, out: Console) -> None:
    from dsc.cli.render import diff_line

    where = f"{s.graph} before all passes" if s.name == "trace" else f"{s.graph} after {s.name}"
    if s.side != "both":
        side = "first" if s.side == "a" else "second"
        out.print(f"  {where}: only in the {side}", style="yellow", highlight=False, markup=False)
        return
    noted = f", {s.count('noted')} with other notes" if s.count("noted") else ""
    out.print(f"  {where}: +{s.count('new')} -{s.count('gone')} lines{noted}", style="yellow", highlight=False)
    for line in s.lines if in_full else ():
        out.print(diff_line(line), soft_wrap=True)


def as_data(found: TraceDiff) -> dict[str, Any]:
    return {
        "same": found.same,
        "a": found.a,
        "b": found.b,
        "versions": [vars(v) for v in found.versions],
        "graphs": [
            {
                "index": r.index,
                "function": r.function,
                "in": r.side,
                "same": r.same,
                "settings": [vars(v) for v in r.settings],
                "numbers": [vars(v) for v in r.numbers],
                "seconds": [vars(v) for v in r.seconds],
                "stages": [
                    {
                        "graph": s.graph,
                        "pass": s.name,
                        "in": s.side,
                        "same": s.same,
                        "diff": [{"kind": line.kind, "text": line.text} for line in s.lines],
                    }
                    for s in r.stages
                ],
            }
            for r in found.regions
        ],
    }
