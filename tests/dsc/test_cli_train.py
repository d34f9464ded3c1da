"""``dsc train``: what it prints and saves, and what it says to bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsc.cli import app


def train(*arguments: object) -> tuple[int, str, str]:
    torch.compiler.reset()
    found = CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "120"})
    return found.exit_code, found.stdout, found.stderr


def test_dynamic_sparsity_of_a_bert_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    weights = tmp_path / "weights.pt"
    code, out, err = train(
        "--model", "bert-tiny", "--sparse-mode", "dynamic", "--pattern", "2:4", "--gate-threshold", 0.01,
        "--balance-entropy", 0.5, "--data", text, "--steps", 3, "--save", weights,
    )  # fmt: skip
    assert code == 0, err
    assert "blocks.1.down" in out and "compilations" in out and "gradient rows gated" in out
    found = torch.load(weights)
    for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
        assert bool(((found[name].view(-1, 4) != 0).sum(1) == 2).all())
    assert bool((found["blocks.0.attention.q.weight"] != 0).all())


@pytest.mark.parametrize("model", ["mlp-tiny", "gpt-tiny"])
def test_other_models_and_json(model: str) -> None:
    code, out, err = train("--model", model, "--sparse-mode", "static", "--layers", "all", "--steps", 2, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found["losses"]) == 2 and found["compilations"] == 1
    assert all(layer["density"] == 0.5 for layer in found["telemetry"]["layers"])


def test_dense_training_has_no_masks() -> None:
    code, out, _ = train("--model", "gpt-tiny", "--sparse-mode", "none", "--steps", 2, "--json")
    assert code == 0 and json.loads(out)["telemetry"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "bert-bas"), "No model is named 'bert-bas'; did you mean"),
        (("--data", "/no/such/file"), "/no/such/file cannot be read: No such file or directory."),
        (("--pattern", "4:2", "--model", "gpt-tiny"), "'sparsity.pattern' cannot be '4:2'"),
        (("--save", "/no/such/folder/w.pt"), "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[object, ...], words: str) -> None:
    code, _, err = train(*arguments)
    assert code == 2
    assert words in " ".join(err.split())
    assert "Traceback" not in err


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    code, _, err = train("--data", tmp_path / "short")
    assert code == 2 and "has 5 bytes; give a text of 4096 or more" in " ".join(err.split())
