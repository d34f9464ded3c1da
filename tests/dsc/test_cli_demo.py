"""The command line answers, and the demo trains both copies alike and says so."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("typer")
pytest.importorskip("plotly")

from rich.console import Console
from typer.testing import CliRunner

from dsc import __version__, cli
from dsc.debug import demo
from dsc.models import gpt, zoo

TINY = demo.Settings(steps=3, batch=2, length=16, backend="aot_eager")
MODEL = zoo.gpt_entry("tiny", "tiny", gpt.Config(vocab=256, max_length=16, layers=1, heads=2, width=16), batch=2)


@dataclass(frozen=True)
class FakeRecord:
    kind: str
    numbers: dict[str, float] = field(default_factory=lambda: {"kernels": 3.0, "aten_calls": 2.0, "bytes": 5e6})


@pytest.fixture(scope="module")
def text() -> Tensor:
    return demo.stdlib_text(10_000)


@pytest.fixture(scope="module")
def summary(text: Tensor) -> demo.Summary:
    return demo.run(MODEL.build(), TINY, text, lambda index, eager, compiled: None)


def made(eager: list[float], compiled: list[float], numbers: dict[str, float] | None = None) -> demo.Summary:
    def steps(losses: list[float], seconds: float) -> tuple[demo.Step, ...]:
        return tuple(demo.Step(loss, seconds if index else 1.0) for index, loss in enumerate(losses))

    return demo.Summary("dsc", 1000, 10, steps(eager, 0.2), steps(compiled, 0.1), numbers or {})


def rendered(item: object) -> str:
    console = Console(width=100, record=True, file=open(Path("/dev/null"), "w"))  # noqa: SIM115
    console.print(item)
    return console.export_text()


def test_both_copies_train_alike(summary: demo.Summary) -> None:
    assert summary.steps == len(summary.eager) == len(summary.compiled) == 3
    assert summary.agrees
    assert summary.max_difference < 1e-5
    assert abs(summary.eager[0].loss - math.log(256)) < 0.2
    assert summary.text_bytes == 10_000
    assert summary.parameters > 0
    assert summary.eager_seconds > 0
    assert summary.compile_seconds > summary.compiled_seconds
    assert summary.numbers == {}


def test_the_watcher_sees_every_step(text: Tensor) -> None:
    seen: list[tuple[int, demo.Step, demo.Step]] = []
    summary = demo.run(MODEL.build(), TINY, text, lambda *step: seen.append(step))
    assert seen == list(zip(range(3), summary.eager, summary.compiled))


def test_time_ends_the_training(text: Tensor) -> None:
    settings = replace(TINY, seconds=0.0)
    assert demo.run(MODEL.build(), settings, text, lambda *step: None).steps == 1


def test_the_text_is_source_code_in_a_fixed_order(text: Tensor) -> None:
    assert text.dtype == torch.uint8
    assert torch.equal(text, demo.stdlib_text(20_000)[:10_000])
    assert b"import" in bytes(text.tolist())


def test_targets_are_one_byte_ahead() -> None:
    idx, targets = next(demo.batches(torch.arange(100, dtype=torch.uint8), batch=4, length=8, seed=0))
    assert idx.shape == targets.shape == (4, 8)
    assert idx.dtype == targets.dtype == torch.int64
    assert torch.equal(idx + 1, targets)


def test_summary_times_leave_out_the_first_step() -> None:
    summary = made([3.0, 2.0, 1.0], [3.0, 2.0, 1.0])
    assert (summary.eager_seconds, summary.compiled_seconds, summary.compile_seconds) == (0.2, 0.1, 0.9)


@pytest.mark.parametrize(("loss", "agrees"), [(2.0005, True), (2.002, False), (math.nan, False), (math.inf, False)])
def test_curves_agree_within_the_tolerance(loss: float, agrees: bool) -> None:
    assert made([3.0, 2.0, 1.0], [3.0, loss, 1.0]).agrees is agrees


def test_table_shows_speed_losses_and_kernels() -> None:
    numbers = demo.total([FakeRecord("forward"), FakeRecord("backward"), FakeRecord("inference")])
    shown = rendered(demo.table(made([3.0, 2.0, 1.0], [3.0, 2.0005, 1.0], numbers)))
    for part in ("0.9 s", "200.0 ms", "100.0 ms", "2.00 x", "1.00000", "5.0e-04", "6 + 4", "18", "10.0 MB", "0.03 GB"):
        assert part in shown


def test_table_without_records_has_no_kernels(summary: demo.Summary) -> None:
    shown = rendered(demo.table(summary))
    assert "aot_eager" in shown
    assert "kernels" not in shown


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0.0, 0.5, 1.0], 60, "▁▅█"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([0.0, math.nan], 60, "▁?"),
    ],
)
def test_sparkline(values: list[float], width: int, line: str) -> None:
    assert demo.sparkline(values, 0.0, 1.0, width) == line


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"dsc {__version__} (torch {torch.__version__}")


@pytest.fixture
def tiny_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, ["demo", "--steps", "3", "--backend", "aot_eager", *arguments])

    monkeypatch.setattr(demo, "Settings", partial(replace, TINY))
    monkeypatch.setattr(zoo, "load", {"gpt-bytes": MODEL}.__getitem__)
    return invoke


def test_demo_command_writes_a_self_contained_plot(tiny_command: Callable[..., Any], tmp_path: Path) -> None:
    result = tiny_command("--out", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert "loss after 3 steps" in result.output
    page = (tmp_path / "new" / "loss.html").read_text(encoding="utf-8")
    assert "plotly" in page
    assert "<script src=" not in page


def test_demo_command_fails_when_the_curves_differ(
    tiny_command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = made([3.0, 2.0, 1.0], [3.0, 2.5, 1.0])
    monkeypatch.setattr(demo, "watch_live", lambda *arguments: wrong)
    result = tiny_command("--out", str(tmp_path))
    assert result.exit_code == 1
    assert "does not follow eager: its loss differs by 5.0e-01, more than 0.001" in result.output


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_the_extra_one_sentence_says_what_to_install() -> None:
    result = run_python("import sys; sys.modules['typer'] = None; import dsc.cli")
    assert result.returncode == 1
    assert result.stderr == "The dsc command needs typer: pip install 'dsc-compiler[cli]'\n"


def test_help_does_not_import_torch() -> None:
    assert run_python("import sys, dsc.cli; assert 'torch' not in sys.modules").returncode == 0
