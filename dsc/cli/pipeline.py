"""``dsc pipeline``: cut a model into pipeline stages for a cluster, and choose the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inputs, ModelName, app, console, print_json, progress

if TYPE_CHECKING:
    from rich.table import Table

    from dsc.distributed.plan import PipelinePlan

Stages = Annotated[str, typer.Option("--stages", "-s", metavar="N", help="Ranks of the pipeline, or auto.")]
ClusterName = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        metavar="SPEC",
        help="8xa100, 2x8xh100 (nodes, cards a node), 4x8xh100@ib200 (Gb/s a card between nodes).",
    ),
]
Batches = Annotated[str, typer.Option("--microbatches", "-m", metavar="M", help="Slices of the batch, or auto.")]
ScheduleName = Annotated[
    str,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="auto, searched, gpipe, 1f1b, zb-h1, interleaved, interleaved-zb, zbv or dualpipev.",
    ),
]
MemorySize = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="That a card may use: 70GiB, 80%.")]
Tensor = Annotated[int, typer.Option("--tensor", metavar="N", help="Cards of a tensor-parallel group.")]
Data = Annotated[int, typer.Option("--data", metavar="N", help="Replicas.")]
Zero = Annotated[int, typer.Option("--zero", metavar="LEVEL", min=0, max=3, help="ZeRO over the replicas.")]
Optimizer = Annotated[str, typer.Option("--optimizer", metavar="NAME", help="adam, momentum or sgd.")]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="NAME", help="bf16, f16, f32 or f64 weights and inputs.")]
Effort = Annotated[str, typer.Option("--effort", metavar="NAME", help="quick, usual or long.")]
PlanFile = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan as JSON.")]
OldPlan = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Show this plan instead of making one.")]
Diff = Annotated[Path | None, typer.Option("--diff", metavar="FILE", help="Print what differs from this plan.")]
Gantt = Annotated[Path | None, typer.Option("--gantt", "-g", metavar="FILE", help="Draw the timeline: .html or .png.")]


@app.command()
def pipeline(
    model: ModelName,
    inputs: Inputs = None,
    stages: Stages = "auto",
    cluster: ClusterName = "8xa100",
    microbatches: Batches = "auto",
    schedule: ScheduleName = "auto",
    memory: MemorySize = None,
    tensor: Tensor = 1,
    data: Data = 1,
    zero: Zero = 0,
    optimizer: Optimizer = "adam",
    dtype: Dtype = None,
    effort: Effort = "usual",
    out: PlanFile = None,
    plan: OldPlan = None,
    diff: Diff = None,
    gantt: Gantt = None,
    as_json: AsJson = False,
) -> None:
    """Cut MODEL into pipeline stages for a cluster that need not be here, and choose who runs what when.

    Times and bytes are modelled, not measured.  The inputs are the batch of one replica; with --stages auto they are
    that of the whole cluster.
    """
    from dsc.distributed import table
    from dsc.distributed.plan import PipelinePlan

    if plan is not None:
        found = PipelinePlan.load(plan)
    else:
        found = planned(
            model,
            inputs,
            stages,
            cluster,
            microbatches,
            schedule,
            memory,
            (data, tensor, zero),
            optimizer,
            dtype,
            effort,
        )
    if out is not None:
        found.save(out)
        progress().print(f"The plan is in {out}.", highlight=False)
    if gantt is not None:
        from dsc.distributed import gantt as chart

        chart.write(found, gantt)
        progress().print(f"The chart is in {gantt}.", highlight=False)
    if diff is not None:
        lines = PipelinePlan.load(diff).diff(found)
        console().print("\n".join(lines) or "The plans are equal.", highlight=False, markup=False)
        return
    if as_json:
        print_json(summary(found))
        return
    show = console()
    show.print(table.heading(found), highlight=False, markup=False)
    show.print(rich_table(table.COLUMNS, table.rows(found), numbers=(0, 1, 3, 4, 5, 6, 7, 8, 9)))
    show.print(rich_table(table.RANK_COLUMNS, table.rank_rows(found), numbers=range(6)))
    for line in table.timeline(found, max(20, min(show.width - 6, 160))):
        show.print(line, highlight=False, markup=False)
    show.print(rich_table(table.RIVAL_COLUMNS, table.rival_rows(found), numbers=(2, 3, 4)))
    for remark in table.remarks(found):
        show.print(f"- {remark}", highlight=False, markup=False)


def planned(
    model: str,
    inputs: list[str] | None,
    stages: str,
    cluster: str,
    microbatches: str,
    schedule: str,
    memory: str | None,
    degrees: tuple[int, int, int],
    optimizer: str,
    dtype: str | None,
    effort: str,
) -> PipelinePlan:
    """The plan of a model by its name."""
    import torch

    from dsc.cli import source
    from dsc.distributed.plan import Degrees
    from dsc.distributed.planner import plan_pipeline

    found = source.in_dtype(source.find(model, inputs or ()), dtype)
    data, tensor, zero = degrees
    given = Degrees(data=data, tensor=tensor, sequence=tensor, zero=zero) if degrees != (1, 1, 0) else None
    return plan_pipeline(
        found.module,
        tuple(a for a in found.args if isinstance(a, torch.Tensor)),
        stages=whole(stages),  # type: ignore[arg-type]  # the planner says what is wrong with a text
        cluster=cluster,
        microbatches=whole(microbatches),  # type: ignore[arg-type]
        schedule=schedule,
        memory=memory,
        degrees=given,
        optimizer=optimizer,
        effort=effort,
    )


def whole(text: str) -> int | str:
    """A number where it is one."""
    try:
        return int(text)
    except ValueError:
        return text


def rich_table(names: tuple[str, ...], rows: list[tuple[str, ...]], numbers: tuple[int, ...] | range) -> Table:
    from rich import box
    from rich.table import Table

    found = Table(*names, box=box.SIMPLE_HEAD)
    for i in numbers:
        found.columns[i].justify = "right"
    for row in rows:
        found.add_row(*row)
    return found


def summary(plan: PipelinePlan) -> dict[str, object]:
    return {
        "model": plan.model,
        "cluster": str(plan.cluster),
        "ranks": plan.ranks,
        "stages": len(plan.stages),
        "schedule": plan.schedule,
        "split": plan.split,
        "placement": plan.placement,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "seconds": plan.seconds,
        "bubble": plan.bubble,
        "bound": plan.bound,
        "peaks": list(plan.peaks),
        "limit": plan.limit,
        "first_calls": [s.nodes[0] for s in plan.stages],
        "shared": {name: list(at) for name, at in plan.shared.items()},
        "remarks": [{"node": r.node, "verdict": r.verdict, "why": r.why} for r in plan.remarks],
    }
