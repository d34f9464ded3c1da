"""Commands on the four families, for a CPU and for a GPU that is not here, read as a person would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from dsc import cli

MODELS = ("gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny")
TARGETS = ("cpu", "h100")


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module", params=[(m, t) for m in MODELS for t in TARGETS], ids=lambda p: f"{p[0]}-{p[1]}")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Model, target, and a trace of it: what the commands read instead of tracing the model again each time."""
    model, target = request.param
    path = tmp_path_factory.mktemp("traces") / f"{model}.trace"
    run("trace", model, "-o", str(path), "--target", target)
    return model, target, str(path)


def test_passes_and_explain_agree(recorded: tuple[str, str, str]) -> None:
    _, target, path = recorded
    data = json.loads(run("passes", path, "--json"))
    assert data["target"] == target
    text = run("passes", path)
    for word in ("canonicalize", "recompute", "forward", "backward", "fuse", "link", "step"):
        assert word in text
    assert "kernels and " in run("explain", path).splitlines()[0]


def test_show_prints_groups_of_the_target(recorded: tuple[str, str, str]) -> None:
    _, target, path = recorded
    text = run("show", path, "--after", "fuse", "--graph", "forward")
    assert "{group=" in text
    assert ("@cuda" in text) == (target == "h100")


def test_kernels_are_of_the_targets_language(recorded: tuple[str, str, str]) -> None:
    _, target, path = recorded
    listed: list[dict[str, Any]] = json.loads(run("kernels", path, "nll_loss_forward", "--json"))["kernels"]
    assert listed
    word = "tl.load" if target == "h100" else "void"
    assert all(word in json.dumps(k) for k in listed)


def test_graph_draws_the_operators(recorded: tuple[str, str, str], tmp_path: Path) -> None:
    model, _, path = recorded
    picture = tmp_path / "forward.svg"
    run("graph", path, "--graph", "forward", "-o", str(picture))
    assert ("convolution" if "resnet" in model or "vit" in model else "embedding") in picture.read_text()


@pytest.mark.parametrize(("model", "target"), list(zip(MODELS, TARGETS * 2)), ids=str)
def test_bisect_finds_nothing_wrong(model: str, target: str) -> None:
    assert f"No pass changes the numbers of {model}" in run("bisect", model, "--target", target)
