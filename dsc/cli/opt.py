"""``dsc opt``: a pipeline of the user's choice, its result, and whether that computes what eager does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import FAILED, AsJson, Inference, Inputs, ModelName, TargetName, app, console, print_json
from dsc.cli.show import GraphName, RegionNumber, Source

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from dsc.debug.check import Compared

Passes = Annotated[
    str | None,
    typer.Option("--passes", "-p", metavar="PIPELINE", help="Such as 'recompute,fuse{max_nodes=4}'."),
]
StopAfter = Annotated[str | None, typer.Option("--stop-after", metavar="PASS", help="Run no pass after this one.")]
Disable = Annotated[list[str] | None, typer.Option("--disable", metavar="PASS", help="Leave this pass out.")]
Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Check the graph after every pass.")]
Run = Annotated[bool, typer.Option("--run", help="Run it here, forward and backward, and compare with eager.")]


@app.command()
def opt(
    model: ModelName,
    pipeline: Passes = None,
    stop_after: StopAfter = None,
    disable: Disable = None,
    verify: Verify = True,
    run: Run = False,
    graph: GraphName = None,
    region: RegionNumber = None,
    source: Source = False,
    inputs: Inputs = None,
    target: TargetName = None,
    inference: Inference = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline of passes over MODEL and print the graphs that come out.

    A pass that works on the joint graph runs before the split, the others on each graph after it.  If the last pass
    is one of the joint graph, that is printed, else the graphs that become programs.  With --run the exit code is 1
    if the results differ from eager's.
    """
    from dsc.cli import source as sources
    from dsc.cli.show import as_data, print_graph
    from dsc.debug import check, stages
    from dsc.debug.pipeline import cut
    from dsc.manager import spell
    from dsc.options import Options

    chosen = cut(pipeline, stop_after, disable or ())
    options = Options(passes=chosen, verify=verify)
    session = sources.captured(model, inputs, target, training=not inference, options=options)
    picked = stages.pick(session, None, graph, region)
    if graph is None:
        joint = bool(chosen) and chosen[-1].runs_on == "joint" and any(p.stage.graph == "joint" for p in picked)
        picked = [p for p in picked if (p.stage.graph == "joint") == joint]
    compared = []
    if run:
        given = {"passes": chosen, "verify": verify, "target": session.target.name}
        compared = check.check(session.model, given, training=not inference)
    if as_json:
        print_json(
            {
                "model": session.model.name,
                "target": session.target.name,
                "passes": spell(chosen),
                "graphs": [as_data(p, False, source) for p in picked],
                "compared": [{**c.__dict__, "agrees": c.agrees} for c in compared],
            }
        )
    else:
        out = console()
        for i, p in enumerate(picked):
            if i:
                out.print()
            print_graph(p, len(session.regions) > 1, source, out)
        if run:
            out.print(verdict(compared), soft_wrap=True)
            out.print(comparison(compared))
    if not check.agree(compared):
        raise typer.Exit(FAILED)


def verdict(every: Sequence[Compared]) -> Text:
    """In one line."""
    from rich.text import Text

    wrong = sum(not c.agrees for c in every)
    if wrong:
        return Text(f"\n{wrong} of {len(every)} results and gradients differ from eager's:", style="red")
    return Text(f"\nAll {len(every)} results and gradients agree with eager's; the furthest off:", style="green")


def comparison(every: Sequence[Compared]) -> Table:
    """What differs, or the results that are furthest off for what is allowed."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    wrong = [c for c in every if not c.agrees]
    worst = sorted(every, key=lambda c: c.ours / c.allowed if c.allowed else 0.0, reverse=True)[:5]
    out = Table(box=SIMPLE_HEAD)
    out.add_column("", overflow="fold")
    for name in ("off by", "eager", "allowed"):
        out.add_column(name, justify="right", no_wrap=True)
    for c in wrong[:20] or worst:
        out.add_row(
            Text(c.name + (f": {c.problem}" if c.problem else "")),
            *(f"{x:.1e}" for x in (c.ours, c.eager, c.allowed)),
            style="" if c.agrees else "red",
        )
    return out
