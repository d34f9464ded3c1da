"""A pipeline plan as a Gantt chart: a lane a rank, a bar an action, arrows' delays as gaps; HTML alone in one file, or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsc.distributed import table
from dsc.distributed.plan import PipelinePlan
from dsc.errors import BadOption, ChartImpossible

NAMES = {"F": "forward", "I": "input gradients", "W": "weight gradients", "B": "backward"}
COLORS = {"F": "#4c78a8", "I": "#e45756", "W": "#72b7b2", "B": "#f58518"}


def figure(plan: PipelinePlan) -> Any:
    """The plotly figure.

    Raises:
        ChartImpossible: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError:
        raise ChartImpossible("plotly is not installed", "pip install 'dsc-compiler[cli]'") from None
    line = table.simulated(plan)
    last = len(plan.stages) // plan.ranks
    fig = go.Figure()
    for kind, name in NAMES.items():
        bars: dict[str, list[Any]] = {"x": [], "base": [], "y": [], "text": [], "hover": [], "shade": []}
        for rank, (order, spans) in enumerate(zip(plan.orders, line.spans)):
            for (stage, k, batch), (start, end) in zip(order, spans):
                if k == kind and end > start:
                    bars["x"].append((end - start) * 1e3)
                    bars["base"].append(start * 1e3)
                    bars["y"].append(f"rank {rank}")
                    bars["text"].append(str(batch))
                    bars["hover"].append(
                        f"{name}, stage {stage}, micro-batch {batch}<br>{start * 1e3:.4g} to {end * 1e3:.4g} ms"
                    )
                    bars["shade"].append(1.0 - 0.45 * (stage // plan.ranks) / max(last - 1, 1))
        if bars["x"]:
            fig.add_bar(
                orientation="h",
                name=name,
                x=bars["x"],
                base=bars["base"],
                y=bars["y"],
                text=bars["text"],
                hovertext=bars["hover"],
                hoverinfo="text",
                textposition="inside",
                insidetextanchor="middle",
                marker={"color": COLORS[kind], "opacity": bars["shade"], "line": {"width": 0.5, "color": "white"}},
            )
    caption = table.heading(plan).replace("\n", "<br>")
    fig.update_layout(
        title={"text": f"<span style='font-size:13px'>{caption}</span>", "x": 0.01},
        barmode="overlay",
        bargap=0.15,
        plot_bgcolor="white",
        height=170 + 44 * plan.ranks,
        margin={"l": 70, "r": 20, "t": 90, "b": 50},
        legend={"orientation": "h", "y": -0.12 - 1.2 / (plan.ranks + 2)},
        uniformtext={"minsize": 8, "mode": "hide"},
    )
    fig.update_yaxes(
        categoryorder="array", categoryarray=[f"rank {r}" for r in reversed(range(plan.ranks))], title_text=""
    )
    fig.update_xaxes(title_text="ms (modelled); lighter: later stages of a rank", range=[0, line.seconds * 1e3])
    return fig


def write(plan: PipelinePlan, path: str | Path) -> None:
    """Write the chart, as its ending says: ``.html`` (works without network) or ``.png`` (needs kaleido).

    Raises:
        BadOption: another ending.
        ChartImpossible: a library that it needs is not installed.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in (".html", ".png"):
        raise BadOption("--gantt", str(path), "a file name that ends in .html or .png")
    fig = figure(plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".html":
        fig.write_html(path, include_plotlyjs=True)
        return
    try:
        fig.write_image(path, width=1400, scale=2)
    except (ImportError, ValueError, RuntimeError) as why:
        reason = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
        raise ChartImpossible(
            f"no picture could be made ({reason.rstrip('.')})", "give a file that ends in .html"
        ) from why
