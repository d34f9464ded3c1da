"""Passes of users: in a list, in text, from an installed package; verified, traced and told apart like ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from torch.fx import GraphModule
from typer.testing import CliRunner

import dsc
from dsc import cli, ops, passlist
from dsc.debug import crash, trace
from dsc.errors import BadCrash, BadOption, BadPassOrder, BadPlugin, DscWarning, PassFailed, UnknownPass
from dsc.target import Target

ROOT = Path(__file__).parents[2]
EXAMPLE = re.search(r"```python\n(from dataclasses import.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def _own_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@dataclass(frozen=True)
class Seen(dsc.Pass):
    """Says which graphs it saw."""

    name: ClassVar[str] = "seen"
    word: str = "seen"

    def run(self, gm: GraphModule, target: Target) -> dsc.Report:
        return dsc.Report(False, (dsc.Remark("", "skipped", f"{self.word} {len(gm.graph.nodes)} nodes"),))


@dataclass(frozen=True)
class SeenJoint(Seen):
    name: ClassVar[str] = "seen-joint"
    runs_on: ClassVar[Literal["joint", "graph", "both"]] = "joint"


@dataclass(frozen=True)
class Crasher(dsc.Pass):
    """Fails at the first relu."""

    name: ClassVar[str] = "crasher"

    def run(self, gm: GraphModule, target: Target) -> dsc.Report:
        for node in gm.graph.nodes:
            if ops.name_of(node) == "relu.default":
                raise ZeroDivisionError("planted")
        return dsc.Report(False)


@dataclass(frozen=True)
class Wrong(dsc.Pass):
    """Leaves a graph that is not legal: relu becomes something of another dtype."""

    name: ClassVar[str] = "wrong"

    def run(self, gm: GraphModule, target: Target) -> dsc.Report:
        for node in [n for n in gm.graph.nodes if ops.name_of(n) == "relu.default"]:
            del node.meta["val"]
        return dsc.Report(True)


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 3).sum()


def step(**options: object) -> torch.Tensor:
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    torch.autograd.backward(torch.compile(f, backend="dsc", options=options)(x))
    assert x.grad is not None
    return x.grad


def test_a_list_is_the_whole_pipeline() -> None:
    joint, graph = passlist.chosen([Seen(), "default", SeenJoint(), Seen("again")])
    assert [p.name for p in joint] == [*(p.name for p in passlist.JOINT), "seen-joint"]
    assert graph == (Seen(), *passlist.GRAPH, Seen("again"))
    assert passlist.chosen("canonicalize,fuse") == passlist.chosen(["canonicalize", "fuse"])
    assert passlist.chosen(None) == passlist.chosen("default") == (passlist.JOINT, passlist.GRAPH)
    assert passlist.chosen([]) == ((), ())


@pytest.mark.parametrize(
    ("passes", "error", "match"),
    [
        ([Seen], BadOption, r"it called, as in MyPass\(\)"),
        ([3], BadOption, "a name or an instance of dsc.Pass"),
        ("nothing,default", UnknownPass, "'nothing' is not a pass"),
        ("default{x=1}", Exception, "'x' is not an option of pass 'default'"),
    ],
)
def test_what_is_no_pass(passes: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        passlist.chosen(passes)  # type: ignore[arg-type]


def test_an_order_that_loses_notes_is_refused() -> None:
    @dataclass(frozen=True)
    class Late(Seen):
        name: ClassVar[str] = "late"
        retraces: ClassVar[bool] = True

    with pytest.raises(Exception, match="'late' retraces the graph, which loses the notes of 'fuse'") as raised:
        step(passes=["default", Late()])
    assert isinstance(getattr(raised.value, "inner_exception", raised.value), BadPassOrder)


def test_it_is_traced_with_its_options(tmp_path: Path) -> None:
    with dsc.trace(tmp_path / "a.trace") as path:
        step(passes=[Seen("hello"), SeenJoint(), "default"])
    (region,) = trace.read(path).regions
    assert region.options["passes"] == "seen{word=hello},seen-joint,default"
    assert [s.name for s in region.of("joint")][:2] == ["trace", "seen-joint"]
    stage = region.of("forward")[1]
    assert stage.spelled == "seen{word=hello}" and stage.report is not None
    assert stage.report.remarks[0].why.startswith("hello ")


def test_it_is_verified_and_named() -> None:
    with pytest.warns(
        DscWarning, match=r"Pass 'wrong' failed.*at node 'relu\w*'.*has no meta\['val'\].*test_third_party.py"
    ):
        assert torch.equal(step(passes=[Wrong(), "default"]).sum(), torch.tensor(18.0))


# --- crashes


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The text file of a crash."""
    sentence = (
        r"The forward graph runs on ATen, .*Pass 'crasher' failed after canonicalize: ZeroDivisionError: planted at node "
        r"'relu', from test_third_party.py:\d+, in f: return torch.relu\(x \* 3\).sum\(\); the graph before it is in "
        rf"{tmp_path}/crashes/\S+\.txt; leave it out"
    )
    with pytest.warns(DscWarning, match=sentence):
        assert torch.equal(
            step(passes=["canonicalize", Crasher(), "fuse"], cache_dir=str(tmp_path)).sum(), torch.tensor(18.0)
        )
    (path,) = crash.saved(tmp_path / crash.CRASHES)
    return path


def test_a_crash_leaves_the_graph_before_it(crashed: Path) -> None:
    text = crashed.read_text()
    assert text.startswith("Pass 'crasher' failed after canonicalize")
    assert 'raise ZeroDivisionError("planted")' in text
    assert "relu: f32[3,4] = relu(mul)" in text
    saved = crash.read(crashed.with_suffix(".json"))
    assert (saved.stage, saved.spelled, saved.target.name) == ("forward", "crasher", "cpu")
    with pytest.raises(PassFailed, match=r"planted at node 'relu', from test_third_party\.py"):
        crash.replay(saved, {"crasher": Crasher})
    with pytest.raises(UnknownPass, match="'crasher' is not a pass"):
        crash.replay(saved, {})


def test_replay_as_a_command(crashed: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nimport dsc\n\n@dataclass(frozen=True)\nclass C(dsc.Pass):\n"
        "    name = 'crasher'\n    def run(self, gm, target):\n        raise KeyError('still')\n"
    )
    invoke = CliRunner().invoke
    failed = invoke(cli.app, ["replay", str(crashed), "--from", str(file)])
    assert failed.exit_code == 1 and "Pass 'crasher' failed: KeyError: 'still'" in failed.output
    data = json.loads(invoke(cli.app, ["replay", str(crashed), "--from", str(file), "--json"]).output)
    assert data["then"].startswith("Pass 'crasher' failed after") and "still" in data["now"]
    file.write_text(file.read_text().replace("raise KeyError('still')", "return dsc.Report(False)"))
    fixed = tmp_path / "fixed.py"
    fixed.write_text(file.read_text())
    mended = invoke(cli.app, ["replay", str(crashed), "--from", str(fixed)])
    assert mended.exit_code == 0 and "runs now on the forward graph on which it failed" in mended.output
    assert invoke(cli.app, ["replay", str(file)]).exit_code == 2
    with pytest.raises(BadCrash, match="no such file"):
        crash.read(tmp_path / "none.json")


def test_crashes_are_bounded(tmp_path: Path) -> None:
    for i in range(crash.KEPT + 5):
        (tmp_path / f"2026-{i:02}.crash.txt").write_text("")
        (tmp_path / f"2026-{i:02}.crash.json").write_text("")
    crash.forget(tmp_path)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert len(left) == 2 * crash.KEPT and left[0] == "2026-05.crash.json"


# --- installed packages, and the README


def install(folder: Path, points: str, code: str) -> None:
    """A package as pip would leave it."""
    info = folder / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dsc.passes]\n{points}\n")
    (folder / "theirs.py").write_text(code)


THEIRS = """
from dataclasses import dataclass
from typing import ClassVar
import dsc

@dataclass(frozen=True)
class Mine(dsc.Pass):
    name: ClassVar[str] = "mine"
    word: str = "x"

    def run(self, gm, target):
        return dsc.Report(False, (dsc.Remark("", "did", self.word),))
"""


def test_passes_of_packages_are_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "mine = theirs:Mine\nbad = theirs:nothing\nother = theirs:Mine\nnone = theirs:dsc", THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    joint, graph = passlist.chosen("mine{word=hello},default")
    assert joint == passlist.JOINT
    assert [p.name for p in graph] == ["mine", "canonicalize", "fuse"]
    assert graph[0].word == "hello"  # type: ignore[attr-defined]
    assert passlist.chosen(None) == (passlist.JOINT, passlist.GRAPH), "what is not named does not run"
    for name, problem in (
        ("bad", "AttributeError"),
        ("other", "calls itself 'mine'"),
        ("none", "is no class of passes"),
    ):
        with pytest.raises(BadPlugin, match=f"'{name}' of the package 'theirs' cannot be used: .*{problem}"):
            passlist.chosen(name)


def test_the_example_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    assert EXAMPLE is not None
    code = EXAMPLE[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DSC_TRACE": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (region,) = trace.read(tmp_path).regions
    assert region.left == [] and done.stderr == ""
    report = region.of("forward")[1].report
    assert report is not None and [r.why for r in report.remarks] == ["-(-x) is x"]
    assert "neg(" in region.of("forward")[0].text and "neg(" not in region.of("forward")[-1].text
