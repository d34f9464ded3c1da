"""``dsc demo``: a small GPT learns real text twice at once, in eager PyTorch and through dsc."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dsc.cli.app import app, fail


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="Training steps of each copy.")] = 100,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no step later than this.")] = 120.0,
    device_threads: Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch; all by default.")] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the plot.")] = Path("demo_out"),
    backend: Annotated[str, typer.Option(hidden=True)] = "dsc",
) -> None:
    """Train a small GPT in eager PyTorch and through dsc at once, and compare speed and losses."""
    import torch

    try:
        import plotly  # noqa: F401  # better to miss it now than after two minutes
    except ModuleNotFoundError:
        fail("The demo needs plotly: pip install 'dsc-compiler[cli]'")
    from dsc.debug.demo import TOLERANCE, Settings, chart, stdlib_text, table, watch_live, write_plot
    from dsc.models.zoo import load

    if device_threads:
        torch.set_num_threads(device_threads)
    console = Console()
    settings = Settings(steps=steps, seconds=seconds, backend=backend)
    text = stdlib_text(settings.text_bytes)
    entry = load("gpt-bytes")
    console.print(
        f"{entry.name} ({entry.description}) learns {len(text) / 1e6:.1f} MB of Python's standard library, "
        f"{settings.batch} x {settings.length} bytes a step, {torch.get_num_threads()} threads."
    )
    summary = watch_live(entry.build(settings.seed), settings, text, console)
    console.print(table(summary))
    console.print(chart(summary))
    write_plot(summary, out / "loss.html")
    console.print(f"Wrote {out / 'loss.html'}")
    if not summary.agrees:
        difference = summary.max_difference
        fail(f"The compiled model does not follow eager: its loss differs by {difference:.1e}, more than {TOLERANCE}.")
