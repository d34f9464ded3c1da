"""``dsc show``: the graphs as text, after any pass, or what a pass changed in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import BAD_INPUT, AsJson, Inference, Inputs, ModelName, TargetName, app, console, fail, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from dsc.debug.stages import Picked

After = Annotated[
    str | None,
    typer.Option("--after", "-a", metavar="PASS", help="The graphs after this pass; trace is before the first."),
]
Diff = Annotated[str | None, typer.Option("--diff", "-d", metavar="PASS", help="What this pass changed.")]
GraphName = Annotated[
    str | None,
    typer.Option("--graph", "-g", metavar="NAME", help="joint, forward, backward or inference; default: all."),
]
RegionNumber = Annotated[
    int | None, typer.Option("--region", metavar="N", help="Of a model that breaks into several graphs, this one.")
]
Source = Annotated[bool, typer.Option("--source", "-s", help="Lines and modules of the program, as comments.")]


@app.command()
def show(
    model: ModelName,
    after: After = None,
    diff: Diff = None,
    graph: GraphName = None,
    region: RegionNumber = None,
    source: Source = False,
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Print the graphs of MODEL: after all passes, after one of them, or what one of them changed.

    A diff marks lines with - and +, and with ~ where a node only got other notes.
    """
    from dsc.cli import source as sources
    from dsc.debug import stages

    if after is not None and diff is not None:
        fail("--after prints a graph and --diff a difference: give one of them.", BAD_INPUT)
    session = sources.captured(model, inputs, target, training=not inference)
    picked = stages.pick(session, diff or after, graph, region)
    if as_json:
        data = [as_data(p, diff is not None, source) for p in picked]
        print_json({"model": session.model.name, "target": session.target.name, "graphs": data})
        return
    out = console()
    several = len(session.regions) > 1
    for i, p in enumerate(picked):
        if i:
            out.print()
        print_diff(p, several, out) if diff is not None else print_graph(p, several, source, out)
    if not picked:
        out.print("Nothing was compiled: dsc passes says why.", style="yellow")


def title(p: Picked, several: bool) -> str:
    """``# forward after fuse, 137 nodes``."""
    region = f" of graph {p.region}" if several else ""
    return f"# {p.stage.graph}{region} after {p.stage.name}, {len(p.stage.gm.graph.nodes)} nodes"


def print_graph(p: Picked, several: bool, source: bool, out: Console) -> None:
    """The canonical text: what is printed is what the golden tests hold, with comments in between."""
    from dsc.cli.render import colored, listing

    for line in [title(p, several), *listing(p.stage.gm.graph, source)]:
        out.print(colored(line), soft_wrap=True)


def print_diff(p: Picked, several: bool, out: Console) -> None:
    """A unified diff of the graph before the pass and after it."""
    from dsc.cli.render import colored, diff_line
    from dsc.debug import diff

    if p.before is None:
        out.print(colored(f"{title(p, several)}: the first, with nothing before it"), soft_wrap=True)
        return
    lines = diff.graphs(p.before.gm.graph, p.stage.gm.graph)
    out.print(colored(title(p, several) if lines else f"{title(p, several)}: no change"), soft_wrap=True)
    for line in lines:
        out.print(diff_line(line), soft_wrap=True)


def as_data(p: Picked, as_diff: bool, source: bool) -> dict[str, object]:
    """The graph, or the diff, as JSON."""
    from dsc.cli.render import listing
    from dsc.debug import diff

    data: dict[str, object] = {"region": p.region, "graph": p.stage.graph, "pass": p.stage.name}
    if as_diff:
        lines = diff.graphs(p.before.gm.graph, p.stage.gm.graph) if p.before else []
        return {**data, "diff": [{"kind": line.kind, "text": line.text} for line in lines]}
    return {**data, "nodes": len(p.stage.gm.graph.nodes), "text": "\n".join(listing(p.stage.gm.graph, source)) + "\n"}
