"""passes, show and explain on four models and two machines, their output read as a person reads it."""

import json
import re

import pytest

from dsc import text
from dsc.debug import launches, summary
from kit_cli import as_json, dsc, session, use_cached

MODELS = ("gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny")


@pytest.fixture(autouse=True)
def _cached(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cached(monkeypatch)


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize("model", MODELS)
def test_reads_as_it_is(model: str, target: str) -> None:
    """One test a model and machine, so that each is captured once."""
    passes_table(model, target)
    if model in ("gpt-tiny", "resnet-tiny"):
        passes_json(model, target)
    graphs_and_diffs(model, target)
    summary_of_a_step(model, target)
    nodes_explained(model, target)


def passes_table(model: str, target: str) -> None:
    out = dsc("passes", model, "--target", target)
    lines = out.splitlines()
    assert re.fullmatch(rf"{model} for {target}: 1 graph, captured in [\d.]+ (ms|s)", lines[0])
    assert max(map(len, lines)) <= 80
    assert "…" not in out
    graphs = [line.strip() for line in lines if re.fullmatch(r" (joint|forward|backward) *", line)]
    assert graphs == ["joint", "forward", "backward"]
    rows = [line.split()[0] for line in lines[3:] if line.startswith("   ") and line.strip()]
    graph = ["trace", "canonicalize", "fuse", "link"]
    attention = ["attention", "grouped"] if target != "cpu" else []
    assert rows == ["trace", "chunk-loss", "canonicalize", "embedding", *attention, "recompute", *graph, *graph]
    step = re.search(r"^ step +([\d.]+) +(\d+)→(\d+) +(\d+) +(\d+) ([\d.]+ [kM]B) +([\d.]+M) ([\d.]+ [kM]B)", out, re.M)
    assert step is not None, out
    programs = session(model, target).regions[0].programs
    assert int(step[4]) == sum(p.numbers["kernels"] for p in programs)
    assert int(step[5]) == sum(p.numbers["aten_calls"] for p in programs)


def passes_json(model: str, target: str) -> None:
    data = as_json("passes", model, "--target", target)
    last = [p for p in data["passes"] if p["name"] == "link"]
    assert data["step"]["bytes"] == sum(p["bytes"] for p in last)
    assert data["step"]["modelled"] == pytest.approx(sum(p["modelled"] for p in last))
    for graph in ("forward", "backward"):
        before, *_, after = (p for p in data["passes"] if p["graph"] == graph)
        assert after["bytes"] < before["bytes"]
        assert after["modelled"] < before["modelled"]
        assert after["flops"] == pytest.approx(before["flops"], rel=0.05)
        assert after["peak"] > 0
    assert any(r["why"].endswith("are never computed again") for p in data["passes"] for r in p["remarks"])


def graphs_and_diffs(model: str, target: str) -> None:
    region = session(model, target).regions[0]
    graph = region.of("forward")[-1].gm.graph
    out = dsc("show", model, "-t", target, "--after", "fuse", "--graph", "forward")
    assert out == f"# forward after fuse, {len(graph.nodes)} nodes\n{text.show(graph)}"
    commented = dsc("show", model, "-t", target, "-g", "forward", "--source")
    assert "".join(x for x in commented.splitlines(True) if not x.startswith("#")) == text.show(graph)
    file = f"models/{model.removesuffix('-tiny')}.py"
    assert re.search(rf"^# [\w.]+  \S*{file}:\d+  .*self\.", commented, re.M)
    diff = dsc("show", model, "-t", target, "--diff", "canonicalize")
    assert diff.count("# ") == 3
    assert "# backward after canonicalize" in diff
    removed = [x[1:] for x in diff.splitlines() if x.startswith("-")]
    before = text.show(region.of("joint")[0].gm.graph)
    assert removed
    assert all(x in before for x in removed)
    assert any("nll_loss_forward" in x for x in removed)
    noted = dsc("show", model, "-t", target, "--diff", "fuse", "-g", "backward").splitlines()
    assert {x[0] for x in noted[1:]} == {"@", " ", "~"}
    assert all("group=k" in x for x in noted if x.startswith("~"))


def summary_of_a_step(model: str, target: str) -> None:
    s = session(model, target)
    out = dsc("explain", model, "-t", target, "--top", "4")
    assert all(len(x) <= 80 for x in out.splitlines() if "  " in x)
    head = re.match(rf"{model} for {target}: a step of (\S+) (ns|µs|ms), (\d+) kernels and (\d+) calls of ATen", out)
    assert head is not None, out
    for title in ("What takes longest", "What moves most", "Saved for the backward: ", "Left to ATen: "):
        assert re.search(f"^{title}", out, re.M)
    assert "of inputs and weights that live anyway\n" in out
    data = as_json("explain", model, "-t", target)
    assert sum(x["seconds"] for x in data["launches"]) == pytest.approx(data["seconds"])
    assert sum(x["bytes"] for x in data["launches"]) == data["bytes"]
    assert sum(x["count"] for x in data["launches"]) == int(head[3]) + int(head[4])
    assert sum(x["count"] for x in data["aten"]) == int(head[4])
    assert {"launch" if target == "h100" else "memory"} <= {x["bound"] for x in data["launches"]}
    sizes = [x["bytes"] for x in data["saved"]]
    assert sizes == sorted(sizes, reverse=True)
    inputs = {n.name for n in s.regions[0].of("backward")[0].gm.graph.find_nodes(op="placeholder")}
    assert {x["node"] for x in data["saved"]} == {n for n in inputs if "tangents" not in n}
    assert all(x["why"] for x in data["saved"])
    matmul = "convolution" if model == "resnet-tiny" else "mm"
    assert next(x for x in data["aten"] if x["op"] == matmul)["why"].endswith("left to the library that ATen calls")


def nodes_explained(model: str, target: str) -> None:
    """A kernel's node, a product of ATen, one that is saved, and one that is computed again."""
    region = session(model, target).regions[0]
    forward = next(p for p in region.programs if p.kind == "forward")
    kernel = next(
        x for x in launches.of_program(forward, session(model, target).target) if x.group and len(x.nodes) > 3
    )
    one = next(n for n in kernel.nodes if n.meta.get("stack_trace"))
    out = dsc("explain", model, one.name, "-t", target, columns=200)
    assert out.startswith(text.line(one))
    assert re.search(r"^  \S*models/\w+\.py:\d+ in \w+$", out, re.M)
    assert re.search(rf"fused +kernel {kernel.name} with \w+", out)
    assert re.search(rf"cost +kernel {kernel.name}: [\d.]+ (ns|µs) on {target}, (memory|launch|compute)-bound", out)
    assert "sparsity" in out
    assert "dense" in out
    saved = next(x for x in summary.saved(session(model, target)) if x.computed)
    assert re.search(r"(saved|recomputed) +\S", dsc("explain", model, saved.node, "-t", target))
    remarks = [r for s in region.of("joint") if s.report and s.name == "recompute" for r in s.report.remarks]
    again = next(r for r in remarks if r.verdict == "did")
    facts = {f["topic"]: f["text"] for e in as_json("explain", model, again.node, "-t", target) for f in e["facts"]}
    assert facts["recomputed"] == again.why
    assert re.search(r"moves \d\S* \w+ instead of", again.why)


def test_every_remark_is_printed() -> None:
    out = dsc("passes", "gpt-tiny", "--remarks", columns=80)
    remarks = [r for s in session("gpt-tiny").regions[0].stages if s.report for r in s.report.remarks]
    assert len(re.findall(r"^  (did|skipped) +\w", out, re.M)) == len(remarks)
    assert f"  skipped add_1: {next(r.why for r in remarks if r.node == 'add_1' and 'through' in r.why)}" in out


def test_wide_tables_show_lines_of_the_program() -> None:
    assert re.search(r"blocks\.\d\S*  \S*models/gpt\.py:\d+", dsc("explain", "gpt-tiny", columns=160))
    assert "models/gpt.py" not in dsc("explain", "gpt-tiny", columns=80)


def test_a_node_that_a_pass_took_out() -> None:
    (found,) = as_json("explain", "gpt-tiny", "nll_loss_forward")
    assert found["graph"] == "joint"
    assert {"topic": "canonicalize", "text": "took it out: nll_loss_forward(logp, target) -> losses of rows, their sum, and how many count"} in found["facts"]  # fmt: skip


def test_kernels_that_stay_apart_say_why() -> None:
    facts = [f for e in as_json("explain", "gpt-tiny", "add_1") for f in e["facts"] if f["topic"] == "apart"]
    assert any("through memory: addmm_2 runs between the two" in f["text"] for f in facts)


def test_inference() -> None:
    assert " inference" in dsc("passes", "mlp-tiny", "--inference")
    assert "backward" not in dsc("show", "mlp-tiny", "--inference")
    assert "Saved" not in dsc("explain", "mlp-tiny", "--inference")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("show", "mlp-tiny", "--after", "fus"), "'fus' is not a pass; did you mean 'fuse'?"),
        (
            ("show", "mlp-tiny", "--after", "fuse", "--graph", "joint"),
            "give one on which fuse runs: forward, backward.",
        ),
        (("show", "mlp-tiny", "--graph", "front"), "give one of joint, forward, backward."),
        (("show", "mlp-tiny", "--region", "3"), "Option '--region' cannot be 3; give a number from 0 to 0."),
        (("show", "mlp-tiny", "--after", "fuse", "--diff", "fuse"), "give one of them."),
        (("explain", "mlp-tiny", "adm"), "No graph has a node 'adm'; did you mean 'addmm'"),
        (("passes", "mlp-tiny", "-t", "h10"), "'h10' is not a target that dsc knows; did you mean 'h100'?"),
        (("passes", "no-such.trace"), "no-such.trace is not a trace that can be read"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    out = dsc(*arguments, code=2)
    assert sentence in out
    assert len(out.splitlines()) == 1


def test_json_is_all_that_is_printed() -> None:
    for command in (("passes",), ("show",), ("show", "--diff", "fuse"), ("explain",), ("explain", "addmm")):
        json.loads(dsc(command[0], "mlp-tiny", *command[1:], "--json"))
