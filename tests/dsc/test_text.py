from dataclasses import replace

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsc import text
from dsc.notes import Notes, decided, notes, set_notes
from dsc.torch_shim import FakeTensorMode

aten = torch.ops.aten


def test_static_graph() -> None:
    def f(x, w):
        y = (x + 1.5).relu() @ w.t()
        values, places = y.topk(2)
        return (
            values.to(torch.bfloat16),
            places,
            y.sum([1], dtype=torch.float64),
            [y.clone(memory_format=torch.contiguous_format)],
        )

    gm = make_fx(f, tracing_mode="fake")(torch.randn(8, 16), torch.randn(4, 16))
    node = next(n for n in gm.graph.nodes if n.name == "relu")
    set_notes(node, Notes(group="k0", stage=0, keep="save"))
    want = """\
x_1: f32[8,16]
w_1: f32[4,16]
add: f32[8,16] = add.Tensor(x_1, 1.5)
relu: f32[8,16] = relu(add)  {keep=save stage=0 group=k0}
t: f32[16,4]{1,16} = t(w_1)
mm: f32[8,4] = mm(relu, t)
topk: (f32[8,2], i64[8,2]) = topk(mm, 2)
getitem: f32[8,2] = getitem(topk, 0)
getitem_1: i64[8,2] = getitem(topk, 1)
_to_copy: bf16[8,2] = _to_copy(getitem, dtype=bf16)
sum_1: f64[8] = sum.dim_IntList(mm, [1], dtype=f64)
clone: f32[8,4] = clone(mm, memory_format=contiguous_format)
return (_to_copy, getitem_1, sum_1, [clone])
"""
    assert text.show(gm.graph) == want


def test_symbolic_graph_prints_sizes_and_adds_no_guard() -> None:
    def f(x, n):
        return x.t(), x.new_zeros(x.shape[0] + n)

    gm = make_fx(f, tracing_mode="symbolic")(torch.randn(8, 16), 3)
    x, n, *_ = gm.graph.nodes
    (a, b), k = (str(s) for s in x.meta["val"].shape), str(n.meta["val"])
    env = x.meta["val"].shape[0].node.shape_env
    guards = len(env.guards)
    shown = text.show(gm.graph)
    assert f"x_1: f32[{a},{b}]\nn_1: sym({k})\nt: f32[{b},{a}]{{1,{b}}} = t(x_1)\n" in shown
    assert "sym_size.int(x_1, 0)" in shown
    assert any(f"sym({s})" in shown for s in (f"{a}+{k}", f"{k}+{a}"))
    assert len(env.guards) == guards


def test_unbacked_sizes_are_contiguous() -> None:
    env = ShapeEnv()
    n, m = env.create_unbacked_symint(), env.create_unbacked_symint()
    assert text.is_contiguous((2, n, m), (n * torch.sym_max(1, m), torch.sym_max(1, m), 1))
    assert text.is_contiguous((2, n, m), (n * m, m, 1))
    assert not text.is_contiguous((2, n, m), (n * m, 1, n))
    assert not env.guards


@pytest.mark.parametrize(
    ("val", "want"),
    [
        (torch.empty(()), "f32[]"),
        (torch.empty(2, dtype=torch.float8_e4m3fn), "f8e4m3[2]"),
        (torch.empty(2, dtype=torch.complex64), "c64[2]"),
        (torch.empty(2, dtype=torch.bool), "b1[2]"),
        (torch.empty(0, 3), "f32[0,3]"),
        (torch.empty(4, 1).expand(4, 8), "f32[4,8]{1,0}"),
        (torch.empty(4, 8, device="meta"), "f32[4,8]@meta"),
        (torch.eye(2).to_sparse(), "f32[2,2]{sparse_coo}"),
        ((torch.empty(1), None, [3]), "(f32[1], None, (int))"),
    ],
)
def test_types(val: object, want: str) -> None:
    assert text.type_text(val) == want


@pytest.mark.parametrize(
    ("a", "want"),
    [
        (0.1, "0.1"), (True, "True"), (None, "None"), ("sum", "'sum'"), (torch.int8, "i8"), (torch.strided, "strided"),
        (torch.device("cuda:3"), "cuda"), (torch.channels_last, "channels_last"), ([1, (2,)], "[1, (2,)]"),
        (slice(1, None, 2), "1:None:2"), ({"a": 1}, "{a: 1}"), (torch.relu, "relu"), (object(), "object"),
        (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_arguments(a: object, want: str) -> None:
    assert text.arg(a) == want


def test_devices_have_no_number() -> None:
    with FakeTensorMode():
        assert text.type_text(torch.empty(2, device="cuda:1")) == "f32[2]@cuda"


def test_other_kinds_of_node() -> None:
    g = Graph()
    w = g.get_attr("w")
    y = g.call_method("relu", (w,))
    z = g.call_module("lin", (y,))
    g.output(z)
    gm = GraphModule({"w": torch.ones(2), "lin": torch.nn.Linear(2, 2)}, g)
    assert text.show(gm.graph) == "w: ? = self.w\nrelu: ? = .relu(w)\nlin: ? = lin(relu)\nreturn lin\n"


def test_notes_keep_other_fields() -> None:
    node = Graph().placeholder("x")
    assert notes(node) == Notes()
    assert decided(node) == {}
    set_notes(node, replace(notes(node), stage=0))
    set_notes(node, replace(notes(node), group="k1"))
    assert decided(node) == {"stage": 0, "group": "k1"}
