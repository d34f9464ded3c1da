"""``dsc pipeline``: tables, JSON, plans on disk, and a Gantt chart in a browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kit_cli
from dsc.distributed.plan import PipelinePlan

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = ("pipeline", "llama-tiny", "--stages", "2", "--cluster", "2xa100", "--microbatches", "2", "--effort", "quick")


def test_the_tables_and_a_replay(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    out = kit_cli.dsc(*SMALL, "--out", str(file), columns=140)
    assert "Llama on 2xa100: 2 stages, 2 micro-batches of 1" in out
    assert "embedding .." in out and "cross_entropy_loss" in out and "zb-h1" in out
    saved = PipelinePlan.load(file)
    assert saved.ranks == 2
    again = kit_cli.dsc("pipeline", "llama-tiny", "--plan", str(file), columns=140)
    assert again == out
    assert "The plans are equal." in kit_cli.dsc("pipeline", "llama-tiny", "--plan", str(file), "--diff", str(file))


def test_json() -> None:
    found = kit_cli.as_json(*SMALL, "--schedule", "1f1b")
    assert found["ranks"] == found["stages"] == 2 and found["schedule"] == "1f1b"
    assert found["seconds"] >= found["bound"] > 0


def test_mistakes_end_with_one_sentence(tmp_path: Path) -> None:
    for options, sentence in (
        (("--cluster", "many"), "'many' is no cluster"),
        (("--schedule", "best"), "'best' is not a schedule"),
        (("--microbatches", "3"), "unequal"),
        (("--stages", "few"), "Option 'stages' cannot be 'few'"),
        (("--gantt", str(tmp_path / "g.gif")), "a file name that ends in .html or .png"),
        (("--plan", str(tmp_path / "none.json")), "No such file"),
    ):
        out = kit_cli.dsc(*SMALL, *options, code=2)
        assert sentence in " ".join(out.split()) and "Traceback" not in out


def test_the_chart_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("plotly")
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no browser on this machine: install chromium")
    file, saved = tmp_path / "g.html", tmp_path / "p.json"
    kit_cli.dsc(*SMALL, "--schedule", "zbv", "--gantt", str(file), "--out", str(saved))
    made = PipelinePlan.load(saved)
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = started.new_page(viewport={"width": 1200, "height": 500})
        complaints: list[str] = []
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.on("request", lambda r: complaints.append(r.url) if r.url.startswith("http") else None)
        page.goto(file.as_uri())
        page.wait_for_selector(".plotly .bars")
        bars = page.locator(".bars .point").count()
        labels = page.locator(".ytick").all_text_contents()
        started.close()
    assert complaints == [], "the page needs no network"
    cost = [{"F": s.forward, "I": s.dgrad, "W": s.wgrad} for s in made.stages]
    assert bars == sum(cost[s][k] > 0 for order in made.orders for s, k, _ in order) > 20
    assert sorted(labels) == ["rank 0", "rank 1"]
