"""``dsc explain``: why a node is as it is; without a node, where the step spends its time, bytes and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsc.cli.app import AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsc.debug.capture import Session
    from dsc.debug.explain import Explanation
    from dsc.debug.launches import Launch
    from dsc.debug.summary import Alike

NodeName = Annotated[str | None, typer.Argument(metavar="[NODE]", help="A node, as dsc show prints it: addmm_3.")]
Top = Annotated[int, typer.Option("--top", min=1, help="Rows of each table.")]

SHORT = {"forward": "fwd", "backward": "bwd", "inference": "inf"}
WIDE = 120
"""Columns from which on tables show modules and lines too."""


@app.command()
def explain(
    model: ModelName,
    node: NodeName = None,
    top: Top = 10,
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Say why NODE is saved or computed again, fused or not and with what, in which precision, and what it costs.

    Without NODE: the launches that take longest and that move most, what the forward saves for the backward, and what
    stays with ATen.  Times are predicted for the target by a roofline.
    """
    from dsc.cli import source
    from dsc.debug import explain as why
    from dsc.debug import launches

    session = source.captured(model, inputs, target, training=not inference)
    if node is not None:
        found = why.explain(session, node)
        if as_json:
            print_json([e.as_json() for e in found])
        else:
            for e in found:
                print_node(e, len(session.regions) > 1, console())
        return
    every = launches.of_session(session)
    if as_json:
        print_json(summary_data(session, every))
    else:
        print_summary(session, every, top, console())


def print_node(e: Explanation, several: bool, out: Console) -> None:
    """The line, where it comes from, and a fact a row."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from dsc.cli.render import colored

    out.print(colored(e.line), soft_wrap=True)
    graph = f"{e.graph} of graph {e.region}" if several else e.graph
    out.print(Text("  ".join(filter(None, (graph, e.origin.module))), style="dim"), soft_wrap=True)
    for frame in e.origin.frames[-2:]:
        out.print(Text(f"  {frame.place} in {frame.function}", style="dim"), soft_wrap=True)
        out.print(Text(f"    {frame.code}"), soft_wrap=True)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in e.facts:
        grid.add_row(fact.topic, Text(fact.text))
    out.print(Padding(grid, (0, 0, 1, 2)))


def print_summary(session: Session, every: Sequence[Launch], count: int, out: Console) -> None:
    from rich.text import Text

    from dsc.debug import launches, summary, units

    whole = launches.total_seconds(every)
    kernels = sum(x.group is not None for x in every)
    out.print(
        Text(
            f"{session.model.name} for {session.target.name}: a step of {units.seconds(whole)}, "
            f"{units.plural(kernels, 'kernel')} and {units.plural(len(every) - kernels, 'call')} of ATen, "
            f"{units.nbytes(sum(x.bytes for x in every))} moved, {units.flops(sum(x.flops for x in every))} FLOP"
        ),
        soft_wrap=True,
    )
    wide = out.width >= WIDE
    alike = summary.alike(every)
    if every:
        by_time = summary.top(alike, lambda a: a.seconds, count)
        section("What takes longest", launch_table(by_time, whole, wide), out)
        by_bytes = summary.top(alike, lambda a: a.bytes, count)
        section("What moves most", launch_table(by_bytes, whole, wide), out)
    print_saved(session, count, wide, out)
    print_fallbacks(session, every, count, whole, out)
    for graph, reasons in summary.unrecordable(session):
        words = (
            f"cannot be replayed as a CUDA graph: {'; '.join(reasons)}"
            if reasons
            else "can be replayed as a CUDA graph"
        )
        out.print(Text(f"The {graph} {words}."), soft_wrap=True)


def launch_table(rows: Sequence[Alike], whole: float, wide: bool) -> Table:
    from rich.text import Text

    from dsc.debug import units

    out = table(("what", "node"), ("graph", "runs", "time", "step", "moved", "FLOP", "bound"), wide)
    for a in rows:
        cells = [SHORT.get(a.graph, a.graph), f"{a.count}", units.seconds(a.seconds), units.percent(a.seconds, whole)]
        cells += [units.nbytes(a.bytes), units.flops(a.flops), a.bound]
        out.add_row(Text(a.name), a.node, *cells, *([Text(a.origin.place, style="dim")] if wide else []))
    return out


def print_saved(session: Session, count: int, wide: bool, out: Console) -> None:
    from rich.text import Text

    from dsc.debug import summary, units

    every = summary.saved(session)
    computed = [s for s in every if s.computed]
    if not every:
        return
    held = units.nbytes(sum(s.bytes for s in every if not s.computed))
    title = (
        f"Saved for the backward: {units.nbytes(sum(s.bytes for s in computed))} in {units.plural(len(computed), 'value')}, "
        f"and {held} of inputs and weights that live anyway"
    )
    made = table(("node", "type", "why"), ("bytes",), wide)
    for s in computed[:count]:
        made.add_row(
            s.node,
            Text(s.type),
            Text(s.why),
            units.nbytes(s.bytes),
            *([Text(s.origin.place, style="dim")] if wide else []),
        )
    if len(computed) > count:
        rest = computed[count:]
        made.add_row(f"{len(rest)} more", "", "", units.nbytes(sum(s.bytes for s in rest)))
    section(title, made, out)


def print_fallbacks(session: Session, every: Sequence[Launch], count: int, whole: float, out: Console) -> None:
    from rich.text import Text

    from dsc.cli.passes import print_left
    from dsc.debug import summary, units

    found = summary.fallbacks(session, every)
    if found:
        title = f"Left to ATen: {units.percent(sum(f.seconds for f in found), whole)} of the step"
        made = table(("operator", "why"), ("calls", "time", "step", "moved"), False)
        for f in found[:count]:
            cells = f"{f.count}", units.seconds(f.seconds), units.percent(f.seconds, whole), units.nbytes(f.bytes)
            made.add_row(Text(f.op), Text(f.why), *cells)
        if len(found) > count:
            rest = found[count:]
            calls, seconds = sum(f.count for f in rest), sum(f.seconds for f in rest)
            moved = units.nbytes(sum(f.bytes for f in rest))
            cells = f"{calls}", units.seconds(seconds), units.percent(seconds, whole), moved
            made.add_row(f"{len(rest)} more", "", *cells)
        section(title, made, out)
    for group, reason in summary.refused(session):
        out.print(Text(f"Group {group} became no kernel: {reason}", style="yellow"), soft_wrap=True)
    print_left(session, out)


def section(title: str, made: Table, out: Console) -> None:
    """A title that no narrow table folds."""
    from rich.text import Text

    out.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    out.print(made)


def table(words: Sequence[str], numbers: Sequence[str], wide: bool) -> Table:
    """Words to the left and folded, numbers to the right and whole."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.padding = (0, 1) if wide else (0, 0)
    for name in words:
        made.add_column(name, overflow="fold")
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    if wide:
        made.add_column("where", overflow="fold")
    return made


def summary_data(session: Session, every: Sequence[Launch]) -> dict[str, Any]:
    """The summary as JSON, whole."""
    from dsc.debug import launches, summary

    def place(data: dict[str, Any], text: str) -> dict[str, Any]:
        return {**{k: v for k, v in data.items() if k != "origin"}, "where": text}

    return {
        "model": session.model.name,
        "target": session.target.name,
        "seconds": launches.total_seconds(every),
        "bytes": sum(x.bytes for x in every),
        "flops": sum(x.flops for x in every),
        "launches": [place(asdict(a), a.origin.place) for a in summary.alike(every)],
        "saved": [place(asdict(s), s.origin.place) for s in summary.saved(session)],
        "aten": [asdict(f) for f in summary.fallbacks(session, every)],
        "refused": [{"group": g, "why": w} for g, w in summary.refused(session)],
        "cuda_graphs": [{"graph": g, "refused": list(why)} for g, why in summary.unrecordable(session)],
    }
