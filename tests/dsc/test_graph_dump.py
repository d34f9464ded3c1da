"""Graphs as pictures and files: what is drawn is what is there, nothing overlaps, and ONNX computes the same."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.debug.capture import Stage
from dsc.debug.dump import clusters, collapse, dot, files, layered, layout, picture, svg
from dsc.debug.dump.layered import Edge, Item
from dsc.debug.dump.layout import LABEL_HEIGHT, Layout
from dsc.debug.dump.picture import Picture
from kit_views import EVIL, deep, session

MODELS = ("gpt-tiny", "llama-tiny", "vit-tiny", "resnet-tiny")


def last(name: str, graph: str = "forward", target: str = "cpu") -> tuple[Picture, Stage]:
    s = session(name, target)
    stage = s.regions[0].of(graph)[-1]
    return picture.of(s, s.regions[0], stage), stage


# --- layers


@st.composite
def levels(draw: st.DrawFn) -> tuple[list[Item], list[Edge]]:
    count = draw(st.integers(1, 14))
    items = [Item(draw(st.floats(5, 80)), draw(st.floats(0, 60))) for _ in range(count)]
    ends = st.integers(0, count - 1)
    return items, [Edge(draw(ends), draw(ends)) for _ in range(draw(st.integers(0, 20)))]


@settings(max_examples=60, deadline=None)
@given(levels())
def test_boxes_of_a_level_do_not_overlap_and_edges_join_them(level: tuple[list[Item], list[Edge]]) -> None:
    items, edges = level
    placed = layered.place(items, edges)
    frames = [(x - i.width / 2, y, x + i.width / 2, y + i.height) for i, (x, y) in zip(items, placed.at)]
    for k, a in enumerate(frames):
        assert a[0] >= -1e-6 and a[2] <= placed.width + 1e-6 and a[3] <= placed.height + 1e-6
        for b in frames[:k]:
            assert a[2] <= b[0] + 1e-6 or b[2] <= a[0] + 1e-6 or a[3] <= b[1] + 1e-6 or b[3] <= a[1] + 1e-6
    for e, path in zip(edges, placed.paths):
        assert path[0] == (placed.at[e.source][0], frames[e.source][3])
        assert path[-1] == (placed.at[e.target][0], frames[e.target][1])


@settings(max_examples=60, deadline=None)
@given(levels())
def test_without_turned_edges_there_is_no_cycle_and_the_rest_goes_down(level: tuple[list[Item], list[Edge]]) -> None:
    items, edges = level
    turned = layered.back_edges(len(items), edges)
    kept = nx.DiGraph((e.source, e.target) for i, e in enumerate(edges) if i not in turned)
    assert nx.is_directed_acyclic_graph(kept)
    everything = nx.DiGraph((e.source, e.target) for e in edges)
    assert bool(turned) is not nx.is_directed_acyclic_graph(everything) or not edges
    placed = layered.place(items, edges)
    for a, b in kept.edges:
        assert placed.at[a][1] + items[a].height <= placed.at[b][1]


def test_a_straight_chain_is_drawn_straight() -> None:
    placed = layered.place([Item(20, 10)] * 4, [Edge(0, 1), Edge(1, 2), Edge(2, 3)])
    assert len({x for x, _ in placed.at}) == 1


def test_two_crossing_edges_are_untangled() -> None:
    items = [Item(20, 10)] * 4
    placed = layered.place(items, [Edge(0, 3), Edge(1, 2)])
    assert (placed.at[0][0] < placed.at[1][0]) == (placed.at[3][0] < placed.at[2][0])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0.1, 5)), min_size=2, max_size=8))
def test_places_apart_are_the_nearest_ones(wishes: list[tuple[float, float]]) -> None:
    wanted, weights = [w for w, _ in wishes], [m for _, m in wishes]
    gaps = [3.0] * (len(wanted) - 1)
    found = layered.apart(wanted, weights, gaps)
    assert all(b - a >= 3 - 1e-6 for a, b in itertools.pairwise(found))

    def cost(xs: list[float]) -> float:
        return sum(m * (x - w) ** 2 for x, w, m in zip(xs, wanted, weights))

    for i in range(len(found)):  # no single block can move for the better
        for j in range(i, len(found)):
            for step in (-0.01, 0.01):
                moved = [x + step if i <= k <= j else x for k, x in enumerate(found)]
                if all(b - a >= 3 - 1e-9 for a, b in itertools.pairwise(moved)):
                    assert cost(moved) >= cost(found) - 1e-6


# --- pictures


@pytest.mark.parametrize("name", MODELS)
def test_a_picture_has_every_node_with_its_decision(name: str) -> None:
    p, stage = last(name)
    nodes = {n.name for n in stage.gm.graph.nodes if n.op != "output"}
    assert {b.id for b in p.boxes if b.decision != "result"} == nodes
    assert next(b.title for b in p.boxes if b.decision == "result") == "result 0"
    assert {b.kernel for b in p.boxes} - {""} == set(p.kernels)
    assert all(b.kernel == "" or b.decision == "kernel" for b in p.boxes)
    assert any(b.keep == "save" for b in p.boxes)
    assert {w.source for w in p.wires} <= nodes


def test_inputs_are_named_as_the_model_names_them() -> None:
    boxes = {b.id: b for b in last("gpt-tiny")[0].boxes}
    assert (boxes["primals_1"].title, boxes["primals_1"].decision) == ("idx", "input")
    assert (boxes["primals_4"].title, boxes["primals_4"].module) == ("weight", ("blocks", "0", "norm1"))
    backward = {b.title for b in last("gpt-tiny", "backward")[0].boxes}
    assert {"gradient of result 0", "gradient of tokens.weight"} <= backward


def test_the_joint_graph_keeps_forward_and_backward_apart() -> None:
    p, _ = last("gpt-tiny", "joint")
    assert {b.module[0] for b in p.boxes if b.module} == {"forward", "backward"}
    assert all(b.decision != "aten" for b in p.boxes), "nothing is decided before fuse"


def test_layers_that_look_alike_are_drawn_once() -> None:
    s = deep(4)
    for graph in ("forward", "backward"):
        whole = picture.of(s, s.regions[0], s.regions[0].of(graph)[-1])
        short = collapse.collapse(whole)
        assert len(short.boxes) < 0.6 * len(whole.boxes)
        assert sum(b.count for b in short.boxes) == len(whole.boxes), "each node is drawn, or stood for"
        ids = {b.id for b in short.boxes}
        assert all(w.source in ids and w.target in ids for w in short.wires)
        (title,) = short.layers.values()
        assert title.split(" × ")[1].startswith(("3", "4"))


def test_layers_that_differ_are_all_drawn() -> None:
    p, _ = last("resnet-tiny")
    assert collapse.collapse(p) == p


@pytest.mark.parametrize("by", ["both", "module", "kernel", "none"])
def test_nothing_overlaps_and_frames_hold_what_is_theirs(by: clusters.By) -> None:
    placed = layout.lay_out(last("gpt-tiny")[0], by)
    at = {b.box.id: b for b in placed.boxes}
    assert set(at) == {b.id for b in placed.picture.boxes}
    boxes = [(b.x, b.y, b.x + b.width, b.y + b.height + LABEL_HEIGHT) for b in placed.boxes]
    for k, a in enumerate(boxes):
        for b in boxes[:k]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 1e-6 or b[3] <= a[1] + 1e-6
    for f in placed.frames:
        for inner in f.cluster.boxes:
            b = at[inner.id]
            assert f.x <= b.x and b.x + b.width <= f.x + f.width and f.y < b.y and b.y + b.height <= f.y + f.height
    kinds = {f.cluster.kind for f in placed.frames}
    assert kinds == {"both": {"module", "kernel"}, "module": {"module"}, "kernel": {"kernel"}, "none": set()}[by]


def test_wires_lead_from_box_to_box_and_never_up() -> None:
    placed = layout.lay_out(last("gpt-tiny")[0])
    at = {b.box.id: b for b in placed.boxes}
    assert len(placed.lines) == len(placed.picture.wires)
    for line in placed.lines:
        a, b = at[line.wire.source], at[line.wire.target]
        assert a.x <= line.points[0][0] <= a.x + a.width
        assert b.x <= line.points[-1][0] <= b.x + b.width and line.points[-1][1] == b.y
        assert all(q[1] >= p[1] - 1e-6 for p, q in zip(line.points, line.points[1:]))


# --- files


def test_the_svg_is_well_formed_and_says_what_was_decided() -> None:
    text = files.content(".svg", *picked("gpt-tiny"), "a & b", False, "both", "dsc")
    root = ET.fromstring(text)
    ns = "{http://www.w3.org/2000/svg}"
    groups = [g for g in root.iter(f"{ns}g") if g.get("data-n")]
    assert {g.get("class") for g in groups} >= {"box kernel c0", "box aten", "box view", "box parameter"}
    words = [t.text for t in root.iter(f"{ns}text")]
    assert {"a & b", "tokens", "addmm ×2", "f32[32,96] 12.0 KiB", "k0"} <= set(words)
    assert any(r.get("class") == "mark save" for g in groups for r in g)


def test_names_of_the_user_are_escaped() -> None:
    for kind in (".svg", ".dot"):
        text = files.content(kind, *picked("evil"), EVIL, True, "both", "dsc")
        assert isinstance(text, str)
        assert "<script>" not in text if kind == ".svg" else EVIL in text
    ET.fromstring(str(files.content(".svg", *picked("evil"), EVIL, True, "both", "dsc")))


def picked(name: str, graph: str = "forward") -> tuple[Any, Any]:
    from dsc.debug import stages

    s = session(name)
    return s, stages.pick(s, None, graph)[0]


def test_dot_names_every_node_and_frames_modules_and_kernels() -> None:
    p, _ = last("gpt-tiny")
    text = dot.text(p)
    assert all(f"{dot.quoted(b.id)} [label=" in text for b in p.boxes)
    assert text.count(" -> ") == len(p.wires)
    assert 'label="attention"' in text and 'label="k0  k0_embedding_add_native_layer_norm"' in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_places_the_same_boxes() -> None:
    p = collapse.collapse(last("gpt-tiny")[0])
    placed: Layout = files.lay_out(p, "both", "graphviz")
    assert {b.box.id for b in placed.boxes} == {b.id for b in p.boxes}
    assert {f.cluster.id for f in placed.frames} == {f.cluster.id for f in layout.lay_out(p).frames}
    ET.fromstring(svg.document(placed, ""))


def test_without_graphviz_the_layout_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    p, _ = last("gpt-tiny")
    assert files.lay_out(p, "both", "auto") == layout.lay_out(p)
    with pytest.raises(dot.NoGraphviz, match="not installed"):
        files.lay_out(p, "both", "graphviz")


def test_json_holds_nodes_edges_and_notes() -> None:
    data = json.loads(files.content(".json", *picked("gpt-tiny"), "", False, "both", "auto"))
    nodes = {n["id"]: n for n in data["nodes"]}
    assert (data["graph"], data["stage"]) == ("forward", "fuse")
    assert nodes["addmm"]["keep"] == "save" and nodes["addmm"]["flops"] == 2 * 32 * 32 * 96
    assert nodes["addmm"]["line"]["file"].endswith("gpt.py") and nodes["addmm"]["module"][-1] == "qkv"
    assert all(e["source"] in nodes and e["target"] in nodes for e in data["edges"])
    assert next(e for e in data["edges"] if e["source"] == "addmm")["bytes"] == 32 * 96 * 4


def test_png_is_a_picture_of_that_size() -> None:
    pytest.importorskip("resvg_py")
    data = files.content(".png", *picked("gpt-tiny"), "gpt", False, "both", "dsc")
    assert isinstance(data, bytes)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) > 1000


# --- ONNX


def onnx_of(name: str, graph: str, target: str = "cpu") -> tuple[Any, Stage]:
    onnx = pytest.importorskip("onnx")
    from dsc.debug.dump import onnx as dump

    s = session(name, target)
    stage = s.regions[0].of(graph)[-1]
    model = dump.model(s, s.regions[0], stage)
    onnx.checker.check_model(model, full_check=not dump.opaque(model))
    return model, stage


def values(stage: Stage, seed: int = 0) -> list[torch.Tensor]:
    """Random inputs, in the strides that the graph was traced for."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for n in stage.gm.graph.find_nodes(op="placeholder"):
        v = n.meta["val"]
        t = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype)
        wide = torch.rand(v.shape, generator=generator, dtype=torch.float64) * 0.5 + 0.5
        out.append(t.copy_(wide if v.dtype.is_floating_point else (wide * 8).floor() - 4))
    return out


@pytest.mark.parametrize("graph", ["forward", "backward"])
@pytest.mark.parametrize("name", MODELS)
def test_onnx_computes_what_the_graph_computes(name: str, graph: str) -> None:
    model, stage = onnx_of(name, graph)
    runtime = pytest.importorskip("onnxruntime")
    from dsc.debug.dump import onnx as dump

    assert dump.opaque(model) == []
    given = values(stage)
    with torch.no_grad():
        want = [t for t in stage.gm(*[t.clone() for t in given]) if isinstance(t, torch.Tensor)]
    run = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = run.run(None, dump.feeds(model, given))
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        found = torch.from_numpy(a)
        assert found.shape == b.shape and found.dtype == b.dtype
        scale = max(b.double().abs().max().item(), 1e-3) if b.numel() else 1.0
        torch.testing.assert_close(found.double() / scale, b.double() / scale, rtol=0, atol=2e-3)


def test_onnx_says_the_shape_of_every_node() -> None:
    model, stage = onnx_of("gpt-tiny", "forward")
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    for n in stage.gm.graph.nodes:
        if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor):
            assert known[n.name] == list(n.meta["val"].shape)
    assert model.graph.input[3].doc_string == "blocks.0.norm1.weight"


def test_onnx_of_what_it_has_no_operator_for_is_legal_and_says_so() -> None:
    from dsc.debug.capture import capture
    from dsc.debug.source import Model

    onnx = pytest.importorskip("onnx")
    from dsc.debug.dump import onnx as dump

    s = capture(Model("dropout", torch.nn.Dropout(0.5), (torch.ones(4, 4, requires_grad=True),)))
    model = dump.model(s, s.regions[0], s.regions[0].of("forward")[-1])
    onnx.checker.check_model(model)
    assert dump.opaque(model) == ["bernoulli.p"]


def test_onnx_of_a_gpu_plan_is_legal() -> None:
    for graph in ("forward", "backward"):
        onnx_of("gpt-tiny", graph, "h100")


# --- the command


def invoke(*words: str) -> Any:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from dsc import cli

    return CliRunner().invoke(cli.app, ["graph", *words])


def test_the_command_writes_the_file_that_its_name_asks_for(tmp_path: Path) -> None:
    out = tmp_path / "new" / "mlp.svg"
    result = invoke("mlp-tiny", "-o", str(out), "--graph", "backward", "--after", "fuse", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert (said["graph"], said["after"], said["target"]) == ("backward", "fuse", "cpu")
    assert out.stat().st_size > 5000 and out.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mlp-tiny", "-o", "x.jpg"], "A graph cannot be written as .jpg; use one of .svg, .png"),
        (["mlp-tiny", "-o", "x.svg", "--after", "fuze"], "did you mean 'fuse'?"),
        (["mlp-tiny", "-o", "/proc/x.svg"], "cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words: list[str], sentence: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1


def test_a_missing_package_is_named_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    result = invoke("no-such-model", "-o", "x.png")
    assert result.exit_code == 2
    assert "pip install 'dsc-compiler[dumps]'" in result.output
