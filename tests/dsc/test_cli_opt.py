"""dsc opt: chosen pipelines, cut pipelines, and whether they compute what eager does."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from dsc import passlist, text
from dsc.debug import check
from dsc.debug.pipeline import cut
from dsc.debug.source import Called, Model
from dsc.errors import BadOption, UnknownOption, UnknownPass
from dsc.manager import Pass, Report, spell
from dsc.passlist import chosen
from dsc.target import Target
from kit_cli import as_json, dsc, session


def test_the_default_pipeline_is_what_it_is_without_a_choice() -> None:
    assert chosen(cut()) == (passlist.JOINT, passlist.GRAPH)


def test_pipelines_are_cut() -> None:
    assert spell(cut("canonicalize,fuse{max_nodes=4}")) == "canonicalize,fuse{max_nodes=4}"
    assert [p.name for p in cut(stop_after="recompute")] == ["chunk-loss", "canonicalize", "embedding", "recompute"]
    assert [p.name for p in cut(disable=["recompute", "fuse"])] == ["chunk-loss", "canonicalize", "embedding"]
    assert [p.name for p in cut("fuse,canonicalize,fuse", stop_after="fuse")] == ["fuse", "canonicalize", "fuse"]
    assert cut("canonicalize", disable=["canonicalize"]) == ()
    with pytest.raises(UnknownPass, match="'fus' is not a pass; did you mean 'fuse'"):
        cut(disable=["fus"])
    with pytest.raises(UnknownPass):
        cut("canonicalize", stop_after="fuse")
    with pytest.raises(UnknownOption):
        cut("fuse{max=3}")
    with pytest.raises(BadOption):
        cut("fuse{")


def test_the_graphs_that_come_out() -> None:
    out = dsc("opt", "mlp-tiny", "-p", "canonicalize,recompute,fuse", "-t", "a100")
    graphs = [s.gm.graph for s in session("mlp-tiny", "a100").regions[0].stages if s.name == "fuse"]
    assert out == "\n".join(
        f"# {kind} after fuse, {len(g.nodes)} nodes\n{text.show(g)}" for kind, g in zip(("forward", "backward"), graphs)
    )


def test_a_joint_pass_at_the_end_shows_the_joint_graph() -> None:
    data = as_json("opt", "mlp-tiny", "--stop-after", "recompute")
    assert data["passes"] == "chunk-loss,canonicalize,embedding,recompute"
    assert [(g["graph"], g["pass"]) for g in data["graphs"]] == [("joint", "recompute")]


def test_no_passes_at_all() -> None:
    data = as_json(
        "opt",
        "mlp-tiny",
        *(x for p in ("chunk-loss", "canonicalize", "embedding", "recompute", "fuse") for x in ("--disable", p)),
    )
    assert [(g["graph"], g["pass"]) for g in data["graphs"]] == [("forward", "trace"), ("backward", "trace")]


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_run_compares_with_eager(target: str) -> None:
    out = dsc("opt", "mlp-tiny", "-p", "canonicalize,fuse{max_nodes=4}", "-t", target, "-g", "forward", "--run")
    assert "All 7 results and gradients agree with eager's; the furthest off:" in out
    assert "gradient of" in out


@dataclass(frozen=True)
class TanhIsSin(Pass):
    """A wrong rewrite."""

    name: ClassVar[str] = "wrong"

    def run(self, gm: GraphModule, target: Target) -> Report:
        found = [n for n in gm.graph.nodes if n.target is torch.ops.aten.tanh.default]
        for n in found:
            n.target = torch.ops.aten.sin.default
        return Report(bool(found))


def test_a_wrong_pass_is_found_out() -> None:
    model = Model("m", nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.randn(3, 4),))
    compared = check.check(model, {"passes": [TanhIsSin(), "default"]})
    assert not check.agree(compared)
    assert next(c.name for c in compared if not c.agrees) == "result 0"
    assert check.agree(check.check(model, {}))


def test_a_wrong_pass_makes_the_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(passlist, "KNOWN", {**passlist.KNOWN, "wrong": TanhIsSin})
    file = tmp_path / "user.py"
    file.write_text("import torch\ndef squashed(x):\n    return x.tanh()\ndef inputs():\n    return torch.ones(3)\n")
    out = dsc("opt", f"{file}:squashed", "-p", "wrong,fuse", "--run", code=1)
    assert "1 of 1 results and gradients differ from eager's" in out


def test_values_that_are_wrong_in_other_ways() -> None:
    x = torch.tensor([1.0, 2.0])
    same = check.compared("r", x, x, x.double())
    assert same.agrees
    assert check.compared("r", x.double(), x, None).problem == "float64(2,) instead of float32(2,)"
    assert check.compared("r", None, x, None).problem == "None instead of float32(2,)"
    assert not check.compared("r", x * float("inf"), x, None).agrees
    assert not check.compared("r", torch.tensor([1, 2]), torch.tensor([1, 3]), None).agrees
    assert check.compared("r", x * (1 + 1e-7), x, x.double()).agrees
    assert not check.compared("r", x * (1 + 1e-4), x, x.double()).agrees


def test_random_numbers_are_the_same_on_both_sides() -> None:
    model = Model("m", Called(lambda x: torch.nn.functional.dropout(x, 0.5)), (torch.ones(64, requires_grad=True),))
    assert check.agree(check.check(model, {}))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--disable", "fus"), "'fus' is not a pass; did you mean 'fuse'?"),
        (("-p", "fuse{max_nodes=x}"), "Option 'fuse.max_nodes' cannot be 'x'; give a whole number."),
        (("-p", "fuse,,"), "Option 'passes' cannot be 'fuse,,'; give a list such as"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert dsc("opt", "mlp-tiny", *arguments, code=2).startswith(sentence)
