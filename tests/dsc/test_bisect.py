"""Planted mistakes are found by pass and by node, cut down to a few lines, and nothing is found where nothing is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import planted
from dsc import bind, compiler, errors, ops, passlist
from dsc.debug import capture as capturing
from dsc.debug import reduce, repro, sketch
from dsc.debug.bisect import Verdict, bisect, examine
from dsc.debug.bisect.align import align, same_results
from dsc.debug.bisect.run import Twin, run, run_twins, seeded
from dsc.debug.bisect.tolerance import Rule, compare
from dsc.debug.capture import Session
from dsc.debug.source import Model
from dsc.manager import Pass, Remark, Report
from dsc.models.zoo import load
from dsc.options import Options
from dsc.target import Target
from kit_graphs import trace

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
EVERY = range(len(planted.MISTAKES))


def model(name: str) -> Model:
    entry = load(name)
    return Model(name, entry.build(), entry.inputs())


@pytest.fixture(scope="module")
def gpt() -> Session:
    return capturing.capture(model("gpt-tiny"), "cpu", keep_values=True, on_host=True)


@pytest.fixture
def with_mistake(gpt: Session) -> Callable[[int], Verdict]:
    def found(bug: int) -> Verdict:
        with planted.planted(bug) as options:
            return examine(planted.planned_again(gpt, options))

    return found


# Twenty mistakes.


@pytest.mark.parametrize("bug", EVERY, ids=[f"{m.by}-{m.graph}-{m.title[:30]}" for m in planted.MISTAKES])
def test_the_pass_and_the_node_are_found(bug: int, with_mistake: Callable[[int], Verdict]) -> None:
    mistake = planted.MISTAKES[bug]
    verdict = with_mistake(bug)
    found = verdict.finding
    assert found is not None
    assert (found.pass_name, found.graph) == (mistake.by, mistake.graph)
    assert found.line and found.diff and found.difference.times > 1
    if mistake.op:
        node = next(n for n in verdict.session.regions[0].of(mistake.graph)[-1].gm.graph.nodes if n.name == found.node)
        assert ops.name_of(node) == mistake.op
    else:
        assert found.node == planted.BROKEN[0]
        assert found.confirmed
        assert any(found.node in line for line in found.changed)


def test_the_twenty_are_twenty() -> None:
    assert len(planted.MISTAKES) == 20
    assert {m.by for m in planted.MISTAKES} == {"canonicalize", "recompute", "fuse", "link"}
    assert {m.graph for m in planted.MISTAKES} == {"joint", "forward", "backward"}


# The script.


@pytest.mark.parametrize("bug", [0, 4, 7, 8, 9, 14])
def test_a_mistake_is_cut_down_to_a_few_lines(bug: int, with_mistake: Callable[[int], Verdict]) -> None:
    small = reduce.reduce(with_mistake(bug), seconds=600)
    assert small.lines <= 15
    assert not small.saved
    scope: dict[str, Any] = {"__name__": "script"}
    with pytest.raises(SystemExit) as left:
        exec(compile(small.script, "script.py", "exec"), scope)
    assert left.value.code == 1
    assert scope["found"].kind == small.difference.kind


def test_a_wrong_kernel_is_cut_down(gpt: Session) -> None:
    bug = 19
    with planted.planted(bug) as options:
        small = reduce.reduce(examine(planted.planned_again(gpt, options)), seconds=60)
    assert small.lines <= 15
    assert "kernels=True" in small.script
    assert "gelu_backward" in small.script


def test_the_script_runs_by_itself(with_mistake: Callable[[int], Verdict], tmp_path: Path) -> None:
    small = reduce.reduce(with_mistake(0), seconds=600)
    script = tmp_path / "script.py"
    reduce.save(small, script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("values: ") and "instead of" in done.stdout
    mended = small.script.replace("bug=0", "bug=None")
    script.write_text(mended)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no difference\n")


# Where nothing is wrong.


class Noisy(nn.Module):
    """Dropout, batch statistics, a 16-bit region, and an integer result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.dropout(self.norm(self.first(x)), 0.5, self.training)
        with torch.autocast("cpu", torch.bfloat16):
            z = self.second(F.gelu(y))
        return z.float().logsumexp(1).sum(), z.argmax(1)


def noisy() -> Model:
    torch.manual_seed(0)
    return Model("noisy", Noisy(), (torch.randn(12, 8),))


@pytest.mark.parametrize("training", [True, False])
def test_no_pass_is_blamed_for_randomness_and_roundings(training: bool) -> None:
    made = noisy()
    before = [b.clone() for b in made.module.buffers()]
    verdict = bisect(made, training=training)
    assert verdict.finding is None
    assert [c.pass_name for c in verdict.checked].count("link") == (2 if training else 1)
    assert all(torch.equal(a, b) for a, b in zip(before, made.module.buffers()))


def test_the_compiler_is_right_on_a_gpt_for_another_machine(gpt: Session) -> None:
    verdict = examine(gpt, Rule(against="float64"))
    assert verdict.finding is None
    assert {c.graph for c in verdict.checked} == {"model", "joint", "forward", "backward"}
    for_h100 = bisect(model("mlp-tiny"), "h100")
    assert for_h100.finding is None and for_h100.session.target.name == "h100"
    with pytest.raises(errors.NotReduced, match="no pass changes its results"):
        reduce.reduce(verdict)


# Passes of others.


@dataclass(frozen=True)
class Halve(Pass):
    """relu(x) -> relu(x) / 2, which is wrong."""

    name: ClassVar[str] = "halve"

    def run(self, gm: GraphModule, target: Target) -> Report:
        done = []
        for node in list(gm.graph.nodes):
            if node.target is aten.relu.default:
                with gm.graph.inserting_after(node):
                    half = gm.graph.call_function(aten.mul.Tensor, (node, 0.5))
                half.meta = dict(node.meta)
                node.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)
                done.append(Remark(half.name, "did", "half of a relu"))
        return Report(bool(done), tuple(done))


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x)).sum()


def relu() -> Model:
    torch.manual_seed(1)
    return Model("relu", Relu(), (torch.randn(4, 6),))


def test_a_pass_of_the_user_is_found_and_reduced_like_ours() -> None:
    verdict = bisect(relu(), options=Options(passes=("default", Halve())))
    found = verdict.finding
    assert found is not None
    assert (found.pass_name, found.graph, found.node, found.confirmed) == ("halve", "forward", "mul_tensor", True)
    assert found.remarks == ("mul_tensor: half of a relu",)
    assert "F.relu(self.linear(x))" in found.line
    assert "+mul_tensor: f32[4,5] = mul.Tensor(relu, 0.5)" in found.diff
    small = reduce.reduce(verdict)
    assert small.lines <= 3 and "Halve()" in small.script


# The command line.


def invoke(*words: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dsc import cli

    return CliRunner().invoke(cli.app, list(words))


def test_the_command_says_that_all_is_well() -> None:
    done = invoke("bisect", "mlp-tiny")
    assert done.exit_code == 0, done.output
    assert "No pass changes the numbers of mlp-tiny" in done.stdout
    assert "same by construction" in done.stderr


def test_the_commands_name_pass_node_line_and_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(passlist.KNOWN, "fuse", planted.PlantedFuse)  # type: ignore[arg-type]
    bug = next(i for i, m in enumerate(planted.MISTAKES) if m.make is planted.wrong_bias_gradient)
    passes = ("--passes", f"canonicalize,recompute,fuse{{bug={bug}}}")
    done = invoke("bisect", "mlp-tiny", *passes)
    assert done.exit_code == 1, done.output
    assert "Pass 'fuse' changes the numbers of the backward graph." in done.stdout
    assert "  node     sum_1" in done.stdout
    assert "mlp.py:" in done.stdout
    assert "+sum_1" in done.stdout and "-sum_1" in done.stdout
    as_json = invoke("bisect", "mlp-tiny", *passes, "--json")
    assert as_json.exit_code == 1
    data = json.loads(as_json.stdout)
    assert (data["finding"]["pass_name"], data["finding"]["node"]) == ("fuse", "sum_1")
    assert data["stages"][-1]["difference"]["kind"] == "values"
    script = tmp_path / "small.py"
    reduced = invoke("reduce", "mlp-tiny", *passes, "-o", str(script))
    assert reduced.exit_code == 1, reduced.output
    assert "aten.sum.dim_IntList" in script.read_text()


def test_bad_input_is_one_sentence_and_exit_code_2() -> None:
    for words, said in (
        (("bisect", "mlp-tiny", "--passes", "fuze"), "did you mean 'fuse'?"),
        (("bisect", "mlp-tiny", "--target", "h101"), "did you mean"),
        (("bisect", "mlp-tiny", "--against", "float16"), "float16"),
        (("reduce", "no-such-model"), "no-such-model"),
    ):
        done = invoke(*words)
        assert done.exit_code == 2, done.output
        assert said in done.stderr


# The parts.


def test_what_counts_as_different() -> None:
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    want = Twin(exact.float(), exact)
    assert compare(exact.float() * (1 + 1e-6), want, Rule()) is None
    off = exact.float()
    off[3] += 1e-3
    found = compare(off, want, Rule())
    assert found is not None and "(3,)" in found.text and "1 of 100" in found.text
    assert found.times == pytest.approx(1e-3 / (1e-5 * 2.5), rel=0.1)
    assert compare(off, want, Rule(unit=1e-2)) is None
    assert compare(off.double(), want, Rule()) is not None
    off[3] = float("nan")
    assert getattr(compare(off, want, Rule()), "kind", "") == "nonfinite"
    noisy = Twin(exact.float() + 1e-3, exact)  # eager itself is off by so much
    assert compare(exact.float(), noisy, Rule()) is None
    numbers = torch.arange(4)
    assert compare(numbers, Twin(numbers, numbers), Rule()) is None
    assert compare(numbers + 1, Twin(numbers, numbers), Rule()) is not None


def test_a_twin_goes_the_way_of_eager() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = aten.bernoulli.p(torch.empty_like(x), 0.5)
        values, places = torch.topk(x.bfloat16().float(), 3)
        return y * x, values, places

    gm = trace(f, torch.randn(7))
    given = {n.name: torch.linspace(0, 1, 7) for n in gm.graph.find_nodes(op="placeholder")}
    with seeded():
        plain = run(gm, given).outputs
    with seeded():
        twins = run_twins(gm, given).outputs
    for value, t in zip(plain, twins):
        assert torch.equal(value, t.value)
    assert twins[0].exact.dtype == torch.float64 and twins[2].exact is twins[2].value
    assert not torch.equal(twins[1].value.double(), twins[1].exact)  # the twin skips the rounding to 16 bits


def test_which_nodes_stand_for_which() -> None:
    before = trace(lambda x: (torch.relu(x).sin() * 2, x.cos()), torch.randn(3))
    after = compiler.copied(before)
    assert same_results(before, after)
    (sine,) = [n for n in after.graph.nodes if n.target is aten.sin.default]
    with after.graph.inserting_after(sine):
        new = after.graph.call_function(aten.tan.default, sine.args)
    new.meta = dict(sine.meta)
    sine.replace_all_uses_with(new)
    after.graph.erase_node(sine)
    assert not same_results(before, after)
    pairs = list(zip(after.graph.output_node().all_input_nodes, before.graph.output_node().all_input_nodes))
    found = align(before, after, pairs, names=True)
    assert {a.name: b.name for a, b in found.counterpart.items()} == {"tan_default": "sin", "mul": "mul"}
    assert [n.name for n in found.vanished] == ["sin", "mul"]
    assert {n.name for n in found.same} >= {"relu", "cos"}


def test_a_node_that_raises_is_the_node() -> None:
    @dataclass(frozen=True)
    class Flat(Pass):
        """mm(a, b) -> mm(a, b.t())"""

        name: ClassVar[str] = "flat"

        def run(self, gm: GraphModule, target: Target) -> Report:
            for node in gm.graph.nodes:
                if node.target is aten.addmm.default:
                    node.args = (node.args[0], node.args[1], node.args[2].args[0])
                    return Report(True)
            return Report(False)

    found = bisect(relu(), options=Options(passes=(Flat(), "default"))).finding
    assert found is not None
    assert (found.pass_name, found.node, found.difference.kind) == ("flat", "addmm", "raises")


def test_a_graph_is_cut_and_written_down() -> None:
    gm = trace(lambda x: torch.relu(x.t() @ x.exp()) + 1, torch.randn(4, 6))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not aten.exp.default]
    values: dict[Any, Any] = {}
    with seeded():
        run(gm, {"x_1": torch.randn(4, 6)}, lambda n, v: values.setdefault(n, v))
    read = {a: values[a] for n in nodes for a in n.all_input_nodes if a not in nodes}
    made = sketch.of(nodes, read)
    assert made is not None
    (want,) = made.function()(*made.tensors())
    assert torch.equal(want, values[nodes[-1]])
    small = sketch.resized(sketch.drawn(made, range(2)), 4, 2, False)
    assert small is not None
    assert [x.shape for x in small.inputs] == [(2, 6), (2, 6)]
    assert small.function()(*small.tensors())[0].shape == (6, 6)
    shorter = sketch.without(made, [len(made.lines) - 1])
    assert shorter is not None and shorter.lines[-1].target is aten.relu.default
    assert torch.equal(repro.drawn([2, 3], order=[1, 0]), repro.drawn([2, 3], order=[1, 0]))
    assert repro.drawn([2, 3], order=[1, 0]).stride() == (1, 2)


def test_rules_are_as_they_were_after_a_mistake(gpt: Session) -> None:
    kept = dict(bind.RULES)
    with planted.planted(17):
        assert kept != bind.RULES
    assert kept == bind.RULES
    assert replace(gpt.options, passes=None) == replace(gpt.options)
