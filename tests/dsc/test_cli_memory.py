"""``dsc memory``: the table, the frontier, JSON, a plan file, and a budget that cannot be met."""

import json
from pathlib import Path

from typer.testing import CliRunner

from dsc import plan as plans
from dsc.cli import app


def run(*args: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["memory", "mlp-tiny", *args], env={"COLUMNS": "120"})
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
