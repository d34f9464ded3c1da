"""``dsc memory``: whether a train step fits into a budget, by which plan, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inputs, ModelName, TargetName, app, console, fail, print_json

if TYPE_CHECKING:
    from rich.table import Table
    from torch.fx import GraphModule

    from dsc.debug.capture import Session
    from dsc.passes.memory_plan import Search
    from dsc.plan import MemoryPlan

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

Budget = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="SIZE", help="40GiB, 80% of the target's memory, or auto (the default)."),
]
Held = Annotated[
    str, typer.Option("--held", metavar="SIZE", help="Of the budget, what something else occupies: optimizer state.")
]
Frontier = Annotated[bool, typer.Option("--frontier", help="Print the time at many peaks instead.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Write the plan here: options={'memory_plan': ...}.")]


@app.command()
def memory(
    model: ModelName,
    inputs: Inputs = None,
    target: TargetName = None,
    budget: Budget = "auto",
    held: Held = "0B",
    frontier: Frontier = False,
    plan: PlanFile = None,
    as_json: AsJson = False,
) -> None:
    """Plan the train step of MODEL within a memory budget: peak, extra time, and what becomes of the largest values.

    A budget that cannot be met ends with exit code 1 and the smallest that can.  Time is modelled, not measured.
    """
    from dsc import budget as budgets
    from dsc import plan as plans
    from dsc.cli import source
    from dsc.errors import InfeasibleBudget
    from dsc.passes import memory as planner
    from dsc.passes.memory_plan import Search
    from dsc.passes.memory_problem import extract

    session = source.captured(model, inputs, target)
    limit = budgets.bytes_of(budget or "auto", session.target, "--budget")
    other = 0 if held == "0B" else budgets.bytes_of(held, session.target, "--held")
    found = []
    for gm in joints(session):
        search = Search(gm, extract(gm, session.target), session.target)
        if frontier:
            console().print(frontier_table(search))
            continue
        program = search.within(limit - other)
        if program is None:
            error: InfeasibleBudget = planner.infeasible(search, search.least(), limit, other)
            fail(str(error))
        described = planner.described(search, program, limit, other)
        found.append(described)
        if plan is not None:
            plans.add(plan, plans.fingerprint(gm), described)
    if as_json:
        print_json([summary(p) for p in found])
        return
    for p in found:
        console().print(heading(p), highlight=False)
        console().print(decisions_table(p))


def joints(session: Session) -> list[GraphModule]:
    """The joint graphs as the planner gets them; a model without gradients has none."""
    graphs = []
    for region in session.regions:
        stages = [s for s in region.of("joint") if s.name == "canonicalize"]
        if stages:
            graphs.append(stages[0].gm)
    if not graphs:
        fail(f"{session.model.name} has no backward to plan for.")
    return graphs


def heading(p: MemoryPlan) -> str:
    from dsc.errors import size

    return (
        f"{p.target}: planned peak {size(p.peak)} of {size(p.budget)}, {p.extra:+.1%} time ({p.origin}); "
        f"without a budget {size(p.default_peak)}, {p.default_seconds * 1e3:.3g} ms"
    )


def decisions_table(p: MemoryPlan) -> Table:
    """The ten largest values of the forward that the backward reads."""
    from rich.table import Table

    from dsc.errors import size

    table = Table("value", "size", "decision")
    table.columns[1].justify = "right"
    for d in p.decisions[:10]:
        table.add_row(d.name, size(d.nbytes), d.keep)
    return table


def frontier_table(search: Search) -> Table:
    """Extra time at shares of the default's peak."""
    from rich.table import Table

    from dsc.errors import size

    table = Table("peak", "share", "extra time", "plan")
    seen = set()
    for share in SHARES:
        program = search.within(int(search.default.peak * share))
        program = program or search.least()
        if program.peak in seen:
            break
        seen.add(program.peak)
        extra = program.seconds / search.default.seconds - 1
        table.add_row(size(program.peak), f"{program.peak / search.default.peak:.0%}", f"{extra:+.1%}", program.origin)
    return table


def summary(p: MemoryPlan) -> dict[str, object]:
    return {
        "target": p.target,
        "budget": p.budget,
        "held": p.held,
        "peak": p.peak,
        "extra": p.extra,
        "plan": p.origin,
        "default_peak": p.default_peak,
        "default_seconds": p.default_seconds,
        "largest": [{"name": d.name, "bytes": d.nbytes, "keep": d.keep} for d in p.decisions[:10]],
    }
