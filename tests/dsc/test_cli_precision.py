"""``dsc precision``: the table, JSON, a plan that torch.compile takes, a picture, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from dsc.cli import app
from dsc.models import zoo
from dsc.precision import plan as plans


def run(*args: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["precision", *args], env={"COLUMNS": "140"})
    return found.exit_code, found.stdout, found.stderr


def test_a_plan_that_torch_compile_takes(tmp_path: Path) -> None:
    file, picture = tmp_path / "plan.json", tmp_path / "plan.html"
    more = ("--scale", "1024", "--plan", str(file), "--plot", str(picture))
    code, out, _ = run("mlp-tiny", "--target", "h100", "--error-budget", "0.02", *more)
    assert code == 0
    assert "h100: 1." in out and "int8-blockwise" in out and "budget 0.02" in out
    assert "Speed-up against error" in picture.read_text()
    made = plans.load(file)
    assert made.measured is not None and made.measured <= 1.05 * 0.02 and made.speedup > 1.2
    entry = zoo.load("mlp-tiny")
    torch._dynamo.reset()
    seen: list[object] = []
    options = {"precision": "auto", "precision_plan": str(file), "on_compile": seen.append}
    torch.compile(entry.build(), backend="dsc", options=options)(*entry.inputs()).backward()
    assert "precision=int8-blockwise" in seen[0].text + seen[1].text  # type: ignore[attr-defined]
    torch._dynamo.reset()


def test_json() -> None:
    code, out, _ = run("mlp-tiny", "-t", "a100", "-e", "0.05", "--scale", "128", "--json")
    (p,) = json.loads(out)
    assert code == 0
    assert p["target"] == "a100"
    eighth = {"int8-tensorwise", "int8-rowwise", "int8-blockwise"}
    assert {x["format"] for x in p["products"]} <= {"tf32", "bf16", "fp16"} | eighth


def test_what_it_refuses() -> None:
    code, _, err = run("mlp-tiny", "-t", "cpu")
    assert code == 1 and "A CPU only emulates formats" in err
    code, _, err = run("mlp-tiny", "-e", "2")
    assert code == 2 and "Option 'error_budget' cannot be 2.0; give a number between 0 and 1" in err
    code, _, err = run("mlp-tiny", "-e", "1e-7")
    assert code == 2 and "An error budget of 1e-07 cannot be met" in err
