"""``dsc kernels`` as a person reads it, and as a program does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("triton")

from typer.testing import CliRunner

from dsc import cli
from dsc.debug.capture import capture
from dsc.debug.kernels import FEW, facts_of, listed
from dsc.debug.source import Model
from dsc.models.zoo import load


def dsc(*words: str, code: int = 0) -> str:
    """What ``dsc kernels`` prints: its output, or with ``code`` its sentence on the error stream."""
    done = CliRunner().invoke(cli.app, ["kernels", *words], env={"COLUMNS": "150"})
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        dsc("mlp-tiny", "--target", "h100", "--dtype", "bf16", "--json", "--parallel", "1")
    )
    return found


def test_json_has_graph_source_and_facts(data: dict[str, Any]) -> None:
    assert data["target"] == "h100"
    names = [k["name"] for k in data["kernels"]]
    assert len(set(names)) == len(names)
    relu = next(k for k in data["kernels"] if "relu" in k["name"] or "gelu" in k["name"] or "threshold" in k["name"])
    assert any("mlp.py:" in n["line"] for n in relu["graph"])
    assert "@triton.jit" in relu["source"]
    assert relu["bytes"] == sum(relu["traffic"].values()) > 0
    for kernel in data["kernels"]:
        for sm in ("sm_80", "sm_90"):
            facts = kernel[sm]
            assert facts["spilled_bytes"] == 0
            assert 0 < facts["registers"] < 256
            assert 0 < facts["occupancy"] <= 1
            assert facts["loads"] == sum(a["instructions"] for a in facts["accesses"] if not a["store"])
            assert f".target {sm}" in facts["ptx"]
            assert {a["buffer"] for a in facts["accesses"]} <= {*kernel["traffic"], "fail"}


def test_table(data: dict[str, Any]) -> None:
    text = dsc("mlp-tiny", "--target", "h100", "--dtype", "bf16", "--parallel", "1")
    launches = sum(k["launches"] for k in data["kernels"])
    assert text.startswith("mlp-tiny for h100")
    assert f"{len(data['kernels'])} kernels, {launches} launches" in text
    for column in ("kernel", "regs", "spill", "shared", "occ.", "loads", "stores", "tensor"):
        assert column in text
    for kernel in data["kernels"]:
        assert kernel["name"] in text
        assert f"{kernel['sm_80']['registers']}" in text


def test_code_of_a_kernel() -> None:
    text = dsc("mlp-tiny", "log_softmax_nll", "--target", "a100", "--ptx", "--sass")
    assert "mlp.py:" in text
    assert "@triton.jit" in text
    assert "bytes a thread" in text
    for part in (".target sm_80", ".target sm_90", "code for sm_80", "code for sm_90", "LDG.E"):
        assert part in text


def test_cpp() -> None:
    text = dsc("mlp-tiny", "log_softmax", "--target", "cpu")
    assert "static void" in text
    assert "launches" in text
    assert "regs" not in text
    shown = json.loads(dsc("mlp-tiny", "--json"))
    assert shown["target"] == "cpu"
    assert all("sm_80" not in k for k in shown["kernels"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("mlp-tiny", "nothing_like_it"),
            "No kernel of mlp-tiny has 'nothing_like_it' in its name; it has: forward.k0",
        ),
        (("mlp-tiny", "--ptx"), "give a NAME too"),
        (("mlp-tiny", "softmax", "--sass"), "need a GPU target: add --target h100"),
        (
            ("mlp-tiny", "--dtype", "int7"),
            "Option '--dtype' cannot be 'int7'; give a dtype of floating-point numbers: bf16",
        ),
        (("mlp-tiny", "--target", "h101"), "did you mean 'h100'?"),
    ],
)
def test_bad_input(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in dsc(*words, code=2)


def test_processes_find_what_one_finds() -> None:
    entry = load("mlp-tiny")
    kernels = listed(capture(Model("mlp", entry.build(), entry.inputs()), "h100"))
    ticks: list[int] = []
    apart = facts_of(kernels, (80,), parallel=2, done=lambda: ticks.append(1))
    assert apart == facts_of(kernels, (80,), parallel=1)
    assert len(ticks) == len(apart) == len(kernels) > FEW


def test_without_triton() -> None:
    """Kernels in C++ need none; for a GPU there is one sentence."""
    script = """
import sys

sys.modules["triton"] = None
import dsc.debug.kernels as kernels, dsc.kernels
kernels.find_spec = lambda name: None
from dsc.errors import TritonMissing
for call in (lambda: kernels.facts_of([]), lambda: dsc.kernels.triton_launches([], [], True)):
    try:
        call()
    except TritonMissing as sentence:
        print(sentence)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("Kernels for GPUs need triton, which is not installed") == 2


def test_candidates_say_why_they_lost() -> None:
    found = json.loads(
        dsc("mlp-tiny", "k0_gelu", "--target", "h100", "--dtype", "bf16", "--candidates", "--json", "--parallel", "1")
    )
    for kernel in found["kernels"]:
        first, *others = kernel["choice"]["candidates"]
        assert first["schedule"] == kernel["choice"]["default"]
        assert first["lost"] == ""
        assert others
        assert all(c["lost"] for c in others)
    text = dsc("mlp-tiny", "k0_gelu", "--target", "h100", "--dtype", "bf16", "--candidates", "--parallel", "1")
    assert "why not" in text
    assert "taken" in text
    assert "add --target h100" in dsc("mlp-tiny", "--candidates", code=2)
