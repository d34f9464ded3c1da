"""Traces: what is written while models compile, what is read back, and what two of them have in common."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import dsc
from dsc import cli, errors, text
from dsc.debug import graphs, trace, tracediff
from dsc.debug.capture import Session, capture
from dsc.debug.source import Model
from dsc.errors import BadGraphFile, BadTrace, DscWarning, TraceUnwritable
from dsc.models.zoo import ZOO


@pytest.fixture(autouse=True)
def _own_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DSC_TRACE", raising=False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.norm(self.first(x))).sum()


def recorded(path: Path, rows: tuple[int, ...] = (4,), **options: Any) -> trace.Trace:
    """A train step of ``Net`` for each number of rows, through torch.compile."""
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = torch.compile(Net(), backend="dsc", options=options or None)
    with dsc.trace(path):
        for n in rows:
            compiled(torch.randn(n, 8)).backward()
    return trace.read(path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two compilations: the second for other sizes."""
    path = tmp_path_factory.mktemp("traces") / "two.trace"
    recorded(path, (4, 5))
    return path


def test_every_line_is_an_event_of_the_schema(two: Path) -> None:
    events = [json.loads(line) for line in two.read_text().splitlines()]
    assert events[0]["event"] == "trace" and events[0]["schema"] == trace.SCHEMA
    assert events[0]["torch"] == torch.__version__
    documented = {line.split()[0] for line in (trace.__doc__ or "").splitlines() if line.startswith("    ")}
    assert {e["event"] for e in events} <= documented
    kinds = [e["event"] for e in events[1:]]
    assert kinds[:4] == ["captured", "options", "traced", "pass"]
    assert kinds.count("compiled") == 4 and kinds.count("recompile") == 1
    assert len({e["region"] for e in events[1:]}) == 2


def test_what_was_compiled_can_be_read_back(two: Path) -> None:
    first, second = trace.read(two).regions
    assert first.graphs == ("joint", "forward", "backward")
    assert [s.name for s in first.of("joint")] == ["trace", "chunk-loss", "canonicalize", "embedding", "recompute"]
    assert first.function.startswith("forward (test_trace.py:")
    assert first.target == "cpu" and first.guard == ""
    assert first.inputs.count("f32[4,8]") == 1
    assert second.guard.endswith("tensor 'x' size mismatch at index 0. expected 4, actual 5")
    assert "\n" not in second.guard
    program = first.programs[0]
    assert program.graph == "forward" and program.numbers["kernels"] >= 1
    assert "def call(args):" in program.source and program.kernels[0] in program.code
    remarks = first.of("forward")[-1].report
    assert remarks is not None and any(r.verdict == "did" for r in remarks.remarks)


def test_a_session_of_a_trace_has_the_graphs_and_kernels_of_the_run(two: Path) -> None:
    session = trace.load(two)
    for read, region in zip(trace.read(two).regions, session.regions):
        assert [text.show(s.gm.graph) for s in region.stages] == [s.text for s in read.stages]
        for program, compilation in zip(read.programs, region.programs):
            assert compilation.numbers == program.numbers
            assert len(compilation.bound) == program.numbers["kernels"]
            assert tuple(k.name for k in compilation.program.kernels) == program.kernels


def test_outside_of_the_block_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    recorded(path)
    size = path.stat().st_size
    torch.compile(Net(), backend="dsc")(torch.randn(3, 8))
    assert path.stat().st_size == size
    assert len(recorded(path).regions) == 1, "a second trace into the same file begins it anew"


def test_a_late_backward_is_still_written(tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend="dsc")
    with dsc.trace(tmp_path / "a.trace") as path:
        loss = compiled(torch.randn(4, 8))
    loss.backward()
    assert [p.graph for p in trace.read(path).regions[0].programs] == ["forward", "backward"]


RUN = """
import os, torch
f = torch.compile(lambda x: (x * 2).relu(), backend="dsc")
f(torch.ones(3))
if os.environ.get("FORKS"):
    child = os.fork()
    torch.compile(lambda x: x.exp() + 1, backend="dsc")(torch.ones(5))
    if child:
        os.waitpid(child, 0)
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )


def test_the_variable_records_a_file_a_process(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    done = run(RUN, DSC_TRACE=str(folder), FORKS="1")
    assert done.returncode == 0, done.stderr
    files = sorted(folder.iterdir())
    assert len(files) == 2 and all(f.suffix == ".trace" for f in files)
    assert [len(trace.read(f).regions) for f in files] in ([2, 1], [1, 2])
    assert len(trace.read(folder).regions) == 3
    assert {str(json.loads(f.read_text().split("\n")[0])["pid"]) for f in files} == {
        f.name.split("-")[-2] for f in files
    }


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceUnwritable, match="No such file or directory"), dsc.trace(tmp_path / "no" / "a.trace"):
        pass
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(DscWarning, match="cannot be written"):
        got = torch.compile(lambda x: x + 1, backend="dsc", options={"trace": str(blocked / "t")})(torch.ones(2))
    assert got.tolist() == [2, 2]


def test_without_a_trace_nothing_of_it_is_imported() -> None:
    done = run(RUN + "\nimport sys\nprint([m for m in sys.modules if m.startswith('dsc.debug')])")
    assert done.stdout == "[]\n", done.stderr


def test_importing_dsc_costs_nothing() -> None:
    code = "import sys, dsc; dsc.__version__; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sympy')])"
    done = run(code)
    assert done.stdout == "[]\n", done.stderr
    with pytest.raises(AttributeError, match="no attribute 'tracee'"):
        dsc.tracee  # type: ignore[attr-defined]  # noqa: B018
    assert set(dsc._HOMES) <= set(dir(dsc))
    assert all(hasattr(dsc, name) for name in dsc._HOMES)


# --- bad files


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "its first line is not the head of one"),
        ("hello\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 is not an event"),
        ('{"event": "pass"}\n', "its first line is not the head of one"),
        ('{"event": "trace", "schema": 99}\n', "it has schema 99, and this version of dsc reads 1"),
        ('{"event": "trace", "schema": 1}\nx\n{"event": "y"}\n', "line 2 is not JSON"),
        ('{"event": "trace", "schema": 1}\n{"event": "left", "region": "1"}\n', "line 2 has no 'graph'"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "a.trace"
    path.write_text(content)
    with pytest.raises(BadTrace, match=problem):
        trace.read(path)
    result = CliRunner().invoke(cli.app, ["diff", str(path), str(path)])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1, result.output


def test_missing_binary_and_empty(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="no such file"):
        trace.read(tmp_path / "none.trace")
    (tmp_path / "b.trace").write_bytes(b"\x80\xff\x00")
    with pytest.raises(BadTrace, match="it is not text"):
        trace.read(tmp_path / "b.trace")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadTrace, match=r"holds no \.trace file"):
        trace.read(tmp_path / "folder")
    (tmp_path / "head.trace").write_text('{"event": "trace", "schema": 1}\n')
    with pytest.raises(BadTrace, match="it holds no compilation"):
        trace.load(tmp_path / "head.trace")


def test_of_a_truncated_trace_the_rest_is_read(two: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.trace"
    cut.write_text(two.read_text()[:-100])
    read = trace.read(cut)
    assert len(read.remarks) == 1 and "the last one, was cut off" in read.remarks[0]
    assert [len(r.programs) for r in read.regions] == [2, 1]
    result = CliRunner().invoke(cli.app, ["passes", str(cut)])
    assert result.exit_code == 0, result.output
    assert "was cut off; the rest was read" in result.output
    assert "canonicalize" in result.output


def test_events_that_are_not_known_are_passed_over(two: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.trace"
    later.write_text(two.read_text() + '{"event": "fancy", "region": "9", "x": 1}\n{"event": "other"}\n')
    assert [r.graphs for r in trace.read(later).regions] == [r.graphs for r in trace.read(two).regions] + [()]


# --- graphs as JSON


@pytest.fixture(scope="module")
def sessions() -> dict[str, Session]:
    found = {}
    for name, target in (("gpt-tiny", "h100"), ("resnet-tiny", "cpu")):
        entry = ZOO[name]
        found[name] = capture(Model(name, entry.build(), entry.inputs()), target)
    return found


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet-tiny"])
def test_graphs_survive_packing(sessions: dict[str, Session], name: str) -> None:
    for stage in sessions[name].regions[0].stages:
        again = graphs.unpack(graphs.pack(stage.gm))
        assert text.show(again.graph) == text.show(stage.gm.graph)
        again.graph.lint()
        for a, b in zip(stage.gm.graph.nodes, again.graph.nodes):
            assert (a.op, a.target, a.meta.get("stack_trace")) == (b.op, b.target, b.meta.get("stack_trace"))


def test_sizes_keep_their_hints_and_relations() -> None:
    from dsc.torch_shim import optimization_hint, sym_expr
    from kit_graphs import trace as traced

    gm = traced(
        lambda x, y: torch.cat([x, y]).view(-1) * x.shape[0], torch.ones(6, 10), torch.ones(4, 10), dynamic=True
    )
    again = graphs.decode(json.loads(json.dumps(graphs.encode(gm))))
    assert text.show(again.graph) == text.show(gm.graph)
    for a, b in zip(gm.graph.nodes, again.graph.nodes):
        if isinstance(a.meta.get("val"), Tensor):
            sizes = [list(map(optimization_hint, n.meta["val"].shape)) for n in (a, b)]
            assert sizes[0] == sizes[1]
            assert list(map(sym_expr, a.meta["val"].shape)) == list(map(sym_expr, b.meta["val"].shape))


def test_arguments_of_every_kind() -> None:
    graph = torch.fx.Graph()
    given = (1, 2.5, float("inf"), float("nan"), True, None, "s", [1, (2, 3)], slice(0, None, 2), 1 + 2j, {"k": [1]})
    kinds = (torch.bfloat16, torch.device("cuda:1"), torch.strided, torch.channels_last)
    node = graph.call_function(torch.ops.aten.add.Tensor, (*given, *kinds))
    graph.output(node)
    again = next(iter(graphs.unpack(graphs.pack(torch.fx.GraphModule({}, graph))).graph.nodes))
    assert repr(again.args) == repr(node.args)


def test_constants_and_subgraphs_come_along() -> None:
    root = nn.Module()
    root.table = torch.tensor([1.5, float("nan"), -0.0])
    root.big = torch.zeros(graphs.SMALL + 1)
    inner = torch.fx.Graph()
    inner.output(inner.call_function(torch.ops.aten.neg.default, (inner.placeholder("x"),)))
    root.body = torch.fx.GraphModule({}, inner)
    graph = torch.fx.Graph()
    graph.output(tuple(graph.get_attr(name) for name in ("table", "big", "body")))
    again = graphs.unpack(graphs.pack(torch.fx.GraphModule(root, graph)))
    assert torch.equal(again.table.view(torch.int32), root.table.view(torch.int32))
    assert again.big.shape == root.big.shape
    assert text.show(again.body.graph) == text.show(inner)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "KeyError: 'nodes'"),
        ({"nodes": [{"name": "x", "op": "call_function", "target": "aten.nothing.default"}]}, "no operator 'aten.nothing"),
        ({"nodes": [{"name": "x", "op": "call_function", "target": "torch:load"}]}, None),
        ({"nodes": [{"name": "x", "op": "call_function", "target": "operator:add", "args": [{"sym": "f()", "type": "int"}]}]}, "is no size"),
        ({"nodes": [{"name": "x", "op": "call_function", "target": "operator:add", "args": [{"dtype": "load"}]}]}, "no dtype 'load'"),
    ],
)  # fmt: skip
def test_bad_graphs(data: dict[str, Any], problem: str | None) -> None:
    if problem is None:  # only operators are looked up: any other function comes back as its name
        (node,) = graphs.decode(data).graph.nodes
        assert node.target is not torch.load
        with pytest.raises(TypeError, match="load was not saved"):
            node.target("file")
        return
    with pytest.raises(BadGraphFile, match=problem):
        graphs.decode(data)


def test_bad_packing() -> None:
    with pytest.raises(BadGraphFile, match="cannot be read"):
        graphs.unpack("!!")


# --- differences


def test_two_runs_are_the_same(two: Path, tmp_path: Path) -> None:
    found = tracediff.compare(trace.read(two), recorded(tmp_path / "again.trace", (4, 5)))
    assert found.same and len(found.regions) == 2
    assert all(v.a and v.b for r in found.regions for v in r.seconds if v.name == "all")
    result = CliRunner().invoke(cli.app, ["diff", str(two), str(tmp_path / "again.trace")])
    assert result.exit_code == 0
    assert "The compilations are the same." in result.output


def test_other_options_are_seen_in_settings_numbers_and_graphs(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.trace"
    recorded(path, passes="chunk-loss,canonicalize,embedding,recompute,fuse{max_nodes=1}")
    result = CliRunner().invoke(cli.app, ["diff", str(two), str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    out = result.output
    assert "option passes: — → chunk-loss,canonicalize,embedding,recompute,fuse{max_nodes=1}" in out
    assert "forward kernels" in out and "%" in out
    assert "forward after fuse: +0 -0 lines" in out
    assert any(line.startswith("~") and "group=" in line for line in out.splitlines())
    assert "Graph 1" in out and "only in the first" in out
    assert "forward before all passes" not in out, "what did not change is not shown"

    data = json.loads(CliRunner().invoke(cli.app, ["diff", str(two), str(path), "--json"]).output)
    assert data["same"] is False
    assert [g["in"] for g in data["graphs"]] == ["both", "a"]
    changed = [(s["graph"], s["pass"]) for s in data["graphs"][0]["stages"] if not s["same"]]
    assert changed == [("forward", "fuse"), ("backward", "fuse")]
    numbers = {v["name"]: (v["a"], v["b"]) for v in data["graphs"][0]["numbers"]}
    assert numbers["forward kernels"][0] < numbers["forward kernels"][1]


def test_command_trace_records_for_machines_that_are_not_here(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{target}.trace") for target in ("a100", "h100")]
    for target, path in zip(("a100", "h100"), paths):
        result = CliRunner().invoke(cli.app, ["trace", "gpt-tiny", "-o", path, "--target", target])
        assert result.exit_code == 0, result.output
        assert result.output.startswith("Wrote ")
    assert trace.load(paths[1]).target.name == "h100"
    out = CliRunner().invoke(cli.app, ["diff", *paths], env={"COLUMNS": "200"}).output
    assert "target: a100 → h100" in out
    shown = CliRunner().invoke(cli.app, ["show", paths[1], "--after", "fuse", "--graph", "forward"])
    assert shown.exit_code == 0 and "primals_1: i64[2,16]@cuda" in shown.output


@pytest.mark.parametrize(
    "command",
    [("kernels",), ("graph", "--graph", "backward", "-o", "graph.svg"), ("view", "-o", "report.html")],
    ids=lambda c: c[0],
)
def test_commands_that_draw_take_a_trace(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, [command[0], str(two), *command[1:]])
    assert result.exit_code == 0, result.output
    shown = result.output + "".join(p.read_text() for p in tmp_path.iterdir())
    assert "gelu" in shown


# --- torch's own logs


def test_recompiles_are_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(Net(), backend="dsc")
    with caplog.at_level(logging.INFO, "dsc"):
        compiled(torch.randn(4, 8))
        assert caplog.messages == []
        compiled(torch.randn(5, 8))
    (line,) = caplog.messages
    assert line.startswith("Recompiling forward (test_trace.py:")
    assert line.endswith("(0/1): 0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5")


def test_structured_logs_show_every_pass(tmp_path: Path) -> None:
    done = run(RUN, TORCH_TRACE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.iterdir()
    found = [json.loads(line.partition("] ")[2]) for line in log.read_text().splitlines() if "dsc_inference" in line]
    names = [e["artifact"]["name"] for e in found]
    assert names == [f"dsc_inference_{x}" for x in ("0_trace", "canonicalize", "fuse", "program", "kernels")]
    assert all(e["frame_id"] == 0 and e["frame_compile_id"] == 0 and e["has_payload"] for e in found)
    assert "relu: f32[3] = relu(mul)  {group=k0}" in log.read_text()


def test_a_failed_pass_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("dsc.passes.fuse.Fuse.run", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = recorded(tmp_path / "a.trace", cache_dir=str(tmp_path))
    (region,) = read.regions
    assert region.failures == ["ValueError: planted"] * 2
    assert [graph for graph, _ in region.left] == ["forward", "backward"]
    assert all("Pass 'fuse' failed" in why for _, why in region.left)
    assert issubclass(errors.PassFailed, errors.DscError)
