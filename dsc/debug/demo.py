"""The demo: a small language model learns real text twice at once, in eager PyTorch and through dsc.

Both copies start from the same weights, see the same batches and take turns, an eager step then a compiled step, so
that whatever else the machine does disturbs both alike.  The text is the source of Python's own standard library,
read byte by byte, so nothing is downloaded.

``run`` trains and returns a ``Summary`` of plain numbers; ``table``, ``chart`` and ``write_plot`` show it.
"""

from __future__ import annotations

import copy
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

TOLERANCE = 1e-3
"""The largest difference of two losses that still counts as the same curve."""


class Record(Protocol):
    """What dsc reports of a graph that it compiled."""

    @property
    def kind(self) -> str:
        """One of forward, backward, inference."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """Among others kernels, aten_calls and bytes, each for one call of the graph."""


@dataclass(frozen=True)
class Settings:
    """The defaults take about two minutes on two cores."""

    steps: int = 100
    seconds: float = 120.0  # no step begins later than this after the first
    batch: int = 8
    length: int = 128
    rate: float = 5e-4
    warmup: int = 20  # steps in which the learning rate rises to ``rate``
    text_bytes: int = 4_000_000
    backend: str = "dsc"
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One training step of one copy."""

    loss: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    backend: str
    parameters: int
    text_bytes: int
    eager: tuple[Step, ...]
    compiled: tuple[Step, ...]
    numbers: Mapping[str, float]  # of the forward and backward graphs together, for one step; empty for other backends

    @property
    def steps(self) -> int:
        return len(self.eager)

    @property
    def max_difference(self) -> float:
        """The largest distance between the two loss curves; not a number if a loss is not."""
        differences = [abs(a.loss - b.loss) for a, b in zip(self.eager, self.compiled)]
        return max(differences) if all(d == d for d in differences) else float("nan")

    @property
    def agrees(self) -> bool:
        return self.max_difference <= TOLERANCE

    @property
    def eager_seconds(self) -> float:
        return steady(self.eager)

    @property
    def compiled_seconds(self) -> float:
        return steady(self.compiled)

    @property
    def compile_seconds(self) -> float:
        """What the first compiled step took beyond a steady one."""
        return max(0.0, self.compiled[0].seconds - self.compiled_seconds)


def steady(steps: tuple[Step, ...]) -> float:
    """The median seconds of a step, without the first, which warms up."""
    return statistics.median(step.seconds for step in steps[1:] or steps)


# Training


def stdlib_text(limit: int) -> Tensor:
    """The first ``limit`` bytes of the standard library's source, files in order of their names: [N] uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (idx, targets), both [batch, length] int64: random places of the text, the targets one byte ahead."""
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, length + 1, 1)
    while True:
        places = torch.randint(len(windows), (batch,), generator=generator)
        chunk = windows[places].long()
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def stepper(call: Callable[..., Any], model: nn.Module, settings: Settings) -> Callable[[Tensor, Tensor], Step]:
    """A function that does one step of AdamW on ``model``, computing its loss with ``call``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / settings.warmup, total_iters=settings.warmup - 1)

    def step(idx: Tensor, targets: Tensor) -> Step:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss: Tensor = call(idx, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        value = loss.item()
        seconds = time.perf_counter() - start
        schedule.step()
        return Step(value, seconds)

    return step


def run(model: nn.Module, settings: Settings, text: Tensor, watch: Callable[[int, Step, Step], None]) -> Summary:
    """Train two copies of ``model`` on ``text`` ([N] uint8), leaving ``model`` itself as it is.

    ``model(idx, targets)``, both [batch, length] int64 below 256, is the loss.  ``watch`` hears of every pair of steps:
    its number, the eager step, the compiled step.
    """
    eager_model, compiled_model = copy.deepcopy(model), copy.deepcopy(model)
    records: list[Record] = []
    options: dict[str, Any] | None = {"on_compile": records.append} if settings.backend == "dsc" else None
    compiled_call = torch.compile(compiled_model, backend=settings.backend, options=options, dynamic=False)
    eager_step = stepper(eager_model, eager_model, settings)
    compiled_step = stepper(compiled_call, compiled_model, settings)

    eager: list[Step] = []
    compiled: list[Step] = []
    data = batches(text, settings.batch, settings.length, settings.seed)
    start = time.perf_counter()
    for index in range(settings.steps):
        if index and time.perf_counter() - start > settings.seconds:
            break
        idx, targets = next(data)
        eager.append(eager_step(idx, targets))
        compiled.append(compiled_step(idx, targets))
        watch(index, eager[-1], compiled[-1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Summary(settings.backend, parameters, len(text), tuple(eager), tuple(compiled), total(records))


def total(records: list[Record]) -> dict[str, float]:
    """The numbers of the forward and backward graphs, added up."""
    numbers: dict[str, float] = {}
    for record in records:
        if record.kind not in ("forward", "backward"):
            continue
        for key, value in record.numbers.items():
            numbers[key] = numbers.get(key, 0) + value
    return numbers


# Showing


def watch_live(model: nn.Module, settings: Settings, text: Tensor, console: Console) -> Summary:
    """``run`` under a progress bar with the losses and times of both copies."""
    columns = (
        TextColumn("[bold]step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("[cyan]eager {task.fields[eager]}"),
        TextColumn("[magenta]{task.fields[name]} {task.fields[compiled]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=settings.steps, name=settings.backend, eager="…", compiled="…")

        def watch(_index: int, eager: Step, compiled: Step) -> None:
            progress.update(task, advance=1, eager=brief(eager), compiled=brief(compiled))

        summary = run(model, settings, text, watch)
        progress.update(task, total=summary.steps)
    return summary


def brief(step: Step) -> str:
    return f"{step.loss:.4f} {step.seconds * 1e3:4.0f} ms"


def table(summary: Summary) -> Table:
    """The numbers of both copies side by side."""
    eager, compiled = summary.eager, summary.compiled
    rows = Table(
        "", "eager", summary.backend, title=f"{summary.parameters / 1e6:.1f} M parameters, {summary.steps} steps"
    )
    for column in rows.columns[1:]:
        column.justify = "right"
    ratio = summary.eager_seconds / summary.compiled_seconds
    rows.add_row("compile", "", f"{summary.compile_seconds:.1f} s")
    rows.add_row("step, median", f"{summary.eager_seconds * 1e3:.1f} ms", f"{summary.compiled_seconds * 1e3:.1f} ms")
    rows.add_row("speed", "1.00 x", f"{ratio:.2f} x")
    rows.add_row(f"loss after {summary.steps} steps", f"{eager[-1].loss:.5f}", f"{compiled[-1].loss:.5f}")
    rows.add_row("largest difference of the losses", "", f"{summary.max_difference:.1e}")
    numbers = summary.numbers
    if not numbers:
        return rows
    per_step = f"{numbers['kernels']:.0f} + {numbers['aten_calls']:.0f}"
    launched = numbers["kernels"] * summary.steps
    rows.add_row("kernels + ATen calls a step", "", per_step)
    rows.add_row("kernels launched", "", f"{launched:,.0f}")
    rows.add_row("bytes moved a step", "", f"{numbers['bytes'] / 1e6:,.1f} MB")
    rows.add_row("bytes moved", "", f"{numbers['bytes'] * summary.steps / 1e9:,.2f} GB")
    return rows


def chart(summary: Summary, width: int = 60) -> Group:
    """The loss curves as two rows of blocks on one scale."""
    losses = [step.loss for step in summary.eager + summary.compiled]
    low, high = min(losses), max(losses)
    margin = max(len("eager"), len(summary.backend))
    lines = [
        Text.assemble((f"{label:>{margin}} ", style), (sparkline([s.loss for s in steps], low, high, width), style))
        for label, style, steps in (("eager", "cyan", summary.eager), (summary.backend, "magenta", summary.compiled))
    ]
    return Group(Text(f"{'':{margin}} loss from {high:.2f} to {low:.2f}"), *lines)


def sparkline(values: list[float], low: float, high: float, width: int) -> str:
    """One block a column, at most ``width``, each the mean of its share of ``values``; "?" where that is no number."""
    blocks = "▁▂▃▄▅▆▇█"
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    line = ""
    for start, stop in pairwise(edges):
        mean = statistics.fmean(values[start:stop])
        height = (mean - low) / (high - low) if high > low else 0.0
        line += blocks[round(height * (len(blocks) - 1))] if 0 <= height <= 1 else "?"
    return line


def write_plot(summary: Summary, path: Path) -> None:
    """Both loss curves and their distance as one HTML file that needs no network."""
    from plotly.graph_objects import Scatter  # heavy, and needed only here
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.75, 0.25], vertical_spacing=0.06)
    steps = list(range(1, summary.steps + 1))
    eager, compiled = [step.loss for step in summary.eager], [step.loss for step in summary.compiled]
    difference = [abs(a - b) for a, b in zip(eager, compiled)]
    figure.add_trace(Scatter(x=steps, y=eager, name="eager", line={"width": 6, "color": "#9ecae1"}), row=1, col=1)
    figure.add_trace(
        Scatter(x=steps, y=compiled, name=summary.backend, line={"width": 2, "color": "#a63603"}), row=1, col=1
    )
    figure.add_trace(Scatter(x=steps, y=difference, name="difference", line={"color": "#636363"}), row=2, col=1)
    figure.update_yaxes(title="loss", row=1, col=1)
    figure.update_yaxes(title="|difference|", exponentformat="e", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title="step", row=2, col=1)
    ratio = summary.eager_seconds / summary.compiled_seconds
    figure.update_layout(title=f"The same model, eager and compiled: {ratio:.2f} x the speed", template="plotly_white")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)
