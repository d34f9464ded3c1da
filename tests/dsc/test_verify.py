import time

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from dsc.errors import InvalidGraph
from dsc.notes import Notes, set_notes
from dsc.verify import Promises, Write, kept, mutation_order, output_signature, promises, verify

aten = torch.ops.aten


def trace(f, *args) -> GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def node(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def two() -> GraphModule:
    return trace(lambda x, y: (x.relu() + y, y.topk(2)[0]), torch.randn(4), torch.randn(4))


def test_a_traced_graph_is_legal() -> None:
    gm = two()
    set_notes(node(gm, "relu"), Notes("bf16", "2:4", "offload", 0, "k0"))
    verify(gm, "after tracing")


def test_use_before_definition() -> None:
    gm = two()
    node(gm, "add").append(node(gm, "relu"))
    with pytest.raises(
        InvalidGraph, match=r"^The graph is not legal after x at node 'add': it uses 'relu' before that is computed"
    ):
        verify(gm, "after x")


def test_missing_and_wrong_values() -> None:
    gm = two()
    val = node(gm, "relu").meta.pop("val")
    with pytest.raises(InvalidGraph, match=r"at node 'relu': it has no meta\['val'\]; give a new node its fake value"):
        verify(gm, "after x")
    node(gm, "relu").meta["val"] = (val,)
    with pytest.raises(InvalidGraph, match=r"its meta\['val'\] is tuple, but aten.relu.default gives a tensor"):
        verify(gm, "after x")
    node(gm, "relu").meta["val"] = val
    del node(gm, "x_1").meta["val"]
    with pytest.raises(InvalidGraph, match="at node 'x_1'"):
        verify(gm, "after x")


def test_lint_is_part_of_it() -> None:
    gm = two()
    gm.w = torch.nn.Parameter(torch.empty(1))
    with gm.graph.inserting_before(node(gm, "add")):
        gm.graph.get_attr("w")
    verify(gm, "after x")
    del gm.w
    with pytest.raises(InvalidGraph, match=r"^The graph is not legal after x: .*nonexistent attribute w"):
        verify(gm, "after x")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"group": "k0"}, "is dict, not Notes"),
        (Notes(keep="drop"), "note keep='drop' is not one of save, recompute, offload, compress"),
        (Notes(stage=-1), "note stage=-1 is not a number from 0 on"),
        (Notes(stage=True), "note stage=True is not a number from 0 on"),
        (Notes(group=""), "note group='' is not a name"),
        (Notes(precision=16), "note precision=16 is not a name"),
    ],
)  # fmt: skip
def test_illegal_notes(bad: object, problem: str) -> None:
    gm = two()
    node(gm, "relu").meta["dsc"] = bad
    with pytest.raises(InvalidGraph, match=f"at node 'relu': its .*{problem}"):
        verify(gm, "after x")


def test_output_signature() -> None:
    gm = trace(lambda x: [x.t(), x.bool().sum(), None], torch.randn(4, 2))
    assert output_signature(gm) == ("f32[2,4]{1,2}", "i64[]", "None")


def test_outputs_must_stay() -> None:
    a, b = (
        trace(lambda x: (x.t(),), torch.randn(4, 2)),
        trace(lambda x: (x.t().clone(memory_format=torch.contiguous_format),), torch.randn(4, 2)),
    )
    kept(promises(a), promises(a), "after x")
    with pytest.raises(InvalidGraph, match=r"output 0 was f32\[2,4\]\{1,2\} and is f32\[2,4\]"):
        kept(promises(a), promises(b), "after x")
    with pytest.raises(InvalidGraph, match="it had 1 outputs and has 2"):
        kept(promises(a), promises(two()), "after x")


X, Y = torch.zeros(4), torch.zeros(4)


def both(x, y):
    z = x + 1
    x.copy_(z)
    y.add_(2.0)
    return z


def test_mutation_order() -> None:
    assert mutation_order(two()) == ()
    assert mutation_order(trace(both, X, Y)) == (
        Write("input 0", "aten.copy_.default", False),
        Write("input 1", "aten.add_.Tensor", False),
    )


def test_writes_through_views_and_items() -> None:
    def f(x):
        x.view(2, 2).split(1)[1].mul_(2.0)
        return x + 1

    assert mutation_order(trace(f, X)) == (Write("input 0", "aten.mul_.Tensor", True),)


def test_a_view_is_no_read_but_its_reader_is() -> None:
    def f(x):
        x.mul_(2.0)
        y = x.view(2, 2)
        return torch.zeros(4), y

    gm = trace(f, X)
    assert mutation_order(gm) == (Write("input 0", "aten.mul_.Tensor", True),)
    zeros, _ = gm.graph.output_node().args[0]
    gm.graph.output_node().args = (zeros,)  # the view stays, unread
    assert "view" in str(gm.graph)
    assert mutation_order(gm) == (Write("input 0", "aten.mul_.Tensor", False),)


def test_scratch_is_not_counted() -> None:
    def f(x):
        t = torch.zeros(4)
        t.copy_(x)
        return t

    assert mutation_order(trace(f, X)) == ()


def test_a_new_read_after_a_write_is_found() -> None:
    gm = trace(both, X, Y)
    before = promises(gm)
    kept(before, before, "after x")
    with gm.graph.inserting_before(gm.graph.output_node()):
        read = gm.graph.call_function(aten.neg.default, (node(gm, "x_1"),))
    read.meta["val"] = torch.empty(4)
    gm.graph.output_node().args = (read,)
    with pytest.raises(InvalidGraph, match=r"input 0 is read after aten.copy_.default writes it, and was not before"):
        kept(before, promises(gm), "after x")


def test_writes_to_different_inputs_may_change_places() -> None:
    gm = trace(both, X, Y)
    before = promises(gm)
    node(gm, "copy_").prepend(node(gm, "add_"))
    kept(before, promises(gm), "after x")


def test_lost_writes_are_found() -> None:
    gm = trace(both, X, Y)
    before = promises(gm)
    gm.graph.erase_node(node(gm, "add_"))
    with pytest.raises(
        InvalidGraph,
        match=r"its writes to inputs were aten.copy_.default to input 0, aten.add_.Tensor to input 1 and are aten.copy_",
    ):
        kept(before, promises(gm), "after x")


def test_a_read_that_goes_away_is_fine() -> None:
    gm = trace(lambda x: (x.add_(1.0), x * 2)[1], X)
    before = promises(gm)
    assert before.writes == (Write("input 0", "aten.add_.Tensor", True),)
    kept(before, Promises(before.outputs, (Write("input 0", "aten.add_.Tensor", False),)), "after x")


def test_cheap() -> None:
    g = Graph()
    x = g.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    for _ in range(5000):
        last, x = x, g.call_function(aten.add.Tensor, (x, 1))
        x.meta["val"] = last.meta["val"]
    g.output((x,))
    gm = GraphModule({}, g)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        verify(gm, "after x")
        promises(gm)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05
