"""``dsc precision``: which format each matrix product gets under a budget of gradient error, and what that is worth."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsc.cli.app import AsJson, Inputs, ModelName, TargetName, app, console, fail, print_json, progress

if TYPE_CHECKING:
    from rich.table import Table

    from dsc.passes.precision_calibrate import Calibration
    from dsc.precision.plan import PrecisionPlan

BUDGETS = (0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08)
UNIFORM = ("bf16", "fp8-rowwise", "fp8-blockwise", "int8-rowwise", "int8-blockwise")

Budget = Annotated[
    float, typer.Option("--error-budget", "-e", metavar="X", help="The most that the gradient may change, relatively.")
]
Scale = Annotated[
    float,
    typer.Option("--scale", metavar="X", help="Model times for layers X times as wide, on X times as many tokens."),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Write the plan here: options={'precision_plan': ...}.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.html", help="Draw speed against error, and the formats.")
]


@app.command()
def precision(
    model: ModelName,
    inputs: Inputs = None,
    target: TargetName = "h100",
    error_budget: Budget = 0.02,
    scale: Scale = 1.0,
    plan: PlanFile = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Choose a number format for every matrix product of MODEL's train step: measured errors, modelled times.

    The errors are measured here, on these inputs; the times are those of TARGET.
    """
    from dsc import target as targets
    from dsc.cli import source
    from dsc.passes.precision_calibrate import calibrate
    from dsc.passes.precision_measure import Measured
    from dsc.passes.precision_plan import plan as planned
    from dsc.passes.precision_sites import extract
    from dsc.precision import plan as plans
    from dsc.precision.request import check_budget

    check_budget(error_budget)
    machine = targets.find(target or "h100")
    if machine.kind == "cpu":
        fail("A CPU only emulates formats, so there is nothing to plan for it; give --target h100 or a100.")
    session = source.captured(model, inputs, "cpu")
    found: list[tuple[Calibration, PrecisionPlan]] = []
    for region in session.regions:
        for gm in [s.gm for s in region.of("joint") if s.name == "canonicalize"][:1]:
            sites = extract(gm)
            if not sites:
                continue
            progress().print(f"measuring {len(sites)} products", highlight=False)
            calibration = calibrate(Measured(gm, sites, region.inputs), sites, machine, scale=scale)
            found.append((calibration, planned(calibration, error_budget)))
    if not found:
        fail(f"{session.model.name} has no matrix product with a backward.")
    for _, made in found:
        if plan is not None:
            plans.add(plan, made)
    if plot is not None:
        draw([c for c, _ in found], [p for _, p in found], plot)
    if as_json:
        print_json([summary(p) for _, p in found])
        return
    for calibration, made in found:
        console().print(table(calibration, made))
        console().print(heading(made), highlight=False)


def heading(p: PrecisionPlan) -> str:
    counts = ", ".join(f"{n} {f}" for f, n in Counter(c.format for c in p.choices).most_common())
    seen = f"measured {p.measured:.4f}" if p.measured is not None else "not measured"
    return (
        f"{p.target}: {p.speedup:.2f}x bf16 in the products (modelled: {p.seconds * 1e6:.0f} us of {p.baseline * 1e6:.0f}), "
        f"gradient error predicted {p.predicted:.4f}, {seen}, budget {p.budget:g}: {counts}"
    )


def table(calibration: Calibration, p: PrecisionPlan) -> Table:
    """A product a row, in the order in which they run."""
    from rich.table import Table

    from dsc.passes.precision_time import product_seconds
    from dsc.precision.formats import FORMATS

    out = Table("product", "MxNxK", "format", "error", "us", "us in bf16")
    for column in out.columns:
        column.no_wrap = column.header != "product"
    for column in out.columns[3:]:
        column.justify = "right"
    for c in p.choices:
        m, n, k = (x * calibration.scale for x in c.shape)
        bf16 = product_seconds(m, n, k, FORMATS["bf16"], calibration.target)
        shape = "x".join(f"{x:.0f}" for x in (m, n, k))
        out.add_row(c.site, shape, c.format, f"{c.error:.4f}", f"{c.seconds * 1e6:.1f}", f"{bf16 * 1e6:.1f}")
    return out


def draw(calibrations: list[Calibration], plans: list[PrecisionPlan], file: Path) -> None:
    """Two pictures: modelled speed-up against gradient error, and the format of every product by layer and role."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    from dsc.precision.formats import FORMATS, ROLES

    names = sorted({c.format for p in plans for c in p.choices}, key=list(FORMATS).index)
    layers = list(dict.fromkeys(c.site.rpartition(".")[0] for p in plans for c in p.choices))
    figure = make_subplots(1, 2, subplot_titles=("Speed-up against error", "Formats"), horizontal_spacing=0.24)
    for calibration in calibrations:
        x, y = frontier(calibration)
        figure.add_trace(go.Scatter(x=x, y=y, mode="lines+markers", name="plans, predicted"), 1, 1)
        places: dict[tuple[float, float], list[str]] = {}
        for name, error, speed in uniform(calibration):
            places.setdefault((round(error, 5), round(speed, 3)), []).append(name)
        for (error, speed), here in places.items():  # plans that are the same share a mark
            figure.add_trace(
                go.Scatter(x=[error], y=[speed], mode="markers+text", text=["<br>".join(here)], textposition="bottom center",
                           marker={"symbol": "x", "size": 10}, name=f"all {', '.join(here)}", showlegend=False, cliponaxis=False), 1, 1
            )  # fmt: skip
    for p in plans:
        figure.add_trace(
            go.Scatter(x=[p.measured or p.predicted], y=[p.speedup], mode="markers", marker={"size": 14, "color": "black"},
                       name="this plan, measured"), 1, 1
        )  # fmt: skip
    codes = {c.site: names.index(c.format) for p in plans for c in p.choices}
    rows = [[codes.get(f"{layer}.{role}") for role in ROLES] for layer in layers]
    words = [["" if v is None else names[v] for v in row] for row in rows]
    figure.add_trace(
        go.Heatmap(z=rows, x=list(ROLES), y=layers, text=words, texttemplate="%{text}", showscale=False,
                   colorscale="Viridis", zmin=0, zmax=max(len(names) - 1, 1), opacity=0.6), 1, 2
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", row=1, col=2, automargin=True)
    figure.update_xaxes(title_text="relative gradient error", row=1, col=1)
    figure.update_yaxes(title_text="modelled speed-up of products over bf16", row=1, col=1)
    figure.update_layout(
        template="plotly_white", height=max(500, 22 * len(layers) + 160), legend={"orientation": "h", "x": 0, "y": -0.12},
        title=f"Formats for {plans[0].target}",
    )  # fmt: skip
    file.write_text(figure.to_html(include_plotlyjs=True))


def frontier(calibration: Calibration) -> tuple[list[float], list[float]]:
    """Predicted errors, and speed-ups, of the plans for many budgets."""
    from dsc.errors import ErrorBudgetTooSmall
    from dsc.passes.precision_plan import choose
    from dsc.passes.precision_time import seconds

    bf16 = seconds(calibration.sites, {}, calibration.target, calibration.scale)
    points = []
    for budget in BUDGETS:
        try:
            formats = choose(calibration, budget)
        except ErrorBudgetTooSmall:
            continue
        time = seconds(calibration.sites, formats, calibration.target, calibration.scale)
        points.append((calibration.predicted(formats), bf16 / time))
    return [x for x, _ in points], [y for _, y in points]


def uniform(calibration: Calibration) -> list[tuple[str, float, float]]:
    """Format, predicted error and speed-up of one format for all products; those that cannot have it are in bf16."""
    from dsc.passes.precision_time import seconds
    from dsc.precision.formats import FORMATS

    out = []
    bf16 = seconds(calibration.sites, {}, calibration.target, calibration.scale)
    for name in UNIFORM:
        formats = {s.name: FORMATS[name if (s.name, name) in calibration.errors else "bf16"] for s in calibration.sites}
        if (
            all((s, f.name) in calibration.errors for s, f in formats.items())
            and FORMATS[name] in calibration.candidates
        ):
            time = seconds(calibration.sites, formats, calibration.target, calibration.scale)
            out.append((name, calibration.predicted(formats), bf16 / time))
    return out


def summary(p: PrecisionPlan) -> dict[str, object]:
    return {
        "target": p.target,
        "budget": p.budget,
        "predicted": p.predicted,
        "measured": p.measured,
        "speedup": p.speedup,
        "probes": p.probes,
        "products": [
            {"site": c.site, "format": c.format, "error": c.error, "seconds": c.seconds, "shape": list(c.shape)}
            for c in p.choices
        ],
    }
