"""``dsc graph``: one graph of a model as a picture, or as a file for another tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsc.cli.app import BAD_INPUT, AsJson, Inference, Inputs, ModelName, TargetName, app, fail, print_json

if TYPE_CHECKING:
    from dsc.debug.capture import Session
    from dsc.debug.stages import Picked

FORMATS = (".svg", ".png", ".dot", ".json", ".onnx", ".html")

Out = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help=f"Where to write it; ends in {', '.join(FORMATS)}.")
]
After = Annotated[
    str | None, typer.Option("--after", "-a", metavar="PASS", help="As this pass left it; trace is before the first.")
]
GraphName = Annotated[
    str | None,
    typer.Option("--graph", "-g", metavar="NAME", help="joint, forward, backward or inference; default: forward."),
]
RegionNumber = Annotated[
    int, typer.Option("--region", metavar="N", help="Of a model that breaks into several graphs, this one.")
]
Expand = Annotated[bool, typer.Option("--expand", help="Draw every layer; else those that look alike are drawn once.")]
ClusterBy = Annotated[
    Literal["both", "module", "kernel", "none"],
    typer.Option("--cluster", help="What to frame: modules, kernels, both."),
]
LayoutBy = Annotated[
    Literal["auto", "dsc", "graphviz"],
    typer.Option("--layout", help="Who places the boxes; auto: Graphviz if it is installed and the graph is small."),
]


@app.command()
def graph(
    model: ModelName,
    output: Out,
    after: After = None,
    graph: GraphName = None,
    region: RegionNumber = 0,
    expand: Expand = False,
    cluster: ClusterBy = "both",
    layout: LayoutBy = "auto",
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Draw a graph of MODEL: after all passes, or after one of them.

    Boxes are coloured by what the passes decided: which kernel computes a node, what is saved for the backward or
    computed again, what is left to ATen.  Frames are modules and kernels.  The ONNX file is the whole graph, to be looked
    at in Netron and run where its operators allow.
    """
    from dsc.cli import source
    from dsc.debug.dump import files

    kind = output.suffix.lower()
    if kind not in FORMATS:
        fail(
            f"A graph cannot be written as {output.suffix or output.name}; use one of {', '.join(FORMATS)}.",
            BAD_INPUT,
        )
    files.check(kind)
    session = source.captured(model, inputs, target, training=not inference)
    picked = chosen(session, after, graph, region)
    title = f"{session.model.name} for {session.target.name}: {picked.stage.graph} after {picked.stage.name}"
    content = files.content(kind, session, picked, title, expand, cluster, layout)
    files.write(output, content)
    summary = {
        "file": str(output),
        "model": session.model.name,
        "target": session.target.name,
        "graph": picked.stage.graph,
        "after": picked.stage.name,
        "nodes": len(picked.stage.gm.graph.nodes),
        "bytes": len(content),
    }
    if as_json:
        print_json(summary)
    else:
        typer.echo(f"Wrote {output}: {title}, {summary['nodes']} nodes.")


def chosen(session: Session, after: str | None, graph: str | None, region: int) -> Picked:
    """One stage: of the graph that is asked for, else of the forward, the inference, or what there is."""
    from dsc.debug import stages

    found = stages.pick(session, after, graph, region)
    if not found:
        why = "; ".join(why for r in session.regions for _, why in r.left) or "it computes nothing"
        fail(f"Nothing of {session.model.name} was captured: {why}.", BAD_INPUT)
    order = ("forward", "inference", "joint", "backward")
    return min(reversed(found), key=lambda p: order.index(p.stage.graph))
