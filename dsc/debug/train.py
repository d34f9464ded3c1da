"""Training with sparse layers on any text, for people to watch: ``dsc train``.

A text is read byte by byte, so that no tokenizer is needed: models that predict the next token get the byte ahead, models
that fill in get 15 per cent of the bytes hidden, and anything else its own random inputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from dsc import sparsity
from dsc.debug.demo import sparkline
from dsc.errors import NoSparsity
from dsc.runtime.state import State
from dsc.sparsity import Telemetry

Mode = Literal["none", "static", "dynamic"]
Draw = Callable[[], tuple[Tensor, ...]]
HIDDEN = 0.15
"""Share of the bytes that a model has to fill in."""
PROBED = 0.25
"""Share of the time that trying decays may take; where that is too little, the default decay stays."""
JUDGED = 4
"""Batches of text that is kept aside for the last loss."""


@dataclass(frozen=True)
class Settings:
    mode: Mode = "dynamic"
    pattern: str = "2:4"
    layers: tuple[str, ...] = ("mlp",)
    density: float = 0.5
    balance_entropy: float = 0.9
    gate_threshold: float = 0.0
    steps: int = 100
    seconds: float = 120.0
    """No step begins later than this after the first."""
    rate: float = 5e-4
    rebalance: int = 10
    """Steps between new densities."""
    probe: int = 6
    """Steps for each decay that is tried."""

    def option(self) -> dict[str, Any] | None:
        """What ``torch.compile`` gets as ``options["sparsity"]``."""
        if self.mode == "none":
            return None
        common = {"pattern": self.pattern, "layers": self.layers, "gate_threshold": self.gate_threshold}
        if self.mode == "static":
            return common
        return {**common, "density": self.density, "balance_entropy": self.balance_entropy}


@dataclass(frozen=True)
class Summary:
    """What a training came to."""

    losses: tuple[float, ...]
    judged: float
    """The loss on batches that were not learned from, with the masks."""
    step_seconds: float
    """The median of a step."""
    compilations: int
    decay: float | None
    telemetry: Telemetry | None
    flips: tuple[float, ...]


def windows(text: Tensor, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Endless [batch, length] int64 from random places of the text ([N] uint8)."""
    generator = torch.Generator().manual_seed(seed)
    rows = text.unfold(0, length, 1)
    while True:
        yield rows[torch.randint(len(rows), (batch,), generator=generator)].long()


def next_bytes(text: Tensor, batch: int, length: int, vocab: int, seed: int) -> Draw:
    """(idx, targets): the targets one byte ahead; bytes modulo the vocabulary."""
    rows = windows(text, batch, length + 1, seed)

    def draw() -> tuple[Tensor, ...]:
        chunk = next(rows) % vocab
        return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()

    return draw


def hidden_bytes(text: Tensor, batch: int, length: int, vocab: int, seed: int, ignored: int = -100) -> Draw:
    """(idx, mask, targets): token 0 where a byte is hidden; rows of half to full length, padded with 0."""
    rows, generator = windows(text, batch, length, seed), torch.Generator().manual_seed(seed)

    def draw() -> tuple[Tensor, ...]:
        tokens = next(rows) % (vocab - 1) + 1
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        places = torch.arange(length)
        real = places < lengths
        hidden = real & ((torch.rand(batch, length, generator=generator) < HIDDEN) | (places == 0))
        return tokens.masked_fill(hidden | ~real, 0), real, tokens.masked_fill(~hidden, ignored)

    return draw


def run(
    model: nn.Module,
    settings: Settings,
    learn: Draw,
    judge: Draw,
    state: State,
    watch: Callable[[str, int, float, Telemetry | None], None],
) -> Summary:
    """Train ``model``, whose result is its loss; ``watch`` hears of every step: phase, number, loss, telemetry."""
    seen: list[Any] = []
    options: Any = {"sparsity": settings.option(), "state": state, "on_compile": seen.append}
    call = torch.compile(model, backend="dsc", options=options, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    took: list[float] = []

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss: Tensor = call(*learn())
        torch.autograd.backward(loss)
        optimizer.step()
        value = loss.item()
        took.append(time.perf_counter() - start)
        return value

    decay, count = None, iter(range(1 << 30))

    def probed() -> None:
        watch("probe", next(count), step(), told(state))

    if settings.mode == "dynamic" and settings.probe:
        probed()
        probed()  # the first step compiled
        steps = min(settings.probe, int(PROBED * settings.seconds / took[-1] / len(sparsity.DECAYS)))
        if steps >= 2 and told(state) is not None:
            decay = sparsity.probe_decay(state, model, optimizer, probed, steps)
    losses, flips = [], []
    start = time.perf_counter()
    for i in range(settings.steps):
        if i and time.perf_counter() - start > settings.seconds:
            break
        losses.append(step())
        now = told(state)
        flips.append(now.flip_rate if now else 0.0)
        watch("train", i + 1, losses[-1], now)
        if settings.mode == "dynamic" and now and (i + 1) % settings.rebalance == 0:
            sparsity.balance(state, settings.density, settings.balance_entropy)
    with torch.no_grad():
        judged = statistics.fmean(float(call(*judge())) for _ in range(JUDGED))
    compilations = sum(r.kind == "forward" for r in seen)
    return Summary(
        tuple(losses), judged, statistics.median(took[1:] or took), compilations, decay, told(state), tuple(flips)
    )


def told(state: State) -> Telemetry | None:
    """The telemetry, if anything is sparse."""
    try:
        return sparsity.read(state)
    except NoSparsity:
        return None


def watch_live(
    model: nn.Module, settings: Settings, learn: Draw, judge: Draw, state: State, console: Console
) -> Summary:
    """``run`` under a progress bar."""
    columns = (
        TextColumn("[bold]{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("[cyan]{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    tried = 3 + settings.probe * len(sparsity.DECAYS) if settings.mode == "dynamic" and settings.probe else 0
    with Progress(*columns, console=console) as progress:
        tasks = {"train": progress.add_task("train", total=settings.steps, loss="…", told="", visible=not tried)}
        if tried:
            tasks["probe"] = progress.add_task("probe", total=tried, loss="…", told="compiling")

        def watch(phase: str, number: int, loss: float, telemetry: Telemetry | None) -> None:
            words = ""
            if telemetry is not None:
                words = f"density {telemetry.density:.2f} flips {telemetry.flip_rate:.2%} gated {telemetry.gated:.0%}"
            progress.update(tasks[phase], advance=1, loss=f"{loss:.4f}", told=words, visible=True)

        summary = run(model, settings, learn, judge, state, watch)
        progress.update(tasks["train"], total=len(summary.losses))
        if "probe" in tasks:
            progress.update(tasks["probe"], visible=False)
    return summary


def layer_table(summary: Summary) -> Table | None:
    """A row for each sparse layer."""
    if summary.telemetry is None:
        return None
    rows = Table("layer", "density", "retained |w|", "flips a step", "gated rows", title="Sparse layers")
    for column in rows.columns[1:]:
        column.justify = "right"
    for x in summary.telemetry.layers:
        rows.add_row(x.name, f"{x.density:.3f}", f"{x.retained:.3f}", f"{x.flip_rate:.3%}", f"{x.gated:.0%}")
    return rows


def table(summary: Summary, settings: Settings, parameters: int) -> Table:
    """The numbers of the training."""
    losses = summary.losses
    rows = Table("", "", title=f"{parameters / 1e6:.1f} M parameters, {len(losses)} steps", show_header=False)
    rows.columns[1].justify = "right"
    rows.add_row("loss", f"{losses[0]:.4f} to {losses[-1]:.4f}")
    rows.add_row("curve", sparkline(list(losses), min(losses), max(losses), 30))
    rows.add_row("loss on text kept aside", f"{summary.judged:.4f}")
    rows.add_row("step, median", f"{summary.step_seconds * 1e3:.1f} ms")
    rows.add_row("compilations", str(summary.compilations))
    for name, value in told_rows(summary, settings).items():
        rows.add_row(name, value)
    return rows


def told_rows(summary: Summary, settings: Settings) -> Mapping[str, str]:
    if (t := summary.telemetry) is None:
        return {"sparsity": "none"}
    flips = summary.flips
    decay = (
        {"decay": "default, no time to try others"}
        if summary.decay is None
        else {"decay, by probe": f"{summary.decay:g}"}
    )
    decay = decay if settings.mode == "dynamic" else {}
    return {
        "sparsity": f"{settings.pattern} {settings.mode}, {len(t.layers)} layers",
        "density": f"{t.density:.3f}",
        "entropy of the kept work": f"{t.entropy:.3f}",
        "share of the model's products": f"{t.coverage:.1%}",
        "retained |w|": f"{t.retained:.3f}",
        "flips a step": f"{flips[min(1, len(flips) - 1)]:.3%} to {flips[-1]:.3%}",
        "gradient rows gated": f"{t.gated:.1%}",
        **decay,
    }
