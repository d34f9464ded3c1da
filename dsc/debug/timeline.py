"""A picture of the bytes that are alive through a train step, by what they are, before and after a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsc.liveness import Kind, Profile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLORS: Mapping[Kind, str] = {
    "input": "#9aa5b1",
    "tangent": "#c3cad2",
    "result": "#6c7a89",
    "gradient": "#7b61a8",
    "saved": "#2b7bba",
    "compressed": "#2a9d6f",
    "temporary": "#f2a33a",
    "pool": "#e0cfa9",
}
NAMES: Mapping[Kind, str] = {
    "input": "parameters and inputs", "tangent": "incoming gradients", "result": "results", "gradient": "gradients",
    "saved": "saved for the backward", "compressed": "saved in fewer bits", "temporary": "temporaries",
}  # fmt: skip
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
LARGE_STEPS = 4000
"""Steps beyond which neighbours are shown as one, at the larger of them."""


def write(path: Path, shown: Sequence[tuple[str, Profile]], budget: int | None, title: str) -> None:
    """``.html``, or an image where kaleido is installed."""
    picture = figure(shown, budget, title)
    if path.suffix == ".html":
        page = picture.to_html(include_plotlyjs=True, config={"responsive": True})
        path.write_text(page.replace("<head>", f"<head>{VIEWPORT}", 1), encoding="utf-8")
    else:
        picture.write_image(path, width=1400, height=420 * len(shown))


def figure(shown: Sequence[tuple[str, Profile]], budget: int | None, title: str) -> Figure:
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    picture = make_subplots(
        rows=len(shown), cols=1, subplot_titles=[name for name, _ in shown], shared_yaxes="all", vertical_spacing=0.12
    )
    named: set[Kind] = set()
    top = max(profile.peak for _, profile in shown)
    unit, size = next((u for u in UNITS if top >= u[1]), UNITS[-1])
    for row, (_, profile) in enumerate(shown, 1):
        steps = [name for name, _ in profile.timeline]
        keep = kept(profile)
        for kind, alive in by_kind(profile).items():
            line: dict[str, Any] = {
                "x": keep, "y": [alive[i] / size for i in keep], "text": [steps[i] for i in keep],
                "name": NAMES.get(kind, kind), "legendgroup": kind, "showlegend": kind not in named,
                "stackgroup": "alive", "line": {"width": 0, "shape": "hv"}, "fillcolor": COLORS[kind],
                "hovertemplate": f"%{{text}}: %{{y:.4~g}} {unit}",
            }  # fmt: skip
            picture.add_trace(go.Scatter(**line), row=row, col=1)
            named.add(kind)
        if budget is not None:
            picture.add_hline(
                y=budget / size, line={"dash": "dash", "color": "#c0392b"}, annotation_text="budget", row=row, col=1
            )
        picture.update_yaxes(title_text=f"{unit} alive", rangemode="tozero", row=row, col=1)
    picture.update_xaxes(title_text="step of forward and backward", row=len(shown), col=1)
    below = {"orientation": "h", "x": 0, "yref": "container", "y": 0.01, "yanchor": "bottom"}
    margin = {"l": 56, "r": 16, "t": 90, "b": 130}
    picture.update_layout(
        title=title, template="plotly_white", hovermode="x", height=420 * len(shown), legend=below, margin=margin
    )
    return picture


def by_kind(profile: Profile) -> dict[Kind, list[int]]:
    """Bytes alive at each step, kind by kind, for kinds that occur."""
    count = len(profile.timeline)
    out: dict[Kind, list[int]] = {}
    for kind in COLORS:
        change = [0] * (count + 1)
        for v in profile.values:
            if v.kind == kind and v.last >= max(v.first, 0):
                change[max(v.first, 0)] += v.nbytes
                change[v.last + 1] -= v.nbytes
        alive = list(accumulate(change[:-1]))
        if any(alive):
            out[kind] = alive
    return out


def kept(profile: Profile) -> list[int]:
    """Steps to show: of very many, the largest of each few."""
    sizes = [n for _, n in profile.timeline]
    few = -(-len(sizes) // LARGE_STEPS)
    return [max(range(i, min(i + few, len(sizes))), key=sizes.__getitem__) for i in range(0, len(sizes), few)]
