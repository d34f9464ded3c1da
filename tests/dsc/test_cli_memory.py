"""``dsc memory``: the table, the frontier, JSON, a plan file, and a budget that cannot be met."""

import json
from pathlib import Path

from typer.testing import CliRunner

from dsc import plan as plans
from dsc.cli import app


def run(*args: str, model: str = "mlp-tiny") -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["memory", model, *args], env={"COLUMNS": "120"})
    return found.exit_code, found.stdout, found.stderr


def test_a_budget_that_is_met(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, _ = run("--target", "a100", "--budget", "1GiB", "--json", "--plan", str(file))
    (p,) = json.loads(out)
    assert code == 0
    assert p["target"] == "a100" and p["peak"] <= p["budget"] == 1 << 30
    assert p["largest"] and {d["keep"] for d in p["largest"]} <= {"save", "recompute"}
    (saved,) = plans.read(file).values()
    assert saved.peak == p["peak"]


def test_a_budget_that_cannot_be_met_ends_with_the_smallest() -> None:
    code, _, err = run("--budget", "1KiB")
    assert code == 1
    assert "A memory budget of 1.00 KiB cannot be met" in err and "give at least" in err


def test_the_tables() -> None:
    code, out, _ = run()
    assert code == 0
    assert "cpu: planned peak" in out and "decision" in out
    code, out, _ = run("--frontier")
    assert code == 0
    assert "extra time" in out and "100%" in out


def test_any_batch_of_a_model_by_name() -> None:
    code, out, _ = run("--batch", "4096", "--target", "a100", "--budget", "1GiB", "--json")
    (p,) = json.loads(out)
    assert code == 0
    assert p["peak"] <= p["reserved"]
    code, out, _ = run("--batch", "4096", "--target", "a100", "--frontier")
    assert code == 0
    assert "activation_memory_budget 0.4" in out


def test_the_largest_batch(tmp_path: Path) -> None:
    code, out, _ = run("--max-batch", "--target", "a100", "--budget", "16MiB", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["peak"] <= 16 << 20
    code, _, err = run("--batch", str(2 * found["batch"]), "--target", "a100", "--budget", "16MiB")
    assert code == 1
    assert "cannot be met" in err
    code, _, err = run("--max-batch", "--target", "a100", "--budget", "1KiB")
    assert code == 1
    assert "Not even one sample" in err


def test_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "alive.html"
    code, _, _ = run("--picture", str(file))
    assert code == 0
    assert "saved for the backward" in file.read_text()


def test_what_does_not_go_together(tmp_path: Path) -> None:
    code, _, err = run("--batch", "8", "--plan", str(tmp_path / "plan.json"))
    assert code == 1
    assert "leave out --batch" in err
    code, _, err = run("--offload", "disk")
    assert code != 0
    assert "nvme:FOLDER" in err
    code, _, err = run("--compress", "fp4")
    assert code != 0
    assert "e5m2" in err
    code, _, err = run("--measure", "--target", "a100")
    assert code == 1
    assert "on this CPU" in err


def test_compression_shows_formats_and_a_measured_error() -> None:
    code, out, _ = run("--budget", "270KiB", "--compress", "bf16", "--measure", "--json", model="gpt-tiny")
    assert code == 0, out
    (p,) = json.loads(out)
    short = [d for d in p["largest"] if d["keep"] == "compress"]
    assert short
    assert all(d["format"] == "bf16" and 2 * d["stored"] == d["bytes"] for d in short)
    assert 0 < p["gradient_error"] < 0.01
