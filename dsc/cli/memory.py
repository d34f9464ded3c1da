"""``dsc memory``: whether a train step fits into a budget, by which plan, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inputs, ModelName, TargetName, app, console, fail, print_json

if TYPE_CHECKING:
    import torch
    from rich.table import Table
    from torch.fx import GraphModule

    from dsc.debug import shapes
    from dsc.debug.capture import Session
    from dsc.debug.source import Model
    from dsc.passes.memory_plan import Search
    from dsc.passes.memory_program import Program
    from dsc.plan import Decision, MemoryPlan
    from dsc.target import Target
    from dsc.tiers import Tier

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
TORCH_SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Values of torch's own budget that a frontier shows beside."""

Budget = Annotated[
    str | None,
    typer.Option("--budget", "-b", metavar="SIZE", help="40GiB, 80% of the target's memory, or auto (the default)."),
]
Held = Annotated[
    str, typer.Option("--held", metavar="SIZE", help="Of the budget, what something else occupies: optimizer state.")
]
Batch = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Samples; of a model by name, which is then traced on shapes alone."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="Of weights traced on shapes: bf16 (for GPUs), f16, f32.")
]
Offload = Annotated[
    str | None, typer.Option("--offload", metavar="TIER", help="Move saved values to cpu, or to nvme:FOLDER.")
]
Compress = Annotated[
    str | None,
    typer.Option("--compress", metavar="FORMAT", help="Keep saved values in bf16, fp8 or e5m2: changes gradients."),
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Run one step in eager and one by the plan here; the error of the gradient.")
]
MaxBatch = Annotated[bool, typer.Option("--max-batch", help="Find the largest batch that fits.")]
Frontier = Annotated[bool, typer.Option("--frontier", help="Print the time at many peaks instead, torch's beside.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Write the plan here: options={'memory_plan': ...}.")]
Picture = Annotated[
    Path | None,
    typer.Option("--picture", help="Draw the bytes alive at each step: FILE.html, or FILE.png with kaleido."),
]


@app.command()
def memory(
    model: ModelName,
    inputs: Inputs = None,
    target: TargetName = None,
    budget: Budget = "auto",
    held: Held = "0B",
    batch: Batch = None,
    dtype: Dtype = None,
    offload: Offload = None,
    compress: Compress = None,
    measure: Measure = False,
    max_batch: MaxBatch = False,
    frontier: Frontier = False,
    plan: PlanFile = None,
    picture: Picture = None,
    as_json: AsJson = False,
) -> None:
    """Plan the train step of MODEL within a memory budget: peak, extra time, and what becomes of the largest values.

    gpt2-xl and llama-3-8b, and with --batch or --max-batch all models by name, are traced on shapes alone, so that they
    may be of any size.  A budget that cannot be met ends with exit code 1 and the smallest that can.  Time is modelled.
    """
    from dsc import narrow, tiers
    from dsc import plan as plans
    from dsc import target as targets
    from dsc.cli import shapes_of, source
    from dsc.passes import memory as planner
    from dsc.passes.memory_plan import Search
    from dsc.passes.memory_problem import extract

    tier = tiers.parse(offload, "--offload") if offload else None
    format = narrow.parse(compress, "--compress") if compress else None
    machine = targets.find(target or "cpu")
    traced: shapes.Joint | None = None
    if measure and (max_batch or frontier or batch is not None or machine.kind != "cpu"):
        fail("--measure runs the model on this CPU: leave out --target, --batch, --max-batch and --frontier.")
    if max_batch:
        largest(model, dtype, machine, tier, format, budget, held, as_json)
        return
    if batch is not None or model.lower() in shapes_of.LARGE:
        if plan is not None or inputs or measure:
            fail(
                "--plan, --measure and --input need the model itself: leave out --batch, or name a model of this machine's size."
            )
        entry = shapes_of.entry(model)
        traced = shapes_of.traced(entry, batch or entry.batch, dtype_of(dtype, machine), machine)
        graphs = [traced.gm]
    else:
        session = source.captured(model, inputs, target, dtype=dtype)
        machine, graphs = session.target, joints(session)
    limit, other = limits(budget, held, machine)
    found = []
    for i, gm in enumerate(graphs):
        search = Search(gm, extract(gm, machine), machine, tier=tier, format=format)
        if frontier:
            console().print(frontier_table(search, traced))
            continue
        program = search.within(limit - other) or search.least()
        if program.peak + other > limit:
            fail(str(planner.infeasible(search, program, limit, other)))
        described = planner.described(search, program, limit, other)
        found.append((described, program))
        if plan is not None:
            plans.add(plan, plans.fingerprint(gm), described)
        if picture is not None:
            draw(numbered(picture, i), model, search, program, limit - other)
    error = measured(session.model, limit, other, offload, compress) if measure else None
    report([p for p, _ in found], [p for _, p in found], as_json, frontier, error)


def measured(model: Model, limit: int, held: int, offload: str | None, compress: str | None) -> float:
    """Of the gradient, by the plan, against eager's."""
    from dsc.debug import gradient_error

    options = {"memory_budget": limit, "memory_held": held, "offload": offload, "compress": compress}
    return gradient_error.measure(model, options)


def largest(
    model: str,
    dtype: str | None,
    machine: Target,
    tier: Tier | None,
    format: str | None,
    budget: str | None,
    held: str,
    as_json: bool,
) -> None:
    from dsc.cli import shapes_of
    from dsc.errors import size
    from dsc.passes import memory as planner

    limit, other = limits(budget, held, machine)
    entry, kind = shapes_of.entry(model), dtype_of(dtype, machine)

    def search(batch: int) -> Search:
        return shapes_of.search(shapes_of.traced(entry, batch, kind, machine), machine, tier, format)

    found = shapes_of.largest_batch(search, limit - other)
    if found is None:
        fail(
            f"Not even one sample of {model} fits into {size(limit)} on {machine.name}; a larger card, or --offload cpu."
        )
    described = planner.described(found.search, found.program, limit, other)
    if as_json:
        print_json({"batch": found.batch, **summary(described, found.program)})
        return
    console().print(f"largest batch: {found.batch}", highlight=False)
    report([described], [found.program], False, False)


def limits(budget: str | None, held: str, machine: Target) -> tuple[int, int]:
    """Bytes of the budget, and of what something else occupies."""
    from dsc import budget as budgets

    other = 0 if held == "0B" else budgets.bytes_of(held, machine, "--held")
    return budgets.bytes_of(budget or "auto", machine, "--budget"), other


def report(
    plans: list[MemoryPlan], programs: list[Program], as_json: bool, frontier: bool, error: float | None = None
) -> None:
    if frontier:
        return
    if as_json:
        more = {} if error is None else {"gradient_error": error}
        print_json([{**summary(p, program), **more} for p, program in zip(plans, programs)])
        return
    for p, program in zip(plans, programs):
        console().print(heading(p), highlight=False)
        console().print(fragments(p, program), highlight=False)
        console().print(decisions_table(p))
    if error is not None:
        console().print(f"error of the gradient against eager's, measured here: {error:.2e}", highlight=False)


def dtype_of(name: str | None, machine: Target) -> torch.dtype | None:
    """The dtype of weights in a trace on shapes; bf16 on a GPU where none is named.

    Raises:
        BadOption: another name.
    """
    import torch

    from dsc.errors import BadOption

    known = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": None}
    name = name or ("bf16" if machine.kind == "cuda" else "f32")
    if name not in known:
        raise BadOption("--dtype", name, f"one of {', '.join(known)}")
    return known[name]


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


def numbered(path: Path, i: int) -> Path:
    return path if i == 0 else path.with_stem(f"{path.stem}-{i + 1}")


def draw(path: Path, model: str, search: Search, program: Program, budget: int) -> None:
    from dsc.debug import timeline
    from dsc.errors import size

    try:
        import plotly  # noqa: F401
    except ImportError:
        fail("Pictures need plotly: pip install 'dsc-compiler[cli]'")
    shown = [("without a budget", search.default.profile), (f"by plan: {program.origin}", program.profile)]
    title = f"{model} on {search.target.name} within {size(budget)}"
    try:
        timeline.write(path, shown, budget, title)
    except (ValueError, ImportError, RuntimeError) as why:
        fail(f"{path} cannot be drawn: {str(why).strip().splitlines()[0]}; name a file that ends in .html.")


def heading(p: MemoryPlan) -> str:
    from dsc.errors import size

    return (
        f"{p.target}: planned peak {size(p.peak)} of {size(p.budget)}, {p.extra:+.1%} time ({p.origin}); "
        f"without a budget {size(p.default_peak)}, {p.default_seconds * 1e3:.3g} ms"
    )


def fragments(p: MemoryPlan, program: Program) -> str:
    """What the allocator has to reserve because values of different lifetimes leave holes."""
    from dsc import fragments
    from dsc.errors import size

    reserved = fragments.reserved(program.profile) + p.held
    return f"with the holes that an allocator leaves: {size(reserved)} ({reserved / p.peak - 1:+.1%})"


def decisions_table(p: MemoryPlan) -> Table:
    """The ten largest values of the forward that the backward reads."""
    from rich.table import Table

    from dsc.errors import size

    table = Table("value", "size", "decision")
    table.columns[1].justify = "right"
    for d in p.decisions[:10]:
        table.add_row(d.name, size(d.nbytes), f"{d.keep} {d.format}, {size(d.stored)}" if d.format else d.keep)
    return table


def frontier_table(search: Search, traced: shapes.Joint | None = None) -> Table:
    """Extra time at shares of the default's peak; of a model traced on shapes with torch's own points."""
    from rich.table import Table

    from dsc.errors import size

    table = Table("peak", "share", "extra time", "plan")
    whole, seconds = search.default.peak, search.default.seconds
    rows: dict[int, tuple[float, str]] = {}
    for share in SHARES:
        program = search.within(int(whole * share)) or search.least()
        if program.peak in rows:
            break
        rows[program.peak] = program.seconds, program.origin
    if traced is not None:
        from dsc.cli import shapes_of

        for share in TORCH_SHARES:
            peak, time = shapes_of.torch_point(traced, share, search.target)
            rows.setdefault(peak, (time, f"torch, activation_memory_budget {share}"))
    for peak, (time, what) in sorted(rows.items(), reverse=True):
        table.add_row(size(peak), f"{peak / whole:.0%}", f"{time / seconds - 1:+.1%}", what)
    return table


def summary(p: MemoryPlan, program: Program) -> dict[str, object]:
    from dsc import fragments

    return {
        "target": p.target,
        "budget": p.budget,
        "held": p.held,
        "peak": p.peak,
        "reserved": fragments.reserved(program.profile) + p.held,
        "extra": p.extra,
        "plan": p.origin,
        "default_peak": p.default_peak,
        "default_seconds": p.default_seconds,
        "largest": [shown(d) for d in p.decisions[:10]],
    }


def shown(d: Decision) -> dict[str, object]:
    short = {"format": d.format, "stored": d.stored} if d.format else {}
    return {"name": d.name, "bytes": d.nbytes, "keep": d.keep, **short}
